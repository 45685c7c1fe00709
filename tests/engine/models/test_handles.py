"""Tests of model handles: their calls become requests to an engine, and they follow the chain of their model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine import workspace as connecting
from engine.errors import BadSpec, NonFiniteGradient, SampleTooLong
from engine.handles import Model, TrainingModel
from engine.protocol import Completion, GenerateRequest
from engine.text.threads import StringThread, TokenizedThread
from storage.chain.records import Chain
from storage.errors import InvalidKey
from storage.store.artifacts import find_artifact
from tests.fixtures.architectures import save_experts
from tests.fixtures.engines import hugging_face_logprobs
from tests.fixtures.spawning import Context, context, language_model
from tests.fixtures.worklog import events

PROMPT = StringThread(turns=[("user", "2+3?")])
ANSWERED = PROMPT.assistant("5")


# -- reading ---------------------------------------------------------------------------------------------------


async def test_generate_appends_an_answer(model: TrainingModel) -> None:
    answered = await model.generate(PROMPT)
    assert [turn.role for turn in answered.turns] == ["user", "assistant"]
    assert answered.turns[0] == PROMPT.turns[0]
    assert len(PROMPT.turns) == 1


async def test_sampled_ids_are_the_engines_for_good(model: TrainingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random byte model samples bytes that are no text: re-tokenising their decoding would change them."""
    requests: list[GenerateRequest] = []
    drawn: list[Completion] = []
    generate = model.engine.generate

    async def spy(request: GenerateRequest, *, epoch: int = 0) -> list[Completion]:
        requests.append(request)
        drawn.extend(await generate(request, epoch=epoch))
        return drawn[-len(request.prompts) :]

    monkeypatch.setattr(model.engine, "generate", spy)
    first = await model.max_gen_len(24).generate_tokens(PROMPT)
    text = (await model.detokenize_thread(first)).last_content()
    assert "\N{REPLACEMENT CHARACTER}" in text  # the premise

    assert first.token_ids == requests[0].prompts[0] + drawn[0].token_ids
    assert first.logprobs == drawn[0].logprobs
    assert sum(weight > 0 for weight in first.weights) == len(drawn[0].token_ids) == first.len_last_turn()

    second = await model.generate_tokens(model.renderer.append(first, "user", "and 4+4?"))
    assert requests[1].prompts[0][: len(first)] == first.token_ids
    assert second.token_ids == requests[1].prompts[0] + drawn[1].token_ids
    assert second.logprobs == drawn[0].logprobs + drawn[1].logprobs


async def test_logprobs_are_those_of_the_trained_tokens(model: TrainingModel, tiny_folder: Path) -> None:
    tokenized = await model.tokenize_thread(ANSWERED)
    ids, images, weights = await model.serialize_tokenized_thread(tokenized)
    assert images is None
    expected = [
        value
        for value, weight in zip(hugging_face_logprobs(tiny_folder, ids), weights[1:], strict=True)
        if weight > 0
    ]
    assert len(expected) == 2  # "5" and the end of the turn
    assert await model.logprobs_per_token(tokenized) == pytest.approx(expected, abs=1e-4)
    assert await model.logprobs(ANSWERED) == pytest.approx(sum(expected), abs=1e-4)


async def test_sampled_logprobs_are_the_trainers(model: TrainingModel) -> None:
    tokenized = await model.generate_tokens(PROMPT)
    assert await model.logprobs_per_token(tokenized) == pytest.approx(tokenized.logprobs, abs=1e-4)


async def test_a_view_scores_at_its_own_temperature(model: TrainingModel, tiny_folder: Path) -> None:
    tokenized = await model.tokenize_thread(ANSWERED)
    logprobs = hugging_face_logprobs(tiny_folder, tokenized.token_ids, temperature=0.5)
    expected = [v for v, weight in zip(logprobs, tokenized.weights[1:], strict=True) if weight > 0]
    warm, cold = await asyncio.gather(
        model.logprobs_per_token(tokenized), model.temperature(0.5).logprobs_per_token(tokenized)
    )
    assert cold == pytest.approx(expected, abs=1e-4)
    assert cold != pytest.approx(warm, abs=1e-2)


# -- views -----------------------------------------------------------------------------------------------------


