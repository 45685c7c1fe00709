"""Deletes runs and versions of models.

A run is everything in its folder. Datasets, prompts and published models are not in there and stay.

A deletion first marks the run (`keys.deletion`). From then on the run cannot be opened, resumed or forked, and
`runs ls` shows it as `deleting`. If nothing needs the run then, the mark is changed to `begun`, and the objects are
deleted, the mark last. A deletion that was killed is finished by the same command. A mark that is not `begun` is
removed by a call that is refused. A version of a model is marked in its claim, and its manifest is deleted first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from storage.chain.fork import read_fork
from storage.chain.leases import current_epoch, is_held
from storage.chain.listing import SERVED, has_objects, has_parts, run_chains, run_objects
from storage.chain.records import Chain, Root, used_by_root
from storage.errors import ModelInUse, ObjectNotFound, RunInUse
from storage.failpoints import failpoint
from storage.registry.decisions import champion_of, decisions_of
from storage.registry.models import list_versions, mark_deletion, move_latest_from
from storage.serialization import Frozen, canonical_json
from storage.store import key_patterns, keys
from storage.store.artifacts import Manifest, read_manifest
from storage.store.index import check_index, forget_run, users_of
from storage.store.objects import ObjectStore, read_json

THREADS = 8
"""Number of objects that are deleted at the same time."""


class RunDeletion(Frozen):
    """What a deletion of runs would delete, and what needs these runs."""

    runs: tuple[str, ...]
    objects: int
    bytes: int
    needed_by: tuple[str, ...]
    """Why the runs cannot be deleted: a sentence per fork, run or lease."""
    unverifiable: tuple[str, ...]
    """Sentences about models and decisions that stay, but whose origin could not be verified any more."""


def plan_deletion(store: ObjectStore, run: str, *, no_active_runs: bool = False) -> RunDeletion:
    """Returns what a deletion of `run` would delete. Writes nothing.

    Args:
        run: A run, or the name of a sweep: then all runs `NAME/…`.
        no_active_runs: The caller guarantees that no process works on the runs. A killed process keeps its lease.

    It reads what uses the runs, which the index of the store names, and no other run. Raises ObjectNotFound,
    CorruptArtifact, IndexIncomplete.
    """
    check_index(store)
    runs = _runs_to_delete(store, run)
    objects = [info for name in runs for info in run_objects(store, name)]
    # Nothing can open a run that is deleted in part, and what was made from it is unverifiable already.
    whole_runs = [name for name in runs if not _is_begun(store, name)]
    needed_by = [*_fork_uses(store, runs), *_start_uses(store, runs)]
    if not no_active_runs:
        needed_by += _lease_uses(store, whole_runs)
    return RunDeletion(
        runs=runs,
        objects=len(objects),
        bytes=sum(info.size for info in objects),
        needed_by=tuple(needed_by),
        unverifiable=tuple(_registry_uses(store, whole_runs)),
    )


def delete_runs(store: ObjectStore, run: str, *, no_active_runs: bool = False, force: bool = False) -> RunDeletion:
    """Deletes `run`, or the runs of the sweep `run`, and returns what was deleted. Can be repeated after a crash.

    With `force`, published models may lose their lineage. Raises RunInUse if something needs the runs; then this call
    has deleted nothing, and the runs that are whole can be opened again. Raises ObjectNotFound, CorruptArtifact.
    """
    planned = plan_deletion(store, run, no_active_runs=no_active_runs)
    try:
        _refuse_use(planned, force=force)
        # mark the runs, and look again: a process may have opened or forked one meanwhile
        for name in planned.runs:
            store.put_if_absent(keys.deletion(name), _mark(name, begun=False))
        failpoint("deletion.marked")
        _refuse_use(plan_deletion(store, run, no_active_runs=no_active_runs), force=force)
    except RunInUse:
        for name in planned.runs:
            if not _is_begun(store, name):
                store.delete(keys.deletion(name))
        raise
    for name in planned.runs:
        store.put(keys.deletion(name), _mark(name, begun=True))
    failpoint("deletion.begun")
    for name in planned.runs:
        _delete_objects(store, name)
    return planned


def delete_model(store: ObjectStore, name: str, version: str, *, dry_run: bool = False) -> int:
    """Deletes the files of a version of a model; returns their bytes. With `dry_run`, only returns them.

    Decisions about the version and its cards stay. The alias "latest" then names the newest version that is left. A
    deletion that was killed is finished by the same call.

    Raises:
        ObjectNotFound: there is no such version.
        ModelInUse: the version is the champion, or a run was trained from it; nothing was deleted.
    """
    if not store.exists(keys.model_claim(name, version)):
        known = ", ".join(list_versions(store, name)) or "none"
        raise ObjectNotFound(f"model {name!r} has no version {version!r}; published: {known}")
    check_index(store)
    model = keys.model_version(name, version)
    files = list(store.list(f"{model}/"))
    served = _check_unused(store, name, version)
    if dry_run:
        return sum(info.size for info in files)
    # mark the version, and look again: a run may have begun at it, or a person may have promoted it meanwhile
    mark_deletion(store, name, version, deleting=True)
    failpoint("deletion.marked")
    manifest = keys.manifest_of_files(model)
    try:
        served = _check_unused(store, name, version)
    except ModelInUse:
        # a version without its manifest was deleted in part before
        if store.exists(manifest):
            mark_deletion(store, name, version, deleting=False)
        raise
    # the manifest first, so that nothing takes the rest for a whole version; the claim last: it lists the version
    move_latest_from(store, name, version)
    store.delete(manifest)
    failpoint("deletion.hidden")
    _delete_all(store, [info.key for info in files if info.key != manifest])
    for run, stage in served:
        _delete_all(store, [info.key for info in store.list(keys.stage_prefix(run, stage))])
    store.delete(keys.model_claim(name, version))
    return sum(info.size for info in files)


def _check_unused(store: ObjectStore, name: str, version: str) -> list[tuple[str, str]]:
    """Returns (run, stage) of the chains without steps by which the engine serves the version.

    Raises ModelInUse if the version is or becomes the champion, or anything else began at it.
    """
    champion = champion_of(store, name)
    if champion is not None and champion.version == version:
        raise ModelInUse(f"nothing was deleted: {name}@{version} is the champion; promote another version first")
    # a decision is committed before it moves the champion, and may have been committed before the version was marked
    number = champion.number if champion is not None else 0
    for decision in decisions_of(store, name):
        if decision.moves and decision.version == version and decision.after == number:
            raise ModelInUse(
                f"nothing was deleted: the decision {decision.id} of {decision.who} makes {name}@{version} the "
                "champion; if it was interrupted, promote a version, and delete this one then"
            )
    model = keys.model_version(name, version)
    served, runs = [], set()
    for run, stage, root in _chain_roots(store, users_of(store, model)):
        if root.base is None or root.base.key != model:
            continue
        if run.startswith(f"{SERVED}/"):
            served.append((run, stage))
        else:
            runs.add(run)
    if runs:
        raise ModelInUse(
            f"nothing was deleted: {', '.join(sorted(runs))} began at {name}@{version}, and without it they could "
            "neither be verified nor resumed; delete these runs first"
        )
    return served


def _mark(run: str, *, begun: bool) -> bytes:
    return canonical_json({"run": run, "begun": begun})


def _is_begun(store: ObjectStore, run: str) -> bool:
    """Whether a call has begun to delete the objects of the run."""
    mark = read_json(store, keys.deletion(run))
    return mark is not None and mark.get("begun") is True


def _refuse_use(planned: RunDeletion, *, force: bool) -> None:
    """Raises RunInUse if something needs the runs."""
    reasons = [*planned.needed_by, *(() if force else planned.unverifiable)]
    if reasons:
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise RunInUse(f"nothing was deleted, because {', '.join(planned.runs)} cannot be deleted yet:\n{listed}")


def _delete_objects(store: ObjectStore, run: str) -> None:
    """Deletes the objects of a marked run: first what makes it visible, last its leases and the mark."""
    own_entries = _entries_of_user(store, run)
    # the record first, so that nothing takes the rest for a whole run
    for key in (keys.run_json(run), keys.result_json(run), keys.fork_json(run)):
        store.delete(key)
    failpoint("deletion.hidden")
    # manifests and records before the data that they name
    objects = [info.key for info in run_objects(store, run)]
    objects = [key for key in objects if not key.startswith(keys.leases_prefix(run))]
    data = [key for key in objects if key_patterns.is_artifact_data(key)]
    _delete_all(store, sorted(set(objects) - set(data)))
    _delete_all(store, data)
    failpoint("deletion.emptied")
    leases = [info.key for info in store.list(keys.leases_prefix(run)) if info.key != keys.deletion(run)]
    _delete_all(store, leases)
    _delete_all(store, own_entries)
    forget_run(store, run)
    store.delete(keys.deletion(run))


def _entries_of_user(store: ObjectStore, run: str) -> list[str]:
    """Returns the keys of the index that say what the run uses. Those that a killed deletion leaves do no harm."""
    entries = []
    for chain in run_chains(store, run):
        root = chain.root()
        if root is not None:
            key = keys.chain_root(chain.run, chain.stage, chain.model)
            entries += [keys.index_use(used, key) for used in used_by_root(root)]
    fork = read_fork(store, run)
    if fork is not None:
        entries.append(keys.index_use(keys.run_prefix(fork.run), keys.fork_json(run)))
    return entries


def _delete_all(store: ObjectStore, object_keys: Collection[str]) -> None:
    def delete(key: str) -> None:
        store.delete(key)
        failpoint("deletion.object")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(delete, object_keys))


def _runs_to_delete(store: ObjectStore, run: str) -> tuple[str, ...]:
    """Returns `run`, or the runs of the sweep of that name. Raises ObjectNotFound."""
    keys.validate_run(run)
    if has_parts(store, run):
        return (run,)
    names = store.folder(keys.run_prefix(run)).folders
    children = tuple(
        f"{run}/{name}" for name in names if keys.is_run(f"{run}/{name}") and has_objects(store, f"{run}/{name}")
    )
    if not children:
        raise ObjectNotFound(f"no run {run!r} in {store.url}; 'ostinato runs ls' lists the runs")
    return children


# -- what needs a run ------------------------------------------------------------------------------------------


def _lease_uses(store: ObjectStore, runs: Collection[str]) -> Iterator[str]:
    for run in runs:
        if is_held(store, run):
            epoch = current_epoch(store, run)
            yield (
                f"run {run!r} may be in progress, its lease {epoch} is held: end it first, or give --no-active-runs if "
                "its process was killed"
            )


def _fork_uses(store: ObjectStore, runs: Collection[str]) -> Iterator[str]:
    """Yields the forks of the runs, and the forks of these. They refer to the batches of the run they share."""
    needed, unread = set(runs), sorted(runs)
    while unread:
        for user in users_of(store, keys.run_prefix(unread.pop(0))):
            run = keys.run_of(user)
            if run is None or run in needed or user != keys.fork_json(run):
                continue
            fork = read_fork(store, run)
            if fork is None or fork.run not in needed:
                continue
            needed.add(run)
            unread.append(run)
            yield (
                f"run {run!r} was forked from {fork.run}/{fork.stage}@{fork.step}: without the batches of its shared "
                "steps it could neither be verified nor resumed; delete it first"
            )


def _start_uses(store: ObjectStore, runs: Collection[str]) -> Iterator[str]:
    """Yields the stages of other runs that began at a policy of the runs."""
    users = {user for run in runs for user in users_of(store, keys.run_prefix(run))}
    for run, stage, root in _chain_roots(store, sorted(users)):
        if run not in runs and root.start is not None and root.start.run in runs:
            start = root.start.uri.partition("#")[0].removeprefix("policy:")
            yield (
                f"stage {stage} of run {run!r} began at {start}: without it the stage could neither be verified nor "
                "resumed; delete that run first"
            )


def _chain_roots(store: ObjectStore, users: Iterable[str]) -> Iterator[tuple[str, str, Root]]:
    """Yields the run, the stage and the root of each chain among the users of a run or of a model."""
    for user in users:
        chain_name = keys.chain_of(user)
        if chain_name is None or user != keys.chain_root(*chain_name):
            continue
        root = Chain(store, *chain_name).root()
        if root is not None:
            run, stage, _ = chain_name
            yield run, stage, root


def _registry_uses(store: ObjectStore, runs: Collection[str]) -> Iterator[str]:
    """Yields the models that were made from the runs, and the decisions that were based on their evaluations."""
    users = {user for run in runs for user in users_of(store, keys.run_prefix(run))}
    for user in sorted(users):
        artifact = key_patterns.artifact_of_manifest(user)
        manifest = None if artifact is None else _find_manifest(store, artifact)
        if artifact is None or manifest is None:
            continue
        if manifest.kind == "model":
            name, version = artifact.split("/")[1:]
            yield (
                f"model {name}@{version} was made from it: neither it nor the models trained from it could be verified "
                "or traced to their data"
            )
        elif manifest.kind == "decision":
            yield f"the decision {artifact.removeprefix(keys.models_prefix())} is based on its evaluation"


def _find_manifest(store: ObjectStore, artifact: str) -> Manifest | None:
    """Returns the manifest of an artifact, or None if there is none."""
    try:
        return read_manifest(store, artifact)
    except ObjectNotFound:
        return None
