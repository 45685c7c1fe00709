"""Named places where a test kills the process, so that crashes are enumerated instead of hoped for.

OSTINATO_FAILPOINT=rollout.after_data:3 ends the process by SIGKILL when that place is reached for the third time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

FAILPOINTS: frozenset[str] = frozenset(
    {
        "artifact.before_data",
        "artifact.after_data",
        "artifact.after_manifest",
        "rollout.sampling",
        "rollout.before_data",
        "rollout.after_data",
        "rollout.after_manifest",
        "trajectory.turn",
        "trajectory.after_data",
        "grade.after_data",
        "batch.after_data",
        "step.before_gradient",
        "step.mid_gradient",
        "step.before_commit",
        "step.after_commit",
        "checkpoint.mid_upload",
        "checkpoint.before_manifest",
        "checkpoint.after_manifest",
        "rebase.before_commit",
        "rebase.after_commit",
        "model.mid_upload",
        "model.before_manifest",
    }
)

_hits: Counter[str] = Counter()  # of this process: a failpoint counts from the start of the process it kills
_lock = threading.Lock()


def failpoint(name: str) -> None:
    """Kills this process if OSTINATO_FAILPOINT asks for it here. Raises ValueError for a name not in FAILPOINTS."""
    if name not in FAILPOINTS:
        raise ValueError(f"unknown failpoint {name!r}; add it to storage.failpoints.FAILPOINTS")
    wanted = os.environ.get("OSTINATO_FAILPOINT")
    if wanted:
        _hit(name, wanted)


def _hit(name: str, wanted: str) -> None:
    target, _, number = wanted.partition(":")
    if target not in FAILPOINTS:
        raise ValueError(f"OSTINATO_FAILPOINT={wanted!r} names no failpoint; known: {', '.join(sorted(FAILPOINTS))}")
    if target != name:
        return
    with _lock:
        _hits[name] += 1
        if _hits[name] == int(number or 1):
            os.kill(os.getpid(), signal.SIGKILL)
