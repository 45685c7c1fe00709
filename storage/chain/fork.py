"""Forks: a new run that shares the history of another run up to a step, like a branch in git.

States do not contain run names. So the root, the records and the marks of a recipe's loops are copied under the new
name with equal states, and a recipe continues in the new run at the first iteration that is not shared. Batches stay
references to the immutable artifacts of the old run. The nearest checkpoint, and every rebase with its checkpoint, is
copied, so that pruning one run does not affect the other. `fork.json` is committed first and lists what will be
copied. An interrupted fork is finished by the same command, and the run cannot be opened before (`check_fork`).

The data cursor is copied unchanged: the new run continues at the same epoch and row of the order that its own
configuration gives. With other data or another seed, this is a place in another order. A dataset with fewer rows than
the cursor is refused when the run starts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from pydantic import ValidationError

from storage.chain.leases import check_not_deleted
from storage.chain.listing import has_objects, run_chains, stages_of
from storage.chain.rebase import (
    Rebase,
    checkpoints_up_to,
    commit_rebase,
    rebase_at,
    rebase_manifest,
    rebases_in_effect,
)
from storage.chain.records import Chain, CommitRecord, PolicyRef
from storage.errors import CorruptArtifact, ForkRefused, ObjectNotFound
from storage.serialization import Frozen, canonical_json
from storage.store import keys
from storage.store.artifacts import (
    ArtifactRef,
    Attempt,
    Manifest,
    commit_files,
    find_artifact,
    map_files,
    read_manifest,
)
from storage.store.backends.protocol import HIDDEN_PREFIX
from storage.store.index import record_run, record_uses
from storage.store.objects import ObjectStore, read_json

Progress = Callable[[str], None]


class ForkInfo(Frozen):
    """The content of runs/<new>/fork.json."""

    schema_version: int = 1
    run: str
    """The old run, whose history the new run shares."""
    stage: str
    step: int
    shared: tuple[PolicyRef, ...]
    """The last shared policy of each chain of the stage, in the old run. A chain with fewer steps is shared whole."""
    rebased: tuple[PolicyRef, ...] = ()
    """Policies of `shared` at which the old run was rebased. The new run continues from the same weights."""
    code_version: str
    attempt: str
    created: str

    @property
    def command(self) -> str:
        """The shell command that makes the fork, without the key of the new run."""
        return f"ostinato fork {self.run} --step {self.step} --stage {self.stage}"


def fork_run(
    store: ObjectStore,
    run: str,
    new: str,
    *,
    step: int,
    stage: str | None = None,
    code_version: str,
    on_progress: Progress = lambda chain: None,
) -> ForkInfo:
    """Creates the run `new` from `run`, up to and including `step` of `stage` (None: the last stage).

    Earlier stages are copied whole. A repetition finishes an interrupted fork and changes nothing in a finished one.

    Args:
        on_progress: Called with "stage/model" before each chain is copied.

    Raises:
        ObjectNotFound: there is no such run, stage or step.
        ForkRefused: `new` is another run already.
        RunBeingDeleted: a deletion of `run` has begun.
    """
    keys.validate_run(new)
    if keys.validate_run(run) == new:
        raise ForkRefused(f"run {run!r} cannot be forked into itself; give another key for the new run")
    check_fork(store, run)
    check_not_deleted(store, run)

    # commit what will be copied
    stages = stages_of(store, run)
    stage = _choose_stage(store, run, stages, stage)
    info = _claim(store, new, _draft_fork(store, run, stage, step, code_version))
    # after the claim, which a deletion of the old run looks for
    check_not_deleted(store, run)

    # copy the loop marks, the versions of the datasets, the earlier stages whole, and the last stage up to the step
    _copy_loops(store, run, new, info, stages)
    for dataset in store.list(keys.pinned_datasets_prefix(run)):
        key = keys.pinned_datasets_prefix(new) + dataset.key.removeprefix(keys.pinned_datasets_prefix(run))
        store.put_if_absent(key, store.get(dataset.key))
    last_steps = {policy.model: policy.step for policy in info.shared}
    for copied_stage in stages[: stages.index(stage) + 1]:
        is_last = copied_stage == stage
        chains = [chain for chain in run_chains(store, run) if chain.stage == copied_stage]
        _copy_stage(store, run, new, copied_stage, until=step if is_last else None)
        for chain in chains:
            on_progress(f"{copied_stage}/{chain.model}")
            _copy_chain(chain, new, last_steps[chain.model] if is_last else chain.head().step)
    return info


def read_fork(store: ObjectStore, run: str) -> ForkInfo | None:
    """Returns where the run was forked, or None if it is not a fork. Raises CorruptArtifact."""
    body = read_json(store, keys.fork_json(run))
    if body is None:
        return None
    try:
        return ForkInfo.model_validate(body)
    except ValidationError as error:
        raise CorruptArtifact(f"{keys.fork_json(run)} is not a readable fork: {error}") from error


def check_fork(store: ObjectStore, run: str) -> None:
    """Raises ForkRefused if the run is an unfinished fork, which would continue from too early a step."""
    info = read_fork(store, run)
    if info is None:
        return
    for policy in info.shared:
        copy = Chain(store, run, policy.stage, policy.model)
        try:
            is_copied = copy.policy(policy.step).state == policy.state
        except ObjectNotFound:
            is_copied = False
        # a rebase is copied after its record
        if is_copied and policy in info.rebased:
            is_copied = rebase_at(copy, policy.step) is not None
        if not is_copied:
            raise ForkRefused(
                f"run {run!r} is an unfinished fork: step {policy.step} of {policy.stage}/{policy.model} is not copied "
                f"yet; finish it with: {info.command} --run {run}"
            )


def _choose_stage(store: ObjectStore, run: str, stages: list[str], stage: str | None) -> str:
    if not stages:
        raise ObjectNotFound(f"no run {run!r} with a chain in {store.url}; 'ostinato runs ls' lists the runs")
    if stage is not None and stage not in stages:
        raise ObjectNotFound(f"run {run!r} has no stage {stage!r}; it has {', '.join(stages)}")
    return stage or stages[-1]


def _draft_fork(store: ObjectStore, run: str, stage: str, step: int, code_version: str) -> ForkInfo:
    """Returns what the fork will share. Raises ObjectNotFound if no chain of the stage has that step."""
    # the longest chain must have the step; shorter ones are shared whole
    heads = {chain: chain.head() for chain in run_chains(store, run) if chain.stage == stage}
    longest = max(head.step for head in heads.values())
    if not 0 <= step <= longest:
        raise ObjectNotFound(f"stage {stage} of run {run!r} has no step {step}; it has {_steps_text(longest)}")
    shared = {chain: chain.policy(min(step, head.step)) for chain, head in heads.items()}
    # the policies among them at which the old run was rebased
    rebased = []
    for chain, policy in shared.items():
        if any(rebase.policy == policy for rebase in rebases_in_effect(chain, policy.step)):
            rebased.append(policy)
    return ForkInfo(
        run=run,
        stage=stage,
        step=step,
        shared=tuple(shared.values()),
        rebased=tuple(rebased),
        code_version=code_version,
        attempt=uuid4().hex,
        created=datetime.now(UTC).isoformat(),
    )


def _steps_text(last: int) -> str:
    """The steps after which a stage can be forked."""
    return f"steps 1 to {last} (0: before step 1)" if last else "no step yet (0: before step 1)"


def _claim(store: ObjectStore, new: str, draft: ForkInfo) -> ForkInfo:
    """Commits fork.json if there is none, and returns the committed one.

    Raises ForkRefused if the run `new` is not a fork, or a fork of another place than `draft`.
    """
    committed = read_fork(store, new)
    if committed is None:
        if has_objects(store, new):
            raise ForkRefused(f"run {new!r} exists already in {store.url} and is no fork; choose another key")
        # the index first, so that the old run is never taken for unused
        record_run(store, new)
        record_uses(store, keys.fork_json(new), [keys.run_prefix(draft.run)])
        put = store.put_if_absent(keys.fork_json(new), canonical_json(draft))
        committed = draft if put.won else read_fork(store, new)
    # an earlier fork must be of the same step, and the old run must still have what it shares
    if committed is None or (committed.run, committed.stage, committed.step) != (draft.run, draft.stage, draft.step):
        origin = committed.command if committed else "fork.json was deleted meanwhile"
        raise ForkRefused(f"run {new!r} is another fork already ({origin}), not {draft.command}; choose another key")
    for policy in committed.shared:
        if Chain.of(store, policy).policy(policy.step) != policy:
            raise ForkRefused(
                f"run {new!r} was forked from {policy.uri}, which {draft.run!r} does not have any more; choose another "
                "key"
            )
    return committed


def _copy_stage(store: ObjectStore, run: str, new: str, stage: str, *, until: int | None) -> None:
    """Copies stage.json, and the metrics of the steps before `until` (None: all), so that curves are continuous."""
    body = read_json(store, keys.stage_json(run, stage))
    if body is not None:
        for name in ("start", "reference"):
            policy = body.get(name)
            if isinstance(policy, dict) and policy.get("run") == run:
                body[name] = policy | {"run": new}
        store.put_if_absent(keys.stage_json(new, stage), canonical_json(body))
    for info in store.list(keys.step_metrics_prefix(run, stage)):
        step = keys.parse_number(info.key)
        if step is not None and (until is None or step < until):
            store.put_if_absent(keys.step_metrics(new, stage, step), store.get(info.key))


def _copy_loops(store: ObjectStore, run: str, new: str, info: ForkInfo, stages: list[str]) -> None:
    """Copies the marks of the loop iterations that ended within the shared history.

    They are copied before the chains, so that `check_fork` refuses a fork that lacks some of them.
    """
    last_steps = {policy.model: policy.step for policy in info.shared}
    last_position = stages.index(info.stage)

    def is_shared(policy: PolicyRef) -> bool:
        position = stages.index(policy.stage) if policy.stage in stages else last_position + 1
        if position == last_position:
            return policy.step <= last_steps.get(policy.model, -1)
        return position < last_position

    for mark in store.list(keys.loops_prefix(run)):
        body = read_json(store, mark.key) or {}
        policies = {name: PolicyRef.model_validate(fields) for name, fields in body.get("policies", {}).items()}
        if all(is_shared(policy) for policy in policies.values()):
            copied = {name: _renamed(policy, run, new).model_dump() for name, policy in policies.items()}
            body |= {"policies": copied}
            key = keys.loops_prefix(new) + mark.key.removeprefix(keys.loops_prefix(run))
            store.put_if_absent(key, canonical_json(body))


def _copy_chain(chain: Chain, new: str, until: int) -> None:
    """Copies the root and the records 1 .. until in their order. The nearest checkpoint and each rebase follow the
    record of their step."""
    store, root = chain.store, chain.root()
    assert root is not None  # a chain with a head has a root
    copy = Chain(store, new, chain.stage, chain.model)
    # the root, whose start may be a policy of an earlier stage of the old run
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

    # the records, each followed by the weights of its step
    copy_weights(0)
    for record in chain.records(after=0, until=until):
        copy.commit(_renamed_record(record, chain.run, new))
        copy_weights(record.policy.step)


def _renamed_record(record: CommitRecord, run: str, new: str) -> CommitRecord:
    """Returns the record with the name of the new run. Its state and all its digests are the same."""
    request = record.request
    # the policies that the request names may belong to the old run
    reference = request.reference and _renamed(request.reference, run, new)
    renamed = {"parent": _renamed(request.parent, run, new), "reference": reference}
    return record.model_copy(update={"request": request.model_copy(update=renamed)})


def _renamed(policy: PolicyRef, run: str, new: str) -> PolicyRef:
    return policy.model_copy(update={"run": new}) if policy.run == run else policy


def _nearest_checkpoint(chain: Chain, until: int) -> int | None:
    """Returns the step of the chain's nearest checkpoint. None if there is none, or if that of a rebase is nearer."""
    nearest = next(checkpoints_up_to(chain, until), None)
    if nearest is None:
        return None
    return keys.checkpoint_step(keys.manifest_of_files(nearest.key))


