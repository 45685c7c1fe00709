"""Who may act for a run: numbered leases, of which the highest is in force.

Leases are for efficiency, commits for correctness: whoever acts on an old epoch wastes time and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from storage.errors import CorruptArtifact, ObjectNotFound
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.objects import ObjectStore


def acquire_lease(store: ObjectStore, run: str, info: Mapping[str, Any]) -> int:
    """A new epoch (from 1), higher than every one before; `info` says who holds it. Earlier holders are fenced."""
    body = {"info": dict(info), "attempt": uuid4().hex, "created": datetime.now(UTC).isoformat()}
    epoch = current_epoch(store, run)
    while True:
        epoch += 1
        if store.put_if_absent(keys.lease(run, epoch), canonical_json(body | {"epoch": epoch})).won:
            return epoch


def release_lease(store: ObjectStore, run: str, epoch: int) -> None:
    """Says that the holder of this epoch acts no more. Nobody waits for it: the next holder takes a higher epoch
    anyway; it tells a person, and `doctor`, a run that was left from one that is driven."""
    body = {"epoch": epoch, "released": datetime.now(UTC).isoformat()}
    store.put_if_absent(keys.lease_release(run, epoch), canonical_json(body))


def is_held(store: ObjectStore, run: str) -> bool:
    """Whether somebody holds the lease and has not released it. A killed holder never does."""
    epoch = current_epoch(store, run)
    return epoch > 0 and not store.exists(keys.lease_release(run, epoch))


def lease_holder(store: ObjectStore, run: str, epoch: int) -> dict[str, Any]:
    """What the holder of this epoch wrote about itself; empty for an epoch without a holder. Raises CorruptArtifact."""
    key = keys.lease(run, epoch)
    try:
        info = json.loads(store.get(key)).get("info")
    except ObjectNotFound:
        return {}
    except (ValueError, AttributeError) as error:
        raise CorruptArtifact(f"{key} is no readable lease ({error}); restore it from a backup") from error
    return info if isinstance(info, dict) else {}


def current_epoch(store: ObjectStore, run: str) -> int:
    """The epoch in force; 0 when nobody has acted for the run yet."""
    numbers = (keys.parse_number(info.key) for info in store.list(keys.leases_prefix(run)))
    return max((n for n in numbers if n is not None), default=0)
