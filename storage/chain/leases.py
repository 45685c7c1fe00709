"""Leases of runs. The lease with the highest number (epoch) is in force; the holder of a lower one is refused.

Leases only save work: two processes on one run waste time, but commits stay correct without any lease.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from storage.errors import CorruptArtifact, ObjectNotFound, RunBeingDeleted
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.index import record_run
from storage.store.objects import ObjectStore, list_numbers


def acquire_lease(store: ObjectStore, run: str, info: Mapping[str, Any]) -> int:
    """Takes a new lease of the run and returns its epoch, which is higher than all earlier ones. The first is 1.

    `info` describes the holder. Holders of earlier epochs are refused from now on. Raises RunBeingDeleted.
    """
    body = {"info": dict(info), "attempt": uuid4().hex, "created": datetime.now(UTC).isoformat()}
    record_run(store, run)
    # another process may take the next epoch first: then try the one after it
    epoch = current_epoch(store, run)
    while True:
        epoch += 1
        if store.put_if_absent(keys.lease(run, epoch), canonical_json(body | {"epoch": epoch})).won:
            break
    # after the lease: a deletion looks for leases after it has marked the run, so one of the two notices the other
    try:
        check_not_deleted(store, run)
    except RunBeingDeleted:
        release_lease(store, run, epoch)
        raise
    return epoch


def check_not_deleted(store: ObjectStore, run: str) -> None:
    """Raises RunBeingDeleted if a deletion of the run has begun and has not ended."""
    if store.exists(keys.deletion(run)):
        raise RunBeingDeleted(
            f"run {run!r} in {store.url} is deleted in part; finish it with: ostinato runs delete {run} --yes"
        )


def release_lease(store: ObjectStore, run: str, epoch: int) -> None:
    """Records that the holder of this epoch has stopped.

    No process waits for it, since the next holder takes a higher epoch. It shows to people and to `doctor` that the run
    is not in progress.
    """
    body = {"epoch": epoch, "released": datetime.now(UTC).isoformat()}
    store.put_if_absent(keys.lease_release(run, epoch), canonical_json(body))


def is_held(store: ObjectStore, run: str) -> bool:
    """Whether the lease in force is not released. A killed holder does not release its lease."""
    epoch = current_epoch(store, run)
    return epoch > 0 and not store.exists(keys.lease_release(run, epoch))


def lease_holder(store: ObjectStore, run: str, epoch: int) -> dict[str, Any]:
    """Returns the `info` of the holder of this epoch, or {} if there is no such epoch. Raises CorruptArtifact."""
    key = keys.lease(run, epoch)
    try:
        info = json.loads(store.get(key)).get("info")
    except ObjectNotFound:
        return {}
    except (ValueError, AttributeError) as error:
        raise CorruptArtifact(f"{key} is no readable lease ({error}); restore it from a backup") from error
    return info if isinstance(info, dict) else {}


def flow_run_of_lease(store: ObjectStore, run: str) -> str:
    """Returns the id of the flow run that took the newest lease. Empty: none did, or no flow run took it."""
    epoch = current_epoch(store, run)
    return str(lease_holder(store, run, epoch).get("flow_run") or "") if epoch else ""


def current_epoch(store: ObjectStore, run: str) -> int:
    """Returns the epoch in force, or 0 if the run has no lease yet."""
    return max(list_numbers(store, keys.leases_prefix(run)), default=0)
