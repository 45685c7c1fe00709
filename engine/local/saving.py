"""Checkpoints and exported models on their way to storage: files are written by the compute thread, which then goes on
with the next step, and committed by another. The manifest is still the last thing written.
"""

from __future__ import annotations

import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engine.local.slots import Slot
from storage import keys
from storage.artifacts import ArtifactRef, Provenance, commit_files, find_artifact, read_manifest
from storage.chain import Chain, PolicyRef
from storage.errors import StorageError
from storage.models import canonical_json
from storage.objects import ObjectStore
from storage.worklog import log_work

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint's files in a scratch folder, which goes when they are committed."""

    policy: PolicyRef
    folder: Path
    files: dict[str, Path]
    name: str | None
    weights_digest: str

    @property
    def key(self) -> str:
        return checkpoint_key(self.policy)


def checkpoint_key(policy: PolicyRef) -> str:
    return keys.checkpoint(policy.run, policy.stage, policy.model, policy.step)


def find_checkpoint(store: ObjectStore, policy: PolicyRef, *, name: str | None) -> ArtifactRef | None:
    """The committed checkpoint of the policy, which bears `name` from now on."""
    found = find_artifact(store, checkpoint_key(policy))
    if found is not None and name is not None:
        store.put_if_absent(keys.checkpoint_name(checkpoint_key(policy)), canonical_json({"name": name}))
    return found


class Saver:
    """Commits snapshots in a thread of its own, in the order they were taken."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ostinato-upload")

    def take(self, slot: Slot, folder: Path, *, name: str | None = None) -> Snapshot:
        """Writes the slot's weights and moments into `folder`. The slot must not move meanwhile."""
        digest, _ = slot.trainer.weights_digest()
        snapshot = Snapshot(slot.policy, folder, slot.trainer.write_checkpoint(folder), name, digest)
        log_work("checkpoint", policy=slot.policy.uri, step=slot.policy.step)
        slot.saved_step = slot.policy.step
        return snapshot

    def submit(self, snapshot: Snapshot, provenance: Provenance) -> Future[ArtifactRef]:
        return self._pool.submit(self._commit, snapshot, provenance)

    def submit_unasked(self, snapshot: Snapshot) -> Future[ArtifactRef | None]:
        """For a checkpoint that nobody waits for: what made the chain's last batch is its provenance, and a failure
        only makes a later redo longer."""

        def commit() -> ArtifactRef | None:
            try:
                record = Chain.of(self.store, snapshot.policy).record(snapshot.policy.step)
                assert record is not None  # only what moved past its last checkpoint is saved unasked
                provenance = read_manifest(self.store, record.request.batch.key).provenance
                return self._commit(snapshot, provenance)
            except (StorageError, OSError) as error:
                log.warning("%s was not checkpointed, a redo will be longer: %s", snapshot.policy.uri, error)
                return None

        return self._pool.submit(commit)

    def _commit(self, snapshot: Snapshot, provenance: Provenance) -> ArtifactRef:
        policy = snapshot.policy
        try:
            return commit_files(
                self.store,
                snapshot.key,
                snapshot.files,
                kind="checkpoint",
                parents=(policy.uri,),
                provenance=provenance,
                extra={"state": policy.state, "name": snapshot.name, "weights_digest": snapshot.weights_digest},
            )
        finally:
            shutil.rmtree(snapshot.folder, ignore_errors=True)

    def close(self) -> None:
        """Waits for what was submitted."""
        self._pool.shutdown()