def _copy_rebase(chain: Chain, copy: Chain, rebase: Rebase) -> None:
    """Copies the checkpoint of a rebase, then the rebase under the new run's name. Its mark stays the same, so that
    the marks in the copied records remain valid."""
    step, attempt = rebase.policy.step, Attempt(chain.store)
    if rebase_at(copy, step) is not None:
        return
    # the checkpoint is one of the chain, or one that only the rebase has
    key = keys.checkpoint(copy.run, copy.stage, copy.model, step)
    if keys.rebase_of_checkpoint(rebase.checkpoint.key) is not None:
        key = keys.rebase_checkpoint(copy.run, copy.stage, copy.model, step, rebase.attempt)
    checkpoint = find_artifact(chain.store, key) or _copy_files(copy, rebase_manifest(chain, rebase), key, step)
    if checkpoint is None:
        raise CorruptArtifact(
            f"{rebase.checkpoint.key} is incomplete, and run {chain.run!r} continues from it after step {step}; "
            "restore it from a backup, or fork before that step"
        )
    policy = _renamed(rebase.policy, chain.run, copy.run)
    commit_rebase(copy, rebase.model_copy(update={"policy": policy, "checkpoint": checkpoint}), attempt)


def _copy_checkpoint(chain: Chain, copy: Chain, step: int) -> None:
    """Copies the files of a checkpoint to the new run."""
    store = chain.store
    key = keys.checkpoint(copy.run, copy.stage, copy.model, step)
    if find_artifact(store, key) is not None:
        return
    try:
        manifest = read_manifest(store, keys.checkpoint(chain.run, chain.stage, chain.model, step))
    except ObjectNotFound:
        return  # pruned after it was listed; the chain does not need it
    _copy_files(copy, manifest, key, step)


