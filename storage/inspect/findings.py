"""What an audit says: findings, and what is collected while it goes on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

from storage.serialization import Frozen

Severity = Literal["error", "warning"]

RESTORE = "restore the object from a backup"


class Finding(Frozen):
    """One thing that is not as it should be."""

    severity: Severity
    key: str
    """The object, the artifact or the folder that it is about."""
    what: str
    """Reads as a sentence after the key."""
    what_to_do: str


class AuditReport(Frozen):
    """What an audit found."""

    problems: tuple[Finding, ...]
    pending: tuple[str, ...]
    """Data that no manifest names: of an attempt that is under way or was interrupted. Garbage collection takes it."""
    counts: dict[str, int]
    """How many objects, artifacts, bytes (read and hashed), chains, steps, checkpoints were looked at."""

    @property
    def ok(self) -> bool:
        return not self.problems


class Findings:
    """Collects findings."""

    def __init__(self) -> None:
        self.problems: list[Finding] = []
        self.counts: Counter[str] = Counter()
        self.states: dict[tuple[str, str, str], dict[int, str]] = defaultdict(dict)
        """(run, stage, model) -> step -> state, of every chain that was read."""

    def error(self, key: str, what: str, what_to_do: str) -> None:
        self.problems.append(Finding(severity="error", key=key, what=what, what_to_do=what_to_do))

    def warning(self, key: str, what: str, what_to_do: str) -> None:
        self.problems.append(Finding(severity="warning", key=key, what=what, what_to_do=what_to_do))

    def report(self, *, pending: Sequence[str]) -> AuditReport:
        return AuditReport(problems=tuple(self.problems), pending=tuple(pending), counts=dict(self.counts))
