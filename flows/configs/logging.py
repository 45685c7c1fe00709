"""Config of where a run's figures are sent besides the terminal. It decides nothing."""

from __future__ import annotations

from pydantic import Field

from storage.serialization import Frozen
from tasks.loggers.services import LoggerName


class LoggingConfig(Frozen):
    """Where the figures of each step are sent, besides the terminal, the run's page and its report."""

    loggers: tuple[LoggerName, ...] = ()
    """Each needs its package; accounts and servers are those of the environment, such as WANDB_API_KEY."""
    project: str = Field("ostinato", min_length=1)
    """What they call the project."""
    experiment: str | None = None
    """What they call the run. None: its key."""
    folder: str = "ostinato-logs"
    """Where they keep files on the machine that runs the flow."""