def _copy_files(copy: Chain, manifest: Manifest, key: str, step: int) -> ArtifactRef | None:
    """Commits the files of a checkpoint under `key`. Returns None if some of them are gone. Raises CorruptArtifact."""
    # inside the folder of a file:// store, the files can be linked instead of copied
    store, path_in_store = copy.store, copy.store.local_path("scratch")
    if path_in_store is not None:
        path_in_store.parent.mkdir(parents=True, exist_ok=True)
    parent = None if path_in_store is None else path_in_store.parent
    with tempfile.TemporaryDirectory(prefix=f"{HIDDEN_PREFIX}scratch-", dir=parent) as folder:
        # fetch the files and check their digests
        files = {entry.name: Path(folder) / entry.name for entry in manifest.files}
        try:
            fetched = map_files(lambda entry: store.fetch(entry.key, files[entry.name]), manifest.files)
        except ObjectNotFound:
            return None  # pruned meanwhile
        for entry, of_file in zip(manifest.files, fetched, strict=True):
            if of_file != (entry.sha256, entry.bytes):
                raise CorruptArtifact(
                    f"{entry.key} is not what its manifest says; delete {keys.manifest_of_files(manifest.key)} (the "
                    "chain does not need a checkpoint, unless it was rebased on it) and fork again"
                )
        # commit them with what the manifest says about the weights
        return commit_files(
            store,
            key,
            files,
            kind=manifest.kind,
            parents=(copy.policy(step).uri,),
            provenance=manifest.provenance,
            extra=manifest.extra,
        )
