"""Checks the consistency of a whole store, for `ostinato doctor --deep` and the chaos tests. Writes nothing.

Every manifest must name complete files. Every chain must be linked, with its batches. Every checkpoint must be of a
committed state, and every prompt of a step accounted for once. Lease numbers must have no gaps, aliases must name
models, and every object must be either readable by some code or removable by garbage collection.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

from storage.chain.listing import has_objects
from storage.chain.rebase import read_rebase
from storage.errors import CorruptArtifact, ObjectNotFound
from storage.inspect.audit_chains import ChainAudit
from storage.inspect.findings import RESTORE, AuditReport, Finding, Findings
from storage.inspect.index import missing_entries
from storage.inspect.scopes import Scope, run_scope, scopes_of
from storage.registry.models import find_model, resolve_alias
from storage.serialization import CHUNK_BYTES
from storage.store import key_patterns, keys
from storage.store.artifacts import FileEntry, Manifest, read_manifest
from storage.store.objects import ObjectInfo, ObjectStore

__all__ = ["AuditReport", "Finding", "audit_store"]

OLD_SECONDS = 24 * 3600
"""Age at which garbage collection may delete the data of an attempt, which can no longer be committed."""
Progress = Callable[[str, int, int], None]
"""(kind of object, number checked, total number)"""


def audit_store(
    store: ObjectStore,
    *,
    run: str | None = None,
    read_bytes: bool = True,
    now: float | None = None,
    on_progress: Progress = lambda kind, done, total: None,
) -> AuditReport:
    """Checks the whole store, one scope after the other (storage.inspect.scopes), or one run. Runs may be in progress:
    what they have not finished yet is no finding.

    Args:
        run: Check only this run. What it starts from is read; no other run is listed.
        read_bytes: Read and hash every file. Otherwise only the sizes are compared.
        now: Epoch seconds, from which the age of unreferenced data is computed. None: this machine's clock.

    Raises ObjectNotFound if there is no such run.
    """
    now = time.time() if now is None else now
    findings, pending = Findings(), list[str]()
    if run is not None and not has_objects(store, run):
        raise ObjectNotFound(f"no run {run!r} in {store.url}; 'ostinato runs ls' lists the runs")
    scopes = [run_scope(run)] if run is not None else list(scopes_of(store))
    for number, scope in enumerate(scopes):
        on_progress("runs and models", number, len(scopes))
        audit = _ScopeAudit(store, scope, findings, read_bytes=read_bytes, now=now, on_progress=on_progress)
        pending += audit.check()
        findings.states.clear()
    return findings.report(pending=sorted(pending))


class _ScopeAudit:
    """Checks the objects of one scope."""

    def __init__(
        self,
        store: ObjectStore,
        scope: Scope,
        findings: Findings,
        *,
        read_bytes: bool,
        now: float,
        on_progress: Progress,
    ) -> None:
        self.store, self.scope, self.findings = store, scope, findings
        self.read_bytes, self.now, self.on_progress = read_bytes, now, on_progress
        self.sizes: dict[str, int] = {}
        self.referenced: set[str] = set()
        """Keys that a manifest names."""
        self.rebase_checkpoints: set[str] = set()
        """Keys of the checkpoints of rebases, which cannot be redone."""

    def check(self) -> list[str]:
        """Checks the scope. Returns the keys of data that no manifest names."""
        objects = self._without_deletions(self.scope.objects(self.store))
        self.findings.counts["objects"] += len(objects)
        self.sizes = {info.key: info.size for info in objects}
        # checkpoints of rebases need another remedy than those of chains
        for info in objects:
            if keys.rebase_step(info.key) is not None:
                with suppress(CorruptArtifact, ObjectNotFound):  # ChainAudit reports it
                    self.rebase_checkpoints.add(read_rebase(self.store, info.key).checkpoint.key)
        # artifacts: manifests and the files that they name
        artifact_keys = [key_patterns.artifact_of_manifest(info.key) for info in objects]
        artifacts = [key for key in artifact_keys if key is not None]
        for number, artifact in enumerate(artifacts):
            self.on_progress("artifacts", number, len(artifacts))
            self._check_artifact(artifact)
        # chains, and their checkpoints
        chain_names = {keys.chain_of(info.key) for info in objects}
        chains = sorted(name for name in chain_names if name is not None)
        for number, name in enumerate(chains):
            self.on_progress("chains", number, len(chains))
            ChainAudit(self.store, *name, self.findings).check()
        self._check_checkpoints(artifacts, set(chains))
        # the index, leases, aliases and the rest
        for key in missing_entries(self.store, objects):
            self.findings.warning(key, "is missing in the index", "rebuild it with: ostinato doctor --deep")
        self._check_leases(objects)
        self._check_aliases(objects)
        return self._check_unreferenced(objects)

    def _without_deletions(self, objects: list[ObjectInfo]) -> list[ObjectInfo]:
        """Returns the objects without those of runs that are deleted in part, and reports these runs."""
        runs = {keys.run_of(info.key) for info in objects}
        listed_keys = {info.key for info in objects}
        deleting = {run for run in runs if run is not None and keys.deletion(run) in listed_keys}
        for run in sorted(deleting):
            remedy = f"finish it with: ostinato runs delete {run} --yes"
            self.findings.warning(keys.deletion(run), f"run {run!r} is deleted in part", remedy)
        return [info for info in objects if keys.run_of(info.key) not in deleting]

    # -- artifacts -------------------------------------------------------------------------------------------

    def _check_artifact(self, key: str) -> None:
        try:
            manifest = read_manifest(self.store, key)
        except ObjectNotFound:
            return  # a checkpoint that was pruned after the listing
        except CorruptArtifact as error:
            self.findings.error(key, str(error), f"{RESTORE}, or delete the manifest to make the artifact again")
            return
        self.findings.counts["artifacts"] += 1
        self.referenced.update(entry.key for entry in manifest.files)
        for entry in manifest.files:
            problem = self._file_problem(entry)
            if problem is None:
                continue
            if self._is_gone(manifest):
                return
            self.findings.error(entry.key, problem, self._remedy(manifest))

    def _file_problem(self, entry: FileEntry) -> str | None:
        """Returns the problem with one file of an artifact, or None."""
        size = self.sizes.get(entry.key)
        try:
            # the digest covers the size, too
            if self.read_bytes:
                sha256, size = self._digest(entry.key)
                self.findings.counts["bytes"] += size
                if sha256 != entry.sha256:
                    return (
                        f"has {size} bytes with sha256 {sha256[:12]}, its manifest says {entry.bytes} with "
                        f"{entry.sha256[:12]}"
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

    def _is_gone(self, manifest: Manifest) -> bool:
        """Whether the artifact was deleted or replaced after its manifest was read. Pruning deletes the manifest of a
        checkpoint first."""
        try:
            return read_manifest(self.store, manifest.key).attempt != manifest.attempt
        except ObjectNotFound:
            return True

    def _remedy(self, manifest: Manifest) -> str:
        if manifest.key in self.rebase_checkpoints:
            return f"{RESTORE}, or fork the run before that step: the next steps continue from it"
        if manifest.kind == "checkpoint":
            return f"delete {keys.manifest_of_files(manifest.key)}: the chain rebuilds the policy without it"
        if manifest.kind == "evaluation":
            return f"delete {keys.manifest(manifest.key)}: the next run of its flow evaluates again"
        return f"{RESTORE}; what was made from it cannot be rebuilt without it"

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _check_checkpoints(self, artifacts: list[str], chains: set[tuple[str, str, str]]) -> None:
        """Checks that each checkpoint is of a state that its chain committed."""
        for artifact in artifacts:
            step = keys.checkpoint_step(keys.manifest_of_files(artifact))
            if step is None:
                continue
            self.findings.counts["checkpoints"] += 1
            run, stage, model = keys.checkpoint_chain(artifact)
            try:
                state = read_manifest(self.store, artifact).extra.get("state")
            except (ObjectNotFound, CorruptArtifact):
                continue  # pruned meanwhile, or reported already
            has_chain = (run, stage, model) in chains
            states = self.findings.states.get((run, stage, model), {}) if has_chain else {}
            if states.get(step) != state:
                chain_state = states[step][:12] if step in states else "no such step"
                self.findings.error(
                    artifact,
                    f"is a checkpoint of state {str(state)[:12]}, the chain has {chain_state}",
                    f"delete {keys.manifest_of_files(artifact)}: it is of another history",
                )

    # -- leases, aliases and unreferenced objects ------------------------------------------------------------

    def _check_leases(self, objects: list[ObjectInfo]) -> None:
        # epochs are numbered without gaps, since each put takes the next number
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
            alias_name = keys.alias_of(info.key)
            if alias_name is not None:
                logs[alias_name].append(keys.parse_number(info.key) or 0)
        for (name, alias), numbers in logs.items():
            prefix = keys.model_aliases_prefix(name, alias)
            self._check_numbering(prefix, numbers, "moves of an alias")
            try:
                version = resolve_alias(self.store, name, alias)
                missing = find_model(self.store, name, version) is None
            except CorruptArtifact as error:
                self.findings.error(prefix, str(error), RESTORE)
                continue
            if missing:
                problem = f"calls version {version} {alias!r}, which is not published"
                self.findings.error(prefix, problem, "publish it, or move the alias")

    def _check_numbering(self, prefix: str, numbers: list[int], name: str) -> None:
        """Checks that the numbers of a log have no gaps."""
        missing = sorted(set(range(1, max(numbers) + 1)) - set(numbers))
        if missing:
            self.findings.error(prefix, f"the {name} have no number {missing[0]}, but {max(numbers)}", RESTORE)

    def _check_unreferenced(self, objects: list[ObjectInfo]) -> list[str]:
        """Returns the keys of data that no manifest names, which garbage collection deletes once it is old. Reports
        objects that garbage collection never deletes."""
        pending = []
        for info in objects:
            is_manifest = key_patterns.artifact_of_manifest(info.key) is not None
            if info.key in self.referenced or is_manifest or key_patterns.is_standalone(info.key):
                continue
            if key_patterns.classify_key(info.key) == "published" and self.now - info.modified > OLD_SECONDS:
                problem = "belongs to an incomplete version of a model, which garbage collection does not delete"
                remedy = "publish the model again, or collect garbage while no other process writes"
                self.findings.warning(info.key, problem, remedy)
            elif key_patterns.is_artifact_data(info.key):
                pending.append(info.key)
            else:
                problem = "is no object of a store, so it is neither read nor collected"
                self.findings.warning(info.key, problem, "move it elsewhere")
        return pending
