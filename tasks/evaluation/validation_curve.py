"""Reads the measurements on held-out rows that a run committed during training, and makes curves of them. Also computes
the mean rewards per prompt and per data source that such a measurement has.

The measurements are in the manifests of the evaluation tables, so a resumed run shows the same curves.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from storage.serialization import Frozen
from storage.store import key_patterns, keys
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import read_table

_TABLE_NAME = re.compile(r"(\d{6,})-(.+)", re.ASCII)
"""Last part of the key of an evaluation table: the policy's step and the name of the evaluation."""


class Validation(Frozen):
    """The result of one evaluation of one policy."""

    name: str
    """Name of the evaluation. Each measure of one name is one curve of the stage."""
    step: int
    """Number of steps that the policy was trained in the stage."""
    measures: dict[str, float] = {}


def validation_entry(name: str, measures: Mapping[str, float | None]) -> dict[str, Any]:
    """The entry of a table's manifest that `read_validations` reads. Measures that are None or not finite are left
    out."""
    finite = {key: value for key, value in measures.items() if value is not None and math.isfinite(value)}
    return {"validation": {"name": name, "measures": finite}}


def validation_of(store: ObjectStore, ref: ArtifactRef) -> Validation | None:
    """The measurement of a table; None if its manifest has none."""
    step = _step_of(ref.key)
    return None if step is None else _read_validation(store, ref.key, step)


def read_validations(store: ObjectStore, run: str, stage: str, *, last_step: int | None = None) -> list[Validation]:
    """The measurements of a stage, by step and name, up to the policy after `last_step` steps (None: all)."""
    validations = {}
    for key in evaluation_keys(store, run, stage):
        # Look at the step before reading the manifest: a read is a request to the store.
        step = _step_of(key)
        if step is None or (last_step is not None and step > last_step):
            continue
        validation = _read_validation(store, key, step)
        if validation is not None:
            validations[step, validation.name] = validation
    return [validations[step_and_name] for step_and_name in sorted(validations)]


def evaluation_keys(store: ObjectStore, run: str, stage: str) -> Iterator[str]:
    """Yields the keys of the committed evaluation tables of a stage, in the order of the store's listing."""
    for info in store.list(f"{keys.stage_prefix(run, stage)}evaluations/"):
        key = key_patterns.artifact_of_manifest(info.key)
        if key is not None:
            yield key


def _step_of(key: str) -> int | None:
    match = _TABLE_NAME.fullmatch(key.rpartition("/")[2])
    return None if match is None else int(match[1])


def _read_validation(store: ObjectStore, key: str, step: int) -> Validation | None:
    entry = read_manifest(store, key).extra.get("validation")
    return Validation(step=step, **entry) if isinstance(entry, dict) else None


def curves(validations: Iterable[Validation]) -> dict[str, list[tuple[int, float]]]:
    """Returns the points (step, value) of each curve, in the order of the steps. The name of a curve is
    `name: measure`."""
    points: dict[str, list[tuple[int, float]]] = {}
    for validation in sorted(validations, key=lambda validation: validation.step):
        for measure, value in validation.measures.items():
            points.setdefault(f"{validation.name}: {measure}", []).append((validation.step, value))
    return points


def describe_size(store: ObjectStore, table: ArtifactRef) -> str:
    """The number of prompts or rows that a table of an evaluation measured, in words."""
    if table.kind != "evaluation":
        return f"{table.rows} rows"
    rewards = reward_by_prompt(read_table(store, table, ["prompt_index", "reward"]).to_pylist(), "prompt_index")
    ungraded = sum(reward is None for reward in rewards.values())
    return f"{len(rewards)} prompts" + (f", {ungraded} of them without a grade" if ungraded else "")


def reward_by_prompt(rows: Iterable[Mapping[str, Any]], prompt_column: str = "prompt_id") -> dict[Any, float | None]:
    """The mean reward of each prompt's completions; None if none of them has a grade. `prompt_column` is
    the column that identifies the prompt."""
    rewards_of: dict[Any, list[float]] = {}
    for row in rows:
        rewards = rewards_of.setdefault(row[prompt_column], [])
        if row["reward"] is not None:
            rewards.append(row["reward"])
    return {prompt: _mean(rewards) for prompt, rewards in rewards_of.items()}


def mean_over_prompts(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """The mean over the prompts of their mean rewards. Prompts without a grade are left out. None if no prompt
    has a grade."""
    rewards = reward_by_prompt(rows, "prompt_index").values()
    return _mean([reward for reward in rewards if reward is not None])


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def sums_by_source(threads: Iterable[object], rewards: Iterable[float | None]) -> dict[str, list[float]]:
    """Data source -> [sum of the rewards, number of rewards]. The source of a thread is `data_source` of its metadata.
    Threads without a source, and rewards that are None, are left out."""
    sums: dict[str, list[float]] = {}
    for thread, reward in zip(threads, rewards, strict=True):
        source = json.loads(str(thread)).get("metadata", {}).get("data_source")
        if source is not None and reward is not None:
            _add(sums, str(source), reward, 1)
    return sums


def means_by_source(sums_of_shards: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Data source -> mean reward over all shards, from the result of `sums_by_source` for each shard."""
    sums: dict[str, list[float]] = {}
    for sums_of_shard in sums_of_shards:
        for source, (total, count) in sums_of_shard.items():
            _add(sums, source, total, count)
    return {source: total / count for source, (total, count) in sorted(sums.items())}


def _add(sums: dict[str, list[float]], source: str, total: float, count: float) -> None:
    source_sums = sums.setdefault(source, [0.0, 0])
    source_sums[0] += total
    source_sums[1] += count
