"""Finds what refers to a checkpoint: forks, runs in progress, champions and rebases. Such a checkpoint is not removed.

A chain can rebuild a policy without its checkpoint, only more slowly. The exception is a policy at which the chain was
rebased: all later policies are computed from that checkpoint (storage.chain.rebase). The other checkpoints are kept
because a person may not know that they are in use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from storage.chain.fork import read_fork
from storage.chain.leases import is_held
from storage.chain.rebase import rebases_in_effect
from storage.chain.records import Chain, PolicyRef
from storage.registry.decisions import champion_of
from storage.registry.models import list_models
from storage.store import keys
from storage.store.artifacts import read_manifest
from storage.store.objects import ObjectStore


def reasons_to_keep(store: ObjectStore, policies: Collection[PolicyRef]) -> dict[PolicyRef, list[str]]:
    """Returns sentences that say what refers to the checkpoint of each policy. Policies without references are left
    out.

    Slow in a large store: it reads the list of all runs and models. Raises CorruptArtifact.
    """
    uses: dict[PolicyRef, list[str]] = {}
    if not policies:
        return uses
    all_uses = [
        *_rebase_uses(store, policies),
        *_run_uses(store),
        *_champion_uses(store, policies),
    ]
    for policy, use in all_uses:
        if policy in policies:
            uses.setdefault(policy, []).append(use)
    return uses


def _rebase_uses(store: ObjectStore, policies: Collection[PolicyRef]) -> Iterator[tuple[PolicyRef, str]]:
    chains = {(policy.run, policy.stage, policy.model): Chain.of(store, policy) for policy in policies}
    for chain in chains.values():
        for rebase in rebases_in_effect(chain):
            yield rebase.policy, f"run {chain.run!r} was rebased there and continues from it"


def _run_uses(store: ObjectStore) -> Iterator[tuple[PolicyRef, str]]:
    """Yields the policies at which runs were forked, and those at which stages of runs in progress began."""
    for info in store.list(keys.runs_prefix()):
        run, chain_key = keys.run_of(info.key), keys.chain_of(info.key)
        if run is not None and info.key == keys.fork_json(run):
            fork = read_fork(store, run)
            shared_policies = fork.shared if fork else ()
            for policy in shared_policies:
                yield policy, f"run {run!r} was forked there"
        elif chain_key is not None and info.key == keys.chain_root(*chain_key):
            root = Chain(store, *chain_key).root()
            run, stage, _ = chain_key
            if root is not None and root.start is not None and _is_in_progress(store, run):
                yield root.start, f"stage {stage} of run {run!r} began there, and the run is not finished"


def _is_in_progress(store: ObjectStore, run: str) -> bool:
    """Whether the run's lease is held and it has no result. A killed process keeps its lease, so its run counts."""
    return is_held(store, run) and not store.exists(keys.result_json(run))


def _champion_uses(store: ObjectStore, policies: Collection[PolicyRef]) -> Iterator[tuple[PolicyRef, str]]:
    # the parents in a model's manifest are URIs
    by_uri = {policy.uri: policy for policy in policies}
    for name in list_models(store):
        champion = champion_of(store, name)
        if champion is not None:
            manifest = read_manifest(store, keys.model_version(name, champion.version))
            for uri in by_uri.keys() & set(manifest.parents):
                yield by_uri[uri], f"{name}@{champion.version}, the champion of {name}, was made from it"