async def test_views_are_copies(model: TrainingModel) -> None:
    before = model.sampling
    view = model.temperature(0.3).top_p(0.9).top_k(7).max_gen_len(3).min_gen_len(2)
    sampling = view.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.3, 0.9, 7)
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == (3, 2)
    assert model.sampling == before
    assert 2 <= (await view.generate_tokens(PROMPT)).len_last_turn() <= 3
    with pytest.raises(BadSpec, match="temperature"):
        model.temperature(-1)


async def test_a_view_moves_with_its_model(model: TrainingModel) -> None:
    view = model.temperature(0.3)
    view.train_language_modelling(ANSWERED)
    await view.optim_step(1e-3)
    assert (await model.policy()).step == 1 == (await view.policy()).step


async def test_a_seeded_view_repeats_itself_and_a_model_does_not(model: TrainingModel) -> None:
    long = model.max_gen_len(12)
    first, second = await long.generate_tokens(PROMPT), await long.generate_tokens(PROMPT)
    assert first.token_ids != second.token_ids
    seeded = [(await long.seed(7).generate_tokens(PROMPT)).token_ids for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert seeded[0] != (await long.seed(8).generate_tokens(PROMPT)).token_ids


async def test_draws_follow_the_runs_seed_and_not_its_name(tmp_path: Path, tiny_folder: Path) -> None:
    async def drawn(**changes: Any) -> list[int]:
        model = await language_model(context(tmp_path, **changes), tiny_folder, tokens=12)
        return (await model.generate_tokens(PROMPT)).token_ids

    assert await drawn(run="one") == await drawn(run="two")
    assert await drawn(run="one", seed=1) != await drawn(run="two", seed=0)


# -- concurrency -----------------------------------------------------------------------------------------------


async def test_concurrent_calls_are_one_call_of_the_engine(model: TrainingModel, worklog: Path) -> None:
    await model.policy()
    await asyncio.gather(*(model.generate(PROMPT) for _ in range(8)))
    assert [event["completions"] for event in events(worklog, "generate")] == [8]
    await asyncio.gather(model.generate(PROMPT), model.temperature(0.5).generate(PROMPT))
    assert [event["completions"] for event in events(worklog, "generate")] == [8, 1, 1]


async def test_concurrent_first_calls_open_one_stage(model: TrainingModel) -> None:
    await asyncio.gather(*(model.generate(PROMPT) for _ in range(4)))
    assert (await model.policy()).stage == "0-recipe"
    assert (await model.begin_stage("second")).stage == "1-second"


async def test_a_failing_call_fails_for_all_that_joined_it(model: TrainingModel) -> None:
    broken = model.max_gen_len(100_000)
    results = await asyncio.gather(*(broken.generate(PROMPT) for _ in range(2)), return_exceptions=True)
    assert [type(result) for result in results] == [SampleTooLong] * 2
    await model.generate(PROMPT)


# -- training --------------------------------------------------------------------------------------------------


async def test_language_modelling_lowers_the_loss(model: TrainingModel) -> None:
    before = await model.logprobs(ANSWERED)
    losses = []
    for _ in range(4):
        await model.train_language_modelling(ANSWERED)
        losses.append((await model.optim_step(1e-2))["loss"])
    assert losses[0] == pytest.approx(-before / 2, abs=1e-4)  # the mean over two trained tokens
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1
    assert await model.logprobs(ANSWERED) > before + 2


async def grpo_step(model: TrainingModel, *, lr: float = 1e-2) -> tuple[list[TokenizedThread], dict[str, float]]:
    """Four completions of a prompt, the first one rewarded: one round of the documented listing."""
    samples = await asyncio.gather(*(model.generate_tokens(PROMPT) for _ in range(4)))
    logprobs = await asyncio.gather(*(model.logprobs_per_token(sample) for sample in samples))
    rewards = [1.0, 0.0, 0.0, 0.0]
    mean = sum(rewards) / len(rewards)
    for sample, old, reward in zip(samples, logprobs, rewards, strict=True):
        await model.train_grpo(sample, old, old, [reward - mean] * len(old), 0.2, 0.01)
    return samples, await model.optim_step(lr, wd=0.0, max_grad_norm=1.0)


async def test_the_grpo_walk_through(model: TrainingModel) -> None:
    start = await model.policy()
    samples, metrics = await grpo_step(model, lr=1e-3)
    frozen = [sum(sample.logprobs) for sample in samples]
    after = [sum(await model.logprobs_per_token(sample)) for sample in samples]
    assert len({tuple(sample.token_ids) for sample in samples}) == 4
    gained = [new - old for new, old in zip(after, frozen, strict=True)]
    assert gained[0] > 0.1
    assert gained[0] > max(gained[1:]) + 0.1  # the others were pushed down
    tokens = [sample.len_last_turn() for sample in samples]
    # on policy every ratio is 1 and the KL 0: the loss is minus the token mean of the advantages
    expected = -sum(n * a for n, a in zip(tokens, [0.75, -0.25, -0.25, -0.25], strict=True)) / sum(tokens)
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["tokens"] == sum(tokens)
    assert metrics["grad_norm"] > 0
    assert (await model.policy()).step == start.step + 1


async def test_the_likelihood_of_a_text_does_not_depend_on_how_the_view_samples(model: TrainingModel) -> None:
    view = model.temperature(0.5)
    view.train_language_modelling(PROMPT.assistant("4"))
    await view.optim_step(lr=1e-3)
    record = view.chain_of(await view.policy()).record(1)
    assert record is not None and record.request.temperature == 1.0


async def test_the_order_of_train_calls_changes_nothing(tmp_path: Path, tiny_folder: Path) -> None:
    threads = [PROMPT.assistant(str(digit)) for digit in range(4)]
    states = []
    for run, order in (("one", threads), ("two", threads[::-1])):
        model = await language_model(context(tmp_path, run=run), tiny_folder)
        for thread in order:
            model.train_language_modelling(thread)
        await model.optim_step(1e-3)
        states.append((await model.policy()).state)
    assert states[0] == states[1]


async def test_one_step_has_one_loss(model: TrainingModel) -> None:
    sample = await model.generate_tokens(PROMPT)
    flat = [0.0] * sample.len_last_turn()
    model.train_language_modelling(ANSWERED)
    with pytest.raises(BadSpec, match=r"cross_entropy.*grpo"):
        model.train_grpo(sample, flat, flat, flat, 0.2, 0.0)
    await model.optim_step(1e-3)
    model.train_grpo(sample, flat, flat, flat, 0.2, 0.0)  # after a step, another loss is free to come


async def test_a_step_without_calls_is_refused(model: TrainingModel) -> None:
    with pytest.raises(BadSpec, match="without a train_"):
        await model.optim_step(1e-3)
    model.train_language_modelling(ANSWERED)
    await model.optim_step(1e-3)
    with pytest.raises(BadSpec, match="without a train_"):
        await model.optim_step(1e-3)
    assert (await model.policy()).step == 1


async def test_a_step_that_failed_for_its_samples_does_not_poison_the_next(model: TrainingModel) -> None:
    sample = await model.generate_tokens(PROMPT)
    length = sample.len_last_turn()
    model.train_grpo(sample, [-1e4] * length, [0.0] * length, [-1e30] * length, 0.2, 0.0)  # ρ = e^10000
    with pytest.raises(NonFiniteGradient):
        await model.optim_step(1e-3)
    model.train_language_modelling(ANSWERED)
    assert (await model.optim_step(1e-3))["tokens"] == 2
    assert (await model.policy()).step == 1


async def test_numbers_that_are_not_finite_are_refused_and_leave_the_tape_as_it_was(model: TrainingModel) -> None:
    sample = await model.generate_tokens(PROMPT)
    fine, bad = [0.0] * sample.len_last_turn(), [float("nan")] * sample.len_last_turn()
    with pytest.raises(BadSpec, match="advantages"):
        model.train_grpo(sample, fine, fine, bad, 0.2, 0.0)
    model.train_language_modelling(ANSWERED)
    assert (await model.optim_step(1e-3))["tokens"] == 2


# -- saving ----------------------------------------------------------------------------------------------------


async def test_a_saved_model_is_found_under_its_key(ctx: Context, model: TrainingModel) -> None:
    model.train_language_modelling(ANSWERED)
    await model.optim_step(1e-2)
    key = await model.save("mine", inference_only=False)
    assert await model.save("mine") == key
    name, _, version = key.partition("@")
    assert (name, version[:7]) == ("mine", "000001-")
    policy = await model.policy()
    store = ctx.workspace.open_store()
    assert find_artifact(store, f"runs/r/stages/{policy.stage}/checkpoints/policy/000001") is not None

    again = await Model(key).to_builder(ctx).spawn_inference("again")
    assert await again.logprobs(ANSWERED) == await model.logprobs(ANSWERED)


async def test_saving_safely_never_takes_a_name_that_is_taken(model: TrainingModel) -> None:
    first = await model.save_model_safely("mine")
    assert first.startswith("mine@")
    assert await model.save_model_safely("mine") == first
    model.train_language_modelling(ANSWERED)
    await model.optim_step(1e-2)
    assert (await model.save_model_safely("mine")).startswith("mine-2@")


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 200, "a b", "mine\n"])
async def test_names_that_are_paths_are_refused(
    ctx: Context, model: TrainingModel, tiny_folder: Path, name: str
) -> None:
    with pytest.raises(BadSpec):
        await model.save(name)
    with pytest.raises(InvalidKey):
        await Model(str(tiny_folder)).to_builder(ctx).spawn_train(name)


