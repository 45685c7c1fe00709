"""Writes checkpoints and uploads them to the store, and publishes policies as Hugging Face folders.

The trainer lane writes the files to a local folder and then goes on with the next step. A thread of the `Saver`
commits them. Ranks write and upload their files themselves. The manifest is the last file, and the engine writes it.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.backends.protocol import Trainer, Transfers
from engine.backends.weight_files.tensor_files import DISK_FULL, MASTER_DTYPE, cast_model
from engine.errors import WorkerDied
from engine.local.loaded_policies import LoadedPolicy
from engine.models.folder import CONFIG_FILE, dtype_of_config, read_config
from engine.protocol import PublishDtype
from engine.text.tokenizers import TOKENIZER_FILES
from storage.chain.rebase import checkpoint_extra, is_in_effect, rebase_at
from storage.chain.records import Chain, PolicyRef, RebaseMark, base_model_of
from storage.errors import StorageFull, VersionConflict
from storage.registry.models import find_published, publish_model
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.artifacts import (
    ArtifactRef,
    Manifest,
    Provenance,
    commit_files,
    digest_of,
    file_entries,
    find_artifact,
    read_manifest,
)
from storage.store.backends.protocol import HIDDEN_PREFIX
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore
from storage.worklog import log_work

log = logging.getLogger(__name__)

MAX_PENDING_UPLOADS = 3
"""Largest number of snapshots that wait on this machine's disk for their upload."""


@dataclass(frozen=True)
class Snapshot:
    """The files of a checkpoint in a scratch folder. The folder is deleted when they are committed."""

    policy: PolicyRef
    folder: Path
    files: dict[str, Path]
    name: str | None
    weights_digest: str
    key: str
    rebase: RebaseMark | None
    """The last rebase of the chain that the weights descend from."""


def checkpoint_key(policy: PolicyRef) -> str:
    return keys.checkpoint(policy.run, policy.stage, policy.model, policy.step)


def find_policy_checkpoint(store: ObjectStore, policy: PolicyRef, *, name: str | None) -> ArtifactRef | None:
    """Finds the committed checkpoint of the policy and gives it `name`, if there is one.

    Where the chain was rebased at this step, it is the checkpoint of the rebase, which is never deleted."""
    # Later steps descend from the weights of the rebase, not from those of the chain's own checkpoint of this step.
    chain = Chain.of(store, policy)
    rebase = rebase_at(chain, policy.step)
    if rebase is not None and rebase.checkpoint.key != checkpoint_key(policy) and is_in_effect(chain, rebase):
        return rebase.checkpoint
    checkpoint = find_artifact(store, checkpoint_key(policy))
    if checkpoint is not None and name is not None:
        store.put_if_absent(keys.checkpoint_name(checkpoint_key(policy)), canonical_json({"name": name}))
    return checkpoint


def batch_provenance(store: ObjectStore, policy: PolicyRef) -> Provenance:
    """The provenance of the batch that the policy was trained on, for a checkpoint that no caller asked for.

    Only for policies after step 0."""
    record = Chain.of(store, policy).committed_record(policy.step)
    return read_manifest(store, record.request.batch.key).provenance


class Saver:
    """Writes snapshots and commits them in one upload thread, in the order in which they were written."""

    def __init__(self, store: ObjectStore, transfers: Transfers | None = None) -> None:
        """`transfers` uploads files in the processes that wrote them."""
        self.store, self._transfers = store, transfers
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ostinato-upload")
        self._uploads: dict[str, Future[ArtifactRef]] = {}
        """Uploads that have not ended, by the checkpoint's key. Equal states of two runs are two checkpoints."""

    def write_snapshot(
        self,
        loaded: LoadedPolicy,
        folder: Path,
        *,
        name: str | None = None,
        key: str | None = None,
        rebase: RebaseMark | None = None,
    ) -> Snapshot:
        """Writes the policy's weights and moments into `folder`. They must not change meanwhile.

        `key` and `rebase` are given for the checkpoint of a rebase. By default they are the chain's checkpoint key and
        the policy's last rebase. Raises StorageFull when the disk is full."""
        digest, _ = loaded.trainer.weights_digest()
        try:
            # The folder is not in the store yet, so an error here leaves nothing behind that could be read.
            files = loaded.trainer.write_checkpoint(folder)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise StorageFull(f"no space for the checkpoint of {loaded.policy.uri} in {folder.parent}") from error
            raise
        log_work("checkpoint", policy=loaded.policy.uri, step=loaded.policy.step)
        # Set before the upload ends. If that fails, the next load only redoes more steps.
        loaded.saved_step = loaded.policy.step
        key = key or checkpoint_key(loaded.policy)
        return Snapshot(loaded.policy, folder, files, name, digest, key, rebase or loaded.rebase)

    def pending_upload(self, policy: PolicyRef) -> Future[ArtifactRef] | None:
        """The upload of this policy's checkpoint, if it has not ended."""
        return self._uploads.get(checkpoint_key(policy))

    def pending_uploads(self, run: str) -> list[Future[ArtifactRef]]:
        """The uploads of the run that have not ended."""
        # A copy, because the upload thread removes entries.
        return [future for key, future in self._uploads.copy().items() if key.startswith(keys.run_prefix(run))]

    def submit(self, snapshot: Snapshot, provenance: Provenance) -> Future[ArtifactRef]:
        """Starts the upload of a snapshot, after waiting for an earlier one if too many are pending.

        A failed upload is logged. It only makes a later redo longer, so callers need not wait for the future."""
        # A slow store must not fill the local disk with snapshots.
        pending = list(self._uploads.copy().values())
        if len(pending) >= MAX_PENDING_UPLOADS:
            wait(pending[:1])
        future = self._pool.submit(self._commit, snapshot, provenance)
        self._uploads[snapshot.key] = future
        future.add_done_callback(lambda done: self._on_upload_end(snapshot, done))
        return future

    def wait_for_chain(self, policy: PolicyRef) -> None:
        """Waits for the uploads of the policy's chain up to its step. Reading a new checkpoint is faster than any redo.

        A later checkpoint cannot help: an old policy, such as a reference, must not wait for it."""
        prefix = keys.checkpoints_prefix(policy.run, policy.stage, policy.model)
        waited = []
        # a copy, because the upload thread removes entries
        for key, upload in self._uploads.copy().items():
            step = keys.checkpoint_step(keys.manifest_of_files(key))
            if key.startswith(prefix) and step is not None and step <= policy.step:
                waited.append(upload)
        wait(waited)

    def close(self) -> None:
        """Waits for all submitted uploads."""
        self._pool.shutdown()

    def _on_upload_end(self, snapshot: Snapshot, upload: Future[ArtifactRef]) -> None:
        self._uploads.pop(snapshot.key, None)
        error = None if upload.cancelled() else upload.exception()
        if error is not None:
            log.warning("the checkpoint of %s failed: %s", snapshot.policy.uri, error)

    def _commit(self, snapshot: Snapshot, provenance: Provenance) -> ArtifactRef:
        policy, url, transfers = snapshot.policy, self.store.url, self._transfers
        extra = checkpoint_extra(policy, snapshot.rebase, snapshot.weights_digest)
        try:
            return commit_files(
                self.store,
                snapshot.key,
                snapshot.files,
                kind="checkpoint",
                parents=(policy.uri,),
                provenance=provenance,
                extra={**extra, "name": snapshot.name},
                upload=None if transfers is None else partial(transfers.upload, url),
            )
        except FileNotFoundError as error:
            raise WorkerDied(
                f"a rank on another machine ended before its part of the checkpoint of {policy.uri} was in the store; "
                "the next call writes the checkpoint again"
            ) from error
        finally:
            shutil.rmtree(snapshot.folder, ignore_errors=True)
            if transfers is not None:
                transfers.discard(url, snapshot.folder)


