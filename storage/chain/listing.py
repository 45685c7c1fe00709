"""Lists the runs of a store, their stages and their chains, from the keys of their objects."""

from __future__ import annotations

from collections.abc import Iterator

from storage.chain.records import Chain
from storage.store import keys
from storage.store.index import run_entries
from storage.store.objects import ObjectInfo, ObjectStore

SERVED = "served"
"""First segment of the keys of the runs under which registered models serve OpenAI clients."""
EVALUATED = "evaluation"
"""First segment of the keys of the runs that hold the completions of evaluated models."""


def is_auxiliary(run: str) -> bool:
    """Whether the run trains nothing: the engine serves a model, or an evaluation works, under its key."""
    return run.startswith((f"{SERVED}/", f"{EVALUATED}/"))


def list_runs(store: ObjectStore, prefix: str = "") -> list[str]:
    """Returns the keys of all runs, sorted, from the index of the store. With `prefix`, only keys that begin with
    it."""
    return sorted(run_entries(store, prefix))


def run_objects(store: ObjectStore, run: str) -> Iterator[ObjectInfo]:
    """Yields the objects of a run, in the order of its parts. Runs `run/time` of a schedule are not read."""
    for prefix in _part_prefixes(run):
        for info in store.list(prefix):
            if keys.run_of(info.key) == run:
                yield info


def _part_prefixes(run: str) -> list[str]:
    # a part is an object or a folder; another run may have a name that begins with the name of a folder
    return [f"{keys.run_prefix(run)}{part}{'' if '.' in part else '/'}" for part in sorted(keys.RUN_PARTS)]


def has_parts(store: ObjectStore, run: str) -> bool:
    """Whether `run_objects` yields anything."""
    return any(store.has_objects(prefix) for prefix in _part_prefixes(run))


def has_objects(store: ObjectStore, run: str) -> bool:
    """Whether the run has any object. Objects of the run `run/time` of a schedule do not count for the run `run`."""
    prefix = keys.run_prefix(run)
    folders, objects = store.folder(prefix)
    # an object that belongs to no run, such as a file that a person put there, counts, too
    of_run = (name for name in folders if name in keys.RUN_PARTS or not keys.is_run(f"{run}/{name}"))
    return bool(objects) or any(store.has_objects(f"{prefix}{name}/") for name in of_run)


def all_chains(store: ObjectStore) -> list[Chain]:
    """Returns every chain of every run, sorted by run, stage and model."""
    chains = [chain for run in list_runs(store) for chain in run_chains(store, run)]
    return sorted(chains, key=lambda chain: (chain.run, chain.stage, chain.model))


def run_chains(store: ObjectStore, run: str) -> list[Chain]:
    """Returns the chains of a run in the order of its stages. Their steps are not listed."""
    chains = []
    for stage in filter(keys.is_name, store.folder(keys.stages_prefix(run)).folders):
        for model in filter(keys.is_name, store.folder(keys.chains_prefix(run, stage)).folders):
            chains.append(Chain(store, run, stage, model))
    # by number, so that the stage 10 comes after the stage 9
    return sorted(chains, key=lambda chain: stage_position(chain.stage))


def stages_of(store: ObjectStore, run: str) -> list[str]:
    """Returns the stages of a run that have a chain, in their order."""
    stages: list[str] = []
    for chain in run_chains(store, run):
        if chain.stage not in stages:
            stages.append(chain.stage)
    return stages


def committed_steps(store: ObjectStore, run: str) -> dict[str, int]:
    """Returns the number of committed steps of each stage, in the order of the stages.

    A step that models take together is committed when all of them have committed it. The models of a recipe take their
    steps apart, so the one with the most steps counts.
    """
    steps_of_chains: dict[str, list[int]] = {}
    for chain in run_chains(store, run):
        steps_of_chains.setdefault(chain.stage, []).append(max(chain.steps(), default=0))
    committed = {}
    for stage, steps in steps_of_chains.items():
        committed[stage] = max(steps) if keys.stage_kind(stage) == "recipe" else min(steps)
    return committed


def stage_position(stage: str) -> int:
    """The number that a stage's name begins with: 1 of `1-gspo`. 0 where there is no number."""
    head = stage.partition("-")[0]
    return int(head) if head.isdigit() else 0


def stored_checkpoint_steps(chain: Chain) -> list[int]:
    """Returns the steps of the complete checkpoints of a chain, ascending."""
    steps = []
    for info in chain.store.list(keys.checkpoints_prefix(chain.run, chain.stage, chain.model)):
        # only the key of a manifest has a step: a checkpoint without one is not complete
        step = keys.checkpoint_step(info.key)
        if step is not None:
            steps.append(step)
    return sorted(steps)
