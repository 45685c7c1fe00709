"""A run that shares another one's history up to a step, like a git branch.

States leave run names out, so the root and the records are copied under the new name and stay equal in state, and so
are the marks of a recipe's loops: the new run goes on in its loop, at the first iteration that is not shared. Batches
stay references to the old run's immutable artifacts; the nearest checkpoint is copied, and every rebase with the
checkpoint it goes on from, so that what is pruned in one run is not missed in the other. `fork.json` is committed
first and says what the copy will be: an interrupted fork is finished by the same command, and the run is not opened
before (`check_fork`).

The data cursor is carried on as it is: the new run goes on at the same epoch and row *of the order that its own
configuration gives*. With other data, or another seed, that is a place in another order; a dataset that is shorter
than the cursor's row is refused when the run starts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from pydantic import ValidationError

from storage.chain.listing import has_objects, run_chains, stages_of
from storage.chain.rebase import (
    Rebase,
    checkpoints_before,
    commit_rebase,
    rebase_at,
    rebase_manifest,
    rebases_in_effect,
)
from storage.chain.records import Chain, CommitRecord, PolicyRef
from storage.errors import CorruptArtifact, ForkRefused, ObjectNotFound
from storage.serialization import Frozen, canonical_json, digest_file
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Attempt, Manifest, commit_files, find_artifact, read_manifest
from storage.store.backends.protocol import HIDDEN_PREFIX
from storage.store.objects import ObjectStore, read_json

Progress = Callable[[str], None]


class ForkInfo(Frozen):
    """runs/<new>/fork.json."""

    schema_version: int = 1
    run: str
    """Whose history it shares."""
    stage: str
    step: int
    shared: tuple[PolicyRef, ...]
    """The last shared policy of each chain of that stage, in the old run. A chain that was shorter is whole."""
    rebased: tuple[PolicyRef, ...] = ()
    """Those of `shared` at which the old run was rebased: the new one goes on from the same weights."""
    code_version: str
    attempt: str
    created: str

    @property
    def command(self) -> str:
        return f"ostinato fork {self.run} --step {self.step} --stage {self.stage}"


def fork_run(
    store: ObjectStore,
    run: str,
    new: str,
    *,
    step: int,
    stage: str | None = None,
    code_version: str,
    on_progress: Progress = lambda what: None,
) -> ForkInfo:
    """Makes the run `new` out of `run` up to and including `step` of `stage` (None: the last stage); earlier stages
    are copied whole. Repeating it finishes an interrupted fork, and changes nothing in a finished one.

    Raises:
        ObjectNotFound: there is no such run, stage or step.
        ForkRefused: `new` is something else already.
    """
    keys.validate_run(new)
    if keys.validate_run(run) == new:
        raise ForkRefused(f"run {run!r} cannot be forked into itself; give another key for the new run")
    check_fork(store, run)
    stages = stages_of(store, run)
    stage = _stage(store, run, stages, stage)
    info = _claim(store, new, _plan(store, run, stage, step, code_version))
    last = {policy.model: policy.step for policy in info.shared}
    _copy_loops(store, run, new, info, stages)
    for at in stages[: stages.index(stage) + 1]:
        chains = [chain for chain in run_chains(store, run) if chain.stage == at]
        _copy_stage(store, run, new, at, until=step if at == stage else None)
        for chain in chains:
            on_progress(f"{at}/{chain.model}")
            _copy_chain(chain, new, last[chain.model] if at == stage else chain.head().step)
    return info


def read_fork(store: ObjectStore, run: str) -> ForkInfo | None:
    """Where the run was forked from; None when it was not. Raises CorruptArtifact."""
    body = read_json(store, keys.fork_json(run))
    try:
        return None if body is None else ForkInfo.model_validate(body)
    except ValidationError as error:
        raise CorruptArtifact(f"{keys.fork_json(run)} is not a readable fork: {error}") from error


def check_fork(store: ObjectStore, run: str) -> None:
    """Raises ForkRefused when the run is a fork whose copy is not finished: it would go on from too early a step."""
    info = read_fork(store, run)
    if info is None:
        return
    for policy in info.shared:
        try:
            state = Chain(store, run, policy.stage, policy.model).policy(policy.step).state
        except ObjectNotFound:
            state = None
        if state == policy.state and policy in info.rebased:
            state = None if rebase_at(Chain(store, run, policy.stage, policy.model), policy.step) is None else state
        if state != policy.state:
            raise ForkRefused(
                f"run {run!r} is an unfinished fork: step {policy.step} of {policy.stage}/{policy.model} is not copied "
                f"yet; finish it with: {info.command} --run {run}"
            )


def _stage(store: ObjectStore, run: str, stages: list[str], stage: str | None) -> str:
    if not stages:
        raise ObjectNotFound(f"no run {run!r} with a chain in {store.url}; `ostinato runs ls` lists the runs")
    if stage is not None and stage not in stages:
        raise ObjectNotFound(f"run {run!r} has no stage {stage!r}; it has {', '.join(stages)}")
    return stage or stages[-1]


def _plan(store: ObjectStore, run: str, stage: str, step: int, code_version: str) -> ForkInfo:
    """What the fork will share. Raises ObjectNotFound when no chain of the stage has that step."""
    heads = {chain: chain.head() for chain in run_chains(store, run) if chain.stage == stage}
    longest = max(head.step for head in heads.values())
    if not 0 <= step <= longest:
        raise ObjectNotFound(f"stage {stage} of run {run!r} has no step {step}; it has steps 0 to {longest}")
    shared = {chain: chain.policy(min(step, head.step)) for chain, head in heads.items()}
    rebased = tuple(
        policy
        for chain, policy in shared.items()
        if policy in [rebase.policy for rebase in rebases_in_effect(chain, policy.step)]
    )
    return ForkInfo(
        run=run,
        stage=stage,
        step=step,
        shared=tuple(shared.values()),
        rebased=rebased,
        code_version=code_version,
        attempt=uuid4().hex,
        created=datetime.now(UTC).isoformat(),
    )


def _claim(store: ObjectStore, new: str, mine: ForkInfo) -> ForkInfo:
    """The fork.json that stands, if it is of the same place as `mine`."""
    there = read_fork(store, new)
    if there is None:
        if has_objects(store, new):
            raise ForkRefused(f"run {new!r} exists already in {store.url} and is no fork; choose another key")
        put = store.put_if_absent(keys.fork_json(new), canonical_json(mine))
        there = mine if put.won else read_fork(store, new)
    if there is None or (there.run, there.stage, there.step) != (mine.run, mine.stage, mine.step):
        was = there.command if there else "something that was deleted meanwhile"
        raise ForkRefused(f"run {new!r} is another fork already ({was}), not {mine.command}; choose another key")
    for policy in there.shared:
        if Chain.of(store, policy).policy(policy.step) != policy:
            raise ForkRefused(
                f"run {new!r} was forked from {policy.uri}, which {mine.run!r} has no more; choose another key"
            )
    return there


def _copy_stage(store: ObjectStore, run: str, new: str, stage: str, *, until: int | None) -> None:
    """stage.json, and the metrics of the shared steps (all: None), so that curves are continuous."""
    body = read_json(store, keys.stage_json(run, stage))
    if body is not None:
        body |= {
            name: body[name] | {"run": new}
            for name in ("start", "reference")
            if isinstance(body.get(name), dict) and body[name].get("run") == run
        }
        store.put_if_absent(keys.stage_json(new, stage), canonical_json(body))
    for info in store.list(keys.step_metrics_prefix(run, stage)):
        step = keys.parse_number(info.key)
        if step is not None and (until is None or step < until):
            store.put_if_absent(keys.step_metrics(new, stage, step), store.get(info.key))


def _copy_loops(store: ObjectStore, run: str, new: str, info: ForkInfo, stages: list[str]) -> None:
    """Of a recipe's loops, the marks of iterations that ended within the shared history: the new run goes on at the
    first that did not. Before the chains: `check_fork` finds no fork whole that lacks them."""
    last = {policy.model: policy.step for policy in info.shared}
    place = stages.index(info.stage)

    def is_shared(policy: PolicyRef) -> bool:
        at = stages.index(policy.stage) if policy.stage in stages else place + 1
        return at < place or (at == place and policy.step <= last.get(policy.model, -1))

    for mark in store.list(keys.loops_prefix(run)):
        body = read_json(store, mark.key) or {}
        policies = {name: PolicyRef.model_validate(one) for name, one in body.get("policies", {}).items()}
        if all(is_shared(policy) for policy in policies.values()):
            body |= {"policies": {name: _renamed(one, run, new).model_dump() for name, one in policies.items()}}
            key = keys.loops_prefix(new) + mark.key.removeprefix(keys.loops_prefix(run))
            store.put_if_absent(key, canonical_json(body))


def _copy_chain(chain: Chain, new: str, until: int) -> None:
    """Root, records 1 .. until in their order; as soon as its step is there, the nearest checkpoint and each rebase."""
    store, root = chain.store, chain.root()
    assert root is not None  # its head was asked for
    copy = Chain(store, new, chain.stage, chain.model)
    if root.start is not None:
        root = root.model_copy(update={"start": _renamed(root.start, chain.run, new)})
    copy.create_root(root)
    checkpoint = _nearest_checkpoint(chain, until)
    rebases = {rebase.policy.step: rebase for rebase in rebases_in_effect(chain, until)}

    def copy_weights(step: int) -> None:
        if step == checkpoint:
            _copy_checkpoint(chain, copy, step)
        if step in rebases:
            _copy_rebase(chain, copy, rebases[step])

    copy_weights(0)
    for record in chain.records(after=0, until=until):
        copy.commit(_record_of(record, chain.run, new))
        copy_weights(record.policy.step)


def _record_of(record: CommitRecord, run: str, new: str) -> CommitRecord:
    """The record under the new run's name: equal in state, and in every digest."""
    request = record.request
    reference = request.reference and _renamed(request.reference, run, new)
    names = {"parent": _renamed(request.parent, run, new), "reference": reference}
    return record.model_copy(update={"request": request.model_copy(update=names)})


