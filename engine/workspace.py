"""The workspace of a run: its store, engine, lease and seed as plain data that tasks pass to other machines."""

from __future__ import annotations

from functools import lru_cache

from engine.models.hub import hub_repo_of_key
from engine.protocol import Engine
from engine.specs.engine import EngineSpec, HttpEngineSpec, LocalEngineSpec
from storage.registry.hub import with_commit_of
from storage.serialization import Frozen, canonical_json, digest
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore, open_store


class Workspace(Frozen):
    """The store, the engine, the run key and the lease that every task of a run uses."""

    store: str
    """Object storage: file:///folder, s3://bucket/prefix or memory://name. Credentials come from the environment."""
    engine: EngineSpec = LocalEngineSpec()
    run: str
    epoch: int = 0
    """Fencing epoch of this process's lease on the run."""
    seed: int = 0
    provenance: Provenance
    max_tokens: int | None = None
    """Maximum packed tokens of one forward pass in calls for one model: the `max_batch_size` that it was spawned with.
    None: the engine's `max_tokens_per_forward`."""
    hub: dict[str, str] = {}
    """Commit of each branch of a Hugging Face hub that the run uses, by the `hf://` address of the branch."""

    def open_store(self) -> ObjectStore:
        return _open_store(self.store)

    def connect(self) -> Engine:
        return connect(self.store, self.engine)

    def pinned_model(self, key: str) -> str:
        """The key of a model, with the run's commit in place of a branch of the hub. Other keys are unchanged."""
        repo = hub_repo_of_key(key)
        return key if repo is None else with_commit_of(repo, self.hub).uri

    def seed_for(self, *parts: str | int) -> int:
        """Derives a seed below 2**63 from the run's seed and `parts`. It does not depend on the name of the run."""
        return derive_seed(self.seed, *parts)


def derive_seed(seed: int, *parts: str | int) -> int:
    """Derives a seed below 2**63 from `seed` and `parts`."""
    # 64 bits of the digest, without the highest one: seeds are signed integers of 64 bits.
    return int(digest(canonical_json([seed, *parts]))[:16], 16) >> 1


def segment_seed(seed: int, tokens: int) -> int:
    """The seed with which a completion goes on after its first `tokens` tokens. A cut changes the tokens after it, so
    that these need random numbers of their own."""
    return derive_seed(seed, tokens) if tokens else seed


@lru_cache(maxsize=8)
def _open_store(url: str) -> ObjectStore:
    return open_store(url)


@lru_cache(maxsize=8)
def connect(store_url: str, spec: EngineSpec) -> Engine:
    """Returns the engine that `spec` describes, working on the artifacts at `store_url`.

    Equal arguments return the same engine, so that every task of a process finds the weights that earlier tasks loaded.
    """
    from importlib import import_module

    # Import by name, so that a worker without torch can import this module (an import contract checks it).
    if isinstance(spec, HttpEngineSpec):
        return import_module("engine.http.client").EngineClient(store_url, spec)
    return import_module("engine.local.engine").LocalEngine(store_url, spec)
