"""Everything that a store knows about one run, for `ostinato runs show`.

It contains no environment variables and no credentials, because no object of a run does.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import JsonValue

from storage.chain.checkpoint_names import NamedCheckpoint, named_checkpoints
from storage.chain.leases import check_not_deleted, current_epoch, is_held
from storage.chain.listing import EVALUATED, has_objects, run_chains, stored_checkpoint_steps
from storage.chain.rebase import rebases_in_effect
from storage.chain.records import Chain
from storage.chain.run_record import find_run
from storage.errors import ObjectNotFound
from storage.registry.models import registered_key
from storage.serialization import Frozen
from storage.store import key_patterns, keys
from storage.store.artifacts import find_artifact
from storage.store.index import users_of
from storage.store.objects import ObjectStore, read_json

RunState = Literal["finished", "running?", "stopped", "fork", "deleting"]


class RunSummary(Frozen):
    """One line of `ostinato runs ls`."""

    run: str
    kind: str
    """Kinds of its stages, separated by spaces: "sft grpo". "evaluation": it has none."""
    created: str | None
    """ISO time of the first start. None for a fork that has not run yet."""
    state: RunState
    """finished: the run has a result. fork: it was forked and has not run yet. stopped: its lease was released.
    running?: its lease is held. A killed process holds its lease, too: see `last_commit`. deleting: it is deleted in
    part, by a deletion that has not ended."""
    stages: tuple[str, ...]
    head_step: int
    """Last committed step of the longest chain of the last stage, counted from 1. 0: none is committed."""
    last_commit: str | None
    """ISO time of that step's commit. None at step 0."""
    lease_epoch: int
    forked_from: str | None
    """`run/stage@step` of the fork. None if the run is not a fork."""


def summarize_run(store: ObjectStore, run: str) -> RunSummary:
    """Reads the summary of a run. Raises CorruptArtifact."""
    info = find_run(store, run)
    chains = run_chains(store, run)
    stages = tuple(dict.fromkeys(chain.stage for chain in chains))
    # the longest chain of the last stage shows how far the run is
    last_stage_chains = [chain for chain in chains if chain.stage == stages[-1]]
    head_step, last_commit = _longest_head(last_stage_chains)
    return RunSummary(
        run=run,
        kind=" ".join(map(keys.stage_kind, stages)) or (EVALUATED if info and EVALUATED in info.semantic else "-"),
        created=info.created if info else None,
        state=_state(store, run, opened=info is not None),
        stages=stages,
        head_step=head_step,
        last_commit=last_commit,
        lease_epoch=current_epoch(store, run),
        forked_from=fork_origin(store, run),
    )


def fork_origin(store: ObjectStore, run: str) -> str | None:
    """Returns `run/stage@step` of the place where the run was forked, or None if it is not a fork."""
    fork = read_json(store, keys.fork_json(run))
    if fork is None:
        return None
    return f"{fork.get('run')}/{fork.get('stage')}@{fork.get('step')}"


