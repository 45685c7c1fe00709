"""The config of the experiment trackers that receive a run's metrics. It does not decide the result."""

from __future__ import annotations

from pydantic import Field

from storage.serialization import Frozen
from tasks.loggers.services import LoggerName


class LoggingConfig(Frozen):
    """Where the metrics of each step are sent, besides the terminal, the page of the run and its report."""

    loggers: tuple[LoggerName, ...] = ()
    """Experiment trackers that receive the metrics. Each needs its package; accounts and servers come from its
    environment variables, such as WANDB_API_KEY."""
    project: str = Field("ostinato", min_length=1)
    """Name of the project in the experiment trackers."""
    experiment: str | None = None
    """Name of the run in the experiment trackers. None: the run's key."""
    folder: str = "ostinato-logs"
    """Folder for the files of experiment trackers, on the machine that runs the flow."""
