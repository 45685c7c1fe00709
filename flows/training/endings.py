"""The end of a run before its last step: its held-out score no longer improves, or it has used up a budget.

Both follow from what is committed: the measurements, and what the run had used when its last step was requested. So a
run that was killed after that step ends there too, and a start with other rules (`rules.patience`, `rules.max_hours`,
…) sees whether the run goes on. Rules that end a run as failed are in flows.training.idle_steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from engine.protocol import EngineInfo
from flows.configs.reinforcement import RunRules, SamplingRules
from storage.chain.fork import read_fork
from storage.chain.listing import stages_of
from storage.chain.records import Chain, CommitRecord, PolicyRef, RunUse
from storage.inspect.accounting import step_inputs
from storage.serialization import Frozen
from storage.store.artifacts import read_manifest
from storage.store.objects import ObjectStore
from tasks.evaluation.validation_curve import Validation, read_validations

NOT_USED = RunUse()
SCORES = {"reward": 1, "loss": -1}
"""The measures that can be a score, the preferred one first, and the sign with which a larger value is better."""
NAMES = ("held-out", "validation")
"""Names of the measurements of the flows. They are preferred to those of a user's callbacks."""


class Ending(Frozen):
    """Why a run ended before its last step. It is part of the run's result."""

    rule: str
    """The rule that ended it, as in a config."""
    step: int
    reason: str
    limit: float
    """The value of the rule."""


def check_ending(store: ObjectStore, result: Mapping[str, Any]) -> str | None:
    """The problem with the ending in the result of a run, if what is committed does not say the same. None: it does, or
    the run took all its steps."""
    if "ending" not in result:
        return None
    ending, policy = Ending.model_validate(result["ending"]), PolicyRef.from_uri(result["policy"])
    name, whole = ending.rule.removeprefix("rules."), int(ending.limit)
    rules = SamplingRules.model_validate({name: whole if whole == ending.limit else ending.limit})
    again = ending_of(store, policy, rules)
    if again == ending:
        return None
    other = "nothing that ends it" if again is None else again.reason
    return (
        f"the result of the run says that it ended after step {ending.step}: {ending.reason}; its records say: {other}"
    )


class UseMeter:
    """Measures what a run has used: the recorded use of its earlier processes, and the time of this one."""

    def __init__(self, earlier: RunUse, info: EngineInfo) -> None:
        self._earlier, self._started = earlier, time.monotonic()
        self._gpus = info.devices if info.spec.device == "cuda" else 0
        self._tokens = earlier.tokens_sampled

    def add_tokens(self, tokens: int) -> None:
        """Adds the tokens that were sampled for a committed step."""
        self._tokens += tokens

    def read(self) -> RunUse:
        """What the run has used until now."""
        seconds = time.monotonic() - self._started
        return RunUse(
            seconds=self._earlier.seconds + seconds,
            gpu_seconds=self._earlier.gpu_seconds + seconds * self._gpus,
            tokens_sampled=self._tokens,
        )


def use_after(store: ObjectStore, policy: PolicyRef) -> RunUse:
    """What the run had used when the last step up to `policy` was requested, with the tokens of that step. The first
    step of a stage goes on from the stage before it in the same run."""
    chain = Chain.of(store, policy)
    record = chain.record(policy.step) if policy.step else None
    if record is not None:
        return _with_own_tokens(store, record)
    root = chain.root()
    if policy.step or root is None or root.start is None or root.start.run != policy.run:
        return NOT_USED
    return use_after(store, root.start)


def _with_own_tokens(store: ObjectStore, record: CommitRecord) -> RunUse:
    used = record.request.used or NOT_USED
    rollouts = step_inputs(store, record).rollouts
    counts = [read_manifest(store, ref.key).extra.get("completion_tokens") for ref in rollouts]
    tokens = sum(count for count in counts if isinstance(count, int))
    return used.model_copy(update={"tokens_sampled": used.tokens_sampled + tokens})


