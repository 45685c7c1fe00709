"""Handles of models with a scalar head: scores are those of the plain transformers model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.errors import BadSpec
from engine.handles import Model, ModelBuilder
from engine.models.scores import last_token_sequence
from engine.specs.adapters import FullSpec, LoraSpec
from engine.text.threads import StringThread
from storage.store.objects import open_store
from tests.fixtures.engines import commit_batch, hugging_face_scores, request_after
from tests.fixtures.spawning import Context

ASKED = StringThread(turns=[("user", "2+3?")])
ANSWERED = ASKED.assistant("5").with_weight_all_assistant_turns()


def builder(ctx: Context, folder: Path | str) -> ModelBuilder:
    return Model(str(folder)).to_builder(ctx)


def test_the_whole_of_a_sequence_is_scored_at_its_last_token() -> None:
    sequence = last_token_sequence([5, 6, 7], end=2)
    assert (sequence.token_ids.tolist(), sequence.loss_mask.tolist()) == ([5, 6, 7, 2], [False, False, False, True])


def test_a_scalar_head_stays_whatever_is_trained(ctx: Context) -> None:
    plain = builder(ctx, "m")
    assert plain.trainable == FullSpec()
    assert plain.into_scoring_model().trainable == FullSpec(head="scalar")
    adapter = LoraSpec(rank=4, alpha=8.0, head="scalar")
    assert plain.into_scoring_model().with_adapter(rank=4, alpha=8.0).trainable == adapter
    assert plain.with_adapter(rank=4, alpha=8.0).into_scoring_model().trainable == adapter
    assert plain.into_scoring_model().training(FullSpec()).trainable == FullSpec(head="scalar")


async def test_scores_are_those_of_the_transformers_model(ctx: Context, scalar_folder: Path) -> None:
    model = await builder(ctx, scalar_folder).into_scoring_model().spawn_inference("reward-model")
    tokenized = await model.tokenize_thread(ANSWERED)
    ids, _, weights = await model.serialize_tokenized_thread(tokenized)
    expected = hugging_face_scores(scalar_folder, ids)
    trained = [place for place, weight in enumerate(weights) if weight > 0]
    assert 0 < len(trained) < len(ids) - 1
    assert await model.score(tokenized) == pytest.approx([expected[place - 1] for place in trained], abs=1e-5)
    assert await model.score_last_token(ANSWERED) == pytest.approx(expected[-1], abs=1e-5)
    prompt = await model.tokenize_thread(ASKED)
    prompt_ids, _, _ = await model.serialize_tokenized_thread(prompt)
    last, same, of_prompt = await asyncio.gather(
        model.score_last_token(ANSWERED), model.score_last_token(tokenized), model.score_last_token(prompt)
    )
    assert last == same == await model.score_last_token(ANSWERED)  # whatever it is computed with
    assert of_prompt == pytest.approx(hugging_face_scores(scalar_folder, prompt_ids)[-1], abs=1e-5)


async def test_a_scoring_model_is_trained_saved_and_spawned_again(ctx: Context, tiny_folder: Path) -> None:
    model = await builder(ctx, tiny_folder).into_scoring_model().spawn_train("value", init_seed=3)
    before = await model.score_last_token(ANSWERED)
    policy = await model.policy()
    ids, _, _ = await model.serialize_tokenized_thread(await model.tokenize_thread(ANSWERED))
    sequence = last_token_sequence(ids, end=2)
    columns = {"token_ids": sequence.token_ids, "loss_mask": sequence.loss_mask, "returns": [before + 1.0]}
    store = open_store(ctx.workspace.store)
    row = {"group": "", "completion": 0, **columns}
    empty = dict.fromkeys(("advantages", "old_logprobs", "reference_logprobs", "sampler_logprobs", "reward"))
    batch = commit_batch(store, policy, [empty | row])
    await model.take_step(request_after(policy, batch, lr=3e-4, loss={"kind": "mse"}))
    after = await model.score_last_token(ANSWERED)
    assert after > before + 0.01
    frozen = await model.clone_inf()
    assert await frozen.score_last_token(ANSWERED) == after
    key = await model.save("critic")
    again = await builder(ctx, key).into_scoring_model().spawn_inference("again")
    assert await again.score_last_token(ANSWERED) == pytest.approx(after, abs=1e-6)


async def test_what_has_no_such_head_is_refused_before_anything_loads(
    ctx: Context, tiny_folder: Path, scalar_folder: Path
) -> None:
    with pytest.raises(BadSpec, match="a new head with random weights"):
        await builder(ctx, tiny_folder).into_scoring_model().spawn_inference("reward-model")
    for spawn in (builder(ctx, scalar_folder).spawn_inference, builder(ctx, scalar_folder).spawn_train):
        with pytest.raises(BadSpec, match=r"scalar head.*into_scoring_model"):
            await spawn("policy")
    language = await builder(ctx, tiny_folder).spawn_inference("policy")
    with pytest.raises(BadSpec, match="into_scoring_model"):
        await language.score_last_token(ANSWERED)
    scoring = await builder(ctx, scalar_folder).into_scoring_model().spawn_inference("scoring")
    with pytest.raises(BadSpec, match="no logprobs"):
        await scoring.logprobs(ANSWERED)
    with pytest.raises(BadSpec, match="draws no tokens"):
        await scoring.generate(ASKED)
