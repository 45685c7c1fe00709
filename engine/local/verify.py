"""`ostinato verify`: redoes a run on a new backend and compares the weights with the committed ones.

Each chain is divided into segments. By default the whole chain is one segment, which is redone from the chain's root
without reading checkpoints. Otherwise the segments lie between checkpoints, and each is redone from the one at its
start. Every recorded digest of weights, every stored checkpoint and every published model is compared with the redone
weights, and tokens that were sampled in flight with the logprobs of the policies that they name. The report names the
first step and the first tensor that differ. Steps that differ by rounding alone, on a device that does not repeat its
sums or under other numerics, are only noted (engine.local.closeness). Links, batches and records of all steps are
checked, too.

A rebase always ends a segment. The steps before it are redone under the numerics before it, and the steps after it from
its checkpoint under the new numerics. The checkpoint of an exact rebase must hold the redone weights. Any other rebase
has other weights, and the report only mentions it.
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
from engine.backends.weight_files.tensor_files import MASTER_DTYPE, cast_model, shapes_of, tensor_bytes
from engine.errors import BadSpec, EngineError, PermanentEngineError
from engine.local.apply import TENSOR_DIGITS
from engine.local.closeness import Judgement, Redo, judge_redo
from engine.local.redo import (
    PolicyRebuilder,
    chain_title,
    checkpoint_of,
    checkpoint_steps,
    clean_backend,
    numerics_notes,
)
from engine.local.sampled_parts import SampledParts
from storage.chain.listing import run_chains
from storage.chain.rebase import Rebase, RedoneStep, rebase_manifest, rebases_in_effect
from storage.chain.records import Chain, CommitRecord
from storage.errors import ObjectNotFound, StorageError
from storage.inspect.audit_chains import ChainAudit
from storage.inspect.findings import RESTORE, Finding, Findings
from storage.registry.models import list_models, list_versions
from storage.serialization import Frozen, digest_file
from storage.store import keys
from storage.store.artifacts import FileEntry, Manifest, read_bytes, read_manifest
from storage.store.objects import ObjectStore
from storage.temporary import process_folder

OnProgress = Callable[[str, int, int], None]
"""Called after each redone step with (chain, number of steps redone, number of steps to redo in the chain)."""

Segment = tuple[int, int]
"""(start, end): policy `start` is loaded, and the steps `start` + 1 to `end` are redone."""


class ChainReport(Frozen):
    """The result of verifying one chain."""

    chain: str
    steps: int
    """Number of committed steps."""
    redone: int
    """Number of redone steps."""
    digests: int
    """Number of recorded digests of weights that were compared."""
    checkpoints: int
    """Number of stored checkpoints that were compared tensor by tensor."""
    models: int
    """Number of published models that were compared tensor by tensor."""
    sampled_tokens: int = 0
    """Number of sampled tokens whose logprobs were compared with those of the policies that their rows name. They are
    compared if weights were updated in flight."""
    notes: tuple[str, ...]
    """The numerics that differ between the commits and this verification, the rebases of the chain, and the steps that
    differ by rounding alone."""
    problems: tuple[Finding, ...]


class VerifyReport(Frozen):
    """The results of all verified chains of one run."""

    run: str
    chains: tuple[ChainReport, ...]

    @property
    def problems(self) -> list[Finding]:
        problems: list[Finding] = []
        for chain in self.chains:
            problems += chain.problems
        return problems


def verify_run(
    store: ObjectStore,
    run: str,
    *,
    stage: str | None = None,
    model: str | None = None,
    from_checkpoints: bool = False,
    sample: int | None = None,
    on_step: OnProgress = lambda chain, step, steps: None,
) -> VerifyReport:
    """Redoes the chains of the run, or only those of `stage` or `model`, and reports every difference.

    `sample` redoes that many segments between checkpoints, drawn at random. The records and batches of the other
    segments are still read and checked. Nothing is written.

    Raises PermanentEngineError when there is no such chain.
    """
    all_chains = run_chains(store, run)
    chains = [chain for chain in all_chains if stage in (None, chain.stage) and model in (None, chain.model)]
    if not all_chains:
        raise PermanentEngineError(
            f"no run {run!r} with gradient steps in {store.url}; if the run is in another store, give it with "
            "--storage ('ostinato runs ls' lists the runs)"
        )
    if not chains:
        known = ", ".join(f"{chain.stage}/{chain.model}" for chain in all_chains)
        pattern = f"{stage or '*'}/{model or '*'}"
        raise PermanentEngineError(f"run {run!r} has no chain {pattern} in {store.url}; it has {known}")
    # A sample is drawn from the segments between checkpoints: a whole chain is one segment, with nothing to draw.
    split_at_checkpoints = from_checkpoints or sample is not None
    verifications = [_ChainVerification(chain, split_at_checkpoints, sample, on_step) for chain in chains]
    # The store's models are listed once for all chains. What cannot be read is reported with the first chain.
    published = _published_models(store, verifications[0].findings)
    reports = []
    for verification in verifications:
        verification.published = published
        reports.append(verification.report())
    return VerifyReport(run=run, chains=tuple(reports))


def _published_models(store: ObjectStore, findings: Findings) -> dict[str, list[Manifest]]:
    """The manifests of the store's models, by the URI of each policy that a model was made from. A manifest that cannot
    be read is reported, and does not stop the verification."""
    manifests: dict[str, list[Manifest]] = {}
    for name in list_models(store):
        for version in list_versions(store, name):
            key = keys.model_version(name, version)
            try:
                manifest = read_manifest(store, key)
            except StorageError as error:
                findings.error(key, str(error), RESTORE)
                continue
            if "averaged" in manifest.extra:
                # no policy has the weights of an average
                continue
            for parent in manifest.parents:
                manifests.setdefault(parent, []).append(manifest)
    return manifests


@dataclass
class _ChainVerification:
    """Redoes one chain, and collects what differs and what was compared."""

    chain: Chain
    split_at_checkpoints: bool
    sample: int | None
    on_step: OnProgress
    findings: Findings = field(default_factory=Findings)
    changed_numerics: dict[str, None] = field(default_factory=dict)
    """Notes on numerics that differ. A dict keeps their order and holds each note once."""
    rebases: dict[int, Rebase] = field(default_factory=dict)
    """The rebases in effect, by step."""
    rebase_notes: list[str] = field(default_factory=list)
    rounding_notes: list[str] = field(default_factory=list)
    redone: int = 0
    digests: int = 0
    checkpoints: int = 0
    models: int = 0
    published: dict[str, list[Manifest]] = field(default_factory=dict)
    """The store's published models, by the URI of the policy."""
    sampled: SampledParts = field(init=False)

    def __post_init__(self) -> None:
        self.sampled = SampledParts(self.chain, self.findings)

    def report(self) -> ChainReport:
        name = (self.chain.run, self.chain.stage, self.chain.model)
        ChainAudit(self.chain.store, *name, self.findings).check()
        states = self.findings.states[name]
        steps = max(self.chain.steps(), default=0)
        if steps and states:
            # The audit ends at a broken link between two steps, and no step after it can be redone.
            is_intact = len(states) == steps + 1
            last_step = steps if is_intact else max(states)
            try:
                self._redo(last_step)
            except (EngineError, StorageError) as error:
                self.findings.error(chain_title(self.chain), f"cannot be redone further: {error}", RESTORE)
        return ChainReport(
            chain=chain_title(self.chain),
            steps=steps,
            redone=self.redone,
            digests=self.digests,
            checkpoints=self.checkpoints,
            models=self.models,
            sampled_tokens=self.sampled.tokens,
            notes=(*self.changed_numerics, *self.rebase_notes, *self.rounding_notes, *self.sampled.notes),
            problems=tuple(self.findings.problems),
        )

    def _redo(self, until: int) -> None:
        self.rebases = {rebase.policy.step: rebase for rebase in rebases_in_effect(self.chain, until)}
        segments = self._segments(until)
        total = sum(end - start for start, end in segments)
        self._check_other_batches(segments, until)

        # Between two rebases the numerics do not change, so the segments there share one backend.
        borders = sorted({0, *self.rebases, until + 1})
        for first, last in pairwise(borders):
            segments_between = [(start, end) for start, end in segments if first <= start < last]
            record = self.chain.record(first + 1)
            if segments_between and record is not None:
                with clean_backend(record.numerics) as backend:
                    for start, end in segments_between:
                        self._redo_segment(backend, start, end, total)

    def _redo_segment(self, backend: TrainerBackend, start: int, end: int, total: int) -> None:
        rebuilder = PolicyRebuilder(self.chain.store, backend)
        trainer = self._segment_start(rebuilder, start)
        if start == 0 and start not in self.rebases:
            self._compare_checkpoint(trainer, 0)

        # Redo its steps, and compare the weights after each. Each policy but the last may have sampled for later steps.
        self.sampled.compare(trainer, self.chain.policy(start))
        redo, sketch = Redo(), trainer.weights_sketch()
        for record in self.chain.records(after=start, until=end):
            self.changed_numerics |= dict.fromkeys(numerics_notes(record.numerics, backend.numerics()))
            rebuilder.redo_step(trainer, record)
            self.redone += 1
            self.on_step(chain_title(self.chain), self.redone, total)
            before, sketch = sketch, trainer.weights_sketch()
            redo.add(record, sketch - before, *trainer.weights_digest())
            if not redo.differing:
                self._compare_files(trainer, record)
            if record.policy.step < end:
                self.sampled.compare(trainer, record.policy)
        if not redo.differing:
            if end in self.rebases:
                self._compare_rebase(trainer, self.rebases[end])
            return

        # The checkpoints, models and rebases after the first step that differs have other bytes.
        del trainer
        judgement = judge_redo(
            redo,
            backend.numerics(),
            restart=lambda: self._segment_start(rebuilder, start),
            redo_step=rebuilder.redo_step,
        )
        self._report_differences(redo, judgement)
        if end in self.rebases:
            self.rebase_notes.append(f"rebased at {self.rebases[end].title}")

    def _segment_start(self, rebuilder: PolicyRebuilder, start: int) -> Trainer:
        """The policy that the segment starts from."""
        if start in self.rebases or start == 0:
            return rebuilder.after_rebase(self.chain, self.rebases.get(start))
        return rebuilder.from_checkpoint(self.chain, start)

    def _segments(self, until: int) -> list[Segment]:
        """The segments to redo, in order. A segment never contains a rebase, except at its ends."""
        borders = {0, *self.rebases, until}
        if self.split_at_checkpoints:
            borders |= {step for step in checkpoint_steps(self.chain) if step <= until}
        segments = list(pairwise(sorted(borders)))
        if self.sample is None or self.sample >= len(segments):
            return segments
        # Not seeded: each verification draws other segments, so that repeated ones cover the chain.
        return sorted(random.SystemRandom().sample(segments, self.sample))

    def _check_other_batches(self, segments: list[Segment], until: int) -> None:
        """Reads the batches of the steps that are not redone, which checks their hashes."""
        redone_steps: set[int] = set()
        for start, end in segments:
            redone_steps.update(range(start + 1, end + 1))
        for step in range(1, until + 1):
            if step in redone_steps:
                continue
            record = self.chain.record(step)
            assert record is not None  # the audit read it
            try:
                read_bytes(self.chain.store, record.request.batch)
            except StorageError as error:
                self.findings.error(record.request.batch.key, str(error), RESTORE)

    # -- comparing ---------------------------------------------------------------------------------------------

    def _compare_files(self, trainer: Trainer, record: CommitRecord) -> None:
        """Compares the stored checkpoint and the published models of a step whose redone weights have the digest of
        the record."""
        self.digests += 1
        # The checkpoint at an inexact rebase has other weights, as the rebase records. It is not compared.
        rebase = self.rebases.get(record.policy.step)
        if rebase is None or rebase.exact:
            self._compare_checkpoint(trainer, record.policy.step)
        for manifest in self.published.get(record.policy.uri, []):
            self._compare_model(trainer, manifest)

    def _report_differences(self, redo: Redo, judgement: Judgement) -> None:
        """Notes steps that differ by rounding. Reports the first step that differs by more."""
        differing = redo.differing
        if judgement.is_close:
            self.digests += len(differing)
            first, last = differing[0].policy.step, differing[-1].policy.step
            self.rounding_notes.append(
                f"redone here, steps {first} to {last} have other bits, by rounding alone ({judgement.steps[-1].title})"
            )
            return
        first_far = next((step for step in judgement.steps if not step.is_close), None)
        by_step = {record.policy.step: record for record in differing}
        record = differing[0] if first_far is None else by_step[first_far.step]
        digest = redo.first_digest if record is differing[0] else "others"
        self._report_step(record, digest, first_differing(differing[0], redo.first_tensors), first_far)

    def _report_step(
        self, record: CommitRecord, digest: str, tensor: str | None, redone_step: RedoneStep | None
    ) -> None:
        """Reports a step whose redone weights have another digest than the record. `redone_step` says by how much they
        differ, where the device does not repeat."""
        step = record.policy.step
        problem = f"step {step} differs: redone, the weights are {digest[:12]}, recorded {record.weights_digest[:12]}; "
        if redone_step is not None:
            problem += f"rounding does not explain it: {redone_step.title}"
        else:
            problem += f"the first tensor that differs is {tensor}" if tensor else "the record names no tensors"
        remedy = "the record, its batch or the base model was altered, or a machine computed wrongly; redo it elsewhere"
        if self.changed_numerics:
            problem += f" ({'; '.join(self.changed_numerics)})"
            remedy = f"verify it on the machine and with the versions that made it; if it differs there too, {remedy}"
        key = keys.chain_record(self.chain.run, self.chain.stage, self.chain.model, step)
        self.findings.error(key, problem, remedy)

    def _compare_checkpoint(self, trainer: Trainer, step: int) -> bool:
        """Whether the stored checkpoint of that step, if there is one, holds the redone weights and moments."""
        manifest = checkpoint_of(self.chain, step)
        return manifest is None or self._compare_manifest(trainer, manifest, step)

    def _compare_rebase(self, trainer: Trainer, rebase: Rebase) -> None:
        """Notes the rebase, and compares its checkpoint with the redone weights if it is exact."""
        self.rebase_notes.append(f"rebased at {rebase.title}")
        # An exact rebase may use the checkpoint of its step, which was compared with that step.
        if rebase.exact and keys.rebase_of_checkpoint(rebase.checkpoint.key):
            self._compare_manifest(trainer, rebase_manifest(self.chain, rebase), rebase.policy.step)

    def _compare_manifest(self, trainer: Trainer, manifest: Manifest, step: int) -> bool:
        self.checkpoints += 1
        with tempfile.TemporaryDirectory(prefix="verify-", dir=process_folder()) as folder:
            redone_files = trainer.write_checkpoint(Path(folder) / "redone")
            problem = self._checkpoint_problem(manifest, redone_files, Path(folder) / "stored")
        if problem is None:
            return True
        # The checkpoint of a rebase cannot be rebuilt. Any other one only saves time.
        remedy = f"delete {keys.manifest_of_files(manifest.key)}: the chain rebuilds the policy without it"
        if step in self.rebases:
            remedy = RESTORE
        which = f"of step {step}" if step else "before step 1"
        self.findings.error(manifest.key, f"the checkpoint {which} differs from the redone weights: {problem}", remedy)
        return False

    def _compare_model(self, trainer: Trainer, manifest: Manifest) -> None:
        """Compares the weight files of a published model with an export of the redone weights."""
        self.models += 1
        with tempfile.TemporaryDirectory(prefix="verify-", dir=process_folder()) as folder:
            dtype = str(manifest.extra.get("dtype", MASTER_DTYPE))
            exported = cast_model(trainer.export_merged(Path(folder) / "redone"), Path(folder) / "cast", dtype)
            for entry in manifest.files:
                if entry.name not in exported or not entry.name.endswith(".safetensors"):
                    continue
                try:
                    stored = self._stored_file(entry, Path(folder) / "stored")
                    difference = first_difference(exported[entry.name], stored)
                except (ObjectNotFound, BadSpec) as error:
                    difference = f"unknown, because it cannot be read: {error}"
                if difference:
                    problem = f"the published model differs from the redone step: the first tensor of {entry.name} "
                    self.findings.error(manifest.key, f"{problem}that differs is {difference}", RESTORE)
                    return

    def _checkpoint_problem(self, manifest: Manifest, redone_files: dict[str, Path], to: Path) -> str | None:
        """The first difference between a stored checkpoint and the redone files. None when they are equal."""
        stored = {entry.name: entry for entry in manifest.files}
        unpaired = sorted(stored.keys() ^ redone_files.keys())
        if unpaired:
            status = "not stored" if unpaired[0] in redone_files else "not part of it"
            return f"{unpaired[0]} is {status}"
        # Weights before moments: a difference in the weights explains one in the moments.
        for name in sorted(redone_files, key=lambda file: (not file.startswith("weights"), file)):
            try:
                path = self._stored_file(stored[name], to)
                difference = first_difference(redone_files[name], path)
            except (ObjectNotFound, BadSpec) as error:
                return f"{name} cannot be read: {error}"
            if difference:
                return f"the first tensor of {name} that differs is {difference}"
            if digest_file(path)[0] != stored[name].sha256:
                return f"{name} is not what its manifest says"
        return None

    def _stored_file(self, entry: FileEntry, to: Path) -> Path:
        """The stored file, without a check of its hash: a damaged file must be compared tensor by tensor."""
        path = self.chain.store.local_path(entry.key)
        if path is None:
            path = to / entry.name
            self.chain.store.fetch(entry.key, path)
        elif not path.is_file():
            raise ObjectNotFound(f"{entry.key} is gone")
        return path


