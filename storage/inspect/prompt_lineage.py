"""Finds the steps that trained on one prompt, and every checkpoint and model that descends from them.

A policy descends from a step if its history has the state of that step. A fork has equal states, so it is found, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from storage.chain.listing import all_chains, stored_checkpoint_steps
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
    """URI of the policy that the step made."""
    step: int
    prompt: str
    """Id of the prompt."""
    completion: int
    text: str | None
    """Text of the sampled completion. None for a completion of the dataset."""
    reward: float | None
    status: str
    """ok, masked or ignored; "given" for a completion of the dataset."""
    trained: bool
    """Whether the completion is in the batch."""


class PromptReport(Frozen):
    """The uses of one prompt in a lineage, and everything that descends from them."""

    asked: str
    """The id or text that was searched for."""
    ids: tuple[str, ...]
    """Ids of the matching prompts: the prompt with that id, or all prompts whose text contains the query."""
    uses: tuple[PromptUse, ...]
    checkpoints: tuple[str, ...]
    """run/stage/model@step of every stored checkpoint of a policy that was trained on the prompt, in every run."""
    models: tuple[str, ...]
    """name@version of every registered model that was made from such a policy."""


def prompt_report(store: ObjectStore, lineage: Lineage, query: str) -> PromptReport:
    """Returns the steps of the lineage that used the prompt, and what descends from them. `query` is the id of the
    prompt or a part of its text."""
    # the steps of the lineage that used a matching prompt
    records = list(lineage.records(store))
    ids = _matching_ids(store, records, query)
    uses: list[PromptUse] = []
    touched: set[str] = set()
    for record in records:
        uses_in_step = _uses_in_step(store, record, ids)
        if uses_in_step:
            uses += uses_in_step
            touched.add(record.state)
    # everything that descends from these steps
    checkpoints: list[str] = []
    models: list[str] = []
    if touched:
        checkpoints, models = _descendants(store, touched)
    return PromptReport(
        asked=query, ids=tuple(sorted(ids)), uses=tuple(uses), checkpoints=tuple(checkpoints), models=tuple(models)
    )


def _matching_ids(store: ObjectStore, records: list[CommitRecord], query: str) -> set[str]:
    """Returns the ids of the dataset rows whose id is `query`, or else whose text contains it."""
    # the datasets of all steps
    datasets: dict[str, ArtifactRef] = {}
    for record in records:
        datasets.update((ref.uri, ref) for ref in step_inputs(store, record).datasets)
    # read the rows in groups; a row with that id ends the search
    by_text: set[str] = set()
    for ref in datasets.values():
        reader = RowReader(store, ref)
        try:
            for start in range(0, len(reader), ROW_GROUP):
                for row in reader.rows(range(start, min(start + ROW_GROUP, len(reader)))):
                    if row["id"] == query:
                        return {query}
                    if _contains(json.loads(row["thread"]), query):
                        by_text.add(row["id"])
        finally:
            reader.close()
    return by_text


def _contains(value: Any, text: str) -> bool:
    """Whether a text of a thread contains `text`. Names of fields and roles do not count."""
    if isinstance(value, str):
        return text in value
    if isinstance(value, dict):
        return any(_contains(part, text) for name, part in value.items() if name != "role")
    return isinstance(value, list) and any(_contains(part, text) for part in value)


def _uses_in_step(store: ObjectStore, record: CommitRecord, ids: set[str]) -> list[PromptUse]:
    """Returns the uses of these prompts in one step."""
    # the trained completions
    inputs = step_inputs(store, record)
    batch = read_table(store, inputs.batch, ["group", "completion"]).to_pylist()
    trained = {(row["group"], row["completion"]) for row in batch if row["group"] in ids}
    policy, step = record.policy.uri, record.policy.step
    if not inputs.rollouts:
        # the completions of a dataset are all trained, and have no text or grade of their own
        return [_use_of_given(policy, step, prompt, index) for prompt, index in sorted(trained)]
    # the sampled completions with their grades
    grades = {}
    for row in _read_rows_of(store, inputs.graded, ["prompt_id", "completion", "reward", "status"]):
        grades[row["prompt_id"], row["completion"]] = row
    uses = []
    for row in _read_rows_of(store, inputs.rollouts, ["prompt_id", "completion", "text"]):
        if row["prompt_id"] in ids:
            completion_id = (row["prompt_id"], row["completion"])
            grade = grades.get(completion_id, {"reward": None, "status": "not graded"})
            uses.append(
                PromptUse(
                    policy=policy,
                    step=step,
                    prompt=row["prompt_id"],
                    completion=row["completion"],
                    text=row.get("text"),  # an episode has none
                    reward=grade["reward"],
                    status=grade["status"],
                    trained=completion_id in trained,
                )
            )
    return uses


def _use_of_given(policy: str, step: int, prompt: str, index: int) -> PromptUse:
    """The use of a completion of the dataset, which is always trained on."""
    return PromptUse(
        policy=policy, step=step, prompt=prompt, completion=index, text=None, reward=None, status="given", trained=True
    )


def _read_rows_of(store: ObjectStore, refs: Iterable[ArtifactRef], columns: list[str]) -> Iterator[dict[str, Any]]:
    for ref in refs:
        yield from read_table(store, ref, columns).to_pylist()


def _descendants(store: ObjectStore, touched: set[str]) -> tuple[list[str], list[str]]:
    """Returns the checkpoints and models of every policy at or after a touched state: in forks, in later stages, and in
    runs that started from a touched model. Adds the states that it finds to `touched`."""
    histories = {chain: _states(chain) for chain in all_chains(store)}
    models = _registered_models(store)
    first_steps: dict[Chain, int] = {}
    touched_models: set[str] = set()
    # a touched chain can touch models and chains that start from it: repeat until nothing is added
    while True:
        count_before = len(first_steps) + len(touched_models)
        for chain, history in histories.items():
            if chain in first_steps:
                continue
            step = _first_touched(chain, history, touched, touched_models)
            if step is not None:
                first_steps[chain] = step
                touched |= set(history[step:])
        touched_models |= {model.key for model, state in models if state in touched}
        if len(first_steps) + len(touched_models) == count_before:
            break

    # the stored checkpoints of the touched chains, in the order of their names
    checkpoints = []
    for chain in sorted(first_steps, key=lambda chain: (chain.run, chain.stage, chain.model)):
        for step in stored_checkpoint_steps(chain):
            if step >= first_steps[chain]:
                checkpoints.append(f"{chain.run}/{chain.stage}/{chain.model}@{step}")
    return checkpoints, [registered_key(model) for model, _ in models if model.key in touched_models]


def _states(chain: Chain) -> list[str]:
    """Returns the states of steps 0 .. head."""
    return [chain.policy(step).state for step in range(max(chain.steps(), default=0) + 1)]


def _first_touched(chain: Chain, history: list[str], touched: set[str], touched_models: set[str]) -> int | None:
    """Returns the first step of the chain that is touched, or None."""
    # a chain that starts from a touched policy or model is touched from its root
    root = chain.root()
    if root is not None and root.start is not None and root.start.state in touched:
        return 0
    if root is not None and root.base is not None and root.base.key in touched_models:
        return 0
    return next((step for step, state in enumerate(history) if state in touched), None)


def _registered_models(store: ObjectStore) -> list[tuple[ArtifactRef, str | None]]:
    """Returns every registered model with the state of its policy."""
    models = []
    for info in store.list(keys.models_prefix()):
        key = key_patterns.artifact_of_manifest(info.key)
        if key is None:
            continue
        model = read_manifest(store, key).ref
        try:
            policy = policy_of_model(store, model)
        except ObjectNotFound:
            policy = None  # its run is gone
        models.append((model, policy.state if policy else None))
    return models
