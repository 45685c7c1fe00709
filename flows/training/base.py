"""What every training class has: a model, how it is stepped, when it is kept, and who hears of it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.handles import TrainingModel
from flows.callbacks import Callback
from flows.display.terminal import TerminalProgress
from flows.loggers import StageNotifier
from flows.training.checkpointing import CheckpointSchedule
from flows.training.journal import adamw
from flows.training.schedules import CosineScheduler, Schedule
from storage.chain.records import NanPolicy, PolicyRef
from tasks.task_runs import link_stage_start


class Trainer:
    """The arguments that all training classes share. `await X(...).run()` resumes where the run stands.

    `lr_scheduler` stands instead of `lr`; `weight_decay` is a number or a schedule; `betas` and `eps` are AdamW's.
    `checkpoints` stands instead of `checkpoint_frequency` (a share of the run) and `checkpoint_every_steps`.
    `restart_from_checkpoint` names a checkpoint, `run/stage/name`, whose weights the stage begins with.
    """

    stage: str

    def __init__(  # noqa: PLR0913  a constructor like a config
        self,
        model: TrainingModel,
        *,
        lr: float,
        lr_scheduler: Schedule | None = None,
        logger: TerminalProgress | None = None,
        max_grad_norm: float = 1.0,
        weight_decay: float | Schedule = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        skip_nan_gradients: bool = False,
        checkpoint_frequency: float | None = 0.2,
        checkpoint_every_steps: int | None = None,
        checkpoints: CheckpointSchedule | None = None,
        data_seed: int = 42,
        callbacks: Sequence[Callback] = (),
        stage_notifier: StageNotifier | None = None,
        restart_from_checkpoint: str | None = None,
    ) -> None:
        self.model = model
        self.logger = logger or TerminalProgress()
        self.schedule = lr_scheduler or CosineScheduler(lr)
        self.optimizer = adamw(weight_decay, max_grad_norm, betas, eps)
        self.nan_policy: NanPolicy = "skip" if skip_nan_gradients else "fail"
        self.checkpoints = checkpoints or CheckpointSchedule.every(checkpoint_frequency, checkpoint_every_steps)
        self.data_seed = data_seed
        self.callbacks, self.notifier = list(callbacks), stage_notifier
        self.restart_from = restart_from_checkpoint
        self._start: PolicyRef | None = None

    async def open(self) -> PolicyRef:
        """Opens the stage, once, and returns the policy it starts from: the reference of a KL term."""
        if self._start is None:
            checkpoint = self.restart_from
            self._start = await self.model.begin_stage(self.stage, checkpoint=checkpoint, exclusive=True)
            root = self.model.chain_of(self._start).root()
            if root is not None and root.start is not None:
                link_stage_start(self._start, root.start)
        return self._start
