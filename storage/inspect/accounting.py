"""Prompts in = prompts accounted for: of every committed step, what was taken, sampled, graded and trained.

It reads what the batch of a step descends from, so it holds for steps that a fork shares with another run too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from storage.chain.records import Chain, CommitRecord
from storage.errors import CorruptArtifact, SchemaMismatch, StorageError
from storage.serialization import Frozen
from storage.store.artifacts import ArtifactRef, Manifest, read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import read_table


class StepInputs(Frozen):
    """What one committed step was made from."""

    step: int = Field(ge=1)
    """The policy that the step made."""
    batch: ArtifactRef
    rollouts: tuple[ArtifactRef, ...]
    """Completions, or the trajectories of episodes."""
    graded: tuple[ArtifactRef, ...]
    datasets: tuple[ArtifactRef, ...]


def step_inputs(store: ObjectStore, record: CommitRecord) -> StepInputs:
    """The artifacts behind a step, from the parents that their manifests name. Raises ObjectNotFound, CorruptArtifact
    when one is gone or is another one now."""
    batch = _of_uri(store, f"{record.request.batch.key}#{record.request.batch.sha256}")
    parents = [_of_uri(store, uri) for uri in batch.parents if not uri.startswith("policy:")]
    rollouts = [ref for ref in parents if ref.kind in ("rollouts", "trajectories")]
    above = [uri for ref in rollouts for uri in ref.parents if not uri.startswith("policy:")]
    datasets = {ref.uri: ref for ref in (*(_of_uri(store, uri) for uri in dict.fromkeys(above)), *parents)}
    return StepInputs(
        step=record.policy.step,
        batch=batch,
        rollouts=tuple(rollouts),
        graded=tuple(ref for ref in parents if ref.kind == "graded"),
        datasets=tuple(ref for ref in datasets.values() if ref.kind == "threads"),
    )


def check_accounting(store: ObjectStore, record: CommitRecord) -> list[str]:
    """What is wrong with the accounts of a step, one sentence each; empty when every prompt is accounted for once.

    taken by the data cursor = prompts of the shards; sampled = graded; graded and not empty = trained.
    A batch without rollouts and without a cursor (written by hand) has no accounts to keep.
    """
    try:
        material = step_inputs(store, record)
        if any(ref.kind == "trajectories" for ref in material.rollouts):
            return _EpisodeAccounts(store, record, material).problems()
        if material.rollouts:
            return _Accounts(store, record, material).problems()
        return _completions(store, record, material)
    except (StorageError, KeyError, ValueError) as error:
        return [f"its prompts cannot be counted: {error}"]


def rows_consumed(record: CommitRecord, rows: int) -> int | None:
    """Dataset rows that the cursor passed in this step; None when the step keeps no cursor."""
    before, after = record.request.cursor_in, record.request.cursor_out
    if not before or not after or rows < 1:
        return None
    return (after["epoch"] - before["epoch"]) * rows + after["index"] - before["index"]


def _of_uri(store: ObjectStore, uri: str) -> ArtifactRef:
    key, _, sha256 = uri.partition("#")
    manifest = read_manifest(store, key)
    if manifest.sha256 != sha256:
        raise CorruptArtifact(f"{key} is {manifest.sha256[:12]} now, it was {sha256[:12]} when the step was made")
    return manifest.ref


def _completions(store: ObjectStore, record: CommitRecord, material: StepInputs) -> list[str]:
    """The accounts of a step on given completions."""
    for dataset in material.datasets:
        taken = rows_consumed(record, dataset.rows or 0)
        if taken is not None and taken != material.batch.rows:
            return [f"the cursor passed {taken} rows of {dataset.key}, the batch has {material.batch.rows}"]
    return []


@dataclass
class _Accounts:
    """The accounts of one step of reinforcement learning. A completion is (prompt id, number of the completion)."""

    store: ObjectStore
    record: CommitRecord
    material: StepInputs
    found: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        manifests = [read_manifest(self.store, ref.key) for ref in self.material.rollouts]
        self._check_taken(manifests)
        sampled = {ref.uri: self._rows(ref, _SAMPLED) for ref in self.material.rollouts}
        self._check_sampled(manifests, sampled)
        self._check_trained(self._check_graded(sampled))
        return self.found

    def _rows(self, ref: ArtifactRef, columns: list[str]) -> list[dict[str, Any]]:
        return read_table(self.store, ref, columns).to_pylist()

    def _check_taken(self, manifests: list[Manifest]) -> None:
        prompts = sum(_count(manifest, "prompts") for manifest in manifests)
        for dataset in self.material.datasets:
            taken = rows_consumed(self.record, dataset.rows or 0)
            if taken is not None and taken != prompts:
                self.found.append(f"the cursor passed {taken} rows of {dataset.key}, the shards sampled {prompts}")

    def _rules(self) -> dict[str, Any]:
        """What the batch says that it may lack (tasks.batches.rl.BatchPlan.rules)."""
        rules = read_manifest(self.store, self.material.batch.key).extra.get("rules")
        return rules if isinstance(rules, dict) else {}

    def _sampler_state(self) -> str:
        """Of the policy that must have sampled: the parent, or, of a value model's step, the policy that the batch was
        made for; or the one so many steps before it."""
        parent = self.record.request.parent
        parents = read_manifest(self.store, self.material.batch.key).parents
        made_for = next((uri for uri in parents if uri.startswith("policy:")), parent.uri)  # …/model@step#state
        model, state = made_for.partition("@")[0].rpartition("/")[2], made_for.rpartition("#")[2]
        staleness = int(self._rules().get("max_staleness", 0))
        if staleness:
            chain = Chain(self.store, parent.run, parent.stage, model)
            return chain.policy(max(0, parent.step - staleness)).state
        return parent.state if model == parent.model else state

    def _check_sampled(self, manifests: list[Manifest], sampled: dict[str, list[dict[str, Any]]]) -> None:
        state = self._sampler_state()
        numbers: dict[tuple[int, str], list[int]] = defaultdict(list)
        for manifest in manifests:
            rows = sampled[manifest.ref.uri]
            prompts = _count(manifest, "prompts") - _count(manifest, "dropped")
            if (prompts == 0 and rows) or (prompts and (not rows or len(rows) % prompts)):
                self.found.append(f"{manifest.key} has {len(rows)} completions of {prompts} prompts")
            if any(row["policy_state"] != state for row in rows):
                self.found.append(f"{manifest.key} was sampled by another policy than the one that the step says")
            for row in rows:
                numbers[row["prompt_index"], row["prompt_id"]].append(row["completion"])
        for (_, prompt), completions in numbers.items():
            if sorted(completions) != list(range(len(completions))):
                self.found.append(f"prompt {prompt!r} has the completions {sorted(completions)}, not each number once")

    def _check_graded(self, sampled: dict[str, list[dict[str, Any]]]) -> Counter[tuple[str, int]]:
        """The completions that a batch must have: graded, not empty, and not left out by its rules."""
        rules, teaching = self._rules(), Counter[tuple[str, int]]()
        rewards: dict[str, set[float]] = defaultdict(set)
        by_parent: dict[str, list[ArtifactRef]] = defaultdict(list)
        for ref in self.material.graded:
            for uri in ref.parents:
                by_parent[uri].append(ref)
        for uri, rows in sampled.items():
            refs = by_parent.pop(uri, [])
            if len(refs) != 1:
                self.found.append(f"{uri.partition('#')[0]} was graded {len(refs)} times, expected once")
                continue
            grades = self._rows(refs[0], ["prompt_id", "completion", "status", "reward"])
            if [_completion(grade) for grade in grades] != [_completion(row) for row in rows]:
                self.found.append(f"{refs[0].key} does not grade the completions of {uri.partition('#')[0]}, one each")
                continue
            for row, grade in zip(rows, grades, strict=True):
                if grade["status"] != "ok":
                    continue
                rewards[row["prompt_id"]].add(grade["reward"])
                cut = rules.get("mask_truncated") and row["stop_reason"] == "length"
                if row["completion_ids"] and not cut:
                    teaching[_completion(row)] += 1
        if rules.get("drop_equal_groups"):
            teaching = Counter({name: count for name, count in teaching.items() if len(rewards[name[0]]) > 1})
        self.found.extend(f"{ref.key} grades no shard of this step" for refs in by_parent.values() for ref in refs)
        return teaching

    def _check_trained(self, expected: Counter[tuple[str, int]]) -> None:
        batch = self._rows(self.material.batch, ["group", "completion"])
        trained = Counter((row["group"], row["completion"]) for row in batch)
        for name, odd in (("lacks", expected - trained), ("has, and should not have,", trained - expected)):
            if odd:
                prompt, number = min(odd)
                self.found.append(
                    f"the batch {name} {odd.total()} graded completions, the first is number {number} of {prompt!r}"
                )


class _EpisodeAccounts(_Accounts):
    """The same of a step of episodes: played and graded in one; a segment of an episode is a row."""

    def problems(self) -> list[str]:
        manifests = [read_manifest(self.store, ref.key) for ref in self.material.rollouts]
        self._check_taken(manifests)
        state = self._sampler_state()
        episodes: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
        for manifest in manifests:
            for row in self._rows(manifest.ref, _PLAYED):
                episodes[_completion(row)].append(row)
                if row["policy_state"] != state:
                    self.found.append(f"{manifest.key} was played by another policy than the one that the step says")
                    break
        for (prompt, number), rows in episodes.items():
            if [row["segment"] for row in rows] != list(range(len(rows))):
                self.found.append(f"episode {number} of prompt {prompt!r} has not each of its segments once, in order")
        self._check_numbers(episodes)
        graded = [rows for rows in episodes.values() if any(row["graded_turns"] for row in rows)]
        teaching = (row for rows in graded for row in rows if row["status"] == "ok" and row["turn_tokens"])
        self._check_trained(Counter(map(_completion, teaching)))
        return self.found

    def _check_numbers(self, episodes: Iterable[tuple[str, int]]) -> None:
        numbers: dict[str, list[int]] = defaultdict(list)
        for prompt, number in episodes:
            numbers[prompt].append(number)
        for prompt, found in numbers.items():
            if sorted(found) != list(range(len(found))):
                self.found.append(f"prompt {prompt!r} has the episodes {sorted(found)}, not each number once")


_PLAYED = ["prompt_id", "completion", "segment", "turn_tokens", "graded_turns", "status", "policy_state"]
_SAMPLED = ["prompt_index", "prompt_id", "completion", "completion_ids", "stop_reason", "policy_state"]


def _completion(row: dict[str, Any]) -> tuple[str, int]:
    return row["prompt_id"], row["completion"]


def _count(manifest: Manifest, name: str) -> int:
    value = manifest.extra.get(name)
    if not isinstance(value, int):
        raise SchemaMismatch(f"{manifest.key} does not say how many {name} it has")
    return value
