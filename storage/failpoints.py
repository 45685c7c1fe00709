"""Named places in the code at which a test can kill the process, so that tests cover a crash at each of them.

OSTINATO_FAILPOINT=rollout.after_data:3 ends the process with SIGKILL when it reaches that place for the third time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

FAILPOINTS: frozenset[str] = frozenset(
    {
        # every artifact, and the kinds of artifacts with failpoints of their own
        "artifact.before_data",
        "artifact.after_data",
        "artifact.after_manifest",
        "rollout.sampling",
        "rollout.before_data",
        "rollout.after_data",
        "rollout.after_manifest",
        "segment.committed",
        "trajectory.turn",
        "trajectory.call",
        "grade.after_data",
        "batch.after_data",
        # a gradient step
        "step.before_gradient",
        "step.mid_gradient",
        "step.before_commit",
        "step.after_commit",
        # the way of a policy's weights to the sampler lane
        "publish.staged",
        "publish.loaded",
        # checkpoints and rebases
        "checkpoint.mid_upload",
        "checkpoint.before_manifest",
        "checkpoint.after_manifest",
        "rebase.before_commit",
        "rebase.after_commit",
        # an entry of the index, before the object that it points to
        "index.recorded",
        # deletion of a checkpoint
        "retention.named",
        "retention.unlisted",
        # deletion of a run
        "deletion.marked",
        "deletion.begun",
        "deletion.hidden",
        "deletion.object",
        "deletion.emptied",
        # publication of a model
        "model.mid_upload",
        "model.before_manifest",
    }
)

_hits: Counter[str] = Counter()
"""How often this process has reached each failpoint."""
_lock = threading.Lock()


def failpoint(name: str) -> None:
    """Kills this process if OSTINATO_FAILPOINT names this place and count.

    Raises ValueError for a name that is not in FAILPOINTS.
    """
    if name not in FAILPOINTS:
        raise ValueError(f"unknown failpoint {name!r}; add it to storage.failpoints.FAILPOINTS")
    setting = os.environ.get("OSTINATO_FAILPOINT")
    if setting:
        _count_and_kill(name, setting)


def _count_and_kill(name: str, setting: str) -> None:
    target, _, number = setting.partition(":")
    if target not in FAILPOINTS:
        raise ValueError(f"OSTINATO_FAILPOINT={setting!r} names no failpoint; known: {', '.join(sorted(FAILPOINTS))}")
    if target != name:
        return
    # count and kill under the lock, so that exactly the n-th thread to arrive kills the process
    with _lock:
        _hits[name] += 1
        if _hits[name] == int(number or 1):
            os.kill(os.getpid(), signal.SIGKILL)