# -- resuming --------------------------------------------------------------------------------------------------


async def test_a_new_handle_of_the_run_stands_at_the_head(
    ctx: Context, model: TrainingModel, tiny_folder: Path
) -> None:
    for _ in range(2):
        await grpo_step(model)
    connecting.connect.cache_clear()  # as a new process
    resumed = await language_model(ctx, tiny_folder)
    assert await resumed.policy() == await model.policy()
    assert (await resumed.policy()).step == 2
    assert await resumed.logprobs(ANSWERED) == await model.logprobs(ANSWERED)
    resumed.train_language_modelling(ANSWERED)
    await resumed.optim_step(1e-3)
    assert list(Chain.of(ctx.workspace.open_store(), await resumed.policy()).steps()) == [1, 2, 3]


async def test_a_second_stage_starts_where_the_first_ended(
    ctx: Context, model: TrainingModel, tiny_folder: Path
) -> None:
    base = await model.logprobs(ANSWERED)
    await model.begin_stage("sft")
    model.train_language_modelling(ANSWERED)
    await model.optim_step(1e-2)
    first = await model.policy()
    trained = await model.logprobs(ANSWERED)
    second = await model.begin_stage("rl")
    assert (second.stage[2:], second.step) == ("rl", 0)
    assert await model.policy() == second
    assert await model.logprobs(ANSWERED) == trained != base
    root = Chain.of(ctx.workspace.open_store(), second).root()
    assert root is not None and root.start == first


