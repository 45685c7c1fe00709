"""Retention of recovery checkpoints. They are caches: the chain rebuilds any policy without them, only slower."""

from __future__ import annotations

from storage import keys
from storage.artifacts import read_manifest
from storage.chain import PolicyRef
from storage.errors import ObjectNotFound
from storage.objects import ObjectStore


def prune_checkpoints(store: ObjectStore, policy: PolicyRef, *, keep_last: int) -> list[int]:
    """Deletes the chain's unnamed checkpoints but the last `keep_last`; returns the steps removed.

    The manifest goes first: a reader never follows one to data that is gone.
    """
    prefix = keys.checkpoints_prefix(policy.run, policy.stage, policy.model)
    unnamed = []
    for step in sorted(step for info in store.list(prefix) if (step := keys.checkpoint_step(info.key)) is not None):
        key = keys.checkpoint(policy.run, policy.stage, policy.model, step)
        try:
            manifest = read_manifest(store, key)
        except ObjectNotFound:
            continue  # another pruner was here first
        named = store.exists(keys.checkpoint_name(key)) or manifest.extra.get("name") is not None
        if not named:
            unnamed.append((step, manifest))
    removed = unnamed[:-keep_last] if keep_last else unnamed
    for _, manifest in removed:
        store.delete(keys.manifest_of_files(manifest.key))
        for entry in manifest.files:
            store.delete(entry.key)
    return [step for step, _ in removed]
