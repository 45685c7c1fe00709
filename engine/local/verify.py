"""`ostinato verify`: a run redone on a clean engine, compared with what it committed.

Each chain is redone from its root (checkpoints are not read), or each stretch between two checkpoints from the earlier
of them. Every recorded digest of weights and every stored checkpoint is compared with the redone weights; the first
step and the first tensor that differ are named. Links, batches and the accounts of every step are checked as well.

A rebase ends a stretch: up to it the steps are redone under the numerics before it, from its checkpoint on under those
after it. An exact one holds the redone weights; of another one the digests before and after are told.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from safetensors import safe_open

from engine.backends.protocol import Trainer, TrainerBackend
from engine.backends.weight_files.tensor_files import shapes_of, tensor_bytes
from engine.errors import BadSpec, EngineError, PermanentEngineError
from engine.local.redo import (
    Redo,
    chain_title,
    checkpoint_of,
    checkpoint_steps,
    clean_backend,
    numerics_notes,
)
from storage.chain.listing import run_chains
from storage.chain.rebase import Rebase, rebase_manifest, rebases_in_effect
from storage.chain.records import Chain, CommitRecord
from storage.errors import ObjectNotFound, StorageError
from storage.inspect.audit_chains import ChainAudit
from storage.inspect.findings import RESTORE, Finding, Findings
from storage.serialization import Frozen, digest_file
from storage.store import keys
from storage.store.artifacts import FileEntry, Manifest, read_bytes
from storage.store.objects import ObjectStore

TENSOR_DIGITS = 8
"""Hex digits of each tensor's digest that a record keeps."""

OnStep = Callable[[str, int, int], None]
"""(chain, step redone, steps to redo in it)"""


class ChainReport(Frozen):
    """What one chain showed."""

    chain: str
    steps: int
    """Committed."""
    redone: int
    digests: int
    """Recorded digests of weights that were compared."""
    checkpoints: int
    """Stored checkpoints that were compared tensor by tensor."""
    notes: tuple[str, ...]
    """What is not here as it was when the chain was made, and where the chain was rebased."""
    problems: tuple[Finding, ...]


class VerifyReport(Frozen):
    run: str
    chains: tuple[ChainReport, ...]

    @property
    def problems(self) -> list[Finding]:
        return [problem for chain in self.chains for problem in chain.problems]


def verify_run(
    store: ObjectStore,
    run: str,
    *,
    stage: str | None = None,
    model: str | None = None,
    from_checkpoints: bool = False,
    sample: int | None = None,
    on_step: OnStep = lambda chain, step, steps: None,
) -> VerifyReport:
    """Redoes the run's chains (of that stage, of that model). `sample` redoes that many stretches between checkpoints,
    drawn at random; all else is still read and checked. Nothing is written.

    Raises PermanentEngineError when there is no such chain.
    """
    every = run_chains(store, run)
    chains = [chain for chain in every if stage in (None, chain.stage) and model in (None, chain.model)]
    if not chains:
        known = ", ".join(f"{chain.stage}/{chain.model}" for chain in every) or "none"
        asked = "/".join(part or "*" for part in (stage, model))
        raise PermanentEngineError(f"run {run!r} has no chain {asked} in {store.url}; it has {known}")
    stretched = from_checkpoints or sample is not None
    reports = [_Verification(chain, stretched, sample, on_step).report() for chain in chains]
    return VerifyReport(run=run, chains=tuple(reports))


