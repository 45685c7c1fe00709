"""The errors whose message says what was given, what was expected and what to do, so that no traceback is needed."""

from __future__ import annotations

from engine.errors import EngineError
from flows.configs.overrides import ConfigError
from flows.configs.sweep import TrialsFailed
from storage.errors import StorageError
from tasks.datasets.errors import DatasetError
from tasks.environments.spec import EnvironmentSpecError
from tasks.evaluation.harness import HarnessError
from tasks.graders.spec import GraderSpecError
from tasks.loggers.base import LoggerMissing
from tasks.plans import TooManyMasked


class DoesNotFit(ValueError):
    """The run needs more memory or disk than there is."""


EXPECTED_ERRORS = (
    ConfigError, DoesNotFit, EngineError, StorageError, DatasetError, GraderSpecError, EnvironmentSpecError,
    LoggerMissing, TooManyMasked, TrialsFailed, HarnessError,
)  # fmt: skip