def checkpoint_files(
    store: ObjectStore, transfers: Transfers | None, manifest: Manifest, folder: Path
) -> dict[str, Path]:
    """Returns the files of a checkpoint by name, with checked digests, for `Trainer.read_checkpoint`. Files of a store
    on another machine are downloaded to `folder`, by the processes of `transfers` if there are any.

    Raises ObjectNotFound, CorruptArtifact, WorkerDied."""
    names = [entry.name for entry in manifest.files]
    if transfers is not None and transfers.download(store.url, manifest.key, names, folder):
        return {name: folder / name for name in names}
    return materialise_files(store, manifest.key, folder)


def publish_policy(
    store: ObjectStore,
    trainer: Trainer,
    policy: PolicyRef,
    model_name: str,
    *,
    provenance: Provenance,
    dtype: PublishDtype = "base",
) -> ArtifactRef:
    """Publishes the trainer's weights, those of `policy`, with the tokenizer of the base model. Idempotent."""
    with scratch(store) as folder, scratch(store) as base_folder:
        base_files = materialise_files(
            store, base_model_of(store, policy).key, base_folder, names=(*TOKENIZER_FILES, CONFIG_FILE)
        )
        written_dtype = dtype_of_config(read_config(base_files.pop(CONFIG_FILE))) if dtype == "base" else dtype
        # The version names the content, so that a second export of the same weights is the same version.
        weights_digest, _ = trainer.weights_digest()
        content = [weights_digest, policy.state]
        if written_dtype != MASTER_DTYPE:
            content.append(written_dtype)
        version = f"{policy.step:06d}-{digest(canonical_json(content))[:12]}"
        published = find_published(store, model_name, version)
        if published is not None:
            return published

        # Collect the tokenizer, the merged model and, for peft, the adapter alone.
        exported = cast_model(trainer.export_merged(folder / "whole"), folder / "cast", written_dtype)
        if trainer.adapter is not None:
            adapter = trainer.export(folder / "adapter")
            exported |= {f"adapter/{name}": path for name, path in adapter.items()}
        files = {**base_files, **exported}

        publish = partial(
            publish_model,
            store,
            model_name,
            files=files,
            provenance=provenance,
            parents=(policy.uri,),
            extra={"weights_digest": weights_digest, "state": policy.state, "dtype": written_dtype},
        )
        try:
            return publish(version)
        except VersionConflict:
            # An engine with another library version or device was killed after it claimed this version. Its files
            # differ, so publish these files under a version of their own.
            files_digest = digest_of(file_entries(files, lambda file: file))
            return publish(f"{version}-{files_digest[:8]}")


def scratch_folder(store: ObjectStore) -> Path:
    """Creates a new empty folder, on the same disk as the store if the store is on this machine.

    Its files can then be renamed into the store instead of being copied. The prefix of its name hides a folder that a
    killed process left behind from every listing of the store.
    """
    store_path = store.local_path("scratch")
    parent = None
    if store_path is not None:
        parent = store_path.parent
        parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{HIDDEN_PREFIX}scratch-", dir=parent))


@contextlib.contextmanager
def scratch(store: ObjectStore) -> Iterator[Path]:
    """Creates a scratch folder and removes it at the end of the block."""
    folder = scratch_folder(store)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