async def test_a_frozen_copy_stays(model: TrainingModel) -> None:
    before = await model.logprobs(ANSWERED)
    frozen = await model.clone_inf()
    model.train_language_modelling(ANSWERED)
    await model.optim_step(1e-2)
    assert await frozen.logprobs(ANSWERED) == before != await model.logprobs(ANSWERED)
    assert not hasattr(frozen, "optim_step")


async def test_tensor_parallel_is_asked_of_the_sampler(ctx: Context, tiny_folder: Path) -> None:
    """The torch sampler runs on one device: 1 is what it does anyway, 2 is refused by it, not by the handle."""
    builder = Model(str(tiny_folder)).to_builder(ctx, tokens_to_generate=2)
    clone = await (await builder.tp(1).spawn_train("two")).clone_inf()
    for handle in (await builder.tp(1).spawn_inference("one"), clone):
        assert len((await handle.generate(PROMPT)).turns) == 2
    with pytest.raises(BadSpec, match=r"tp\(2\).*vllm"):
        await (await builder.tp(2).spawn_inference("three")).generate(PROMPT)
    with pytest.raises(BadSpec, match=r"tp\(0\)"):
        builder.tp(0)


async def test_training_a_mixture_of_experts_warns_that_it_has_no_router_loss(
    ctx: Context, tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    builder = Model(str(save_experts(tiny_folder, tmp_path / "experts"))).to_builder(ctx)
    await builder.spawn_inference("judge")
    await Model(str(tiny_folder)).to_builder(ctx).spawn_train("dense")
    assert "router loss" not in caplog.text
    await builder.spawn_train("policy")
    assert "is a mixture of experts (num_local_experts=4), and is trained without its router loss" in caplog.text
