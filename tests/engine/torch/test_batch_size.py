"""`max_batch_size` of a spawned model: the longest sample, and how much is packed into one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import BadSpec, SampleTooLong
from engine.handles import Model
from engine.specs.engine import LocalEngineSpec
from engine.text.threads import StringThread
from storage.chain.records import Chain
from tests.fixtures.spawning import context, own_engines

PROMPT = StringThread(turns=[("user", "2+3?")])
ANSWERED = PROMPT.assistant("5")
SMALL = LocalEngineSpec(deterministic=True, threads=1, max_tokens_per_forward=64)


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    with own_engines():
        yield


async def test_too_long_for_the_model_as_spawned_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    ctx = context(tmp_path, engine=SMALL)
    builder = Model(str(tiny_folder)).to_builder(ctx)
    with pytest.raises(BadSpec, match="max_batch_size=0; give a number of tokens"):
        await builder.spawn_train("policy", 0)
    model = await builder.spawn_train("policy", 32)
    with pytest.raises(SampleTooLong, match="32"):
        model.train_language_modelling(PROMPT.assistant("x" * 40))
    model.train_language_modelling(ANSWERED)
    assert (await model.optim_step(1e-3))["tokens"] == 2


async def test_the_engine_follows_a_larger_max_batch_size(tmp_path: Path, tiny_folder: Path) -> None:
    long = PROMPT.assistant("x" * 150)
    builder = Model(str(tiny_folder)).to_builder(context(tmp_path, engine=SMALL))
    model = await builder.spawn_train("policy", 200)
    assert model.max_batch_size == 200
    reference = await model.clone_inf()
    tokenized = await model.tokenize_thread(long)
    assert await reference.logprobs_per_token(tokenized) == await model.logprobs_per_token(tokenized)
    model.train_language_modelling(long)
    assert (await model.optim_step(1e-3))["tokens"] == 151  # and the end of the turn

    # a model without a limit of its own has the engine's
    limited_by_engine = await builder.spawn_train("other")
    with pytest.raises(SampleTooLong, match="64"):
        limited_by_engine.train_language_modelling(long)
    with pytest.raises(SampleTooLong, match="64"):
        await limited_by_engine.logprobs_per_token(tokenized)


async def test_forward_passes_are_packed_within_max_batch_size(tmp_path: Path, tiny_folder: Path) -> None:
    answers = [PROMPT.assistant(letter * 20) for letter in "abcd"]
    records = {}
    for size in (None, 64):
        ctx = context(tmp_path, run=f"size-{size}")
        model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy", size)
        for answer in answers:
            model.train_language_modelling(answer)
        await model.optim_step(1e-3)
        policy = await model.policy()
        record = Chain.of(ctx.workspace.open_store(), policy).record(1)
        assert record is not None
        records[size] = record
    assert records[None].numerics.micro_batches == 1 and records[64].numerics.micro_batches > 1
    assert set(records[64].numerics.max_tokens_of_updates) == {64}
    assert records[64].state == records[None].state  # the packing is no part of what a step means
    assert records[64].metrics["loss"] == pytest.approx(records[None].metrics["loss"], rel=1e-5)
