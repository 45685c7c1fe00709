"""The report of an audit, and the object that collects its findings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

from storage.serialization import Frozen

Severity = Literal["error", "warning"]

RESTORE = "restore the object from a backup"


class Finding(Frozen):
    """One problem that an audit found."""

    severity: Severity
    key: str
    """Key of the object, artifact or folder that has the problem."""
    what: str
    """The problem, written as the rest of a sentence that begins with the key."""
    what_to_do: str


class AuditReport(Frozen):
    """The result of an audit."""

    problems: tuple[Finding, ...]
    pending: tuple[str, ...]
    """Keys of data that no manifest names: of attempts in progress or interrupted ones. Garbage collection deletes
    them when they are old."""
    counts: dict[str, int]
    """Numbers of checked objects, artifacts, bytes (read and hashed), chains, steps, checkpoints and rebases."""

    @property
    def ok(self) -> bool:
        return not self.problems


class Findings:
    """Collects the findings, the counts and the chain states of an audit."""

    def __init__(self) -> None:
        self.problems: list[Finding] = []
        self.counts: Counter[str] = Counter()
        self.states: dict[tuple[str, str, str], dict[int, str]] = defaultdict(dict)
        """The state of each step of each chain that was read, by (run, stage, model)."""

    def error(self, key: str, what: str, what_to_do: str) -> None:
        self.problems.append(Finding(severity="error", key=key, what=what, what_to_do=what_to_do))

    def warning(self, key: str, what: str, what_to_do: str) -> None:
        self.problems.append(Finding(severity="warning", key=key, what=what, what_to_do=what_to_do))

    def report(self, *, pending: Sequence[str]) -> AuditReport:
        return AuditReport(problems=tuple(self.problems), pending=tuple(pending), counts=dict(self.counts))