def _renamed(policy: PolicyRef, run: str, new: str) -> PolicyRef:
    return policy.model_copy(update={"run": new}) if policy.run == run else policy


def _nearest_checkpoint(chain: Chain, until: int) -> int | None:
    """The step of the nearest checkpoint of the chain; None where there is none, or a rebase's is nearer."""
    nearest = next(checkpoints_before(chain, until), None)
    return None if nearest is None else keys.checkpoint_step(keys.manifest_of_files(nearest.key))


def _copy_rebase(chain: Chain, copy: Chain, rebase: Rebase) -> None:
    """The rebase under the new run's name, after the checkpoint that it goes on from. Marks of records stay true."""
    step, attempt = rebase.policy.step, Attempt(chain.store)
    if rebase_at(copy, step) is not None:
        return
    key = keys.checkpoint(copy.run, copy.stage, copy.model, step)
    if keys.rebase_of_checkpoint(rebase.checkpoint.key) is not None:
        key = keys.rebase_checkpoint(copy.run, copy.stage, copy.model, step, rebase.attempt)
    checkpoint = find_artifact(chain.store, key) or _copy_files(copy, rebase_manifest(chain, rebase), key, step)
    if checkpoint is None:
        raise CorruptArtifact(
            f"{rebase.checkpoint.key} is not whole, and run {chain.run!r} goes on from it after step {step}; restore "
            "it from a backup, or fork before that step"
        )
    policy = _renamed(rebase.policy, chain.run, copy.run)
    commit_rebase(copy, rebase.model_copy(update={"policy": policy, "checkpoint": checkpoint}), attempt)


