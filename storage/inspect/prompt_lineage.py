"""What one prompt touched: the steps that trained on it, and every checkpoint and model that descends from them.

Descent is by state: a fork holds the very states that it shares, so it is found without being asked for.
"""

from __future__ import annotations

import json
from typing import Any

from storage.chain.listing import all_chains
from storage.chain.records import Chain, CommitRecord
from storage.errors import ObjectNotFound
from storage.inspect.accounting import step_inputs
from storage.inspect.lineage import Lineage, policy_of_model
from storage.registry.models import registered_key
from storage.serialization import Frozen
from storage.store import key_patterns, keys
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import ROW_GROUP, RowReader, read_table


class PromptUse(Frozen):
    """One completion of the prompt in one step."""

    policy: str
    """The policy that the step made, as an uri."""
    step: int
    prompt: str
    """Its id."""
    completion: int
    text: str | None
    """What was sampled; None where the completion was given."""
    reward: float | None
    status: str
    """ok, masked, ignored; given for a completion of the dataset."""
    trained: bool
    """Whether it is in the batch."""


class PromptReport(Frozen):
    """Everything about one prompt in a lineage."""

    asked: str
    ids: tuple[str, ...]
    """The prompts that match: the one of that id, else all whose text holds what was asked for."""
    uses: tuple[PromptUse, ...]
    checkpoints: tuple[str, ...]
    """run/stage/model@step of every stored checkpoint that the prompt touched, in every run."""
    models: tuple[str, ...]
    """name@version of every registered model that it touched."""


def prompt_report(store: ObjectStore, lineage: Lineage, asked: str) -> PromptReport:
    """Which steps of the lineage used the prompt, by id or by a part of its text, and what descends from them."""
    records = list(lineage.records(store))
    ids = _matching(store, records, asked)
    uses: list[PromptUse] = []
    touched: set[str] = set()
    for record in records:
        if found := _uses(store, record, ids):
            uses += found
            touched.add(record.state)
    checkpoints, models = _descendants(store, touched) if touched else ([], [])
    return PromptReport(
        asked=asked, ids=tuple(sorted(ids)), uses=tuple(uses), checkpoints=tuple(checkpoints), models=tuple(models)
    )


def _matching(store: ObjectStore, records: list[CommitRecord], asked: str) -> set[str]:
    """Ids of the dataset rows that are meant."""
    datasets: dict[str, ArtifactRef] = {}
    for record in records:
        datasets.update((ref.uri, ref) for ref in step_inputs(store, record).datasets)
    by_text: set[str] = set()
    for ref in datasets.values():
        reader = RowReader(store, ref)
        try:
            for start in range(0, len(reader), ROW_GROUP):
                for row in reader.rows(range(start, min(start + ROW_GROUP, len(reader)))):
                    if row["id"] == asked:
                        return {asked}
                    if _holds(json.loads(row["thread"]), asked):
                        by_text.add(row["id"])
        finally:
            reader.close()
    return by_text


def _holds(value: Any, text: str) -> bool:
    """Whether some text of a thread holds `text`; keys and roles do not count."""
    if isinstance(value, str):
        return text in value
    if isinstance(value, dict):
        return any(_holds(part, text) for name, part in value.items() if name != "role")
    return isinstance(value, list) and any(_holds(part, text) for part in value)


def _uses(store: ObjectStore, record: CommitRecord, ids: set[str]) -> list[PromptUse]:
    material = step_inputs(store, record)
    batch = read_table(store, material.batch, ["group", "completion"]).to_pylist()
    trained = {(row["group"], row["completion"]) for row in batch if row["group"] in ids}
    place = {"policy": record.policy.uri, "step": record.policy.step}
    if not material.rollouts:
        return [
            PromptUse(
                **place, prompt=prompt, completion=number, text=None, reward=None, status="given", trained=True
            )
            for prompt, number in sorted(trained)
        ]
    columns = ["prompt_id", "completion", "text"]
    sampled = [row for ref in material.rollouts for row in read_table(store, ref, columns).to_pylist()]
    columns = ["prompt_id", "completion", "reward", "status"]
    grades = [row for ref in material.graded for row in read_table(store, ref, columns).to_pylist()]
    by_completion = {(row["prompt_id"], row["completion"]): row for row in grades}
    found = []
    for row in sampled:
        if row["prompt_id"] in ids:
            name = (row["prompt_id"], row["completion"])
            grade = by_completion.get(name, {"reward": None, "status": "not graded"})
            found.append(
                PromptUse(
                    **place,
                    prompt=name[0],
                    completion=name[1],
                    text=row["text"],
                    reward=grade["reward"],
                    status=grade["status"],
                    trained=name in trained,
                )
            )
    return found


def _descendants(store: ObjectStore, touched: set[str]) -> tuple[list[str], list[str]]:
    """Checkpoints and models of every policy at or after a touched state: in forks, in later stages, and in runs that
    started from a touched model."""
    states = {chain: _states(chain) for chain in all_chains(store)}
    models = _models(store)
    first: dict[Chain, int] = {}
    bad_models: set[str] = set()
    while True:
        known = len(first) + len(bad_models)
        for chain, history in states.items():
            if chain not in first and (step := _first_touched(chain, history, touched, bad_models)) is not None:
                first[chain] = step
                touched |= set(history[step:])
        bad_models |= {model.key for model, state in models if state in touched}
        if len(first) + len(bad_models) == known:
            break
    checkpoints = [
        f"{chain.run}/{chain.stage}/{chain.model}@{step}"
        for chain, start in sorted(first.items(), key=lambda item: (item[0].run, item[0].stage, item[0].model))
        for step in _checkpoints(chain)
        if step >= start
    ]
    return checkpoints, [registered_key(model) for model, _ in models if model.key in bad_models]


def _states(chain: Chain) -> list[str]:
    """States 0 .. head."""
    return [chain.policy(step).state for step in range(max(chain.steps(), default=0) + 1)]


def _first_touched(chain: Chain, history: list[str], touched: set[str], bad_models: set[str]) -> int | None:
    root = chain.root()
    if root is not None and root.start is not None and root.start.state in touched:
        return 0
    if root is not None and root.base is not None and root.base.key in bad_models:
        return 0
    return next((step for step, state in enumerate(history) if state in touched), None)


def _models(store: ObjectStore) -> list[tuple[ArtifactRef, str | None]]:
    """Every registered model, and the state that it is."""
    found = []
    for info in store.list(keys.models_prefix()):
        key = key_patterns.artifact_of_manifest(info.key)
        if key is None:
            continue
        model = read_manifest(store, key).ref
        try:
            policy = policy_of_model(store, model)
        except ObjectNotFound:
            policy = None  # its run is gone
        found.append((model, policy.state if policy else None))
    return found


def _checkpoints(chain: Chain) -> list[int]:
    listed = chain.store.list(keys.checkpoints_prefix(chain.run, chain.stage, chain.model))
    return sorted({step for info in listed if (step := keys.checkpoint_step(info.key)) is not None})
