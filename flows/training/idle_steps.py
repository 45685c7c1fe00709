"""Idle steps: committed steps from which a model learnt nothing, because no reward or target had a gradient, or the
learning rate was 0. A KL penalty or an entropy bonus may have moved the weights all the same.

Whether a step was idle follows from its commit record, so a resumed run counts what the earlier attempt counted.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import PermanentEngineError
from flows.runs.events import emit_run_idle
from storage.chain.records import Chain, CommitRecord, PolicyRef
from storage.store.objects import ObjectStore

RATE_OF_ZERO = "the learning rate was 0"


class NothingLearned(PermanentEngineError):
    """A run had too many idle steps in a row (rules.max_idle_steps)."""


def idle_cause(record: CommitRecord) -> tuple[str, str] | None:
    """(why the step was idle, what to change), or None if it was not. A step that was not to change the weights, as
    when a value model is trained alone or a step without grades is skipped, is not idle."""
    metrics = record.metrics
    if not _makes_updates(record):
        return None
    if record.request.optimizer.lr == 0:
        return RATE_OF_ZERO, "raise the learning rate, or the lowest rate of its schedule"
    if record.updates == 0 and record.skipped:
        return "every update was skipped, because its gradient held NaN or infinity", "lower the learning rate"
    if record.updates == 0:
        return "its batch has no trained token", "look at the rows of the data, their loss weights and max_tokens"
    if metrics.get("informative_fraction") == 0:
        return (
            "all rewards of each group were equal, so every advantage was 0",
            "give prompts that the model solves sometimes but not always, a grader with partial credit or more "
            "completions_per_sample, or fine-tune on examples first (sft)",
        )
    if metrics.get("grad_norm") == 0:
        return "its gradient was 0", "look at the data and at the loss: nothing in them depends on the weights"
    return None


def _makes_updates(record: CommitRecord) -> bool:
    """Whether the request of the step asks for updates of the weights."""
    return record.request.minibatches.epochs > 0


def has_learnt(store: ObjectStore, policy: PolicyRef) -> bool:
    """Whether a step of this run up to `policy` was not idle, in the policy's stage or in an earlier one that it
    continues."""
    chain = Chain.of(store, policy)
    for record in chain.records(after=0, until=policy.step):
        if _makes_updates(record) and idle_cause(record) is None:
            return True
    root = chain.root()
    if root is None or root.start is None or root.start.run != policy.run:
        return False
    return has_learnt(store, root.start)


class IdleSteps:
    """Counts the idle steps at the end of a chain, says so at the first one, and ends the run at the limit."""

    def __init__(self, chain: Chain, *, last_step: int, limit: int | None, note: Callable[[str], None]) -> None:
        """`last_step` is the last committed step, `limit` the number of idle steps in a row that end the run (None: any
        number is allowed), `note` writes a line for the user."""
        self.chain, self.limit, self._note = chain, limit, note
        self._in_a_row, self._said = 0, False
        self._cause: tuple[str, str] | None = None
        # the steps of earlier attempts count, too
        step = last_step
        while step > 0 and self._in_a_row < (limit or 0):
            record = chain.committed_record(step)
            cause = idle_cause(record)
            if _makes_updates(record) and cause is None:
                break
            if cause is not None:
                self._in_a_row, self._cause = self._in_a_row + 1, self._cause or cause
            step -= 1

    def add(self, record: CommitRecord) -> None:
        """Counts the step of `record`. Tells the user about the first idle step of this attempt, unless it is a single
        step with a rate of 0."""
        if not _makes_updates(record):
            return
        self._cause = idle_cause(record)
        if self._cause is None:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        why, remedy = self._cause
        # a warm-up may begin at a rate of 0, and a schedule may end there
        expected = why == RATE_OF_ZERO and self._in_a_row == 1
        if self._said or expected:
            return
        self._said = True
        step = record.policy.step
        end = ""
        if self.limit is not None:
            end = f"; {self.limit} such steps in a row end the run as failed (rules.max_idle_steps)"
        self._note(f"step {step} taught the model nothing: {why}. To change that, {remedy}{end}")
        emit_run_idle(self.chain.run, step=step, reason=why)

    def check(self, step: int) -> None:
        """Raises NothingLearned if the last steps up to `step` were idle and reach the limit."""
        if self.limit is None or self._cause is None or self._in_a_row < self.limit:
            return
        why, remedy = self._cause
        raise NothingLearned(
            f"the last {self._in_a_row} steps of run {self.chain.run}, up to step {step}, taught the model nothing: "
            f"{why}. The run ends as failed, and its model is not published. To change that, {remedy}, and start a run "
            "with another key; to go on with this run as it is, raise rules.max_idle_steps, or set it to null for no "
            "limit"
        )
