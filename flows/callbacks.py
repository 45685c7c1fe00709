"""Callbacks of the training classes: measurements at the beginning of a run, at regular intervals, and at its end.

    await SFT(..., callbacks=[ValidationLoss(threads, Cadence(every=0.1))]).run()

A callback commits an artifact under a key that names the policy. A resumed run finds the artifact, or computes it again
with the same result; a callback never changes what the run learns. Cadences by fraction are computed on integers: 0.2
of 10 steps is after 2, 4, 6, 8 and 10.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, Self, runtime_checkable

from engine.handles import TrainingModel
from engine.losses.spec import LossSpec
from engine.protocol import SamplingParams
from engine.text.threads import StringThread
from engine.workspace import Workspace
from flows.configs.validation import Every
from flows.training.arguments import grading_of
from storage.chain.records import PolicyRef
from storage.inspect.accounting import step_inputs
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from tasks.batches.truncation import ANY_LENGTH, LengthPlan
from tasks.datasets.load import LoadedDataset
from tasks.datasets.spec import DatasetUse, InlineDataset, InlinePairs
from tasks.evaluation.heldout import evaluate_policy
from tasks.evaluation.lm_validation import ValidationLossPlan, validate_loss
from tasks.graders.base import BaseGrader
from tasks.graders.spec import GraderSpec
from tasks.load import load_prompts
from tasks.loggers.base import Table
from tasks.plans import AgentPlan, EpisodePlan, EvaluationPlan, Grading, PromptShard
from tasks.reports.flow_run_page import sample_rows


@dataclass(frozen=True)
class Cadence:
    """When a callback is called: at an interval, in fractions of the run or in steps, and at its beginning and end."""

    every: float | None = None
    every_steps: int | None = None
    at_start: bool = True
    at_end: bool = True

    def __post_init__(self) -> None:
        if self.every is not None and self.every_steps is not None:
            raise ValueError(f"both every={self.every} and every_steps={self.every_steps} were given; give one of them")
        # limits of each interval
        if self.every is not None and not 0 < self.every <= 1:
            raise ValueError(f"every={self.every}, expected a share of the run above 0, at most 1")
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"every_steps={self.every_steps}, expected 1 or more")

    @classmethod
    def of(cls, config: Every) -> Self:
        """The cadence that a config describes."""
        return cls(config.every, config.every_steps, at_start=config.before)

    def due(self, steps_done: int, total_steps: int | None) -> bool:
        """Whether the callback is due after `steps_done` steps. Raises ValueError for a fraction of a run without an
        end."""
        if self.every is not None and total_steps is None:
            raise ValueError(
                f"every={self.every} is a share of the run, and this one has no end; give every_steps, or a length"
            )
        # the beginning and the end have their own switches
        if steps_done == 0:
            return self.at_start
        if steps_done == total_steps:
            return self.at_end
        if self.every_steps is not None:
            return steps_done % self.every_steps == 0
        if self.every is None or total_steps is None:
            return False
        # due when the step reaches a further multiple of the interval; fractions, because floats would round
        share = Fraction(str(self.every)) * total_steps
        return int(steps_done / share) > int((steps_done - 1) / share)


EVERY_FIFTH = Cadence(every=0.2)
"""The default cadence: after each fifth of the run."""


@dataclass(frozen=True)
class Moment:
    """The state of a run when a callback is called."""

    model: TrainingModel
    policy: PolicyRef
    """The policy after the last committed step."""
    total_steps: int | None
    loss: LossSpec | None = None
    """The loss of supervised training; None for reinforcement learning."""
    reference: PolicyRef | None = None
    """The policy that the loss compares with."""
    rollouts: tuple[ArtifactRef, ...] = ()
    """The rollouts of the last step; empty before the first step and after a resume."""
    graded: tuple[ArtifactRef, ...] = ()
    show: Callable[[Table], Awaitable[None]] | None = None
    """Shows a table in the terminal, the loggers and Prefect."""
    note: Callable[[str], None] | None = None
    """Adds a line to the terminal and to the log of the flow run."""

    def announce(self, rows: str) -> None:
        """Adds a line that an evaluation begins. `rows` says on what, such as "64 held-out prompts"."""
        if self.note is not None:
            self.note(f"evaluating {rows} {when(self.policy, self.total_steps)} …")


def when(policy: PolicyRef, total_steps: int | None) -> str:
    """The time of a measurement of the policy in words: before training, after step 12, after training."""
    if policy.step not in (0, total_steps):
        return f"after step {policy.step}"
    return f"{'after' if policy.step else 'before'} {training_name(policy)}"


def training_name(policy: PolicyRef) -> str:
    """The word "training" in the first stage of a run. A later stage is named, such as "gspo"."""
    return "training" if policy.stage.startswith("0-") else keys.stage_kind(policy.stage)


@runtime_checkable
class Callback(Protocol):
    """The interface of a callback."""

    @property
    def cadence(self) -> Cadence: ...

    async def at(self, moment: Moment) -> ArtifactRef | None:
        """Does the work. Returns the committed artifact, if any; measurements in its manifest are shown as curves."""
        ...


def check_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """Returns the callbacks as a list. Raises TypeError for an object that is not a callback."""
    for callback in callbacks:
        if not isinstance(callback, Callback) or not isinstance(callback.cadence, Cadence):
            raise TypeError(
                f"{callback!r:.80} was given as a callback; give an object that has an attribute 'cadence', such as "
                "cadence = Cadence(every=0.2), and a method async def at(self, moment)"
            )
    return list(callbacks)


@dataclass(frozen=True)
class HeldoutEvaluation:
    """Evaluates the policy. `evaluate` returns the committed evaluation of a policy, also when it is called again."""

    evaluate: Callable[[PolicyRef], Awaitable[ArtifactRef | None]]
    cadence: Cadence
    prompts: int
    """Number of held-out prompts."""

    async def at(self, moment: Moment) -> ArtifactRef | None:
        moment.announce(f"{self.prompts} held-out prompts")
        return await self.evaluate(moment.policy)


@dataclass(frozen=True)
class ValidationLoss:
    """The loss of SFT, DPO or RewardModelling on held-out rows: threads, pairs (preferred, dispreferred), or a loaded
    dataset. For pairs it also measures the accuracy and the margin."""

    dataset: Sequence[StringThread] | Sequence[tuple[StringThread, StringThread]] | LoadedDataset
    cadence: Cadence = EVERY_FIFTH
    lengths: LengthPlan = ANY_LENGTH
    """The length limits of a row, as in the training class."""

    async def at(self, moment: Moment) -> ArtifactRef | None:
        """Raises ValueError in a class of reinforcement learning, which has no loss of rows."""
        model, loss = moment.model, moment.loss
        if loss is None:
            raise ValueError(
                "ValidationLoss works with SFT, DPO and RewardModelling, and this class is none of them; leave it out"
            )
        data = self._load(moment.model.workspace, loss)
        moment.announce(f"{data.rows} held-out rows")
        plan = ValidationLossPlan(
            base=model.base, dataset=data.ref, loss=loss, reference=moment.reference, lengths=self.lengths
        )
        return await validate_loss(model.workspace, moment.policy, plan)

    def _load(self, workspace: Workspace, loss: LossSpec) -> LoadedDataset:
        if isinstance(self.dataset, LoadedDataset):
            return self.dataset
        rows = list(self.dataset)
        if loss.pairwise:
            return load_prompts(workspace, InlinePairs.of(rows), "preference")  # type: ignore[arg-type, call-overload]
        # what a scalar model predicts is the rating of a conversation; a label is a rating of 1 or 0
        use: DatasetUse = "rating" if loss.reads == "values" or loss.labelled else "completion"
        return load_prompts(workspace, InlineDataset.of(rows), use)  # type: ignore[arg-type, call-overload]


@dataclass(frozen=True)
class GraderEvaluation:
    """The mean grade of the policy's answers to held-out prompts: threads, or a loaded prompt dataset."""

    dataset: Sequence[StringThread] | LoadedDataset
    grader: BaseGrader | GraderSpec | Grading
    cadence: Cadence = EVERY_FIFTH
    name: str = "evaluation"
    """The name of its curve."""
    sampling: SamplingParams | None = None
    """How answers are sampled. None: as for training, but greedy."""
    completions: int = 1
    """Completions per prompt."""

    async def at(self, moment: Moment) -> ArtifactRef:
        model, prompts = moment.model, _prompts(moment, self.dataset, self.completions)
        moment.announce(f"{len(prompts.rows)} held-out prompts")
        plan = EvaluationPlan(
            prompts=prompts,
            sampling=self.sampling or model.sampling.model_copy(update=GREEDY),
            source=grading_of(self.grader),
            label=self.name,
        )
        return await evaluate_policy(model.workspace, moment.policy, plan)