@dataclass
class _Verification:
    """One chain."""

    chain: Chain
    from_checkpoints: bool
    sample: int | None
    on_step: OnStep
    found: Findings = field(default_factory=Findings)
    notes: dict[str, None] = field(default_factory=dict)
    rebases: dict[int, Rebase] = field(default_factory=dict)
    """Those that stand, by step."""
    rebased: list[str] = field(default_factory=list)
    """What is to be said of them."""
    redone: int = 0
    digests: int = 0
    checkpoints: int = 0

    def report(self) -> ChainReport:
        name = (self.chain.run, self.chain.stage, self.chain.model)
        ChainAudit(self.chain.store, *name, self.found).check()
        links = self.found.states[name]
        steps = max(self.chain.steps(), default=0)
        whole = len(links) == steps + 1  # a broken link ends the audit; there is nothing to redo across it
        if steps and links:
            try:
                self._redo(steps if whole else max(links))
            except (EngineError, StorageError) as error:
                self.found.error(chain_title(self.chain), f"cannot be redone further: {error}", RESTORE)
        return ChainReport(
            chain=chain_title(self.chain),
            steps=steps,
            redone=self.redone,
            digests=self.digests,
            checkpoints=self.checkpoints,
            notes=(*self.notes, *self.rebased),
            problems=tuple(self.found.problems),
        )

    def _redo(self, until: int) -> None:
        self.rebases = {rebase.policy.step: rebase for rebase in rebases_in_effect(self.chain, until)}
        stretches = self._stretches(until)
        total = sum(end - start for start, end in stretches)
        self._read_the_rest(stretches, until)
        borders = [0, *self.rebases, until + 1]
        for first, last in pairwise(sorted(set(borders))):
            own = [(start, end) for start, end in stretches if first <= start < last]
            record = self.chain.record(first + 1)
            if own and record is not None:
                with clean_backend(record.numerics) as backend:
                    for start, end in own:
                        self._redo_stretch(backend, start, end, total)

    def _redo_stretch(self, backend: TrainerBackend, start: int, end: int, total: int) -> None:
        redo = Redo(self.chain.store, backend)
        if start in self.rebases or start == 0:
            trainer = redo.start_of(self.chain, self.rebases.get(start))
        else:
            trainer = redo.from_checkpoint(self.chain, start)
        if start == 0 and start not in self.rebases:
            self._compare_checkpoint(trainer, 0)
        for record in self.chain.records(after=start, until=end):
            self.notes |= dict.fromkeys(numerics_notes(record.numerics, backend.numerics()))
            redo.step(trainer, record)
            self.redone += 1
            self.on_step(chain_title(self.chain), self.redone, total)
            if not self._compare(trainer, record):
                return  # every later step descends from the one that differs
        if end in self.rebases:
            self._compare_rebase(trainer, self.rebases[end])

    def _stretches(self, until: int) -> list[tuple[int, int]]:
        ends = {0, *self.rebases, until}
        if self.from_checkpoints:
            ends |= {step for step in checkpoint_steps(self.chain) if step <= until}
        stretches = list(pairwise(sorted(ends)))
        if self.sample is None or self.sample >= len(stretches):
            return stretches
        return sorted(random.SystemRandom().sample(stretches, self.sample))

    def _read_the_rest(self, stretches: list[tuple[int, int]], until: int) -> None:
        """The batches of the steps that are not redone are read and hashed all the same."""
        covered = {step for start, end in stretches for step in range(start + 1, end + 1)}
        for step in sorted(set(range(1, until + 1)) - covered):
            record = self.chain.record(step)
            assert record is not None  # the audit read it
            try:
                read_bytes(self.chain.store, record.request.batch)
            except StorageError as error:
                self.found.error(record.request.batch.key, str(error), RESTORE)

    # -- comparing ---------------------------------------------------------------------------------------------

    def _compare(self, trainer: Trainer, record: CommitRecord) -> bool:
        """Whether the redone weights are those of the record and of the step's checkpoint."""
        rebase = self.rebases.get(record.policy.step)
        same_checkpoint = True  # the checkpoints of an inexact rebase's step are of other weights
        if rebase is None or rebase.exact:
            same_checkpoint = self._compare_checkpoint(trainer, record.policy.step)
        if record.weights_digest is None:
            return same_checkpoint
        self.digests += 1
        digest, parts = trainer.weights_digest()
        if digest == record.weights_digest:
            return True
        tensor, step = first_differing(record, parts), record.policy.step
        name = (self.chain.run, self.chain.stage, self.chain.model)
        what = f"step {step} differs: redone, the weights are {digest[:12]}, recorded {record.weights_digest[:12]}; "
        what += f"the first tensor that differs is {tensor}" if tensor else "the record names no tensors"
        remedy = "the record, its batch or the base model was altered, or a machine computed wrongly; redo it elsewhere"
        if self.notes:
            what += f" ({'; '.join(self.notes)})"
            remedy = f"verify it on the machine and with the versions that made it; if it differs there too, {remedy}"
        self.found.error(keys.chain_record(*name, step), what, remedy)
        return False

    def _compare_checkpoint(self, trainer: Trainer, step: int) -> bool:
        """Whether the stored checkpoint of that step, if there is one, holds the redone weights and moments."""
        manifest = checkpoint_of(self.chain, step)
        return manifest is None or self._compare_manifest(trainer, manifest, step)

    def _compare_rebase(self, trainer: Trainer, rebase: Rebase) -> None:
        """An exact rebase goes on from the redone weights; another one is told of."""
        self.rebased.append(f"rebased at {rebase.title}")
        if rebase.exact and keys.rebase_of_checkpoint(rebase.checkpoint.key):  # else it was compared with its step
            self._compare_manifest(trainer, rebase_manifest(self.chain, rebase), rebase.policy.step)

    def _compare_manifest(self, trainer: Trainer, manifest: Manifest, step: int) -> bool:
        self.checkpoints += 1
        with tempfile.TemporaryDirectory(prefix="ostinato-verify-") as folder:
            mine = trainer.write_checkpoint(Path(folder) / "redone")
            problem = self._checkpoint_problem(manifest, mine, Path(folder) / "stored")
        if problem is None:
            return True
        self.found.error(
            manifest.key,
            f"the checkpoint of step {step} differs from the redone step: {problem}",
            RESTORE
            if step in self.rebases
            else f"delete {keys.manifest_of_files(manifest.key)}: the chain rebuilds the policy without it",
        )
        return False

    def _checkpoint_problem(self, manifest: Manifest, mine: dict[str, Path], to: Path) -> str | None:
        """The first tensor that differs, or what else is wrong."""
        stored = {entry.name: entry for entry in manifest.files}
        if odd := sorted(stored.keys() ^ mine.keys()):
            return f"{odd[0]} is {'not stored' if odd[0] in mine else 'not part of it'}"
        for name in sorted(mine, key=lambda file: (not file.startswith("weights"), file)):
            try:
                path = self._fetched(stored[name], to)
                difference = first_difference(mine[name], path)
            except (ObjectNotFound, BadSpec) as error:
                return f"{name} cannot be read: {error}"
            if difference:
                return f"the first tensor of {name} that differs is {difference}"
            if digest_file(path)[0] != stored[name].sha256:
                return f"{name} is not what its manifest says"
        return None

    def _fetched(self, entry: FileEntry, to: Path) -> Path:
        """The stored bytes as they are, good or bad."""
        path = self.chain.store.local_path(entry.key)
        if path is None:
            path = to / entry.name
            self.chain.store.fetch(entry.key, path)
        elif not path.is_file():
            raise ObjectNotFound(f"{entry.key} is gone")
        return path


def first_differing(record: CommitRecord, parts: dict[str, str]) -> str | None:
    """The first tensor, by name, whose recorded digest is not the redone one; None when the record keeps none."""
    recorded = record.tensor_digests
    if not recorded:
        return None
    names = sorted(parts)
    if len(names) != len(recorded):
        return f"(the record has {len(recorded)} tensors, the model {len(names)})"
    differing = (name for name, known in zip(names, recorded, strict=True) if parts[name][:TENSOR_DIGITS] != known)
    return next(differing, None)


def first_difference(mine: Path, stored: Path) -> str | None:
    """The first tensor, by name, that is not the same to the bit in two safetensors files. Raises BadSpec."""
    if digest_file(mine) == digest_file(stored):
        return None
    here, there = shapes_of(mine), shapes_of(stored)
    with safe_open(mine, framework="pt") as one, safe_open(stored, framework="pt") as other:
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                return f"{name}, of shape {there.get(name, 'missing')} where {here.get(name, 'none')} is expected"
            left, right = one.get_tensor(name), other.get_tensor(name)
            if left.dtype != right.dtype or tensor_bytes(left) != tensor_bytes(right):
                return name
    return None
