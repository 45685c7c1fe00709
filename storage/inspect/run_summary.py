"""The state of a run in one line, for `ostinato runs ls`. `run_details` reads everything about one run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from storage.chain.leases import current_epoch, is_held
from storage.chain.listing import run_chains
from storage.chain.records import Chain
from storage.chain.run_record import find_run
from storage.serialization import Frozen
from storage.store import keys
from storage.store.objects import ObjectStore, read_json

RunState = Literal["finished", "running?", "stopped", "fork", "deleting"]


class RunSummary(Frozen):
    """One line of `ostinato runs ls`."""

    run: str
    kind: str
    """Kinds of its stages, separated by spaces: "sft grpo"."""
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
        kind=" ".join(map(keys.stage_kind, stages)) or "-",
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