@dataclass(frozen=True)
class EnvironmentValidation:
    """The mean reward of the policy's episodes that begin with held-out prompts."""

    dataset: Sequence[StringThread] | LoadedDataset
    episodes: EpisodePlan | AgentPlan
    """The environment or the agent, and the limits of an episode. Those of a training class are
    `ENVGRPO(...).episodes`."""
    cadence: Cadence = EVERY_FIFTH
    sampling: SamplingParams | None = None
    """How answers are sampled. None: as for training, but greedy."""

    async def at(self, moment: Moment) -> ArtifactRef:
        model, prompts = moment.model, _prompts(moment, self.dataset, 1)
        moment.announce(f"{len(prompts.rows)} held-out prompts")
        plan = EvaluationPlan(
            prompts=prompts, sampling=self.sampling or model.sampling.model_copy(update=GREEDY), source=self.episodes
        )
        return await evaluate_policy(model.workspace, moment.policy, plan)


@dataclass(frozen=True)
class SamplesTable:
    """Shows a table of samples of the last step: prompts, completions (for episodes: conversations) and grades. The
    table is sent to the loggers and the terminal. In a flow it is also an artifact of the flow run, with a version per
    call."""

    cadence: Cadence = EVERY_FIFTH
    samples: int = 8
    """Rows of the table, chosen evenly from the step's shards."""
    name: str = "samples table"

    async def at(self, moment: Moment) -> None:
        """Raises ValueError in a class that does not sample."""
        store, policy = moment.model.workspace.open_store(), moment.policy
        # before the first step there is nothing to show
        if policy.step == 0 or moment.show is None:
            return
        record = moment.model.chain_of(policy).record(policy.step)
        if record is None:
            return
        # read from the record, because after a resume the moment has no rollouts
        inputs = step_inputs(store, record)
        if not inputs.rollouts:
            raise ValueError("SamplesTable shows what a step sampled, and this class does not sample; leave it out")
        # about the same number of rows from each shard
        rows: list[dict[str, Any]] = []
        each = -(-self.samples // len(inputs.rollouts))
        # episodes have no tables of grades: the grades are in the table of the episodes
        tables = inputs.graded or inputs.rollouts
        for drawn, graded in zip(inputs.rollouts, tables, strict=True):
            rows += sample_rows(store, drawn, graded, count=each)
        await moment.show(Table(name=self.name, step=policy.step, rows=tuple(rows[: self.samples])))


GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
"""Changes that make sampling parameters greedy."""


def _prompts(moment: Moment, dataset: Sequence[StringThread] | LoadedDataset, completions: int) -> PromptShard:
    """All prompts of a dataset, as one shard."""
    if not isinstance(dataset, LoadedDataset):
        dataset = load_prompts(moment.model.workspace, InlineDataset.of(list(dataset)), "prompt")
    rows = tuple(range(dataset.rows))
    return PromptShard(base=moment.model.base, dataset=dataset.ref, index=0, rows=rows, completions=completions)
