"""The config of the experiment trackers that receive a run's metrics. It does not decide the result."""

from __future__ import annotations

from storage.serialization import Frozen
from tasks.loggers.services import LoggerName, check_installed
from tasks.loggers.stage_loggers import configured_loggers


class LoggingConfig(Frozen):
    """Where the metrics of each step are sent, besides the terminal, the page of the run and its report."""

    loggers: tuple[LoggerName, ...] | None = None
    """Experiment trackers that receive the metrics. Each needs its package; accounts and servers come from its
    environment variables, such as WANDB_API_KEY. None: the trackers whose variables are set in the process that runs
    the flow, such as WANDB_PROJECT or MLFLOW_TRACKING_URI. An empty list: no tracker."""
    project: str = ""
    """Name of the project in the experiment trackers. Empty: the tracker's environment variable (WANDB_PROJECT,
    MLFLOW_EXPERIMENT_NAME, SWANLAB_PROJ_NAME), else "ostinato"."""
    experiment: str | None = None
    """Name of the run in the experiment trackers. None: the run's key."""
    folder: str = ""
    """Folder for the files of experiment trackers, on the machine that runs the flow. Empty: the tracker's environment
    variable (WANDB_DIR, TENSORBOARD_LOGGING_DIR, SWANLAB_LOGDIR), else "ostinato-logs"."""

    def trackers(self) -> tuple[LoggerName, ...]:
        """The trackers that receive the metrics. Raises LoggerMissing if the package of one is not installed."""
        names = configured_loggers() if self.loggers is None else self.loggers
        for name in names:
            check_installed(name)
        return names
