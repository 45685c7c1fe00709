"""Rebuilds the weights of a chain's policies without an engine, for `ostinato verify` and `ostinato replay`.

Nothing is written to the store. A step is redone with its recorded thread count and micro-batches.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from engine.backends.factory import create_trainer_backend
from engine.backends.protocol import Trainer, TrainerBackend
from engine.errors import UnknownPolicy
from engine.local.apply import StepEffect, apply_request
from engine.local.saving import checkpoint_files
from engine.specs.adapters import LoraSpec, parse_trainable
from engine.specs.engine import LocalEngineSpec, TorchTrainerSpec, TrainerSpec, spec_of_layout
from storage.chain.rebase import (
    Rebase,
    checkpoints_up_to,
    differences,
    has_current_weights,
    rebase_in_effect,
    rebase_manifest,
    step_of_checkpoint,
)
from storage.chain.records import Chain, CommitRecord, Numerics, Root, StepRequest
from storage.errors import ObjectNotFound
from storage.store import keys
from storage.store.artifacts import Manifest, read_manifest
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore
from storage.temporary import process_folder

OnRedoneStep = Callable[[Chain, int], None]
"""Called with the chain and the number of each step that was redone."""
RANKS_PER_CORE = 4
"""Most ranks per CPU core with which a step is redone. More would work, but would take too long to be of use."""
_KNOWN_DTYPES = ("float32", "bfloat16", "float64")


@contextlib.contextmanager
def clean_backend(numerics: Numerics) -> Iterator[TrainerBackend]:
    """A new backend on this machine with the precision, the ranks and the threads of a committed step.

    The thread count of the caller is restored at the end of the block."""
    dtype = numerics.compute_dtype if numerics.compute_dtype in _KNOWN_DTYPES else "auto"
    backend = create_trainer_backend(
        LocalEngineSpec.model_validate(
            {
                "trainer": _trainer_spec(numerics),
                "compute_dtype": dtype,
                "threads": numerics.threads,
                "max_tokens_per_forward": numerics.max_tokens,
            }
        )
    )
    threads_before = torch.get_num_threads()
    backend.prepare_thread()
    try:
        yield backend
    finally:
        torch.set_num_threads(threads_before)
        backend.close()


def _trainer_spec(numerics: Numerics) -> TrainerSpec:
    """The trainer of a committed step if this machine can run it, else the torch trainer, whose bits may differ."""
    if numerics.backend != "deepspeed" or find_spec("deepspeed") is None:
        return TorchTrainerSpec()
    spec = spec_of_layout(numerics.layout)
    if spec is None or spec.ranks == "auto":
        return TorchTrainerSpec()
    max_ranks = torch.cuda.device_count() or RANKS_PER_CORE * (os.cpu_count() or 1)
    return spec if spec.ranks <= max_ranks else TorchTrainerSpec()


def numerics_notes(committed: Numerics, here: Numerics) -> list[str]:
    """One line per numeric setting that differs here from the committed step and that may change its bits.

    Threads and micro-batches are not compared, because a redo uses the committed ones."""
    return [f"{name}: committed under {old}, redone under {new}" for name, old, new in differences(committed, here)]


def fresh_trainer(store: ObjectStore, backend: TrainerBackend, root: Root) -> Trainer:
    """Policy 0 of a chain that starts from a registered model, with fresh moments. It shares no weights."""
    assert root.base is not None  # base_root and policy_zero pass only such a root
    with tempfile.TemporaryDirectory(prefix="redo-", dir=process_folder()) as folder:
        # Files in subfolders, such as an adapter for peft, are not part of the model.
        names = [entry.name for entry in read_manifest(store, root.base.key).files if "/" not in entry.name]
        files = materialise_files(store, root.base.key, Path(folder), names=names)
        model_folder = files["config.json"].parent
        spec = parse_trainable(root.trainable)
        if isinstance(spec, LoraSpec):
            base = backend.load_base(model_folder, key=root.base.key, load_in_4bit=spec.load_in_4bit)
            return backend.adapter(base, spec, init_seed=root.init_seed)
        return backend.load(model_folder, head=spec.head, init_seed=root.init_seed)


class PolicyRebuilder:
    """Rebuilds the weights and moments of policies on one backend, from roots or checkpoints and committed steps."""

    def __init__(
        self, store: ObjectStore, backend: TrainerBackend, on_step: OnRedoneStep = lambda chain, step: None
    ) -> None:
        self.store, self.backend, self.on_step = store, backend, on_step

    def policy_zero(self, chain: Chain) -> Trainer:
        """Policy 0 of the chain. An earlier stage that the chain starts from is redone from its own root."""
        root = root_of(chain)
        if root.start is None:
            return fresh_trainer(self.store, self.backend, root)

        # Redo the earlier stage up to the policy that this chain starts from.
        earlier = Chain.of(self.store, root.start)
        rebase = rebase_in_effect(earlier, root.start.step)
        trainer = self.after_rebase(earlier, rebase)
        first_step = rebase.policy.step if rebase else 0
        for record in earlier.records(after=first_step, until=root.start.step):
            self.redo_step(trainer, record)
        trainer.reset_optimizer()
        return trainer

    def after_rebase(self, chain: Chain, rebase: Rebase | None) -> Trainer:
        """The policy that the steps after `rebase` descend from. Without a rebase it is policy 0."""
        if rebase is None:
            return self.policy_zero(chain)
        return self._read_checkpoint(chain, rebase_manifest(chain, rebase))

    def from_checkpoint(self, chain: Chain, step: int) -> Trainer:
        """The policy of the stored checkpoint of that step, with its moments.

        Raises ObjectNotFound, CorruptArtifact."""
        manifest = checkpoint_of(chain, step)
        if manifest is None:
            raise ObjectNotFound(f"{chain.run}/{chain.stage}/{chain.model} has no checkpoint of step {step}")
        return self._read_checkpoint(chain, manifest)

    def rebuild(self, chain: Chain, step: int) -> Trainer:
        """Policy `step`, with as few redone steps as possible: from the last checkpoint at or before it."""
        manifest = next(checkpoints_up_to(chain, step), None)
        if manifest is None:
            trainer, saved_step = self.policy_zero(chain), 0
        else:
            trainer, saved_step = self._read_checkpoint(chain, manifest), step_of_checkpoint(manifest)
        for record in chain.records(after=saved_step, until=step):
            self.redo_step(trainer, record)
        return trainer

    def redo_step(self, trainer: Trainer, record: CommitRecord, request: StepRequest | None = None) -> StepEffect:
        """Redoes one committed step, or another request in its place, with the recorded threads and micro-batches."""
        limits = record.numerics.max_tokens_of_updates or record.numerics.max_tokens
        if request is not None and request.batch != record.request.batch:
            # The recorded limits belong to the updates of the committed batch. Another batch has other updates.
            limits = record.numerics.max_tokens
        with self.backend.threads_of(record.numerics):
            effect = apply_request(trainer, request or record.request, self.store, max_tokens=limits)
        self.on_step(Chain.of(self.store, record.policy), record.policy.step)
        return effect

    def _read_checkpoint(self, chain: Chain, manifest: Manifest) -> Trainer:
        trainer = fresh_trainer(self.store, self.backend, base_root(chain))
        with tempfile.TemporaryDirectory(prefix="redo-", dir=process_folder()) as folder:
            files = checkpoint_files(self.store, self.backend.transfers, manifest, Path(folder))
            trainer.read_checkpoint(files, optimizer=True)
        return trainer


def root_of(chain: Chain) -> Root:
    """The root of the chain. Raises UnknownPolicy when the chain does not exist."""
    root = chain.root()
    if root is None:
        raise UnknownPolicy(f"there is no chain {chain_title(chain)}; 'ostinato runs show {chain.run}' lists them")
    return root


def base_root(chain: Chain) -> Root:
    """The root of the first stage. It names the registered model from which all later stages descend."""
    root = root_of(chain)
    while root.start is not None:
        root = root_of(Chain.of(chain.store, root.start))
    return root


def checkpoint_of(chain: Chain, step: int) -> Manifest | None:
    """The manifest of the chain's checkpoint of that step, or None.

    A checkpoint of another policy under the same key counts as none."""
    try:
        manifest = read_manifest(chain.store, keys.checkpoint(chain.run, chain.stage, chain.model, step))
    except ObjectNotFound:
        return None
    return manifest if has_current_weights(chain, manifest) else None


def checkpoint_steps(chain: Chain) -> list[int]:
    """Committed steps that have a checkpoint of their policy, ascending."""
    stored_steps: set[int] = set()
    for info in chain.store.list(keys.checkpoints_prefix(chain.run, chain.stage, chain.model)):
        step = keys.checkpoint_step(info.key)
        if step is not None:
            stored_steps.add(step)
    committed_steps = {0, *chain.steps()}
    return [step for step in sorted(stored_steps & committed_steps) if checkpoint_of(chain, step) is not None]


def chain_title(chain: Chain) -> str:
    return f"{chain.run}/{chain.stage}/{chain.model}"
