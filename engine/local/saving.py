"""Checkpoints and exported models on their way to storage: files are written by the compute thread, which then goes on
with the next step, and committed by another. The manifest is still the last thing written.
"""

from __future__ import annotations

import errno
import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from engine.local.slots import Slot
from storage import keys
from storage.artifacts import ArtifactRef, Provenance, commit_files, find_artifact
from storage.chain import PolicyRef
from storage.errors import StorageFull
from storage.models import canonical_json
from storage.objects import ObjectStore
from storage.worklog import log_work

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
MOST_UNDER_WAY = 3
"""Snapshots that wait on this machine's disk for their upload."""


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
        self._under_way: dict[str, Future[ArtifactRef]] = {}
        """By the key of the checkpoint: equal states of two runs are two checkpoints."""

    def take(self, slot: Slot, folder: Path, *, name: str | None = None) -> Snapshot:
        """Writes the slot's weights and moments into `folder`. The slot must not move meanwhile. Raises StorageFull."""
        digest, _ = slot.trainer.weights_digest()
        try:
            files = slot.trainer.write_checkpoint(folder)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in FULL:
                raise StorageFull(f"no space for the checkpoint of {slot.policy.uri} in {folder.parent}") from error
            raise
        log_work("checkpoint", policy=slot.policy.uri, step=slot.policy.step)
        slot.saved_step = slot.policy.step
        return Snapshot(slot.policy, folder, files, name, digest)

    def under_way(self, policy: PolicyRef) -> Future[ArtifactRef] | None:
        """The upload of this policy's checkpoint that has not ended yet."""
        return self._under_way.get(checkpoint_key(policy))

    def of_run(self, run: str) -> list[Future[ArtifactRef]]:
        """The run's uploads that have not ended yet."""
        prefix = keys.run_prefix(run)
        return [future for key, future in self._under_way.copy().items() if key.startswith(prefix)]

    def submit(self, snapshot: Snapshot, provenance: Provenance) -> Future[ArtifactRef]:
        """Its upload. One that nobody waits for and that fails only makes a later redo longer. Waits while the disk
        holds as many snapshots as may be under way."""
        if len(before := list(self._under_way.copy().values())) >= MOST_UNDER_WAY:
            wait(before[:1])
        future = self._pool.submit(self._commit, snapshot, provenance)
        self._under_way[snapshot.key] = future
        future.add_done_callback(lambda done: self._ended(snapshot, done))
        return future

    def settle(self, policy: PolicyRef) -> None:
        """Waits for the uploads of the policy's chain: a checkpoint under way is nearer than any redo."""
        prefix = keys.checkpoints_prefix(policy.run, policy.stage, policy.model)
        wait([future for key, future in self._under_way.copy().items() if key.startswith(prefix)])

    def _ended(self, snapshot: Snapshot, done: Future[ArtifactRef]) -> None:
        self._under_way.pop(snapshot.key, None)
        if not done.cancelled() and (error := done.exception()):
            log.warning("the checkpoint of %s failed: %s", snapshot.policy.uri, error)

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
