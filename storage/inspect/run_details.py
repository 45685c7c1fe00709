"""Everything that a store knows about one run: `ostinato runs show`. It holds no environment and no credentials,
since nothing of a run does."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

from storage.chain.checkpoint_names import NamedCheckpoint, named_checkpoints
from storage.chain.listing import has_objects, run_chains
from storage.chain.rebase import rebases_in_effect
from storage.chain.records import Chain
from storage.chain.run_record import find_run
from storage.errors import ObjectNotFound
from storage.inspect.run_summary import RunSummary, summarize_run
from storage.registry.models import registered_key
from storage.serialization import Frozen
from storage.store import key_patterns, keys
from storage.store.artifacts import read_manifest
from storage.store.objects import ObjectStore, read_json


class ChainDetails(Frozen):
    stage: str
    model: str
    head: int
    state: str
    starts_from: str
    """A registered model, or the policy of an earlier stage."""
    checkpoints: tuple[int, ...]
    names: dict[int, tuple[str, ...]] = {}
    """Of the named checkpoints, by step."""
    rebases: tuple[str, ...] = ()
    """Where the chain goes on under other numerics, a line each."""
    trainable: dict[str, JsonValue]


class LeaseDetails(Frozen):
    epoch: int
    created: str | None
    pid: int | None
    code_version: str | None
    released: str | None


class ModelView(Frozen):
    model: str
    """name@version"""
    policy: str


class RunDetails(Frozen):
    row: RunSummary
    semantic: dict[str, JsonValue]
    """The config that decides the result; empty for a fork that did not run yet."""
    code_version: str | None
    machine: dict[str, JsonValue]
    packages: dict[str, JsonValue]
    chains: tuple[ChainDetails, ...]
    last_metrics: dict[str, dict[str, JsonValue]]
    """Of each stage that has some."""
    leases: tuple[LeaseDetails, ...]
    result: dict[str, JsonValue] | None
    models: tuple[ModelView, ...]
    """Published from a policy of this run."""


def describe_run(store: ObjectStore, run: str) -> RunDetails:
    """Raises ObjectNotFound, CorruptArtifact."""
    if not has_objects(store, run):
        raise ObjectNotFound(f"no run {run!r} in {store.url}; `ostinato runs ls` lists the runs")
    info, chains = find_run(store, run), run_chains(store, run)
    named = named_checkpoints(store, run)
    machine: dict[str, Any] = dict(info.machine) if info else {}
    packages = machine.pop("packages", {})
    return RunDetails(
        row=summarize_run(store, run),
        semantic=info.semantic if info else {},
        code_version=info.code_version if info else None,
        machine=machine,
        packages=packages if isinstance(packages, dict) else {},
        chains=tuple(_chain(chain, named) for chain in chains),
        last_metrics=_last_metrics(store, run, list(dict.fromkeys(chain.stage for chain in chains))),
        leases=tuple(_leases(store, run)),
        result=read_json(store, keys.result_json(run)),
        models=tuple(_models(store, run)),
    )


def _chain(chain: Chain, named: list[NamedCheckpoint]) -> ChainDetails:
    root, head = chain.root(), chain.head()
    base = root.base if root else None
    start = root.start if root else None
    listed = chain.store.list(keys.checkpoints_prefix(chain.run, chain.stage, chain.model))
    names: dict[int, tuple[str, ...]] = {}
    for one in named:
        if (one.policy.stage, one.policy.model) == (chain.stage, chain.model):
            names[one.policy.step] = (*names.get(one.policy.step, ()), one.name)
    return ChainDetails(
        stage=chain.stage,
        model=chain.model,
        head=head.step,
        state=head.state,
        starts_from=registered_key(base) if base else start.uri if start else "nothing",
        checkpoints=tuple(sorted({step for info in listed if (step := keys.checkpoint_step(info.key)) is not None})),
        names=names,
        rebases=tuple(rebase.title for rebase in rebases_in_effect(chain)),
        trainable=root.trainable if root else {},
    )


def _last_metrics(store: ObjectStore, run: str, stages: list[str]) -> dict[str, dict[str, JsonValue]]:
    found = {}
    for stage in stages:
        listed = [info.key for info in store.list(keys.step_metrics_prefix(run, stage))]
        if listed:
            found[stage] = read_json(store, listed[-1]) or {}
    return found


def _leases(store: ObjectStore, run: str) -> list[LeaseDetails]:
    found = []
    for info in store.list(keys.leases_prefix(run)):
        epoch = keys.parse_number(info.key)
        if epoch is None:
            continue
        body = read_json(store, info.key) or {}
        holder = body.get("info") or {}
        released = read_json(store, keys.lease_release(run, epoch)) or {}
        found.append(
            LeaseDetails(
                epoch=epoch,
                created=body.get("created"),
                pid=holder.get("pid"),
                code_version=holder.get("code_version"),
                released=released.get("released"),
            )
        )
    return found


def _models(store: ObjectStore, run: str) -> list[ModelView]:
    found = []
    for info in store.list(keys.models_prefix()):
        key = key_patterns.artifact_of_manifest(info.key)
        if key is None:
            continue
        ref = read_manifest(store, key).ref
        policy = next((parent for parent in ref.parents if parent.startswith(f"policy:{run}/")), None)
        # a run `a` and a run `a/b`: the rest of the uri is stage/model@step
        if policy is not None and policy.removeprefix(f"policy:{run}/").partition("@")[0].count("/") == 1:
            found.append(ModelView(model=registered_key(ref), policy=policy))
    return found
