"""The config of the experiment trackers that receive a run's metrics. It does not decide the result."""

from __future__ import annotations

from storage.serialization import Frozen
from tasks.loggers.services import LoggerName


class LoggingConfig(Frozen):
    """Where the metrics of each step are sent, besides the terminal, the page of the run and its report."""

    loggers: tuple[LoggerName, ...] = ()
    """Experiment trackers that receive the metrics. Each needs its package; accounts and servers come from its
    environment variables, such as WANDB_API_KEY."""
    project: str = ""
    """Name of the project in the experiment trackers. Empty: the tracker's environment variable (WANDB_PROJECT,
    MLFLOW_EXPERIMENT_NAME, SWANLAB_PROJ_NAME), else "ostinato"."""
    experiment: str | None = None
    """Name of the run in the experiment trackers. None: the run's key."""
    folder: str = ""
    """Folder for the files of experiment trackers, on the machine that runs the flow. Empty: the tracker's environment
    variable (WANDB_DIR, TENSORBOARD_LOGGING_DIR, SWANLAB_LOGDIR), else "ostinato-logs"."""