def first_differing(record: CommitRecord, tensor_digests: dict[str, str]) -> str | None:
    """The first tensor, by name, whose digest differs from the recorded one. None when the record has no digests."""
    recorded = record.tensor_digests
    if not recorded:
        return None
    # A record has the digests in the order of the names, without the names.
    names = sorted(tensor_digests)
    if len(names) != len(recorded):
        return f"(the record has {len(recorded)} tensors, the model {len(names)})"
    for name, recorded_digest in zip(names, recorded, strict=True):
        if tensor_digests[name][:TENSOR_DIGITS] != recorded_digest:
            return name
    return None


def first_difference(redone: Path, stored: Path) -> str | None:
    """The first tensor, by name, that differs in two safetensors files. Raises BadSpec for an unreadable file."""
    if digest_file(redone) == digest_file(stored):
        return None
    redone_shapes, stored_shapes = shapes_of(redone), shapes_of(stored)
    with safe_open(redone, framework="pt") as redone_file, safe_open(stored, framework="pt") as stored_file:
        for name in sorted(redone_shapes.keys() | stored_shapes.keys()):
            if redone_shapes.get(name) != stored_shapes.get(name):
                shape, expected = stored_shapes.get(name, "missing"), redone_shapes.get(name, "none")
                return f"{name}, of shape {shape} where {expected} is expected"
            redone_tensor, stored_tensor = redone_file.get_tensor(name), stored_file.get_tensor(name)
            # Compare bytes, because NaN is not equal to itself.
            same_type = redone_tensor.dtype == stored_tensor.dtype
            if not same_type or tensor_bytes(redone_tensor) != tensor_bytes(stored_tensor):
                return name
    return None
