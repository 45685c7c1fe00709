"""Weights brought along a chain step by step, beside any engine: what verifications and replays stand on.

Nothing is written to the store. A step is redone under its recorded threads and micro-batching.
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
from engine.specs.adapters import LoraSpec, parse_trainable
from engine.specs.engine import LocalEngineSpec
from engine.specs.trainer import TorchTrainerSpec, TrainerSpec, spec_of_layout
from storage.chain.rebase import (
    Rebase,
    checkpoints_before,
    differences,
    is_checkpoint_of,
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

OnStep = Callable[[Chain, int], None]
RANKS_PER_CORE = 4
"""More would redo a step of many ranks on a CPU, but not in any useful time."""
_KNOWN_DTYPES = ("float32", "bfloat16", "float64")


@contextlib.contextmanager
def clean_backend(like: Numerics) -> Iterator[TrainerBackend]:
    """A backend of this machine in the precision of a committed step, and on as many ranks. The thread count of the
    caller comes back."""
    dtype = like.compute_dtype if like.compute_dtype in _KNOWN_DTYPES else "auto"
    backend = create_trainer_backend(
        LocalEngineSpec.model_validate(
            {
                "trainer": _trainer_like(like),
                "compute_dtype": dtype,
                "threads": like.threads,
                "max_tokens_per_forward": like.max_tokens,
            }
        )
    )
    before = torch.get_num_threads()
    backend.prepare_thread()
    try:
        yield backend
    finally:
        torch.set_num_threads(before)
        backend.close()


def _trainer_like(numerics: Numerics) -> TrainerSpec:
    """The trainer of a committed step where this machine can run it; else the torch trainer, whose bits may differ."""
    spec = spec_of_layout(numerics.layout) if numerics.backend == "deepspeed" else None
    if spec is None or spec.ranks == "auto" or find_spec("deepspeed") is None:
        return TorchTrainerSpec()
    room = torch.cuda.device_count() or RANKS_PER_CORE * (os.cpu_count() or 1)
    return spec if spec.ranks <= room else TorchTrainerSpec()


def numerics_notes(committed: Numerics, here: Numerics) -> list[str]:
    """What the bits of a step depend on and is not here as it was; threads and micro-batches are taken over."""
    return [
        f"{name}: committed under {was}, redone under {now}" for name, was, now in differences(committed, here)
    ]


def fresh_trainer(store: ObjectStore, backend: TrainerBackend, root: Root) -> Trainer:
    """Policy 0 of a chain that starts from a registered model, on weights of its own and with fresh moments."""
    assert root.base is not None  # base_root and policy_zero walk to such a root
    with tempfile.TemporaryDirectory(prefix="ostinato-redo-") as folder:
        plain = [entry.name for entry in read_manifest(store, root.base.key).files if "/" not in entry.name]
        files = materialise_files(store, root.base.key, Path(folder), names=plain)
        at, spec = files["config.json"].parent, parse_trainable(root.trainable)
        if isinstance(spec, LoraSpec):
            return backend.adapter(backend.load_base(at, key=root.base.key), spec, init_seed=root.init_seed)
        return backend.load(at, head=spec.head, init_seed=root.init_seed)


class Redo:
    """Weights on the way along a chain."""

    def __init__(self, store: ObjectStore, backend: TrainerBackend, on_step: OnStep = lambda chain, step: None) -> None:
        self.store, self.backend, self.on_step = store, backend, on_step

    def policy_zero(self, chain: Chain) -> Trainer:
        """Where the chain starts. An earlier stage is redone from its own root."""
        root = root_of(chain)
        if root.start is None:
            return fresh_trainer(self.store, self.backend, root)
        earlier = Chain.of(self.store, root.start)
        rebase = rebase_in_effect(earlier, root.start.step)
        trainer = self.start_of(earlier, rebase)
        for record in earlier.records(after=rebase.policy.step if rebase else 0, until=root.start.step):
            self.step(trainer, record)
        trainer.reset_optimizer()
        return trainer

    def start_of(self, chain: Chain, rebase: Rebase | None) -> Trainer:
        """What the steps after `rebase` descend from; None: the chain's root."""
        return self.policy_zero(chain) if rebase is None else self.restored(chain, rebase_manifest(chain, rebase))

    def from_checkpoint(self, chain: Chain, step: int) -> Trainer:
        """The stored checkpoint of that step, moments included. Raises ObjectNotFound, CorruptArtifact."""
        manifest = checkpoint_of(chain, step)
        if manifest is None:
            raise ObjectNotFound(f"{chain.run}/{chain.stage}/{chain.model} has no checkpoint of step {step}")
        return self.restored(chain, manifest)

    def restored(self, chain: Chain, manifest: Manifest) -> Trainer:
        """The weights and moments of a checkpoint of the chain."""
        trainer = fresh_trainer(self.store, self.backend, base_root(chain))
        with tempfile.TemporaryDirectory(prefix="ostinato-redo-") as folder:
            trainer.read_checkpoint(materialise_files(self.store, manifest.key, Path(folder)), optimizer=True)
        return trainer

    def nearest(self, chain: Chain, step: int) -> Trainer:
        """Policy `step`, by the shortest way: the last checkpoint at or before it that leads to it, and the steps after
        that."""
        anchor = next(checkpoints_before(chain, step), None)
        trainer = self.policy_zero(chain) if anchor is None else self.restored(chain, anchor)
        for record in chain.records(after=step_of_checkpoint(anchor) if anchor else 0, until=step):
            self.step(trainer, record)
        return trainer

    def step(self, trainer: Trainer, record: CommitRecord, request: StepRequest | None = None) -> StepEffect:
        """One committed step again (or another request in its place), under its recorded threads and micro-batches."""
        limits = record.numerics.max_tokens_of_updates or record.numerics.max_tokens
        if request is not None and request.batch != record.request.batch:
            limits = record.numerics.max_tokens  # another batch makes other updates
        with self.backend.threads_of(record.numerics):
            effect = apply_request(trainer, request or record.request, self.store, max_tokens=limits)
        self.on_step(Chain.of(self.store, record.policy), record.policy.step)
        return effect


def root_of(chain: Chain) -> Root:
    root = chain.root()
    if root is None:
        raise UnknownPolicy(f"there is no chain {chain_title(chain)}; `ostinato runs show {chain.run}` lists them")
    return root


def base_root(chain: Chain) -> Root:
    """The root of the first stage, which names the registered model that all later ones descend from."""
    root = root_of(chain)
    while root.start is not None:
        root = root_of(Chain.of(chain.store, root.start))
    return root


def checkpoint_of(chain: Chain, step: int) -> Manifest | None:
    """The manifest of the chain's own checkpoint of the very policy that it has at that step."""
    try:
        manifest = read_manifest(chain.store, keys.checkpoint(chain.run, chain.stage, chain.model, step))
    except ObjectNotFound:
        return None
    return manifest if is_checkpoint_of(chain, manifest) else None


def checkpoint_steps(chain: Chain) -> list[int]:
    """Committed steps that have a checkpoint of their policy, ascending."""
    listed = chain.store.list(keys.checkpoints_prefix(chain.run, chain.stage, chain.model))
    steps = sorted({step for info in listed if (step := keys.checkpoint_step(info.key)) is not None})
    committed = {0, *chain.steps()}
    return [step for step in steps if step in committed and checkpoint_of(chain, step) is not None]


def chain_title(chain: Chain) -> str:
    return f"{chain.run}/{chain.stage}/{chain.model}"