def budget_ending(rules: RunRules, used: RunUse, step: int) -> Ending | None:
    """The ending of a run that had used this when `step` was committed. None: it has not used up a budget."""
    amounts = {
        "max_hours": (used.seconds / 3600, "hours"),
        "max_gpu_hours": (used.gpu_seconds / 3600, "GPU hours"),
        "max_tokens_sampled": (used.tokens_sampled, "sampled tokens"),
    }
    for rule, (amount, unit) in amounts.items():
        limit = getattr(rules, rule, None)
        if limit is not None and amount >= limit:
            reason = f"it has used {amount:,.6g} {unit}, and rules.{rule}={limit:g}"
            return Ending(rule=f"rules.{rule}", step=step, reason=reason, limit=limit)
    return None


class Patience:
    """Counts the measurements since the best one. Of equal scores, the first is the best one."""

    def __init__(self, limit: int | None, measurements: Iterable[Validation] = ()) -> None:
        """`measurements`: those before, by step. `limit` None: any number is allowed."""
        self.limit = limit
        self.best_step, self.best = 0, -math.inf
        self._best_measure: float | None = None
        """The best score as it was measured. None: nothing was measured."""
        self._since_best, self._last_step = 0, -1
        self._curve: str | None = None
        self.add(measurements)

    def add(self, measurements: Iterable[Validation]) -> None:
        """Counts the measurements of later steps than those that are counted already. The score is that of one curve:
        of the measurement of the flow, or else the first by name."""
        of_steps: dict[int, list[Validation]] = {}
        for measurement in measurements:
            if measurement.step > self._last_step:
                of_steps.setdefault(measurement.step, []).append(measurement)
        for step, of_step in sorted(of_steps.items()):
            by_name = {measurement.name: measurement for measurement in of_step}
            if self._curve is None:
                self._curve = next((name for name in (*NAMES, *sorted(by_name)) if name in by_name), None)
            if self._curve in by_name:
                self._count(step, by_name[self._curve].measures)

    def _count(self, step: int, measures: dict[str, float]) -> None:
        self._last_step = step
        name = next((name for name in SCORES if name in measures), None)
        # a measurement without a result is not better
        if name is not None and SCORES[name] * measures[name] > self.best:
            self.best, self._best_measure = SCORES[name] * measures[name], measures[name]
            self.best_step, self._since_best = step, 0
        else:
            self._since_best += 1

    def ending(self, step: int) -> Ending | None:
        """The ending of a run after `step` steps. None: the score may still improve."""
        if self.limit is None or self._since_best < self.limit:
            return None
        missed = "had no result"
        if self._best_measure is not None:
            missed = f"were not better than {self._best_measure:.6g} after step {self.best_step}"
        reason = f"{self._since_best} measurements in a row {missed}, and rules.patience={self.limit}"
        return Ending(rule="rules.patience", step=step, reason=reason, limit=self.limit)


def read_history(store: ObjectStore, policy: PolicyRef) -> list[Validation]:
    """The measurements of a stage up to `policy`, and those that a fork shares with the run that it was made from."""
    fork, shared = read_fork(store, policy.run), []
    if fork is not None:
        stages = stages_of(store, fork.run)
        is_shared = policy.stage in stages and stages.index(policy.stage) <= stages.index(fork.stage)
        last = min(policy.step, fork.step) if policy.stage == fork.stage else policy.step
        if is_shared:
            shared = read_history(store, policy.model_copy(update={"run": fork.run, "step": last}))
    return [*shared, *read_validations(store, policy.run, policy.stage, last_step=policy.step)]


def ending_of(store: ObjectStore, policy: PolicyRef, rules: RunRules) -> Ending | None:
    """The ending by these rules of a run whose last policy is `policy`. None: the rules let it go on."""
    budget = budget_ending(rules, use_after(store, policy), policy.step) if policy.step else None
    if budget is not None or rules.patience is None:
        return budget
    return Patience(rules.patience, read_history(store, policy)).ending(policy.step)
