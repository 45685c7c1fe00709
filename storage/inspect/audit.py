"""Everything that a store promises, checked: `ostinato doctor --deep`, and the last line of every chaos test.

Every manifest names whole files; every chain links, and its batches are there; every checkpoint is of a committed
state; every prompt of a step is accounted for once; leases have no holes; aliases name models; nothing lies about
that nobody reads and nobody would collect. Nothing is written.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

from storage.chain.rebase import read_rebase
from storage.errors import CorruptArtifact, ObjectNotFound
from storage.inspect.audit_chains import ChainAudit
from storage.inspect.findings import RESTORE, AuditReport, Finding, Findings
from storage.registry.models import find_model, resolve_alias
from storage.serialization import CHUNK_BYTES
from storage.store import key_patterns, keys
from storage.store.artifacts import FileEntry, Manifest, read_manifest
from storage.store.objects import ObjectInfo, ObjectStore

__all__ = ["AuditReport", "Finding", "audit_store"]

OLD_SECONDS = 24 * 3600
"""An attempt is over by then: garbage collection takes its data, storage commits it no more."""
Progress = Callable[[str, int, int], None]
"""(what is looked at, how many of those are done, how many there are)"""


def audit_store(
    store: ObjectStore,
    *,
    read_bytes: bool = True,
    now: float | None = None,
    on_progress: Progress = lambda what, done, total: None,
) -> AuditReport:
    """Checks the whole store. A run may be under way meanwhile: what it is about to finish is no finding.

    With `read_bytes` every file is read and hashed; without, only its size is compared. `now` is epoch seconds (None:
    by this machine's clock), for the age of what no manifest names.
    """
    now = time.time() if now is None else now
    return _Audit(store, read_bytes=read_bytes, now=now, on_progress=on_progress).report()


class _Audit:
    def __init__(self, store: ObjectStore, *, read_bytes: bool, now: float, on_progress: Progress) -> None:
        self.store, self.read_bytes, self.now, self.on_progress = store, read_bytes, now, on_progress
        self.found = Findings()
        self.sizes: dict[str, int] = {}
        self.referenced: set[str] = set()
        """Keys that a manifest names."""
        self.needed: set[str] = set()
        """Checkpoints that a rebase goes on from: no redo makes them again."""

    def report(self) -> AuditReport:
        objects = list(self.store.list())
        self.found.counts["objects"] = len(objects)
        self.sizes = {info.key: info.size for info in objects}
        for info in objects:
            if keys.rebase_step(info.key) is not None:
                with suppress(CorruptArtifact, ObjectNotFound):  # the audit of its chain says so
                    self.needed.add(read_rebase(self.store, info.key).checkpoint.key)
        owners = [key for info in objects if (key := key_patterns.artifact_of_manifest(info.key)) is not None]
        for number, owner in enumerate(owners):
            self.on_progress("artifacts", number, len(owners))
            self._check_artifact(owner)
        chains = sorted({name for info in objects if (name := keys.chain_of(info.key)) is not None})
        for number, name in enumerate(chains):
            self.on_progress("chains", number, len(chains))
            ChainAudit(self.store, *name, self.found).check()
        self._check_checkpoints(owners, set(chains))
        self._check_leases(objects)
        self._check_aliases(objects)
        return self.found.report(pending=self._check_unreferenced(objects))

    # -- artifacts ---------------------------------------------------------------------------------------------

    def _check_artifact(self, key: str) -> None:
        try:
            manifest = read_manifest(self.store, key)
        except ObjectNotFound:
            return  # a checkpoint that was pruned since the listing
        except CorruptArtifact as error:
            self.found.error(key, str(error), f"{RESTORE}, or delete the manifest to make the artifact again")
            return
        self.found.counts["artifacts"] += 1
        self.referenced.update(entry.key for entry in manifest.files)
        for entry in manifest.files:
            if problem := self._file_problem(entry):
                if self._gone(manifest):
                    return
                self.found.error(entry.key, problem, self._remedy(manifest))

    def _file_problem(self, entry: FileEntry) -> str | None:
        """What is wrong with one file of an artifact."""
        size = self.sizes.get(entry.key)
        try:
            if self.read_bytes:
                sha256, size = self._digest(entry.key)
                self.found.counts["bytes"] += size
                if sha256 != entry.sha256:
                    return f"has {size} bytes with sha256 {sha256[:12]}, its manifest says {entry.bytes} with " + (
                        entry.sha256[:12]
                    )
            elif size is None and not self.store.exists(entry.key):
                return "is gone, and a manifest names it"
        except ObjectNotFound:
            return "is gone, and a manifest names it"
        if size is not None and size != entry.bytes:
            return f"has {size} bytes, its manifest says {entry.bytes}"
        return None

    def _digest(self, key: str) -> tuple[str, int]:
        hasher, size = hashlib.sha256(), 0
        with self.store.open(key) as file:
            while chunk := file.read(CHUNK_BYTES):
                hasher.update(chunk)
                size += len(chunk)
        return hasher.hexdigest(), size

    def _gone(self, manifest: Manifest) -> bool:
        """Whether the artifact was deleted (a pruned checkpoint: its manifest goes first) since it was read."""
        try:
            return read_manifest(self.store, manifest.key).attempt != manifest.attempt
        except ObjectNotFound:
            return True

    def _remedy(self, manifest: Manifest) -> str:
        if manifest.key in self.needed:
            return f"{RESTORE}, or fork the run before that step: what comes after it goes on from it"
        if manifest.kind == "checkpoint":
            return f"delete {keys.manifest_of_files(manifest.key)}: the chain rebuilds the policy without it"
        if manifest.kind == "evaluation":
            return f"delete {keys.manifest(manifest.key)}: the evaluation is made again when its flow runs"
        return f"{RESTORE}; what was made from it cannot be rebuilt without it"

    # -- what stands on chains ---------------------------------------------------------------------------------

    def _check_checkpoints(self, owners: list[str], chains: set[tuple[str, str, str]]) -> None:
        """Each is of a state that its chain committed."""
        for owner in owners:
            step = keys.checkpoint_step(keys.manifest_of_files(owner))
            if step is None:
                continue
            self.found.counts["checkpoints"] += 1
            run, stage, model = keys.checkpoint_chain(owner)
            try:
                state = read_manifest(self.store, owner).extra.get("state")
            except (ObjectNotFound, CorruptArtifact):
                continue  # pruned meanwhile, or reported already
            known = self.found.states.get((run, stage, model), {}) if (run, stage, model) in chains else {}
            if known.get(step) != state:
                there = known.get(step)
                self.found.error(
                    owner,
                    f"is a checkpoint of state {str(state)[:12]}, the chain has "
                    f"{there[:12] if there else 'no such step'}",
                    f"delete {keys.manifest_of_files(owner)}: it is of another history",
                )

    # -- the small logs ----------------------------------------------------------------------------------------

    def _check_leases(self, objects: list[ObjectInfo]) -> None:
        epochs: dict[str, list[int]] = defaultdict(list)
        for info in objects:
            run, number = keys.run_of(info.key), keys.parse_number(info.key)
            if run and number is not None and info.key.startswith(keys.leases_prefix(run)):
                epochs[run].append(number)
        for run, numbers in epochs.items():
            self._check_numbering(keys.leases_prefix(run), numbers, "leases")

    def _check_aliases(self, objects: list[ObjectInfo]) -> None:
        logs: dict[tuple[str, str], list[int]] = defaultdict(list)
        for info in objects:
            if (entry := keys.alias_of(info.key)) is not None:
                logs[entry].append(keys.parse_number(info.key) or 0)
        for (name, alias), numbers in logs.items():
            prefix = keys.model_aliases_prefix(name, alias)
            self._check_numbering(prefix, numbers, "moves of an alias")
            try:
                version = resolve_alias(self.store, name, alias)
                missing = find_model(self.store, name, version) is None
            except CorruptArtifact as error:
                self.found.error(prefix, str(error), RESTORE)
                continue
            if missing:
                what = f"calls version {version} {alias!r}, which is not published"
                self.found.error(prefix, what, "publish it, or move the alias")

    def _check_numbering(self, prefix: str, numbers: list[int], what: str) -> None:
        holes = sorted(set(range(1, max(numbers) + 1)) - set(numbers))
        if holes:
            self.found.error(prefix, f"the {what} have no number {holes[0]}, but {max(numbers)}", RESTORE)

    def _check_unreferenced(self, objects: list[ObjectInfo]) -> list[str]:
        """Data that no manifest names is pending: garbage collection takes it once it is old. What has no place in a
        store at all stays for ever, and is a finding."""
        pending = []
        for info in objects:
            is_manifest = key_patterns.artifact_of_manifest(info.key) is not None
            if info.key in self.referenced or is_manifest or key_patterns.is_standalone(info.key):
                continue
            if key_patterns.classify_key(info.key) == "published" and self.now - info.modified > OLD_SECONDS:
                what = "is of a version of a model that was never published whole, and collections leave it alone"
                self.found.warning(info.key, what, "publish the model again, or collect it when nobody writes")
            elif key_patterns.is_artifact_data(info.key):
                pending.append(info.key)
            else:
                self.found.warning(
                    info.key, "is nothing that a store keeps, so nobody reads or collects it", "move it elsewhere"
                )
        return pending
