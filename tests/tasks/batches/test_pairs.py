"""Tests of the batches of preferences and ratings: their rows, their reference logprobs, and the errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import BadSpec
from engine.handles import TrainingModel
from engine.losses.pairs import KTOSpec
from engine.text.threads import StringThread
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef, read_manifest
from tasks.batches import pairs
from tasks.datasets.spec import DatasetUse, InlineDataset, InlinePairs
from tests.fixtures.runs.batch_workspace import BatchWorkspace, spawned_model

PROMPTS = [StringThread().user(str(n)) for n in range(3)]
PAIRS = [(prompt.assistant("yes"), prompt.assistant("never")) for prompt in PROMPTS]
RATED = [prompt.assistant("yes").with_metadata({"res": n / 2}) for n, prompt in enumerate(PROMPTS)]


Spawned = tuple[BatchWorkspace, TrainingModel]


@pytest.fixture
async def spawned(tmp_path: Path, tiny_folder: Path) -> Spawned:
    return await spawned_model(tmp_path, tiny_folder, "dpo")


@pytest.fixture
def batches(spawned: Spawned) -> BatchWorkspace:
    return spawned[0]


async def pairs_of(batches: BatchWorkspace, rows: list[int], **options: Any) -> ArtifactRef:
    """The batch of these rows of PAIRS."""
    return await batches.pairs(batches.load(InlinePairs.of(PAIRS), "preference"), rows, **options)


async def ratings_of(
    batches: BatchWorkspace, threads: list[StringThread], use: DatasetUse = "rating"
) -> ArtifactRef:
    """The batch of all these conversations."""
    dataset = batches.load(InlineDataset.of(threads), use)
    return await batches.ratings(dataset, list(range(len(threads))))


async def test_a_pair_is_two_rows_of_one_group_with_reference_logprobs(spawned: Spawned) -> None:
    batches, model = spawned
    rows = batches.rows(await pairs_of(batches, [2, 0]))
    assert [(row["completion"], row["preferred"]) for row in rows] == [(0, True), (1, False)] * 2
    assert rows[0]["group"] == rows[1]["group"] != rows[2]["group"] == rows[3]["group"]
    for row, thread in zip(rows, [*PAIRS[2], *PAIRS[0]], strict=True):
        tokenized = await model.tokenize_thread(thread)
        ids, _, weights = await model.serialize_tokenized_thread(tokenized)
        assert (row["token_ids"], row["loss_mask"]) == (ids, weights)
        logprobs = await model.logprobs_per_token(tokenized)
        assert row["reference_logprobs"] == pytest.approx(logprobs, abs=1e-5)
        assert len(logprobs) == len(thread.last_content()) + 1  # bytes are tokens, and the turn ends
        assert row["advantages"] is None and row["returns"] is None


async def test_it_is_prepared_once(batches: BatchWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await pairs_of(batches, [0, 1])

    async def computed_again(*_: object) -> None:
        raise AssertionError("the reference was asked again")

    monkeypatch.setattr(pairs, "add_reference_logprobs", computed_again)
    assert await pairs_of(batches, [0, 1]) == first
    assert read_manifest(batches.store, first.key).extra["prompts"] == 2


async def test_the_same_pair_twice_in_a_batch_is_two_pairs(batches: BatchWorkspace) -> None:
    groups = [row["group"] for row in batches.rows(await pairs_of(batches, [1, 1, 0]))]
    assert groups[0] == groups[1] and groups[2] == groups[3] == f"{groups[0]}/1" and len(set(groups)) == 3


async def test_rows_do_not_depend_on_how_many_are_scored_at_a_time(
    batches: BatchWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = batches.rows(await pairs_of(batches, [0, 1, 2]))
    monkeypatch.setattr(pairs, "CHUNK_TOKENS", 1)
    parts = batches.rows(await pairs_of(batches, [0, 1, 2], step=1))
    for row, part in zip(whole, parts, strict=True):
        assert row["reference_logprobs"] == pytest.approx(part["reference_logprobs"], abs=1e-5)
        assert {**row, "reference_logprobs": None} == {**part, "reference_logprobs": None}


async def test_for_a_scalar_model_only_the_end_is_trained(spawned: Spawned) -> None:
    batches, model = spawned
    rows = batches.rows(await pairs_of(batches, [0], compared=False))
    for row, thread in zip(rows, PAIRS[0], strict=True):
        ids, _, _ = await model.serialize_tokenized_thread(await model.tokenize_thread(thread))
        assert row["token_ids"][:-1] == ids
        assert row["loss_mask"] == [0.0] * len(ids) + [1.0]
        assert row["reference_logprobs"] is None


async def test_a_rating_is_the_return_of_its_row(batches: BatchWorkspace) -> None:
    rows = batches.rows(await ratings_of(batches, RATED))
    assert [row["returns"] for row in rows] == [[0.0], [0.5], [1.0]]
    assert all(row["loss_mask"][-1] == 1.0 and sum(row["loss_mask"]) == 1.0 for row in rows)
    assert len({row["group"] for row in rows}) == 3


async def test_a_conversation_without_a_rating_is_named(batches: BatchWorkspace) -> None:
    unrated = [RATED[0], RATED[1].with_metadata({"res": "high"})]
    with pytest.raises(BadSpec, match=r"row 2 of inline has metadata res='high'; expected a number"):
        await ratings_of(batches, unrated, use="completion")


async def test_labelled_answers_have_the_kl_baseline_of_mismatched_pairs(
    batches: BatchWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt of each row with the completion of the row before it, at most as long as the longest row. A mean
    below 0 counts as 0."""
    answers = ["yes", "never", "no"]
    threads = []
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        threads.append(prompt.assistant(answer).with_metadata({"res": number % 2}))
    dataset = batches.load(InlineDataset.of(threads), "rating")
    plain = batches.rows(await batches.labels(dataset, [0, 1, 2]))
    assert [row["preferred"] for row in plain] == [False, True, False]
    assert [row["kl_baseline"] for row in plain] == [0.0] * 3  # the policy is the reference
    assert all(len(row["reference_logprobs"]) == len(a) + 1 for row, a in zip(plain, answers, strict=True))

    rows = [{"token_ids": np.array(row["token_ids"]), "loss_mask": np.array(row["loss_mask"])} for row in plain]
    longest = max(len(row["token_ids"]) for row in rows)
    mismatched: list[dict[str, Any]] = []
    of_reference = [-4.0, -9.0]
    reference = batches.policy.model_copy(update={"step": 7})

    async def scored(_: object, policy: PolicyRef, chunk: list[dict[str, Any]]) -> list[list[float]]:
        mismatched.extend(chunk)
        return [of_reference if policy == reference else [-1.0, -9.0]] * len(chunk)

    monkeypatch.setattr(pairs, "_logprobs", scored)
    for second, baseline in ((-9.0, 3.0), (-90.0, 84.0), (-6.0, 0.0), (-2.0, 0.0)):
        of_reference[1] = second
        units = [[dict(row)] for row in rows]
        done = await pairs.with_kl_baseline(batches.workspace, batches.policy, reference, KTOSpec(), units)
        assert [row["kl_baseline"] for (row,) in done] == [baseline] * 3
    for number, (row, other) in enumerate(zip(rows, [rows[2], *rows[:2]], strict=True)):
        start, begin = int(row["loss_mask"].argmax()), int(other["loss_mask"].argmax())
        expected = [*row["token_ids"][:start], *other["token_ids"][begin:]][:longest]
        assert mismatched[number]["token_ids"].tolist() == expected
        mask = [False] * start + other["loss_mask"][begin:].tolist()
        assert mismatched[number]["loss_mask"].tolist() == mask[:longest]


async def test_what_has_no_label_or_no_mismatched_pair_is_refused(batches: BatchWorkspace) -> None:
    with pytest.raises(BadSpec, match=r"row 2 of inline has the label 0.5; expected true or 1"):
        await batches.labels(batches.load(InlineDataset.of(RATED), "rating"), [0, 1])
    with pytest.raises(BadSpec, match="two rows whose completions are swapped, and was given one and 1 rows"):
        await batches.labels(batches.load(InlineDataset.of(RATED[:1]), "rating"), [0])
