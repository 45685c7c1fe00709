"""Checks that each committed step accounts for all its prompts: those taken, sampled, graded and trained must agree.

The checks read the artifacts that the batch of a step descends from, so they also hold for steps that a fork shares
with another run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from storage.chain.records import Chain, CommitRecord, PolicyRef
from storage.errors import CorruptArtifact, SchemaMismatch, StorageError
from storage.serialization import Frozen
from storage.store.artifacts import ArtifactRef, Manifest, read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import read_table

Row = dict[str, Any]
CompletionId = tuple[str, int]
"""(prompt id, index of the completion among those of its prompt)"""


class StepInputs(Frozen):
    """The artifacts from which one committed step was made."""

    step: int = Field(ge=1)
    """Step of the policy that was made."""
    batch: ArtifactRef
    rollouts: tuple[ArtifactRef, ...]
    """Completions or episodes."""
    graded: tuple[ArtifactRef, ...]
    datasets: tuple[ArtifactRef, ...]


def step_inputs(store: ObjectStore, record: CommitRecord) -> StepInputs:
    """Finds the artifacts from which a step was made, by the parents in their manifests.

    Raises ObjectNotFound, and CorruptArtifact if one of them is another artifact now.
    """
    # the parents of the batch: rollouts and grades, or a dataset where nothing was sampled
    batch = _artifact_of_uri(store, f"{record.request.batch.key}#{record.request.batch.sha256}")
    batch_parents = [_artifact_of_uri(store, uri) for uri in batch.parents if not uri.startswith("policy:")]
    rollouts = [ref for ref in batch_parents if ref.kind == "rollouts"]
    graded = [ref for ref in batch_parents if ref.kind == "graded"]

    # the parents of the rollouts: datasets
    rollout_parents: dict[str, ArtifactRef] = {}
    for ref in rollouts:
        for uri in ref.parents:
            if not uri.startswith("policy:") and uri not in rollout_parents:
                rollout_parents[uri] = _artifact_of_uri(store, uri)
    sources = {ref.uri: ref for ref in (*rollout_parents.values(), *batch_parents)}
    return StepInputs(
        step=record.policy.step,
        batch=batch,
        rollouts=tuple(rollouts),
        graded=tuple(graded),
        datasets=tuple(ref for ref in sources.values() if ref.kind == "threads"),
    )


def check_accounting(store: ObjectStore, record: CommitRecord) -> list[str]:
    """Returns the problems with the prompts of a step, one sentence each. Empty if each prompt is accounted for once.

    The data cursor must pass as many rows as the shards have prompts, not counting prompts that were sampled a second
    time because no completion got a grade. Every completion must be graded, and every graded completion that is not
    empty must be in the batch. A batch without rollouts and without a cursor has nothing to
    check.
    """
    try:
        inputs = step_inputs(store, record)
        if inputs.rollouts:
            return _Accounting(store, record, inputs).check()
        return _check_dataset_rows(store, record, inputs)
    except (StorageError, KeyError, ValueError) as error:
        return [f"its prompts cannot be counted: {error}"]


def rows_consumed(record: CommitRecord, rows: int) -> int | None:
    """Returns how many rows of a dataset of `rows` rows the cursor passed in this step. None without a cursor."""
    before, after = record.request.cursor_in, record.request.cursor_out
    if not before or not after or rows < 1:
        return None
    # the cursor of a mixture counts what was drawn of each part
    drawn = [name for name in after if name.startswith("drawn_")]
    if drawn:
        return sum(after[name] - before.get(name, 0) for name in drawn)
    # an epoch may leave out rows of the dataset
    rows = after.get("rows", rows)
    return (after["epoch"] - before["epoch"]) * rows + after["index"] - before["index"]


def _artifact_of_uri(store: ObjectStore, uri: str) -> ArtifactRef:
    key, _, sha256 = uri.partition("#")
    manifest = read_manifest(store, key)
    if manifest.sha256 != sha256:
        raise CorruptArtifact(f"{key} is {manifest.sha256[:12]} now, it was {sha256[:12]} when the step was made")
    return manifest.ref


def _check_dataset_rows(store: ObjectStore, record: CommitRecord, inputs: StepInputs) -> list[str]:
    """Checks a step that was trained on completions of the dataset."""
    for dataset in inputs.datasets:
        consumed = rows_consumed(record, dataset.rows or 0)
        if consumed is None:
            continue
        # a batch that left nothing out has no such count
        manifest = read_manifest(store, inputs.batch.key)
        dropped = _count(manifest, "dropped") if "dropped" in manifest.extra else 0
        if consumed != (inputs.batch.rows or 0) + dropped:
            return [
                f"the cursor passed {consumed} rows of {dataset.key}, the batch has {inputs.batch.rows} and left out "
                f"{dropped}"
            ]
    return []


@dataclass
class _Accounting:
    """Checks a step on rollouts: completions with their grades, or episodes that their environment graded."""

    store: ObjectStore
    record: CommitRecord
    inputs: StepInputs
    problems: list[str] = field(default_factory=list)
    with_grades: set[str] = field(default_factory=set)
    """URIs of the rollouts of which a trajectory got a grade."""

    def check(self) -> list[str]:
        manifests = self._manifests()
        self._check_taken(manifests)
        columns = _COMPLETION_COLUMNS if self.inputs.graded else _EPISODE_COLUMNS
        sampled = {ref.uri: self._rows(ref, columns) for ref in self.inputs.rollouts}
        self._check_sampled(manifests, sampled)
        self._check_trained(self._expected_rows(sampled))
        self._check_resampled(manifests)
        return self.problems

    def _rows(self, ref: ArtifactRef, columns: list[str]) -> list[Row]:
        return read_table(self.store, ref, columns).to_pylist()

    def _manifests(self) -> list[Manifest]:
        return [read_manifest(self.store, ref.key) for ref in self.inputs.rollouts]

    def _check_taken(self, manifests: list[Manifest]) -> None:
        # a step without a grade samples its prompts a second time, and the cursor passes them once
        prompts = sum(_count(manifest, "prompts") for manifest in manifests if not manifest.extra.get("resampled"))
        # a cursor that passed more rows than the shards have prompts has lost some
        for dataset in self.inputs.datasets:
            consumed = rows_consumed(self.record, dataset.rows or 0)
            if consumed is not None and consumed != prompts:
                self.problems.append(
                    f"the cursor passed {consumed} rows of {dataset.key}, the shards sampled {prompts}"
                )

    def _rules(self) -> dict[str, Any]:
        """Returns the rules by which completions may be left out of the batch (tasks.batches.rl.BatchPlan.rules)."""
        rules = read_manifest(self.store, self.inputs.batch.key).extra.get("rules")
        return rules if isinstance(rules, dict) else {}

    def _sampler_states(self) -> list[str]:
        """Returns the states of the policies that may have sampled the rollouts, the oldest first.

        It is the parent of the step, or the policy `max_staleness` steps before; if weights were updated in flight, it
        is each policy from that one to the parent. For the step of a value model, it is the policy that the batch was
        made for.
        """
        parent = self.record.request.parent
        batch_parents = read_manifest(self.store, self.inputs.batch.key).parents
        policy_uri = next((uri for uri in batch_parents if uri.startswith("policy:")), parent.uri)
        policy = PolicyRef.from_uri(policy_uri)

        rules = self._rules()
        staleness = int(rules.get("max_staleness", 0))
        if staleness:
            chain = Chain(self.store, parent.run, parent.stage, policy.model)
            oldest = max(0, parent.step - staleness)
            newest = parent.step if rules.get("weight_updates") == "in_flight" else oldest
            return [chain.policy(step).state for step in range(oldest, newest + 1)]
        return [parent.state if policy.model == parent.model else policy.state]

    def _check_trained(self, expected: Counter[CompletionId]) -> None:
        # compare with multiplicity: a completion may be neither missing nor doubled
        batch = self._rows(self.inputs.batch, ["group", "completion"])
        trained = Counter((row["group"], row["completion"]) for row in batch)
        for verb, differing in (("lacks", expected - trained), ("has, and should not have,", trained - expected)):
            if differing:
                prompt, index = min(differing)
                self.problems.append(
                    f"the batch {verb} {differing.total()} graded completions, the first is number {index} of "
                    f"{prompt!r}"
                )

    def _check_sampled(self, manifests: list[Manifest], sampled: dict[str, list[Row]]) -> None:
        states = self._sampler_states()
        indices: dict[tuple[int, str], list[int]] = defaultdict(list)
        for manifest in manifests:
            rows = sampled[manifest.ref.uri]
            # each shard has the same number of completions of each prompt; single episodes may have been dropped
            if self.inputs.graded:
                prompts = _count(manifest, "prompts") - _count(manifest, "dropped")
                if (prompts == 0 and rows) or (prompts and (not rows or len(rows) % prompts)):
                    self.problems.append(f"{manifest.key} has {len(rows)} completions of {prompts} prompts")
            # all were sampled from the right policy
            if not all(_is_sampled_by(row, states) for row in rows):
                self.problems.append(f"{manifest.key} was sampled by another policy than the one that the step says")
            # the segments of a trajectory are adjacent and in order
            expected: tuple[CompletionId, int] | None = None
            for row in rows:
                if row["segment"] == 0:
                    indices[row["prompt_index"], row["prompt_id"]].append(row["completion"])
                elif (_completion_id(row), row["segment"]) != expected:
                    self.problems.append(
                        f"completion {row['completion']} of prompt {row['prompt_id']!r} does not have each of its "
                        "segments once, in order"
                    )
                expected = (_completion_id(row), row["segment"] + 1)
        # each index of a prompt's completions occurs once
        for (_, prompt), completions in indices.items():
            if sorted(completions) != list(range(len(completions))):
                self.problems.append(
                    f"prompt {prompt!r} has the completions {sorted(completions)}, not each number once"
                )

    def _expected_rows(self, sampled: dict[str, list[Row]]) -> Counter[CompletionId]:
        """Checks the grades, and returns the rows that the batch must have: of graded trajectories, not empty, and not
        left out by its rules."""
        rules = self._rules()
        expected = Counter[CompletionId]()
        rewards: dict[str, set[float]] = defaultdict(set)
        grades_by_shard = self._grades_of_graders(sampled) if self.inputs.graded else _grades_of_environment(sampled)
        for uri, grades in grades_by_shard.items():
            for row in sampled[uri]:
                name = _completion_id(row)
                if name not in grades:
                    continue
                self.with_grades.add(uri)
                rewards[row["prompt_id"]].add(grades[name])
                is_masked = rules.get("mask_truncated") and "length" in row["stop_reasons"]
                if sum(row["turn_tokens"]) and not is_masked:
                    expected[name] += 1
        if rules.get("drop_equal_groups"):
            expected = Counter({name: count for name, count in expected.items() if len(rewards[name[0]]) > 1})
        return expected

    def _grades_of_graders(self, sampled: dict[str, list[Row]]) -> dict[str, dict[CompletionId, float]]:
        """The grade of each graded completion of each shard. Each shard must have one table of grades, with one row for
        each completion."""
        graded_by_parent: dict[str, list[ArtifactRef]] = defaultdict(list)
        for ref in self.inputs.graded:
            for uri in ref.parents:
                graded_by_parent[uri].append(ref)
        grades_by_shard = {}
        for uri, rows in sampled.items():
            refs = graded_by_parent.pop(uri, [])
            if len(refs) != 1:
                self.problems.append(f"{uri.partition('#')[0]} was graded {len(refs)} times, expected once")
                continue
            grades = self._rows(refs[0], ["prompt_id", "completion", "status", "reward"])
            if list(map(_completion_id, grades)) != list(map(_completion_id, rows)):
                self.problems.append(
                    f"{refs[0].key} does not grade the completions of {uri.partition('#')[0]}, one each"
                )
                continue
            grades_by_shard[uri] = {_completion_id(row): row["reward"] for row in grades if row["status"] == "ok"}
        for refs in graded_by_parent.values():
            self.problems.extend(f"{ref.key} grades no shard of this step" for ref in refs)
        return grades_by_shard

    def _check_resampled(self, manifests: list[Manifest]) -> None:
        """Checks that prompts were sampled a second time only where no completion of the first time got a grade, and
        that these were all prompts of the step."""
        again = [manifest for manifest in manifests if manifest.extra.get("resampled")]
        first = [manifest for manifest in manifests if not manifest.extra.get("resampled")]
        if not again:
            return
        if any(manifest.ref.uri in self.with_grades for manifest in first):
            self.problems.append(f"{again[0].key} samples prompts again although their completions have grades")
        counts = [sum(_count(manifest, "prompts") for manifest in part) for part in (first, again)]
        if counts[0] != counts[1]:
            self.problems.append(f"{counts[0]} prompts were sampled, and {counts[1]} of them a second time")


def _grades_of_environment(sampled: dict[str, list[Row]]) -> dict[str, dict[CompletionId, float]]:
    """The sum of the grades of each graded episode of each shard."""
    grades_by_shard: dict[str, dict[CompletionId, float]] = {}
    for uri, rows in sampled.items():
        grades: dict[CompletionId, float] = defaultdict(float)
        for row in rows:
            if row["status"] == "ok" and row["grades"]:
                grades[_completion_id(row)] += sum(row["grades"])
        grades_by_shard[uri] = grades
    return grades_by_shard


def _is_sampled_by(row: Row, states: list[str]) -> bool:
    """Whether all tokens of the row come from these policies, later ones from the same policy or a later one."""
    parts = row.get("policy_states")
    if parts is None:
        return row["policy_state"] in states
    if not set(parts) <= set(states) or sum(row["policy_tokens"]) != sum(row["turn_tokens"]):
        return False
    return [states.index(state) for state in parts] == sorted(states.index(state) for state in parts)


_COMPLETION_COLUMNS = [
    "prompt_index", "prompt_id", "completion", "segment", "turn_tokens", "stop_reasons", "policy_state",
    "policy_states", "policy_tokens",
]  # fmt: skip
_EPISODE_COLUMNS = [*_COMPLETION_COLUMNS, "grades", "status"]


def _completion_id(row: Row) -> CompletionId:
    return row["prompt_id"], row["completion"]


def _count(manifest: Manifest, name: str) -> int:
    value = manifest.extra.get(name)
    if not isinstance(value, int):
        raise SchemaMismatch(f"{manifest.key} does not say how many {name} it has")
    return value
