"""The loop of SFT, RewardModelling and the classes of preferences: trains on the rows of a dataset, epoch after epoch.

Each class defines how rows become a batch, and which loss is minimised. The flow around a class is `train_on_dataset`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from engine.handles import Model, TrainingModel
from engine.losses.spec import LossSpec
from engine.text.threads import StringThread
from flows.callbacks import Cadence, Callback, ValidationLoss
from flows.catalogue import PreferenceAlgorithm, PreferenceOptimizer
from flows.configs.common import SFTAlgorithm, SupervisedConfig
from flows.configs.reinforcement import RunRules
from flows.display.terminal import TerminalProgress
from flows.runs.session import RunSession, open_run
from flows.training.arguments import check_one_length, whole_number
from flows.training.checkpointing import CheckpointSchedule
from flows.training.finish import publish_and_report
from flows.training.options import SupervisedOptions, read_options
from flows.training.training_loop import TrainingLoop
from flows.training.training_steps import training_steps
from storage.chain.records import PolicyRef, StepRequest
from storage.registry.models import registered_key
from storage.store.artifacts import ArtifactRef
from tasks.batches.pairs import prepare_preferences
from tasks.datasets.load import LoadedDataset
from tasks.datasets.load_order import load_order
from tasks.datasets.spec import InlineDataset, InlinePairs
from tasks.load import load_prompts
from tasks.train import take_gradient_step


class SupervisedLoop(TrainingLoop):
    """A training class that trains on the rows of a dataset. Without `max_steps` and `epochs`, it trains one epoch.

    `max_tokens` is the longest conversation (None: the model's context, and the max_batch_size that it was spawned
    with). A longer one is an error, or is dropped and counted (`truncation="drop"`).
    """

    loss: LossSpec
    options_type = SupervisedOptions
    algorithm_type: ClassVar[type[SFTAlgorithm]] = SFTAlgorithm
    """Holds the defaults and the bounds of the algorithm's options."""

    def __init__(self, model: TrainingModel, options: SupervisedOptions) -> None:
        super().__init__(model, options, lr=options.get("lr"))
        check_one_length("max_steps", options.get("max_steps"), options.get("epochs"))
        counts = {
            "steps": whole_number("max_steps", options.get("max_steps")),
            "epochs": whole_number("epochs", options.get("epochs")),
            "samples_per_batch": whole_number("samples_per_batch", options.get("samples_per_batch")),
        }
        given = {name: count for name, count in counts.items() if count is not None}
        self.algorithm = read_options(self.algorithm_type, options, options.get("algorithm"), **given)
        self.rules = read_options(RunRules, options, options.get("rules"))
        # the length of the run
        self.max_steps, self.epochs = self.algorithm.steps, self.algorithm.epochs or 1
        self.samples_per_batch = self.algorithm.samples_per_batch
        self.lengths = self.algorithm.lengths

    async def run(self) -> PolicyRef:
        """The loop. The result of each line is committed before the next line begins, so a crash repeats one line."""
        workspace = self.model.workspace
        # begin or resume the stage
        start = await self.open()
        reference = self.reference(start)
        data = self.load_dataset()
        order = load_order(workspace.open_store(), data, seed=self.data_seed)
        size = self.batch_size(order.rows, mixed=bool(data.parts))
        # rounded up: the last batch may contain rows of one further epoch
        total_steps = self.max_steps or -(-self.epochs * order.rows // size)
        async with training_steps(self, total_steps, loss=self.loss, reference=reference, data=data) as steps:
            async for step in steps:
                cursor = steps.cursor
                # the next rows of the dataset, and their batch
                rows, cursor_out = order.take(cursor, size)
                batch = await self.prepare(step.policy, data.ref, rows, step.index)
                # the gradient step
                request = StepRequest(
                    parent=step.policy,
                    batch=batch,
                    reference=reference,
                    loss=self.loss.model_dump(),
                    optimizer=self.optimizer.at(step.index, total_steps, self.schedule),
                    cursor_in=cursor.model_dump(),
                    cursor_out=cursor_out.model_dump(),
                    nan_policy=self.nan_policy,
                    used=self.use.read(),
                )
                policy = await take_gradient_step(workspace, request, step=step.index)
                step.complete(policy)
        return steps.policy

    def batch_size(self, rows: int, *, mixed: bool) -> int:
        """The rows of a batch: at most those of the dataset, which a note says. `mixed`: they are those of a mixture,
        of whose parts a batch has shares."""
        if rows < self.samples_per_batch and not mixed:
            self.logger.note(
                f"{rows:,} rows, and samples_per_batch={self.samples_per_batch}: every step is the whole dataset"
            )
        return min(self.samples_per_batch, rows)

    async def prepare(self, policy: PolicyRef, dataset: ArtifactRef, rows: list[int], step: int) -> ArtifactRef:
        """The committed batch of these rows."""
        reference = self.reference(await self.open())
        return await prepare_preferences(
            self.model.workspace, policy, self.model.base, dataset, rows,
            loss=self.loss, reference=reference, lengths=self.lengths, step=step,
        )  # fmt: skip

    def load_dataset(self) -> LoadedDataset:
        """The dataset, in the store."""
        raise NotImplementedError

    def reference(self, start: PolicyRef) -> PolicyRef | None:
        """The reference policy of the loss, which is the policy that the stage began with. None for a loss without a
        reference."""
        return start if self.loss.needs_reference else None


class PreferenceLoop(SupervisedLoop):
    """A training class with a loss of pairs, or of labelled answers. `dataset`: pairs (preferred, dispreferred) of
    threads that begin alike, or threads with their label in metadata["res"]; or a loaded dataset of either kind, as the
    loss needs it. `samples_per_batch` counts pairs, or threads.

    Only the turns after those that both threads begin with are compared, unless the threads' weights say otherwise.
    """

    optimizer_type = PreferenceOptimizer

    def __init__(
        self,
        dataset: list[tuple[StringThread, StringThread]] | list[StringThread] | LoadedDataset,
        model: TrainingModel,
        options: SupervisedOptions,
    ) -> None:
        super().__init__(model, options)
        self.dataset = dataset
        assert isinstance(self.algorithm, PreferenceAlgorithm)
        self.loss = self.algorithm.loss

    def load_dataset(self) -> LoadedDataset:
        kind, use = ("pairs", "preference") if self.loss.pairwise else ("threads", "rating")
        if not isinstance(self.dataset, LoadedDataset):
            make = InlinePairs.of if self.loss.pairwise else InlineDataset.of
            return load_prompts(self.model.workspace, make(self.dataset), use)  # type: ignore[arg-type]
        if self.dataset.ref.kind != kind:
            raise ValueError(
                f"{self.dataset.ref.key} holds {self.dataset.ref.kind}; {type(self).__name__} needs {kind}: load it "
                f"with kind={use!r}"
            )
        return self.dataset


async def supervised_arguments(
    config: SupervisedConfig, session: RunSession, logger: TerminalProgress
) -> dict[str, Any]:
    """The arguments of a training class on a dataset. Spawns the model."""
    builder = Model(registered_key(session.base)).to_builder(session).training(config.model.trainable)
    if config.has_scalar_head:
        builder = builder.into_scoring_model()
    return {
        "callbacks": _validation_callbacks(config, session),
        "dataset": session.data,
        "model": await builder.spawn_train(config.model.name),
        "logger": logger,
        "optimizer": config.optimizer,
        "algorithm": config.algorithm,
        "rules": config.rules,
        "checkpoints": CheckpointSchedule(config.checkpoints),
        "data_seed": config.seed,
    }


def _validation_callbacks(config: SupervisedConfig, session: RunSession) -> list[Callback]:
    """The callback for the loss on held-out rows. Empty if the config has no held-out rows."""
    if config.data.heldout_rows is None:
        return []
    heldout = load_prompts(session.workspace, config.data.heldout_rows, config.data.heldout_use)
    return [ValidationLoss(heldout, Cadence.of(config.validation), config.algorithm.lengths)]


async def train_on_dataset(config: SupervisedConfig, kind: type[SupervisedLoop]) -> dict[str, Any]:
    """The flow of a training class on a dataset: opens the run, trains, publishes and reports. Returns the result of
    the run."""
    logger = TerminalProgress()
    async with open_run(config, logger) as session:
        if session.result is not None:
            return session.result
        trainer = kind(**await supervised_arguments(config, session, logger))
        policy = await trainer.run()
        return await publish_and_report(session, logger, config.model, policy, further=trainer.ending_entry)
