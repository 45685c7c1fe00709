"""Finds which run took each step of a chain. A fork shares its first steps with the run that it was forked from, which
may be a fork itself."""

from __future__ import annotations

import re
from typing import Any

from pydantic import JsonValue

from storage.chain.fork import ForkInfo, read_fork
from storage.chain.listing import stage_position
from storage.chain.records import Chain, CommitRecord
from storage.chain.run_record import find_run
from storage.serialization import Frozen, canonical_text, flatten
from storage.store.objects import ObjectStore

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class RunSteps(Frozen):
    """Consecutive steps of a chain that one run took."""

    run: str
    first: int
    """First of the steps, counted from 1."""
    last: int
    learning_rates: tuple[float, float]
    """Learning rates of the first and of the last step."""
    settings: dict[str, JsonValue] = {}
    """Settings in which the runs of the chain differ: dotted key -> value. A key that the run does not have is left
    out."""

    @property
    def title(self) -> str:
        """The steps and their run in words."""
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{steps} of {self.run}"

    @property
    def rate_text(self) -> str:
        """The learning rate, or those of the first and the last step."""
        rates = [f"{rate:.3g}" for rate in dict.fromkeys(self.learning_rates)]
        return " → ".join(rates)


def steps_by_run(chain: Chain, until: int) -> tuple[RunSteps, ...]:
    """Returns which run took the steps 1 .. `until` of a chain, oldest first. Empty if the chain's own run took all of
    them. Raises ObjectNotFound, CorruptArtifact."""
    ranges = _ranges(chain.store, chain.run, chain.stage, chain.model, until)
    if ranges in ([], [(chain.run, 1, until)]):
        return ()
    # a fork has copies of the shared records, so all of them are read from its own chain
    rates, configs, requests = [], [], []
    for run, first, last in ranges:
        first_record, last_record = chain.committed_record(first), chain.committed_record(last)
        rates.append((first_record.request.optimizer.lr, last_record.request.optimizer.lr))
        configs.append(_config(chain.store, run))
        requests.append(_request_settings(last_record))
    settings = _differing(configs)
    if not any(settings):
        # the config of a recipe may not hold its settings
        settings = _differing(requests)
    steps = []
    for number, (run, first, last) in enumerate(ranges):
        values = settings[number]
        steps.append(RunSteps(run=run, first=first, last=last, learning_rates=rates[number], settings=values))
    return tuple(steps)


def differing_settings(steps: tuple[RunSteps, ...]) -> list[tuple[str, list[str]]]:
    """Returns (dotted key, its value in each of the `steps`) of the settings in which they differ. A missing value is
    "–", and a digest is shortened."""
    names: set[str] = set()
    for part in steps:
        names |= part.settings.keys()
    rows = []
    for name in sorted(names):
        rows.append((name, [_text(part.settings.get(name, "–")) for part in steps]))
    return rows


def _text(value: JsonValue) -> str:
    text = value if isinstance(value, str) else canonical_text(value)
    return text[:12] if _SHA256.fullmatch(text) else text


def _ranges(store: ObjectStore, run: str, stage: str, model: str, until: int) -> list[tuple[str, int, int]]:
    """Returns (run, first step, last step) of each run that took some of the steps 1 .. `until`, oldest first."""
    fork = read_fork(store, run)
    shared = 0 if fork is None else min(until, _shared_steps(fork, stage, model, until))
    ranges = _ranges(store, fork.run, stage, model, shared) if fork is not None and shared else []
    if until > shared:
        ranges.append((run, shared + 1, until))
    return ranges


def _shared_steps(fork: ForkInfo, stage: str, model: str, until: int) -> int:
    """Returns how many of the steps 1 .. `until` of a chain the fork shares with its origin."""
    if stage == fork.stage:
        return next((policy.step for policy in fork.shared if policy.model == model), 0)
    # earlier stages are shared whole, later ones not at all
    is_earlier = (stage_position(stage), stage) < (stage_position(fork.stage), fork.stage)
    return until if is_earlier else 0


def _config(store: ObjectStore, run: str) -> dict[str, Any]:
    """Returns dotted key -> value of the config that decides the run's result. Empty for a fork that has not run."""
    info = find_run(store, run)
    return flatten(info.semantic) if info else {}


def _request_settings(record: CommitRecord) -> dict[str, Any]:
    """Returns dotted key -> value of the settings that a step was requested with, except for its learning rate."""
    settings = flatten(record.request.model_dump(mode="json", include={"loss", "optimizer", "temperature"}))
    del settings["optimizer.lr"]
    return settings


def _differing(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns of each config the entries whose values are not the same in all configs that are not empty."""
    known = [config for config in configs if config]
    if not known:
        return configs
    # the keys that all of them have, with equal values; compared as JSON, since True == 1 in Python
    equal = {name: canonical_text(value) for name, value in known[0].items()}
    for config in known[1:]:
        for name in list(equal):
            if name not in config or canonical_text(config[name]) != equal[name]:
                del equal[name]
    return [{name: value for name, value in config.items() if name not in equal} for config in configs]
