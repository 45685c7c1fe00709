"""What was measured on held-out rows while a run trained: read back from the manifests of the tables, so that a curve
of them is the same after any resume.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from storage.serialization import Frozen
from storage.store import key_patterns, keys
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.objects import ObjectStore

_NAMED = re.compile(r"(\d{6,})-(.+)", re.ASCII)


class Validation(Frozen):
    """One measurement of one policy."""

    name: str
    """What is measured; equal names of one stage are one curve."""
    step: int
    """Steps of the stage that the policy has behind it."""
    measures: dict[str, float] = {}


def measured(name: str, measures: Mapping[str, float | None]) -> dict[str, Any]:
    """What a table's manifest says of it, for `read_validations`. What is None or not finite is left out."""
    known = {key: value for key, value in measures.items() if value is not None and math.isfinite(value)}
    return {"validation": {"name": name, "measures": known}}


def validation_of(store: ObjectStore, ref: ArtifactRef) -> Validation | None:
    """What the table measured; None for one that does not say."""
    named = _NAMED.fullmatch(ref.key.rpartition("/")[2])
    said = read_manifest(store, ref.key).extra.get("validation")
    if named is None or not isinstance(said, dict):
        return None
    return Validation(step=int(named[1]), **said)


def read_validations(store: ObjectStore, run: str, stage: str, *, steps: int | None = None) -> list[Validation]:
    """All of a stage, up to the policy of `steps` steps, in the order of steps and names."""
    found = {}
    for info in store.list(f"{keys.stage_prefix(run, stage)}evaluations/"):
        owner = key_patterns.artifact_of_manifest(info.key)
        named = _NAMED.fullmatch(owner.rpartition("/")[2]) if owner else None
        if owner is None or named is None or (steps is not None and int(named[1]) > steps):
            continue
        said = read_manifest(store, owner).extra.get("validation")
        if isinstance(said, dict):
            one = Validation(step=int(named[1]), **said)
            found[one.step, one.name] = one
    return [found[place] for place in sorted(found)]


def curves(validations: Iterable[Validation]) -> dict[str, list[tuple[int, float]]]:
    """"name: measure" -> (step, value) in the order of the steps."""
    found: dict[str, list[tuple[int, float]]] = {}
    for one in sorted(validations, key=lambda one: one.step):
        for measure, value in one.measures.items():
            found.setdefault(f"{one.name}: {measure}", []).append((one.step, value))
    return found


def reward_by_prompt(rows: Iterable[Mapping[str, Any]], by: str = "prompt_id") -> dict[Any, float | None]:
    """The mean of the grades of each prompt's completions; None where every one of them failed."""
    grades: dict[Any, list[float]] = {}
    for row in rows:
        given = grades.setdefault(row[by], [])
        if row["reward"] is not None:
            given.append(row["reward"])
    return {prompt: math.fsum(given) / len(given) if given else None for prompt, given in grades.items()}


def mean_reward(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Over the prompts that have a grade."""
    known = [reward for reward in reward_by_prompt(rows, "prompt_index").values() if reward is not None]
    return math.fsum(known) / len(known) if known else None


def sums_by_source(threads: Iterable[object], rewards: Iterable[float | None]) -> dict[str, list[float]]:
    """Per `data_source` of the threads' metadata: the sum of the rewards and their number. Threads without one are left
    out."""
    sums: dict[str, list[float]] = {}
    for thread, reward in zip(threads, rewards, strict=True):
        source = json.loads(str(thread)).get("metadata", {}).get("data_source")
        if source is not None and reward is not None:
            known = sums.setdefault(str(source), [0.0, 0])
            known[0] += reward
            known[1] += 1
    return sums


def means_by_source(parts: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The mean reward of each source over all parts."""
    sums: dict[str, list[float]] = {}
    for part in parts:
        for source, (total, count) in part.items():
            known = sums.setdefault(source, [0.0, 0])
            known[0] += total
            known[1] += count
    return {source: total / count for source, (total, count) in sorted(sums.items())}
