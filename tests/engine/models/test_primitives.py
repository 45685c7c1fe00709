"""Tests of every `train_*`: the loss that `optim_step` reports follows the formula over logprobs and scores read before
the step."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import BadSpec, EngineUnreachable, SampleTooLong, UnsupportedFragment
from engine.handles import Model, TrainingModel
from engine.text.threads import StringThread, TokenizedThread
from tests.fixtures.spawning import Context, context, language_model, scoring_model

PROMPT = StringThread(turns=[("user", "2+3?")])
GOOD, BAD = PROMPT.assistant("5"), PROMPT.assistant("seven")


@pytest.fixture
async def scorer(ctx: Context, tiny_folder: Path) -> TrainingModel:
    return await scoring_model(ctx, tiny_folder)


async def two_samples(model: TrainingModel) -> tuple[list[TokenizedThread], list[list[float]]]:
    """Two texts of different lengths, and their logprobs."""
    samples = [await model.tokenize_thread(GOOD), await model.tokenize_thread(BAD)]
    return samples, [await model.logprobs_per_token(sample) for sample in samples]


def shifted(logprobs: list[float], by: float) -> list[float]:
    return [value + by for value in logprobs]


# -- policies --------------------------------------------------------------------------------------------------


async def test_ppo_is_clipped_per_token_and_a_mean_over_tokens(model: TrainingModel) -> None:
    samples, logprobs = await two_samples(model)
    model.train_ppo(samples[0], shifted(logprobs[0], -0.5), [1.0] * len(logprobs[0]), 0.2)  # ratio e^0.5, clipped
    model.train_ppo(samples[1], shifted(logprobs[1], 0.1), -2.0, 0.2)  # ratio e^-0.1, within
    loss = (await model.optim_step(1e-4))["loss"]
    lengths = [len(values) for values in logprobs]
    expected = (lengths[0] * -1.2 + lengths[1] * 2.0 * math.exp(-0.1)) / sum(lengths)
    assert loss == pytest.approx(expected, abs=1e-5)


async def test_grpo_adds_the_kl_to_the_reference(model: TrainingModel) -> None:
    samples, logprobs = await two_samples(model)
    for sample, own in zip(samples, logprobs, strict=True):
        model.train_grpo(sample, own, shifted(own, 0.3), [0.0] * len(own), 0.2, 0.5)
    loss = (await model.optim_step(1e-4))["loss"]
    assert loss == pytest.approx(0.5 * (math.exp(0.3) - 0.3 - 1), abs=1e-5)


async def test_gspo_has_one_ratio_per_sequence_and_is_a_mean_over_sequences(model: TrainingModel) -> None:
    samples, logprobs = await two_samples(model)
    model.train_gspo(samples[0], shifted(logprobs[0], -0.5), logprobs[0], 1.0, 0.5, 0.3, 0.0)  # above 1 + right
    drifts = [0.2 if place % 2 else -0.1 for place in range(len(logprobs[1]))]
    old = [value - drift for value, drift in zip(logprobs[1], drifts, strict=True)]
    model.train_gspo(samples[1], old, logprobs[1], [-1.0], 0.5, 0.3, 0.0)  # a list of the sequence's one advantage
    loss = (await model.optim_step(1e-4))["loss"]
    ratio = math.exp(sum(drifts) / len(drifts))
    assert loss == pytest.approx((-1.3 + ratio) / 2, abs=1e-5)


async def test_dpo_of_a_policy_that_is_its_reference_is_ln_2_and_then_falls(model: TrainingModel) -> None:
    reference = await model.clone_inf()
    sums = await reference.logprobs(GOOD), await reference.logprobs(BAD)
    per_token = [await reference.logprobs_per_token(await model.tokenize_thread(thread)) for thread in (GOOD, BAD)]
    model.train_dpo(GOOD, BAD, *sums, 0.1)
    model.train_dpo(GOOD, BAD, *per_token, 0.1)  # the same pair, its reference per token
    first = await model.optim_step(1e-3)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)

    margin = (await model.logprobs(GOOD) - sums[0]) - (await model.logprobs(BAD) - sums[1])
    assert margin > 0.1
    model.train_dpo(GOOD, BAD, *sums, 0.5)
    second = await model.optim_step(0.0)
    assert second["loss"] == pytest.approx(math.log1p(math.exp(-0.5 * margin)), abs=1e-5)


async def test_an_adapter_is_trained_against_its_frozen_copy(ctx: Context, tiny_folder: Path) -> None:
    builder = Model(str(tiny_folder)).to_builder(ctx).with_adapter(rank=4, alpha=8.0)
    model = await builder.spawn_train("policy")
    reference = await model.clone_inf()
    sums = await reference.logprobs(GOOD), await reference.logprobs(BAD)
    losses = []
    for _ in range(3):
        model.train_dpo(GOOD, BAD, *sums, 0.1)
        losses.append((await model.optim_step(1e-2))["loss"])
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.01
    assert (await reference.logprobs(GOOD), await reference.logprobs(BAD)) == sums


# -- tangents --------------------------------------------------------------------------------------------------


async def descend(model: TrainingModel, sample: TokenizedThread, tangents: list[float]) -> None:
    """The documented way from a gradient per trained token to a step."""
    tokens, patches, weights = await model.serialize_tokenized_thread(sample)
    targets = np.array(weights[1:])
    full = np.zeros_like(targets, dtype=np.float32)
    full[targets > 0] = tangents
    await model.train_tangents(tokens[:-1], patches, full.tolist(), tokens[1:])


@pytest.mark.parametrize("kind", ["language_modelling", "grpo", "dpo"])
async def test_tangents_of_a_loss_are_its_primitive(tmp_path: Path, tiny_folder: Path, kind: str) -> None:
    async def spawned(run: str) -> TrainingModel:
        return await language_model(context(tmp_path, run=run), tiny_folder)

    built_in, by_hand = await spawned("one"), await spawned("two")
    samples, logprobs = await two_samples(built_in)
    old, reference = [shifted(own, -0.1) for own in logprobs], [shifted(own, 0.2) for own in logprobs]
    advantages, count = [1.0, -0.5], sum(map(len, logprobs))
    current = [torch.tensor(own, dtype=torch.float64, requires_grad=True) for own in logprobs]
    # The primitive gets the samples, and autograd gets the formula over the same logprobs.
    if kind == "language_modelling":
        for thread in (GOOD, BAD):
            built_in.train_language_modelling(thread)
        loss = -torch.cat(current).sum() / count
    elif kind == "grpo":
        loss = torch.zeros(())
        for at, sample in enumerate(samples):
            built_in.train_grpo(sample, old[at], reference[at], advantages[at], 0.2, 0.1)
            ratio = (current[at] - torch.tensor(old[at])).exp()
            policy = torch.minimum(ratio * advantages[at], ratio.clamp(0.8, 1.2) * advantages[at])
            gap = torch.tensor(reference[at]) - current[at]
            loss = loss + (0.1 * (gap.exp() - gap - 1) - policy).sum() / count
    else:
        built_in.train_dpo(GOOD, BAD, sum(reference[0]), sum(old[1]), 0.3)
        lead = (current[0].sum() - sum(reference[0])) - (current[1].sum() - sum(old[1]))
        loss = -torch.nn.functional.logsigmoid(0.3 * lead)
    # The gradients of the formula by the logprobs are the tangents.
    loss.backward()
    for sample, leaf in zip(samples, current, strict=True):
        assert leaf.grad is not None
        await descend(by_hand, sample, leaf.grad.tolist())
    # Both models have taken the same step.
    built_in_metrics, by_hand_metrics = await built_in.optim_step(1e-3), await by_hand.optim_step(1e-3)
    assert built_in_metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert by_hand_metrics["grad_norm"] == pytest.approx(built_in_metrics["grad_norm"], rel=1e-4)
    moved = [await built_in.logprobs(thread) for thread in (GOOD, BAD)]
    assert [await by_hand.logprobs(thread) for thread in (GOOD, BAD)] == pytest.approx(moved, abs=1e-3)


async def test_a_step_along_tangents_descends_the_loss(model: TrainingModel) -> None:
    """A loss that no primitive has: the squared distance of each logprob from -1."""
    sample = await model.tokenize_thread(BAD)
    seen = []
    for _ in range(5):
        logprobs = torch.tensor(await model.logprobs_per_token(sample), requires_grad=True)
        loss = (logprobs + 1).square().mean()
        loss.backward()
        assert logprobs.grad is not None
        seen.append(float(loss))
        await descend(model, sample, logprobs.grad.tolist())
        await model.optim_step(3e-3)
    assert seen == sorted(seen, reverse=True) and seen[-1] < seen[0] / 2


async def test_tangents_that_are_no_sequence_or_hold_images_are_refused(model: TrainingModel) -> None:
    with pytest.raises(UnsupportedFragment, match="text only"):
        model.train_tangents([1, 2], [[0.0]], [0.1, 0.1], [2, 3])
    for inputs, targets in (([1, 2], [3, 4]), ([1, 2, 3], [2, 3]), ([], [])):
        with pytest.raises(BadSpec, match=r"tokens\[:-1\]"):
            model.train_tangents(inputs, None, [0.1] * len(targets), targets)
    with pytest.raises(BadSpec, match="tangents has 1"):
        model.train_tangents([1, 2], None, [0.1], [2, 3])
    before = await model.logprobs(GOOD)
    model.train_tangents([1, 2], None, [0.0, 0.0], [2, 3])  # no gradient is no error
    assert (await model.optim_step(1e-3))["grad_norm"] == 0
    assert await model.logprobs(GOOD) == before


# -- scalar models ---------------------------------------------------------------------------------------------


async def test_mse_is_of_the_score_at_the_last_token(scorer: TrainingModel) -> None:
    scores = [await scorer.score_last_token(thread) for thread in (GOOD, BAD)]
    scorer.train_mse(await scorer.tokenize_thread(GOOD), 2.0)
    scorer.train_mse(BAD, -1.0)
    metrics = await scorer.optim_step(1e-3)
    assert metrics["loss"] == pytest.approx(((scores[0] - 2) ** 2 + (scores[1] + 1) ** 2) / 2, abs=1e-4)
    assert await scorer.score_last_token(GOOD) > scores[0]


async def test_values_are_fitted_per_token_and_within_a_trust_region(scorer: TrainingModel) -> None:
    sample = await scorer.tokenize_thread(BAD)
    values = np.array(await scorer.score(sample))
    targets = np.linspace(-1, 1, len(values))
    scorer.train_mse_per_token(sample, targets)
    assert (await scorer.optim_step(0.0))["loss"] == pytest.approx(np.square(values - targets).mean(), abs=1e-5)

    old = values - 0.5  # every value has left its old one by more than the clip
    scorer.train_trust_region_mse(sample, old.tolist(), targets.tolist(), 0.2)
    free, bound = np.square(values - targets), np.square(old + 0.2 - targets)
    assert (await scorer.optim_step(0.0))["loss"] == pytest.approx(np.maximum(free, bound).mean(), abs=1e-5)


async def test_ranking_is_of_last_scores_and_lifts_the_preferred_one(scorer: TrainingModel) -> None:
    lead = await scorer.score_last_token(GOOD) - await scorer.score_last_token(BAD)
    scorer.train_ranking(GOOD, BAD)
    assert (await scorer.optim_step(1e-3))["loss"] == pytest.approx(math.log1p(math.exp(-lead)), abs=1e-4)
    assert await scorer.score_last_token(GOOD) - await scorer.score_last_token(BAD) > lead


# -- refusals --------------------------------------------------------------------------------------------------


async def test_a_model_without_the_head_that_a_loss_reads_is_refused_at_the_call(
    model: TrainingModel, scorer: TrainingModel
) -> None:
    with pytest.raises(BadSpec, match=r"mse.*into_scoring_model"):
        model.train_mse(GOOD, 1.0)
    with pytest.raises(BadSpec, match=r"cross_entropy.*language head"):
        scorer.train_language_modelling(GOOD)


async def test_what_a_loss_cannot_be_is_refused_at_the_call(model: TrainingModel) -> None:
    sample, nothing = await model.tokenize_thread(GOOD), [0.0, 0.0]
    with pytest.raises(BadSpec, match=r"grpo: clip_low=-1\.0"):
        model.train_ppo(sample, nothing, nothing, -1.0)
    with pytest.raises(BadSpec, match=r"dpo: beta=0\.0"):
        model.train_dpo(GOOD, BAD, -1.0, -1.0, 0.0)
    with pytest.raises(BadSpec, match="old_logprobs has 1 numbers for 2"):
        model.train_ppo(sample, [0.0], nothing, 0.2)
    with pytest.raises(SampleTooLong):
        model.train_dpo(GOOD, PROMPT.assistant("x" * 9000), -1.0, -1.0, 0.1)
    with pytest.raises(BadSpec, match="without a train_"):
        await model.optim_step(1e-3)


# -- once ------------------------------------------------------------------------------------------------------


async def test_calls_made_while_a_step_is_taken_belong_to_the_next(
    model: TrainingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking, go_on = asyncio.Event(), asyncio.Event()
    take = model.engine.take_gradient_step

    async def held(*args: Any, **named: Any) -> Any:
        taking.set()
        await go_on.wait()
        return await take(*args, **named)

    monkeypatch.setattr(model.engine, "take_gradient_step", held)
    model.train_language_modelling(GOOD)
    step = asyncio.create_task(model.optim_step(1e-3))
    await taking.wait()
    model.train_language_modelling(BAD)
    model.train_language_modelling(BAD)
    go_on.set()
    first = await step
    second = await model.optim_step(1e-3)
    short, long = [len(own) for own in (await two_samples(model))[1]]
    assert (first["tokens"], second["tokens"]) == (short, 2 * long)


async def test_two_steps_at_once_are_one_and_a_refusal(model: TrainingModel) -> None:
    model.train_language_modelling(GOOD)
    first, second = await asyncio.gather(model.optim_step(1e-3), model.optim_step(1e-3), return_exceptions=True)
    assert isinstance(first, dict) and isinstance(second, BadSpec)
    assert (await model.policy()).step == 1


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_a_step_that_failed_on_the_way_can_be_asked_for_again(
    model: TrainingModel, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    take = model.engine.take_gradient_step

    async def cut(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(model.engine, "take_gradient_step", take)
        if lost == "answer":
            await take(*args, **named)
        raise EngineUnreachable("cut")

    monkeypatch.setattr(model.engine, "take_gradient_step", cut)
    model.train_language_modelling(GOOD)
    with pytest.raises(EngineUnreachable):
        await model.optim_step(1e-3)
    assert (await model.policy()).step == 0
    await model.optim_step(1e-3)
    assert list(model.chain_of(await model.policy()).steps()) == [1]
