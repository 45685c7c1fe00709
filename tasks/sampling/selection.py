"""Chooses the completions that a round of rejection sampling trains on, and commits them as a dataset."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from engine.errors import PermanentEngineError
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.serialization import canonical_json, canonical_text, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact
from storage.store.tables import TableWriter, read_table, table_schema
from tasks.datasets.load import ID_CHARACTERS, LoadedDataset, thread_id
from tasks.datasets.repetition_counter import RepetitionCounter
from tasks.plans import KeepRule
from tasks.reports.clock import timed
from tasks.sampling.completions import answered_threads
from tasks.task_runs import durable_task


class NothingKept(PermanentEngineError):
    """No completion of a round of rejection sampling is good enough to be trained on."""


class Candidate(NamedTuple):
    """A graded completion."""

    reward: float
    answer: str
    """What the grader extracted from it, or else its whole text."""
    place: tuple[int, int]
    """Its shard and its row there."""


def keep_best(candidates: Iterable[Candidate], rule: KeepRule) -> list[Candidate]:
    """The completions of one prompt that are kept, the best first. Of equal rewards, the first sampled is better."""
    ranked = sorted(candidates, key=lambda candidate: (-candidate.reward, candidate.place))
    if rule.kind != "top":
        ranked = [candidate for candidate in ranked if candidate.reward >= rule.min_reward]
    if rule.kind == "distinct":
        first_of: dict[str, Candidate] = {}
        for candidate in ranked:
            first_of.setdefault(candidate.answer, candidate)
        ranked = list(first_of.values())
    return ranked[: rule.per_prompt]


@durable_task("prepare", "keep-{name}")
def keep_completions(
    workspace: Workspace,
    name: str,
    dataset: ArtifactRef,
    rollouts: Sequence[ArtifactRef],
    graded: Sequence[ArtifactRef],
    rule: KeepRule,
) -> LoadedDataset:
    """The conversations of the completions that `rule` keeps, as the dataset `name`, prompt by prompt.

    The metadata of a row has, besides that of its prompt, `rollout`: the table of rollouts that it comes from, by its
    key in the run, its row there, and its reward. Only the completion is trained. Raises NothingKept.
    """
    store = workspace.open_store()
    version = digest(canonical_json([rule.model_dump(), *(ref.sha256 for ref in (*rollouts, *graded))]))
    key = keys.dataset(name, version[:ID_CHARACTERS])
    known = find_artifact(store, key)
    if known is not None:
        return LoadedDataset(ref=known, rows=known.rows or 0)
    with timed("storage"):
        kept = _kept_by_shard(workspace, rollouts, graded, rule)
        sampled = sum(ref.rows or 0 for ref in rollouts)
        if not kept:
            least = "" if rule.kind == "top" else f" of at least {rule.min_reward:g}"
            raise NothingKept(
                f"{name}: none of {sampled} completions got a reward{least}, so there is nothing to train on; lower "
                "algorithm.min_reward, sample more completions_per_sample, or fine-tune on examples first (sft)"
            )
        with TableWriter("threads") as writer, RepetitionCounter() as counter:
            for shard in sorted(kept):
                writer.write(_rows(workspace, rollouts[shard], kept[shard], counter, writer.rows))
            ref = writer.commit(
                store,
                key,
                parents=[*rollouts, *graded, dataset],
                provenance=workspace.provenance,
                extra={"use": "completion", "source": name, "sampled": sampled},
            )
    return LoadedDataset(ref=ref, rows=writer.rows, new=True)


def _kept_by_shard(
    workspace: Workspace, rollouts: Sequence[ArtifactRef], graded: Sequence[ArtifactRef], rule: KeepRule
) -> dict[int, list[Candidate]]:
    """Shard -> its completions that are kept, in their order."""
    store = workspace.open_store()
    of_prompt: dict[int, list[Candidate]] = defaultdict(list)
    for shard, (texts, grades) in enumerate(zip(rollouts, graded, strict=True)):
        rows = read_table(store, grades, ["prompt_index", "reward", "answer"]).to_pylist()
        # a digest of the text takes the place of an answer that the grader does not extract, and takes less memory
        distinct = _texts(workspace, texts) if rule.kind == "distinct" else itertools.repeat("", len(rows))
        for number, (row, text) in enumerate(zip(rows, distinct, strict=True)):
            if row["reward"] is not None:
                answer = digest(text) if row["answer"] is None else row["answer"]
                of_prompt[row["prompt_index"]].append(Candidate(row["reward"], answer, (shard, number)))
    kept: dict[int, list[Candidate]] = defaultdict(list)
    for candidates in of_prompt.values():
        for candidate in keep_best(candidates, rule):
            kept[candidate.place[0]].append(candidate)
    return {shard: sorted(of_shard, key=lambda candidate: candidate.place) for shard, of_shard in kept.items()}


def _texts(workspace: Workspace, rollouts: ArtifactRef) -> Iterator[str]:
    return iter(read_table(workspace.open_store(), rollouts, ["text"]).column("text").to_pylist())


def _rows(
    workspace: Workspace, rollouts: ArtifactRef, kept: Sequence[Candidate], counter: RepetitionCounter, first: int
) -> pa.Table:
    """The rows of the dataset that come from one shard."""
    table = read_table(workspace.open_store(), rollouts, ["text", "thread"])
    chosen: list[dict[str, Any]] = table.take([candidate.place[1] for candidate in kept]).to_pylist()
    rows: list[dict[str, Any]] = []
    for thread, candidate in zip(answered_threads(chosen), kept, strict=True):
        # without the name of the run, so that equal runs have equal rows, and so equal chains
        table_in_run = "stages/" + rollouts.key.partition("/stages/")[2]
        origin = {"table": table_in_run, "row": candidate.place[1], "reward": candidate.reward}
        metadata = thread.metadata | {"rollout": origin}
        # the turns of the prompt are not trained
        weights = [0.0] * (len(thread.turns) - 1) + [1.0]
        text = StringThread(thread.turns, metadata, weights, thread.tools).to_json()
        row = {"index": first + len(rows), "id": thread_id(text), "thread": text}
        rows.append(row | {"metadata": canonical_text(metadata)})
    for row, times in zip(rows, counter.add_all([str(row["id"]) for row in rows]), strict=True):
        row["id"] = f"{row['id']}#{times}" if times else row["id"]
    return pa.Table.from_pylist(rows, schema=table_schema("threads"))
