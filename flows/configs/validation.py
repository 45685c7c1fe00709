"""The configs of measurements on held-out rows, before, during and after training, and of the experiment trackers that
receive the metrics. They do not decide the result. Also checks the key of a run."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from engine.protocol import SamplingTemperature
from storage.errors import InvalidKey
from storage.serialization import Frozen
from storage.store.keys import validate_run
from tasks.loggers.services import LoggerName, check_installed, configured_loggers


class Every(Frozen):
    """How often the model is measured during training. It is measured after training in any case."""

    before: bool = True
    """Also measure the model that the run starts from."""
    every: float | None = Field(None, gt=0, le=1)
    """Fraction of the run after which the model is measured, again and again. None: not by fraction."""
    every_steps: int | None = Field(None, ge=1)
    """Number of steps after which the model is measured, again and again (instead of every)."""

    @model_validator(mode="after")
    def _one_cadence(self) -> Self:
        if self.every is not None and self.every_steps is not None:
            raise ValueError(f"both every={self.every} and every_steps={self.every_steps} were given; give one of them")
        return self

    def check_length(self, group: str, *, endless: bool) -> None:
        """Raises ValueError for a fraction of a run without an end."""
        if endless and self.every is not None:
            raise ValueError(
                f"a run without steps or epochs has no fractions, and {group}.every={self.every}; give "
                f"{group}.every_steps"
            )


class EvaluationConfig(Every):
    """The evaluation on held-out prompts before, during and after training."""

    temperature: SamplingTemperature = 0.0
    """Sampling temperature of the evaluation. 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass of the most probable tokens that the evaluation samples from. 1: all tokens."""
    top_k: int = Field(0, ge=0)
    """Number of most probable tokens that the evaluation samples from. 0: all tokens."""
    samples_per_prompt: int = Field(1, ge=1)
    """Completions of each held-out prompt. A prompt's reward is the mean of their rewards."""
    samples_shown: int = Field(10, ge=0)
    """Rollouts of the evaluation that the report shows, before and after training."""

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_prompt={self.samples_per_prompt} at temperature=0 would be as many copies of one "
                "completion; give a temperature above 0, or samples_per_prompt=1"
            )
        return self

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling parameters in which the evaluation differs from training."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


class ValidationConfig(Every):
    """The loss on held-out rows (data.heldout) before, during and after training."""


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


def checked_run(run: str) -> str:
    """The key of a run; empty: none is given. Raises ValueError."""
    try:
        return validate_run(run) if run else run
    except InvalidKey as error:
        raise ValueError(str(error)) from error