def _copy_checkpoint(chain: Chain, copy: Chain, step: int) -> None:
    """The checkpoint's bytes under the new run: a copy of its own."""
    store = chain.store
    key = keys.checkpoint(copy.run, copy.stage, copy.model, step)
    if find_artifact(store, key) is not None:
        return
    try:
        manifest = read_manifest(store, keys.checkpoint(chain.run, chain.stage, chain.model, step))
    except ObjectNotFound:
        return  # pruned since it was listed; the chain can do without
    _copy_files(copy, manifest, key, step)


def _copy_files(copy: Chain, manifest: Manifest, key: str, step: int) -> ArtifactRef | None:
    """None when some of them are gone. Raises CorruptArtifact."""
    store, inside = copy.store, copy.store.local_path("scratch")
    if inside is not None:
        inside.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{HIDDEN_PREFIX}scratch-", dir=None if inside is None else inside.parent
    ) as folder:
        files = {entry.name: Path(folder) / entry.name for entry in manifest.files}
        for entry in manifest.files:
            try:
                store.fetch(entry.key, files[entry.name])
            except ObjectNotFound:
                return None  # pruned meanwhile
            if digest_file(files[entry.name]) != (entry.sha256, entry.bytes):
                raise CorruptArtifact(
                    f"{entry.key} is not what its manifest says; delete {keys.manifest_of_files(manifest.key)} (the "
                    "chain can do without a checkpoint, unless it was rebased on it) and fork again"
                )
        return commit_files(
            store,
            key,
            files,
            kind=manifest.kind,
            parents=(copy.policy(step).uri,),
            provenance=manifest.provenance,
            extra=manifest.extra,
        )
