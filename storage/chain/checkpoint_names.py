"""Resolves the names of checkpoints, for stages that restart from one and for commands that take one.

A name belongs to a committed step. It stays when the checkpoint of the step is not written (checkpoints that would be
seconds apart) or is removed from a finished run: the policy is then computed from an earlier checkpoint.

The full name of a checkpoint contains its run and its stage: `run/0-sft/policy-0.4`. A shorter name is accepted if only
one checkpoint matches it: `policy-0.4` or `0-sft/policy-0.4` in the same run, `run/policy-0.4` in another. In the same
run it may be a checkpoint of an earlier stage of the model, or of any stage of another model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from storage.chain.listing import run_chains, stage_position
from storage.chain.records import Chain, PolicyRef
from storage.errors import NoSuchCheckpoint, ObjectNotFound
from storage.serialization import Frozen, canonical_json
from storage.store import keys
from storage.store.artifacts import Manifest, read_manifest
from storage.store.objects import ObjectStore, read_json

MAX_LISTED = 40
"""Number of names that an error message lists at most."""
_SHARE = re.compile(r"0\.\d+", re.ASCII)


class NamedCheckpoint(Frozen):
    """One name of a committed step, whether or not its checkpoint is stored."""

    name: str
    policy: PolicyRef

    @property
    def title(self) -> str:
        """The full name: run/stage/name."""
        return f"{self.policy.run}/{self.policy.stage}/{self.name}"

    def matches(self, text: str, current_run: str) -> bool:
        """Whether `text`, as given in `current_run`, may mean this checkpoint."""
        run, stage, name = self.policy.run, self.policy.stage, self.name
        if text in (f"{run}/{stage}/{name}", f"{run}/{name}"):
            return True
        return run == current_run and text in (name, f"{stage}/{name}")


def share_name(model: str, share: float) -> str:
    """Returns the name of the checkpoint after this share of a run: policy-0.4. The whole run has the share 1."""
    return f"{model}-{share:.4g}"


def is_share_name(name: str, model: str) -> bool:
    """Whether `share_name` made the name for a share below 1, and neither a person nor a number of steps."""
    return name.startswith(f"{model}-") and _SHARE.fullmatch(name.removeprefix(f"{model}-")) is not None


def name_step(store: ObjectStore, policy: PolicyRef, name: str) -> None:
    """Gives a committed step a name, without writing a checkpoint. A name that was given this way before stays."""
    key = keys.checkpoint(policy.run, policy.stage, policy.model, policy.step)
    store.put_if_absent(keys.checkpoint_name(key), canonical_json({"name": name}))


def stored_names(store: ObjectStore, checkpoint_key: str, manifest: Manifest | None) -> list[str]:
    """Returns the names of a step: that in the manifest of its checkpoint, and one that was given by `name_step`."""
    names = [manifest.extra.get("name")] if manifest is not None else []
    names.append((read_json(store, keys.checkpoint_name(checkpoint_key)) or {}).get("name"))
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def named_checkpoints(store: ObjectStore, run: str) -> list[NamedCheckpoint]:
    """Returns the named checkpoints of a run, in the order of its stages and steps."""
    checkpoints: list[NamedCheckpoint] = []
    for chain in run_chains(store, run):
        checkpoints += _named_checkpoints_of(chain)
    return checkpoints


def resolve_restart_point(store: ObjectStore, text: str, *, run: str, stage: str, model: str) -> PolicyRef:
    """Returns the policy of the checkpoint named `text`, from which `stage` of `model` in `run` begins.

    A stage that has begun keeps its start: names that are given later do not change the result.

    Raises:
        NoSuchCheckpoint: no checkpoint has the name, or more than one has it. The message lists the known names.
    """
    # a stage that has begun: its start is the answer if `text` can mean it
    root = Chain(store, run, stage, model).root()
    start = None
    start_names: list[NamedCheckpoint] = []
    if root is not None and root.start is not None:
        start = root.start
        start_names = _names_of(store, start)
        # without names, its checkpoint was removed after the stage began there: compare only run and stage
        candidates = start_names or [NamedCheckpoint(name=text.rpartition("/")[2], policy=start)]
        if any(checkpoint.matches(text, run) for checkpoint in candidates):
            return start

    # Otherwise look among the named checkpoints of the run, and of the runs that `text` may name. Each model counts its
    # own stages, so only the stages of this model can be later ones.
    known: list[NamedCheckpoint] = []
    later: list[NamedCheckpoint] = []
    for checkpoint in named_checkpoints(store, run):
        policy = checkpoint.policy
        is_later = policy.model == model and stage_position(policy.stage) >= stage_position(stage)
        (later if is_later else known).append(checkpoint)
    for other_run in _runs_in(text):
        if other_run != run:
            known += named_checkpoints(store, other_run)
    matching = {checkpoint.policy: checkpoint for checkpoint in known if checkpoint.matches(text, run)}
    if len(matching) == 1:
        return next(iter(matching))
    if matching:
        raise NoSuchCheckpoint(_ambiguous_message(text, list(matching.values())))
    if start is not None and not start_names:
        return start  # its checkpoint was pruned after the stage began there
    message = f"there is no checkpoint {text!r} to restart {stage} of {run} from; {_list_names(known)}"
    not_earlier = [checkpoint.title for checkpoint in later if checkpoint.matches(text, run)]
    if not_earlier:
        message += f"; {', '.join(not_earlier)} is of this stage or a later one of {model!r}, which begins before it"
    raise NoSuchCheckpoint(message)


def resolve_checkpoint_name(store: ObjectStore, text: str) -> PolicyRef:
    """Returns the policy of the checkpoint that `run/stage/name`, or `run/name`, names.

    Raises NoSuchCheckpoint: no checkpoint has the name, or more than one has it. The message lists the known names.
    """
    known: list[NamedCheckpoint] = []
    for run in _runs_in(text):
        known += named_checkpoints(store, run)
    matching = [checkpoint for checkpoint in known if checkpoint.matches(text, current_run="")]
    # a full name has precedence over a shorter one that reads the same
    full_matches = [checkpoint for checkpoint in matching if checkpoint.title == text]
    matching = full_matches or matching
    if len({checkpoint.policy for checkpoint in matching}) == 1:
        return matching[0].policy
    if matching:
        raise NoSuchCheckpoint(_ambiguous_message(text, matching))
    raise NoSuchCheckpoint(f"there is no checkpoint {text!r} in {store.url}; {_list_names(known)}")


def _names_of(store: ObjectStore, policy: PolicyRef) -> list[NamedCheckpoint]:
    checkpoints = _named_checkpoints_of(Chain.of(store, policy))
    return [checkpoint for checkpoint in checkpoints if checkpoint.policy == policy]


def _named_checkpoints_of(chain: Chain) -> Iterator[NamedCheckpoint]:
    for step in _listed_steps(chain):
        key = keys.checkpoint(chain.run, chain.stage, chain.model, step)
        manifest = None
        with suppress(ObjectNotFound):  # only the name is stored
            manifest = read_manifest(chain.store, key)
        policy = chain.policy(step)
        for name in stored_names(chain.store, key, manifest):
            yield NamedCheckpoint(name=name, policy=policy)


def _listed_steps(chain: Chain) -> list[int]:
    """Returns the steps that have a complete checkpoint or a name, ascending."""
    steps = set()
    for info in chain.store.list(keys.checkpoints_prefix(chain.run, chain.stage, chain.model)):
        folder = info.key.rpartition("/")[0]
        if info.key in (keys.manifest_of_files(folder), keys.checkpoint_name(folder)):
            steps.add(keys.checkpoint_step(keys.manifest_of_files(folder)))
    return sorted(step for step in steps if step is not None)


def _runs_in(text: str) -> list[str]:
    """Returns the run keys with which a name `run/…` may begin. A run key has one or two segments."""
    # the last segment is the name itself
    parts = text.split("/")[:-1]
    runs = []
    for count in (1, 2):
        run = "/".join(parts[:count])
        if count <= len(parts) and keys.is_run(run):
            runs.append(run)
    return runs


def _ambiguous_message(text: str, checkpoints: list[NamedCheckpoint]) -> str:
    titles = ", ".join(checkpoint.title for checkpoint in checkpoints)
    return f"{text!r} names {len(checkpoints)} checkpoints: {titles}; give the full name of one of these"


def _list_names(known: list[NamedCheckpoint]) -> str:
    if not known:
        return (
            "no named checkpoint was found; runs with checkpoints.frequency write them, and one of another run is "
            "given as run/stage/name"
        )
    listed = ", ".join(checkpoint.title for checkpoint in known[:MAX_LISTED])
    if len(known) > MAX_LISTED:
        listed += f" and {len(known) - MAX_LISTED} more"
    return f"there are {listed}"
