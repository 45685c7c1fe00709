"""Finds the checkpoints that a finished run does not need, for garbage collection.

A training class deletes them itself after its last step. They are left where it was killed before, and in runs of
earlier versions, which kept every checkpoint of a share of the run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from storage.chain.records import Chain, PolicyRef
from storage.chain.retention import Removal, Retention, plan_pruning
from storage.chain.run_record import find_run
from storage.errors import PermanentStorageError
from storage.store import keys
from storage.store.objects import ObjectStore

log = logging.getLogger(__name__)


class Surplus(NamedTuple):
    """A checkpoint that a finished run does not need."""

    policy: PolicyRef
    """A policy of the checkpoint's chain."""
    removal: Removal


def surplus_checkpoints(store: ObjectStore, listed_keys: Iterable[str]) -> dict[str, Surplus]:
    """Returns the checkpoints that the finished runs of the store do not need, by their logical keys.

    Args:
        listed_keys: The keys of all objects. A run is finished if it has a result.

    The rules are those of the run's config (`checkpoints.keep_*`). Of a run without a config, such as a recipe, only
    checkpoints of shares of the run are returned. What cannot be read is kept, with a warning.
    """
    # the chains of finished runs with more than one checkpoint: the last one always stays
    finished_runs: set[str] = set()
    checkpoints: Counter[tuple[str, str, str]] = Counter()
    for key in listed_keys:
        run = keys.run_of(key)
        if run is not None and key == keys.result_json(run):
            finished_runs.add(run)
        elif keys.checkpoint_step(key) is not None:
            checkpoints[keys.checkpoint_chain(key.rpartition("/")[0])] += 1

    surplus = {}
    for name, count in sorted(checkpoints.items()):
        chain = Chain(store, *name)
        if count < 2 or chain.run not in finished_runs:
            continue
        try:
            policy = chain.policy(0)
            removals = _removals(store, policy)
        except (PermanentStorageError, ValueError) as error:
            log.warning("the checkpoints of %s/%s/%s stay: %s", *name, error)
            continue
        for removal in removals:
            surplus[removal.manifest.key] = Surplus(policy, removal)
    return surplus


def _removals(store: ObjectStore, policy: PolicyRef) -> list[Removal]:
    info = find_run(store, policy.run)
    recorded = info.other.get("checkpoints") if info else None
    if not isinstance(recorded, dict):
        removals = plan_pruning(store, policy, Retention().of_finished())
        return [removal for removal in removals if removal.kept_name is not None]
    rules = Retention.model_validate({name: recorded[name] for name in Retention.model_fields if name in recorded})
    return plan_pruning(store, policy, rules.of_finished())
