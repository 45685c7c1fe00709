"""Which runs, stages and chains a store has: what listings, lineage, forks and audits walk."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Literal

from storage.chain.leases import current_epoch, is_held
from storage.chain.records import Chain
from storage.chain.runs import RunInfo, read_run
from storage.errors import CorruptArtifact, ObjectNotFound
from storage.records import Frozen
from storage.store import keys
from storage.store.objects import ObjectStore

RunState = Literal["finished", "running?", "stopped", "fork"]


class RunRow(Frozen):
    """One line of `ostinato runs ls`."""

    run: str
    kind: str
    """Names of its stages: sft, grpo."""
    created: str | None
    """ISO time; None for a fork that did not run yet."""
    state: RunState
    """finished: it has a result. fork: forked, and not run yet. stopped: whoever drove it said that it stopped.
    running?: nobody said so, but a killed process never does: see `last_commit`."""
    stages: tuple[str, ...]
    head_step: int
    """Of the last stage's longest chain."""
    last_commit: str | None
    lease_epoch: int
    forked_from: str | None
    """run/stage@step"""


SERVED = "served"
"""First part of the run keys under which registered models answer OpenAI clients."""
EVALUATED = "evaluation"
"""The same of the runs that keep what each evaluated model answered."""


def is_auxiliary(run: str) -> bool:
    """Whether the run trains nothing and nobody started it: the engine or an evaluation works under its key."""
    return run.startswith((f"{SERVED}/", f"{EVALUATED}/"))


def list_runs(store: ObjectStore, beginning: str = "") -> list[str]:
    """Every run that has an object, sorted; only those whose key begins so."""
    runs = (keys.run_of(info.key) for info in store.list(f"{keys.runs_prefix()}{beginning}"))
    return sorted({run for run in runs if run is not None})


def has_objects(store: ObjectStore, run: str) -> bool:
    """Whether anything lies at the run's key; the runs of a schedule, `run/time`, are others."""
    return any(keys.run_of(info.key) in (run, None) for info in store.list(keys.run_prefix(run)))


def all_chains(store: ObjectStore) -> list[Chain]:
    """Every chain of every run, by name."""
    names = {keys.chain_of(info.key) for info in store.list(keys.runs_prefix())}
    return [Chain(store, *name) for name in sorted(name for name in names if name is not None)]


def run_chains(store: ObjectStore, run: str) -> list[Chain]:
    """The chains of a run, in the order of its stages."""
    names = {keys.chain_of(info.key) for info in store.list(keys.stages_prefix(run))}
    found = sorted((name for name in names if name is not None), key=lambda name: (_position(name[1]), name))
    return [Chain(store, *name) for name in found]


def stages_of(store: ObjectStore, run: str) -> list[str]:
    """The stages of a run that have a chain, in their order."""
    return list(dict.fromkeys(chain.stage for chain in run_chains(store, run)))


def summarise_run(store: ObjectStore, run: str) -> RunRow:
    """The run's line. Raises CorruptArtifact."""
    info, chains = run_info(store, run), run_chains(store, run)
    stages = tuple(dict.fromkeys(chain.stage for chain in chains))
    heads = {chain.model: max(chain.steps(), default=0) for chain in chains if chain.stage == stages[-1]}
    last = max(heads, key=lambda model: heads[model], default=None)
    step = heads[last] if last is not None else 0
    record = Chain(store, run, stages[-1], last).record(step) if last is not None and step else None
    fork = fork_place(store, run)
    finished = store.exists(keys.result_json(run))
    return RunRow(
        run=run,
        kind=" ".join(map(keys.stage_kind, stages)) or "-",
        created=info.created if info else None,
        state=_state(store, run, finished=finished, opened=info is not None),
        stages=stages,
        head_step=step,
        last_commit=record.time if record else None,
        lease_epoch=current_epoch(store, run),
        forked_from=fork,
    )


def _state(store: ObjectStore, run: str, *, finished: bool, opened: bool) -> RunState:
    if finished:
        return "finished"
    if is_held(store, run):
        return "running?"
    return "stopped" if opened else "fork"


def run_info(store: ObjectStore, run: str) -> RunInfo | None:
    """run.json; None for a fork that did not run yet."""
    try:
        return read_run(store, run)
    except ObjectNotFound:
        return None


def fork_place(store: ObjectStore, run: str) -> str | None:
    """run/stage@step that the run was forked from, or None."""
    body = read_json(store, keys.fork_json(run))
    return None if body is None else f"{body.get('run')}/{body.get('stage')}@{body.get('step')}"


def read_json(store: ObjectStore, key: str) -> dict[str, Any] | None:
    """A small JSON object, or None. Raises CorruptArtifact."""
    try:
        body = json.loads(store.get(key))
    except ObjectNotFound:
        return None
    except ValueError as error:
        raise CorruptArtifact(f"{key} is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise CorruptArtifact(f"{key} is not a JSON object")
    return body


def seconds_since(time: str | None) -> float | None:
    """Seconds between an ISO time and now, by this machine's clock."""
    return None if time is None else (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()


def _position(stage: str) -> int:
    head = stage.partition("-")[0]
    return int(head) if head.isdigit() else 0
