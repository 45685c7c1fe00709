"""Batches of preferences and of ratings: their rows, what they are compared with, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import BadSpec
from engine.handles import Model, TrainingModel
from engine.specs.engine import LocalEngineSpec
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.store.artifacts import ArtifactRef, Provenance, read_manifest
from storage.store.tables import read_table
from tasks.batches import pairs
from tasks.batches.pairs import pair_batch, rating_batch
from tasks.datasets.load import load_dataset
from tasks.datasets.spec import DatasetUse, InlineDataset, InlinePairs

ASKED = [StringThread().user(str(n)) for n in range(3)]
PAIRS = [(asked.assistant("yes"), asked.assistant("never")) for asked in ASKED]
RATED = [asked.assistant("yes").with_metadata({"res": n / 2}) for n, asked in enumerate(ASKED)]


class Stand:
    """A model at policy 0 of a stage."""

    def __init__(self, workspace: Workspace, model: TrainingModel) -> None:
        self.workspace, self.model = workspace, model
        self.store = workspace.open_store()

    def load(self, spec: InlinePairs | InlineDataset, kind: DatasetUse) -> ArtifactRef:
        return load_dataset(self.store, spec, kind=kind, provenance=self.workspace.provenance).ref

    async def pairs(self, rows: list[int], *, compared: bool = True, step: int = 0) -> ArtifactRef:
        dataset, policy = self.load(InlinePairs.of(PAIRS), "preference"), await self.model.policy()
        reference = policy if compared else None
        return await pair_batch(
            self.workspace, policy, self.model.base, dataset, rows, reference=reference, step=step
        )

    async def ratings(self, threads: list[StringThread], kind: DatasetUse = "rating") -> ArtifactRef:
        dataset, policy = self.load(InlineDataset.of(threads), kind), await self.model.policy()
        rows = list(range(len(threads)))
        return await rating_batch(self.workspace, policy, self.model.base, dataset, rows, step=0)

    def rows(self, ref: ArtifactRef) -> list[dict[str, Any]]:
        return read_table(self.store, ref).to_pylist()


@pytest.fixture
async def stand(tmp_path: Path, tiny_folder: Path) -> Stand:
    provenance = Provenance(code_version="abc", config_digest="0" * 64, seed=7)
    engine = LocalEngineSpec(deterministic=True, threads=1)

    class Here:
        workspace = Workspace(store=str(tmp_path / "data"), engine=engine, run="run", provenance=provenance)

    model = await Model(str(tiny_folder)).to_builder(Here()).spawn_train("policy")
    await model.begin_stage("dpo")
    return Stand(Here.workspace, model)


async def test_a_pair_is_two_rows_of_one_group_with_the_references_logprobs(stand: Stand) -> None:
    rows = stand.rows(await stand.pairs([2, 0]))
    assert [(row["completion"], row["preferred"]) for row in rows] == [(0, True), (1, False)] * 2
    assert rows[0]["group"] == rows[1]["group"] != rows[2]["group"] == rows[3]["group"]
    for row, thread in zip(rows, [*PAIRS[2], *PAIRS[0]], strict=True):
        tokenized = await stand.model.tokenize_thread(thread)
        ids, _, weights = await stand.model.serialize_tokenized_thread(tokenized)
        assert (row["token_ids"], row["weights"]) == (ids, weights)
        own = await stand.model.logprobs_per_token(tokenized)
        assert row["reference_logprobs"] == pytest.approx(own, abs=1e-5)
        assert len(own) == len(thread.last_content()) + 1  # bytes are tokens, and the turn ends
        assert row["advantages"] is None and row["returns"] is None


async def test_it_is_prepared_once(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await stand.pairs([0, 1])

    async def computed_again(*_: object) -> None:
        raise AssertionError("the reference was asked again")

    monkeypatch.setattr(pairs, "_add_reference_logprobs", computed_again)
    assert await stand.pairs([0, 1]) == first
    assert read_manifest(stand.store, first.key).extra["prompts"] == 2


async def test_the_same_pair_twice_in_a_batch_is_two_pairs(stand: Stand) -> None:
    groups = [row["group"] for row in stand.rows(await stand.pairs([1, 1, 0]))]
    assert groups[0] == groups[1] and groups[2] == groups[3] == f"{groups[0]}/1" and len(set(groups)) == 3


async def test_rows_do_not_depend_on_how_many_are_scored_at_a_time(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stand.rows(await stand.pairs([0, 1, 2]))
    monkeypatch.setattr(pairs, "CHUNK_TOKENS", 1)
    parts = stand.rows(await stand.pairs([0, 1, 2], step=1))
    for row, part in zip(whole, parts, strict=True):
        assert row["reference_logprobs"] == pytest.approx(part["reference_logprobs"], abs=1e-5)
        assert {**row, "reference_logprobs": None} == {**part, "reference_logprobs": None}


async def test_for_a_scalar_model_only_an_end_is_trained_after_the_whole_conversation(stand: Stand) -> None:
    rows = stand.rows(await stand.pairs([0], compared=False))
    for row, thread in zip(rows, PAIRS[0], strict=True):
        ids, _, _ = await stand.model.serialize_tokenized_thread(await stand.model.tokenize_thread(thread))
        assert row["token_ids"][:-1] == ids
        assert row["weights"] == [0.0] * len(ids) + [1.0]
        assert row["reference_logprobs"] is None


async def test_a_rating_is_the_return_of_its_row(stand: Stand) -> None:
    rows = stand.rows(await stand.ratings(RATED))
    assert [row["returns"] for row in rows] == [[0.0], [0.5], [1.0]]
    assert all(row["weights"][-1] == 1.0 and sum(row["weights"]) == 1.0 for row in rows)
    assert len({row["group"] for row in rows}) == 3


async def test_a_conversation_without_a_rating_is_named(stand: Stand) -> None:
    unrated = [RATED[0], RATED[1].with_metadata({"res": "high"})]
    with pytest.raises(BadSpec, match=r"row 2 of inline has metadata res='high'; expected a number"):
        await stand.ratings(unrated, kind="completion")
