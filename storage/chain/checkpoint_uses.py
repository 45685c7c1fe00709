"""Finds what refers to a checkpoint: forks, runs in progress, champions and rebases. Such a checkpoint is not removed.

A chain can rebuild a policy without its checkpoint, only more slowly. The exception is a policy at which the chain was
rebased: all later policies are computed from that checkpoint. The other references protect checkpoints that a person
may not know to be in use.
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


def checkpoint_uses(store: ObjectStore, policies: Collection[PolicyRef]) -> dict[PolicyRef, list[str]]:
    """Returns sentences that say what refers to the checkpoint of each policy. Policies without references are left
    out.

    Lists all runs and models of the store once. Raises CorruptArtifact.
    """
    uses: dict[PolicyRef, list[str]] = {}
    if not policies:
        return uses
    all_uses = [
        *_uses_by_rebases(store, policies),
        *_uses_by_runs(store),
        *_uses_by_champions(store, policies),
    ]
    for policy, use in all_uses:
        if policy in policies:
            uses.setdefault(policy, []).append(use)
    return uses


def _uses_by_rebases(store: ObjectStore, policies: Collection[PolicyRef]) -> Iterator[tuple[PolicyRef, str]]:
    chains = {(policy.run, policy.stage, policy.model): Chain.of(store, policy) for policy in policies}
    for chain in chains.values():
        for rebase in rebases_in_effect(chain):
            yield rebase.policy, f"run {chain.run!r} was rebased there and continues from it"


def _uses_by_runs(store: ObjectStore) -> Iterator[tuple[PolicyRef, str]]:
    """Yields the policies at which runs were forked, and those at which stages of runs in progress began."""
    for info in store.list(keys.runs_prefix()):
        run, chain = keys.run_of(info.key), keys.chain_of(info.key)
        # a fork refers to the last policy of each chain that it shares
        if run is not None and info.key == keys.fork_json(run):
            fork = read_fork(store, run)
            shared_policies = fork.shared if fork else ()
            for policy in shared_policies:
                yield policy, f"run {run!r} was forked there"
        # a stage refers to the policy that it starts from
        elif chain is not None and info.key == keys.chain_root(*chain):
            root = Chain(store, *chain).root()
            if root is not None and root.start is not None and _is_in_progress(store, chain[0]):
                yield root.start, f"stage {chain[1]} of run {chain[0]!r} began there, and the run is not finished"


def _is_in_progress(store: ObjectStore, run: str) -> bool:
    """Whether a process works on the run. A killed process counts, too, because it could not release its lease."""
    return is_held(store, run) and not store.exists(keys.result_json(run))


def _uses_by_champions(store: ObjectStore, policies: Collection[PolicyRef]) -> Iterator[tuple[PolicyRef, str]]:
    # the parents in a model's manifest are URIs
    by_uri = {policy.uri: policy for policy in policies}
    for name in list_models(store):
        champion = champion_of(store, name)
        if champion is not None:
            manifest = read_manifest(store, keys.model_version(name, champion.version))
            for uri in by_uri.keys() & set(manifest.parents):
                yield by_uri[uri], f"{name}@{champion.version}, the champion of {name}, was made from it"