def seconds_since(time: str | None) -> float | None:
    """Seconds between an ISO time and now, by this machine's clock."""
    if time is None:
        return None
    return (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()


def _longest_head(chains: list[Chain]) -> tuple[int, str | None]:
    """Returns (last step, ISO time of its commit) of the longest chain."""
    longest, last_step = None, 0
    for chain in chains:
        step = max(chain.steps(), default=0)
        if step > last_step:
            longest, last_step = chain, step
    if longest is None:
        return 0, None
    record = longest.record(last_step)
    return last_step, record.time if record else None


def _state(store: ObjectStore, run: str, *, opened: bool) -> RunState:
    if store.exists(keys.deletion(run)):
        return "deleting"
    if store.exists(keys.result_json(run)):
        return "finished"
    if is_held(store, run):
        return "running?"
    return "stopped" if opened else "fork"


class ChainDetails(Frozen):
    """One chain of the run."""

    stage: str
    model: str
    head: int
    """Last committed step."""
    state: str
    starts_from: str
    """Registered model, or URI of the policy of an earlier stage."""
    checkpoints: tuple[int, ...]
    """Steps of the stored checkpoints."""
    names: dict[int, tuple[str, ...]] = {}
    """Names of the named checkpoints, by step."""
    rebases: tuple[str, ...] = ()
    """Descriptions of the rebases in effect, one line each."""
    trainable: dict[str, JsonValue]
    trainer: str | None = None
    """Backend of the last step and how it was divided over processes, such as "torch" or "deepspeed zero2x4"."""


class LeaseDetails(Frozen):
    """One lease of the run."""

    epoch: int
    created: str | None
    pid: int | None
    code_version: str | None
    released: str | None


class PublishedModel(Frozen):
    """A registered model that was made from a policy of the run."""

    model: str
    """name@version"""
    policy: str


class RunDetails(Frozen):
    """Everything that a store knows about one run."""

    row: RunSummary
    semantic: dict[str, JsonValue]
    """The configuration that decides the result. Empty for a fork that has not run yet."""
    warnings: tuple[str, ...] = ()
    """What a person should know of the run's inputs."""
    code_version: str | None
    machine: dict[str, JsonValue]
    packages: dict[str, JsonValue]
    chains: tuple[ChainDetails, ...]
    last_metrics: dict[str, dict[str, JsonValue]]
    """Metrics of the last step of each stage that has some. `step` counts from 1."""
    leases: tuple[LeaseDetails, ...]
    result: dict[str, JsonValue] | None
    models: tuple[PublishedModel, ...]
    """Models that were published from a policy of this run."""


def describe_run(store: ObjectStore, run: str) -> RunDetails:
    """Reads the details of a run. Raises ObjectNotFound, CorruptArtifact, RunBeingDeleted."""
    check_not_deleted(store, run)
    if not has_objects(store, run):
        raise ObjectNotFound(
            f"no run {run!r} in {store.url}; if the run is in another store, give it with --storage ('ostinato runs "
            "ls' lists the runs)"
        )
    # run.json, which a fork that has not run yet lacks
    info = find_run(store, run)
    machine: dict[str, Any] = dict(info.machine) if info else {}
    packages = machine.pop("packages", {})
    # chains and stages
    chains = run_chains(store, run)
    named = named_checkpoints(store, run)
    stages = list(dict.fromkeys(chain.stage for chain in chains))
    return RunDetails(
        row=summarize_run(store, run),
        semantic=info.semantic if info else {},
        warnings=info.warnings if info else (),
        code_version=info.code_version if info else None,
        machine=machine,
        packages=packages if isinstance(packages, dict) else {},
        chains=tuple(_describe_chain(chain, named) for chain in chains),
        last_metrics=_last_metrics(store, run, stages),
        leases=tuple(_describe_leases(store, run)),
        result=read_json(store, keys.result_json(run)),
        models=tuple(published_models(store, run)),
    )


def _describe_chain(chain: Chain, named: list[NamedCheckpoint]) -> ChainDetails:
    root, head = chain.root(), chain.head()
    # a checkpoint may have several names
    names: dict[int, tuple[str, ...]] = {}
    for checkpoint in named:
        policy = checkpoint.policy
        if (policy.stage, policy.model) == (chain.stage, chain.model):
            names[policy.step] = (*names.get(policy.step, ()), checkpoint.name)
    record = chain.record(head.step) if head.step else None
    trainer = None if record is None else f"{record.numerics.backend} {record.numerics.layout}".strip()
    # the model or policy that the chain starts from
    starts_from = "nothing"
    if root is not None and root.base is not None:
        starts_from = registered_key(root.base)
    elif root is not None and root.start is not None:
        starts_from = root.start.uri
    return ChainDetails(
        stage=chain.stage,
        model=chain.model,
        head=head.step,
        state=head.state,
        starts_from=starts_from,
        checkpoints=tuple(stored_checkpoint_steps(chain)),
        names=names,
        rebases=tuple(rebase.title for rebase in rebases_in_effect(chain)),
        trainable=root.trainable if root else {},
        trainer=trainer,
    )


def _last_metrics(store: ObjectStore, run: str, stages: list[str]) -> dict[str, dict[str, JsonValue]]:
    last_metrics = {}
    for stage in stages:
        listed = [info.key for info in store.list(keys.step_metrics_prefix(run, stage))]
        if listed:
            last_metrics[stage] = _counted_from_one(read_json(store, listed[-1]) or {})
    return last_metrics


def _counted_from_one(metrics: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The stored metrics of a step, whose `step` counts from 0, with a `step` that counts from 1."""
    step = metrics.get("step")
    return metrics | {"step": step + 1} if isinstance(step, int) else metrics


def _describe_leases(store: ObjectStore, run: str) -> list[LeaseDetails]:
    leases = []
    for info in store.list(keys.leases_prefix(run)):
        epoch = keys.parse_number(info.key)
        if epoch is None:
            continue
        # the lease, what its holder wrote about itself, and the note of its release
        lease = read_json(store, info.key) or {}
        holder = lease.get("info") or {}
        release = read_json(store, keys.lease_release(run, epoch)) or {}
        leases.append(
            LeaseDetails(
                epoch=epoch,
                created=lease.get("created"),
                pid=holder.get("pid"),
                code_version=holder.get("code_version"),
                released=release.get("released"),
            )
        )
    return leases


def published_models(store: ObjectStore, run: str) -> list[PublishedModel]:
    """Returns the registered models that were made from policies of the run."""
    models = []
    for user in users_of(store, keys.run_prefix(run)):
        key = key_patterns.artifact_of_manifest(user)
        ref = None if key is None else find_artifact(store, key)
        if ref is None or ref.kind != "model":
            continue
        policy = next((parent for parent in ref.parents if parent.startswith(f"policy:{run}/")), None)
        if policy is None:
            continue
        # the rest must be stage/model@step: otherwise the policy belongs to the run `a/b`, and `run` is `a`
        rest = policy.removeprefix(f"policy:{run}/").partition("@")[0]
        if rest.count("/") == 1:
            models.append(PublishedModel(model=registered_key(ref), policy=policy))
    return models
