"""Named checkpoints: what a person calls them, and where a stage that restarts from one begins.

A name is whole with its run and its stage, `run/0-sft/policy-0.4`; where it says less, there must be one checkpoint
only that it can mean: `policy-0.4` or `0-sft/policy-0.4` of the own run, `run/policy-0.4` of another.
"""

from __future__ import annotations

from collections.abc import Iterator

from storage.chain.listing import run_chains
from storage.chain.records import Chain, PolicyRef
from storage.errors import NoSuchCheckpoint, ObjectNotFound
from storage.serialization import Frozen
from storage.store import keys
from storage.store.artifacts import read_manifest
from storage.store.objects import ObjectStore, read_json

LISTED = 40
"""Names in the text of an error."""


class NamedCheckpoint(Frozen):
    """One name of a complete checkpoint."""

    name: str
    policy: PolicyRef

    @property
    def title(self) -> str:
        return f"{self.policy.run}/{self.policy.stage}/{self.name}"

    def is_called(self, text: str, own_run: str) -> bool:
        """Whether a person in `own_run` may mean it by `text`."""
        run, stage, name = self.policy.run, self.policy.stage, self.name
        called = {f"{run}/{stage}/{name}", f"{run}/{name}"}
        return text in called | ({name, f"{stage}/{name}"} if run == own_run else set())


def named_checkpoints(store: ObjectStore, run: str) -> list[NamedCheckpoint]:
    """Those of a run, in the order of its stages and steps."""
    return [one for chain in run_chains(store, run) for one in _of_chain(chain)]


def resolve_restart_point(store: ObjectStore, text: str, *, run: str, stage: str, model: str) -> PolicyRef:
    """The policy of the checkpoint called `text`, for a stage of `model` in `run` that is to begin there. A stage that
    began keeps what it began with: the answer does not depend on what was named since, or by itself.

    Raises:
        NoSuchCheckpoint: nothing is called so, or more than one thing is; the names that there are are listed.
    """
    root = Chain(store, run, stage, model).root()
    start = None if root is None else root.start
    began = [] if start is None else [one for one in _of_chain(Chain.of(store, start)) if one.policy == start]
    if start is not None and any(one.is_called(text, run) for one in began):
        return start
    if start is not None and not began and _may_be_called(start, text, run):
        return start  # its checkpoint was removed since the stage began there, and its name with it
    known = [
        one
        for at in dict.fromkeys((run, *_runs_in(text)))
        for one in named_checkpoints(store, at)
        if at != run or _position(one.policy.stage) < _position(stage)
    ]
    found = {one.policy: one for one in known if one.is_called(text, run)}
    if len(found) == 1:
        return next(iter(found))
    if found:
        titles = ", ".join(one.title for one in found.values())
        raise NoSuchCheckpoint(f"{text!r} names {len(found)} checkpoints: {titles}; give the whole of one of these")
    if start is not None and not began:
        return start  # it was pruned since the stage began there
    raise NoSuchCheckpoint(f"there is no checkpoint {text!r} to restart {stage} of {run} from; {_listed(known)}")


def resolve_checkpoint_name(store: ObjectStore, text: str) -> PolicyRef:
    """The policy of the one checkpoint that `run/stage/name`, or `run/name`, means.

    Raises NoSuchCheckpoint: nothing is called so, or more than one thing is; the names that there are are listed.
    """
    known = [checkpoint for run in _runs_in(text) for checkpoint in named_checkpoints(store, run)]
    called = [checkpoint for checkpoint in known if checkpoint.is_called(text, own_run="")]
    called = [checkpoint for checkpoint in called if checkpoint.title == text] or called
    if len({checkpoint.policy for checkpoint in called}) == 1:
        return called[0].policy
    if called:
        titles = ", ".join(checkpoint.title for checkpoint in called)
        raise NoSuchCheckpoint(f"{text!r} names {len(called)} checkpoints: {titles}; give the whole of one of these")
    raise NoSuchCheckpoint(f"there is no checkpoint {text!r} in {store.url}; {_listed(known)}")


def _may_be_called(start: PolicyRef, text: str, run: str) -> bool:
    """Whether the place in `text`, a name's beginning, is that of `start`."""
    return NamedCheckpoint(name=text.rpartition("/")[2], policy=start).is_called(text, run)


def _of_chain(chain: Chain) -> Iterator[NamedCheckpoint]:
    prefix = keys.checkpoints_prefix(chain.run, chain.stage, chain.model)
    steps = (keys.checkpoint_step(info.key) for info in chain.store.list(prefix))
    for step in sorted(step for step in steps if step is not None):
        key = keys.checkpoint(chain.run, chain.stage, chain.model, step)
        try:
            names = [read_manifest(chain.store, key).extra.get("name")]
        except ObjectNotFound:
            continue  # pruned since it was listed
        later = read_json(chain.store, keys.checkpoint_name(key))
        names += [later.get("name")] if later else []
        policy = chain.policy(step)
        yield from (NamedCheckpoint(name=name, policy=policy) for name in dict.fromkeys(names) if isinstance(name, str))


def _runs_in(text: str) -> list[str]:
    """The runs that the beginning of a name may be: `run/…`, where a run's key is one segment or two."""
    parts = text.split("/")[:-1]
    return [run for count in (1, 2) if count <= len(parts) and keys.is_run(run := "/".join(parts[:count]))]


def _position(stage: str) -> int:
    head = stage.partition("-")[0]
    return int(head) if head.isdigit() else 0


def _listed(known: list[NamedCheckpoint]) -> str:
    if not known:
        return "no run that it may mean has a named one; give run/stage/name, of a run with a checkpoint_frequency"
    shown = ", ".join(one.title for one in known[:LISTED])
    more = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    return f"there are {shown}{more}"
