"""The base of all training classes: the model, the optimizer, the checkpoints and the stage of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from engine.handles import TrainingModel
from flows.callbacks import check_callbacks
from flows.configs.common import CheckpointConfig
from flows.configs.optimizer import OptimizerConfig
from flows.configs.reinforcement import RunRules
from flows.display.terminal import TerminalProgress
from flows.training.checkpointing import CheckpointSchedule
from flows.training.endings import Ending, UseMeter
from flows.training.options import LoopOptions, check_names
from flows.training.schedules import AdamW, schedule_of
from storage.chain.records import NanPolicy, PolicyRef, RunUse
from tasks.task_runs import link_stage_start

DATA_SEED = 42
"""Seed of the order of the data, if neither the arguments nor a config give one."""


class TrainingLoop:
    """The base of all training classes. `await X(...).run()` trains, and continues a run that was interrupted.

    A subclass sets the config classes that hold its defaults. Its options are those of flows.training.options.
    """

    stage: ClassVar[str]
    """The name of the stage in the run's history."""
    options_type: ClassVar[type] = LoopOptions
    optimizer_type: ClassVar[type[OptimizerConfig]] = OptimizerConfig
    """Holds the defaults of the optimizer."""
    rules: RunRules
    """When the run ends early."""
    ending: Ending | None = None
    """Why the run ended before its last step. None: it took all its steps, or is not at its end."""
    earlier_use: RunUse | None = None
    """What the run had used when the stage began. None: what the chain says that it starts from."""
    use: UseMeter
    """What the run has used. Set when the steps begin."""

    def __init__(self, model: TrainingModel, options: LoopOptions, *, lr: float | None) -> None:
        """`lr`: the highest learning rate. None: that of the option `optimizer`, or the default of `optimizer_type`."""
        check_names(type(self).__name__, options, self.options_type.__annotations__)
        self.model = model
        self.logger = options.get("logger") or TerminalProgress()
        # the optimizer and its schedules
        config = options.get("optimizer") or self.optimizer_type()
        self.schedule = options.get("lr_scheduler") or schedule_of(config, lr=lr)
        group = AdamW.of(config)
        self.optimizer = replace(
            group,
            weight_decay=options.get("weight_decay", group.weight_decay),
            max_grad_norm=options.get("max_grad_norm", group.max_grad_norm),
            betas=options.get("betas", group.betas),
            eps=options.get("eps", group.eps),
        )
        skip = options.get("skip_nan_gradients", config.skip_nan_gradients)
        self.nan_policy: NanPolicy = "skip" if skip else "fail"
        # checkpoints
        checkpoints = CheckpointConfig(
            frequency=options.get("checkpoint_frequency", CheckpointConfig().frequency),
            every_steps=options.get("checkpoint_every_steps"),
        )
        self.checkpoints = options.get("checkpoints") or CheckpointSchedule(checkpoints)
        self.restart_from = options.get("restart_from_checkpoint")
        # the order of the data, and what is called during the run
        self.data_seed = options.get("data_seed", DATA_SEED)
        self.callbacks, self.notifier = check_callbacks(options.get("callbacks", ())), options.get("stage_notifier")
        self._start: PolicyRef | None = None

    @property
    def ending_entry(self) -> dict[str, Any]:
        """The entry of a run's result that says why it ended before its last step. Empty if it did not."""
        return {} if self.ending is None else {"ending": self.ending.model_dump()}

    async def open(self) -> PolicyRef:
        """Opens the stage, once. Returns the policy that it starts from, which is the reference of a KL term."""
        if self._start is None:
            checkpoint = self.restart_from
            self._start = await self.model.begin_stage(self.stage, checkpoint=checkpoint, exclusive=True)
            # show in Prefect which policy the stage continues
            root = self.model.chain_of(self._start).root()
            if root is not None and root.start is not None:
                link_stage_start(self._start, root.start)
        return self._start
