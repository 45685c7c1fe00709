"""Checks a world after its end, and measures how long each fault delayed the next committed step."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

from storage.chain.rebase import list_rebases
from storage.chain.records import Chain
from storage.inspect.audit import audit_store
from storage.inspect.gc import collect_garbage
from storage.registry.models import find_model
from storage.store import keys
from storage.store.objects import ObjectStore
from tests.chaos.asynchrony import broken_staleness, epoch_seconds
from tests.chaos.processes import Child
from tests.chaos.world import MODEL, STAGE, Happening, World


@dataclass(frozen=True)
class History:
    """What a run committed: its states and digests by step, and the bytes of the model it published."""

    states: list[str]
    digests: list[str | None]
    published: dict[str, str]
    """File name -> sha256."""


def history(world: World, run: int = 0) -> History:
    store, steps = world.store(), world.mode.steps
    chain = Chain(store, world.run_key(run), STAGE, MODEL)
    ref = find_model(store, f"toy-{run}")
    assert ref is not None, f"run {world.run_key(run)} published no model"
    files = json.loads(store.get(keys.manifest_of_files(ref.key)))["files"]
    return History(
        states=[chain.policy(step).state for step in range(steps + 1)],
        digests=[record.weights_digest for record in chain.records(after=0, until=steps)],
        published={entry["name"]: entry["sha256"] for entry in files},
    )


def problems(world: World, reference: History | None) -> list[str]:
    """Every promise that was not kept, one line each; none is what is expected."""
    store = world.store()
    broken_promises = [*_ends(world), *_results(world, store), *_audit(store)]
    if broken_promises:
        return broken_promises
    if world.mode.max_staleness:
        broken_promises += broken_staleness(world, store)
    if world.mode.noise:
        broken_promises += _unproven_rebases(world, store)
    if broken_promises:
        return broken_promises
    if world.mode.deterministic and reference is not None:
        for run in range(world.mode.runs):
            broken_promises += _differences(history(world, run), reference)
        return broken_promises
    return _unverified(world, store)


def _ends(world: World) -> list[str]:
    """How workers may end; and none of them needs torch."""
    broken_promises = [
        f"{end.worker} ended with status {end.status} by {end.error or 'an error without a name'}"
        for end in world.ends
        if world.is_defect(end)
    ]
    for child in world.children:
        if child.name.startswith("worker") and "torch was imported" in child.text():
            broken_promises.append(f"{child.name} imported torch")
    for zombie in world.zombies:
        if zombie.alive:
            broken_promises.append(f"{zombie.name} was replaced and is still there")
    return broken_promises


def _results(world: World, store: ObjectStore) -> list[str]:
    broken_promises = []
    for run in range(world.mode.runs):
        key, steps = world.run_key(run), Chain(store, world.run_key(run), STAGE, MODEL).steps()
        if not store.exists(keys.result_json(key)):
            broken_promises.append(f"run {key} has no result")
        if sorted(steps) != list(range(1, world.mode.steps + 1)):
            broken_promises.append(f"run {key} has the steps {sorted(steps)}, expected each of 1..{world.mode.steps}")
    return broken_promises


def _audit(store: ObjectStore) -> list[str]:
    report = audit_store(store)
    broken_promises = [f"{problem.key} {problem.what}" for problem in report.problems]
    in_two_days = time.time() + timedelta(days=2).total_seconds()
    garbage = collect_garbage(store, now=in_two_days, dry_run=True, exclusive=True)
    broken_promises += [f"{key} is named by nothing, and garbage collection leaves it" for key in
              sorted(set(report.pending) - set(garbage.names))]  # fmt: skip
    broken_promises += [f"{key} is not understood by garbage collection" for key in garbage.unknown]
    return broken_promises


def _differences(mine: History, reference: History) -> list[str]:
    broken_promises = []
    for step, (one, other) in enumerate(zip(mine.states, reference.states, strict=True)):
        if one != other:
            broken_promises.append(f"state of step {step} is {one[:12]}, without faults it is {other[:12]}")
            break
    if mine.digests != reference.digests:
        broken_promises.append("the weights digests differ from those of the run without faults")
    if mine.published != reference.published:
        odd = sorted(name for name in mine.published if mine.published[name] != reference.published.get(name))
        broken_promises.append(f"published files differ from those of the run without faults: {odd}")
    return broken_promises


def _unproven_rebases(world: World, store: ObjectStore) -> list[str]:
    """On a device that does not repeat, a redo is a rebase whose distance rounding explains."""
    broken_promises = []
    for run in range(world.mode.runs):
        chain = Chain(store, world.run_key(run), STAGE, MODEL)
        for rebase in list_rebases(chain):
            if not rebase.exact and not rebase.proven:
                broken_promises.append(f"{chain.run}: {rebase.title}")
        if any(record.numerics.repeats for record in chain.records(after=0, until=world.mode.steps)):
            broken_promises.append(f"{chain.run}: the noise was not noticed")
    return broken_promises


def _unverified(world: World, store: ObjectStore) -> list[str]:
    from engine.local.verify import verify_run

    reports = [verify_run(store, world.run_key(run)) for run in range(world.mode.runs)]
    problems = itertools.chain.from_iterable(report.problems for report in reports)
    return [f"verify: {problem.key} {problem.what}" for problem in problems]


# -- how the run went on ---------------------------------------------------------------------------------------


def tell(world: World) -> list[Happening]:
    """The faults with what died, how long the next commit took, and how the run went on."""
    store = world.store()
    commits = {
        run: [epoch_seconds(record.time) for record in
              Chain(store, world.run_key(run), STAGE, MODEL).records(after=0, until=world.mode.steps)]
        for run in range(world.mode.runs)
    }  # fmt: skip
    replaced = iter(world.zombies)
    following = [*(happening.time for happening in world.happenings[1:]), float("inf")]
    for happening, next_fault in zip(world.happenings, following, strict=False):
        began = happening.time
        later = [at for at in commits[happening.fault.run] if at > began]
        until = min(later, default=max(world.ended, began))
        happening.recovered, happening.last = until - began, not later
        happening.died = [name for name, at in world.deaths if began <= at <= min(until, next_fault)]
        happening.how = _how(world, began, until)
        if happening.fault.kind in ("zombie worker", "second worker"):
            happening.how += f"; {_end_of(world, next(replaced))}"
    return world.happenings


def _how(world: World, began: float, until: float) -> str:
    started = Counter(name.partition("-")[0] for name, at in world.starts if began <= at <= until)
    window = [event for event in world.log if began <= event["time"] <= until]
    done = Counter(event["event"] for event in window)
    parts = [f"{name} started {count}x" for name, count in sorted(started.items())]
    if done["redo"]:
        parts.append(f"{done['redo']} steps redone")
    parts += [f"{end.worker} ended by {end.error}" for end in world.ends if end.error and began <= end.time <= until]
    if not parts:
        parts.append("calls tried again" if until - began > 1.5 else "not noticed")
    return ", ".join(parts)


def _end_of(world: World, worker: Child) -> str:
    ends = (end.error or f"with status {end.status}" for end in world.ends if end.worker == worker.name)
    return f"{worker.name} ended {next(ends, 'by a signal')}"
