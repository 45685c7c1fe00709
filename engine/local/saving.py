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

from engine.local.loaded_policies import LoadedPolicy
from storage.chain.rebase import checkpoint_extra, is_in_effect, rebase_at
from storage.chain.records import Chain, PolicyRef, RebaseMark
from storage.errors import StorageFull
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, commit_files, find_artifact, read_manifest
from storage.store.objects import ObjectStore
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
    key: str
    rebase: RebaseMark | None
    """What the weights descend from."""


def checkpoint_key(policy: PolicyRef) -> str:
    return keys.checkpoint(policy.run, policy.stage, policy.model, policy.step)


def find_policy_checkpoint(store: ObjectStore, policy: PolicyRef, *, name: str | None) -> ArtifactRef | None:
    """The committed checkpoint of the policy, which bears `name` from now on. Where the chain was rebased: the one that
    it goes on from, which is kept in any case."""
    chain = Chain.of(store, policy)
    rebase = rebase_at(chain, policy.step)
    if rebase is not None and rebase.checkpoint.key != checkpoint_key(policy) and is_in_effect(chain, rebase):
        return rebase.checkpoint
    found = find_artifact(store, checkpoint_key(policy))
    if found is not None and name is not None:
        store.put_if_absent(keys.checkpoint_name(checkpoint_key(policy)), canonical_json({"name": name}))
    return found


def batch_provenance(store: ObjectStore, policy: PolicyRef) -> Provenance:
    """Of the batch that made the policy, for a checkpoint that nobody asked for. Only for steps >= 1."""
    record = Chain.of(store, policy).committed_record(policy.step)
    return read_manifest(store, record.request.batch.key).provenance


class Saver:
    """Commits snapshots in a thread of its own, in the order they were taken."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ostinato-upload")
        self._under_way: dict[str, Future[ArtifactRef]] = {}
        """By the key of the checkpoint: equal states of two runs are two checkpoints."""

    def take(
        self,
        slot: LoadedPolicy,
        folder: Path,
        *,
        name: str | None = None,
        key: str | None = None,
        rebase: RebaseMark | None = None,
    ) -> Snapshot:
        """Writes the slot's weights and moments into `folder`. The slot must not move meanwhile. `key` and `rebase` are
        for checkpoints of rebases; None: the chain's, and what the slot descends from. Raises StorageFull."""
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
        key = key or checkpoint_key(slot.policy)
        return Snapshot(slot.policy, folder, files, name, digest, key, rebase or slot.rebase)

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
                extra={
                    **checkpoint_extra(policy, snapshot.rebase, snapshot.weights_digest),
                    "name": snapshot.name,
                },
            )
        finally:
            shutil.rmtree(snapshot.folder, ignore_errors=True)

    def close(self) -> None:
        """Waits for what was submitted."""
        self._pool.shutdown()
