"""The contract of `engine.protocol.Engine`: invalid requests are refused every time and change nothing."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import BadSpec, PermanentEngineError, SampleTooLong, UnknownPolicy
from engine.models.images import Images, PlacedImage
from engine.protocol import Engine, GenerateRequest, LogprobsRequest, PolicySpec, SamplingParams, TokenSequence
from engine.specs.adapters import FullSpec
from storage.chain.records import Chain, MinibatchPlan, PolicyRef, Root
from storage.errors import StorageError
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from tests.contracts.engine_fixtures import PROMPTS, SCORED, SHORT, EngineFixtures, draw, score
from tests.fixtures.engines import PROVENANCE, commit_batch, new_policy, request_after, row

Ask = Callable[..., Awaitable[Any]]

NO_TEMPERATURES = [0, 1e-320, 1e-3, -1, 1e308, math.inf, math.nan]
"""Logits cannot be divided by 0 or by a number near it. A negative one prefers the least probable token. Infinity makes
all tokens equal."""
SCORED_LOSS = {"advantages": 1.0, "old_logprobs": -5.0, "reference_logprobs": -5.0, "sampler_logprobs": -5.0}


async def refused(kinds: type[Exception] | tuple[type[Exception], ...], ask: Ask, *args: Any, **changes: Any) -> str:
    """The message of the refusal."""
    with pytest.raises(kinds) as caught:
        await ask(*args, **changes)
    return str(caught.value)


async def read(
    call: Ask,
    policy: PolicyRef,
    ids: list[int],
    weights: list[float],
    *,
    images: Images = (),
    temperature: float = 1.0,
) -> None:
    await call(LogprobsRequest(policy, [TokenSequence(ids, weights, images=images)], temperature))


class RefusingContract(EngineFixtures):
    # -- scores ------------------------------------------------------------------------------------------------

    async def test_nonsense_is_not_scored(self, engine: Engine, start: PolicyRef, tiny_folder: Path) -> None:
        ids, weights = [10, 11, 12], [0.0, 1.0, 1.0]
        wrong: dict[str, tuple[list[int], list[float]]] = {
            "3 tokens and 2 weights": (ids, weights[:2]),
            "3 tokens and 4 weights": (ids, [*weights, 1.0]),
            "first token": (ids, [1.0, 1.0, 1.0]),
            "no tokens": ([], []),
            "weight nan": (ids, [0.0, math.nan, 1.0]),
            "weight -1.0": (ids, [0.0, -1.0, 1.0]),
            "weight inf": (ids, [0.0, math.inf, 1.0]),
            "300": ([10, 300, 12], weights),
            "token id": ([10, -1, 12], weights),
        }
        # Language models and scalar models refuse the same sequences.
        valued = await new_policy(engine, tiny_folder, run="valued", trainable=FullSpec(head="scalar"))
        for call, policy in ((engine.logprobs, start), (engine.values, valued)):
            for message, (tokens, given) in wrong.items():
                assert message in await refused(BadSpec, read, call, policy, tokens, given)
            await refused(SampleTooLong, read, call, policy, [10] * 4097, [0.0] * 4097)
            await refused(BadSpec, read, call, policy, ids, weights, images=(PlacedImage(2, 5, b"x"),))
        # Parameters of the request.
        for temperature in NO_TEMPERATURES:
            message = await refused(BadSpec, read, engine.logprobs, start, ids, weights, temperature=temperature)
            assert f"temperature {temperature}" in message
        for tokens in (0, -1, 1 << 40):
            with pytest.raises(BadSpec, match=f"max_tokens={tokens}"):
                await engine.logprobs(LogprobsRequest(start, [SCORED], max_tokens=tokens))
        # The engine still answers.
        assert len(await score(engine, start)) == 3

    # -- completions -------------------------------------------------------------------------------------------

    async def test_nonsense_is_not_drawn(self, engine: Engine, start: PolicyRef) -> None:
        async def ask(seed: Any = 1, images: Any = None, ranks: Any = None, **changes: Any) -> None:
            sampling = SamplingParams(**({"max_new_tokens": 2} | changes))
            await engine.generate(GenerateRequest(start, [[10, 11]], [seed], sampling, ranks, images))

        for temperature in NO_TEMPERATURES[1:]:  # 0 is greedy
            await refused(ValidationError, ask, temperature=temperature)
        for least in (0, 2):
            message = await refused(BadSpec, ask, stop_token_ids=(300,), min_new_tokens=least)
            assert "stop token id 300 is outside 0..258" in message
            await refused(ValidationError, ask, stop_token_ids=(-1,), min_new_tokens=least)
        message = await refused(BadSpec, ask, stop_token_ids=tuple(range(259)), min_new_tokens=2)
        assert "min_new_tokens=2 forbids" in message
        for name, value in (("top_k", 1 << 31), ("top_p", math.nan), ("max_new_tokens", 1 << 40)):
            await refused(ValidationError, ask, **{name: value})
        for seed in (1 << 63, -(1 << 63) - 1, 0.5):
            assert "integer of 64 bits" in await refused(BadSpec, ask, seed)
        for ranks in (0, -1, 1 << 20):
            assert "tensor_parallel" in await refused(BadSpec, ask, ranks=ranks)
        await refused(BadSpec, ask, images=[(), ()])
        await refused(BadSpec, ask, images=[(PlacedImage(1, 5, b"x"),)])
        assert len(await draw(engine, start)) == len(PROMPTS)

    async def test_the_smallest_top_p_keeps_the_most_probable_token(self, engine: Engine, start: PolicyRef) -> None:
        greedy, narrow = SHORT.model_copy(update={"temperature": 0.0}), SamplingParams(top_p=1e-320, max_new_tokens=6)
        expected = [completion.token_ids for completion in await draw(engine, start, greedy)]
        drawn = await draw(engine, start, narrow)
        assert [completion.token_ids for completion in drawn] == expected
        for completion in drawn:
            assert set(completion.logprobs) == {0.0}

    # -- steps -------------------------------------------------------------------------------------------------

    async def test_a_step_that_makes_no_sense_is_refused_and_not_committed(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        batch = commit_batch(store, start, [row([10, 11], [20, 21], **SCORED_LOSS)])

        async def step(**changes: Any) -> None:
            await engine.take_gradient_step(request_after(start, batch, **changes))

        for name in ("clip_high", "importance_cap", "kl_beta", "entropy_coef", "dual_clip"):
            message = await refused(BadSpec, step, loss={"kind": "grpo", name: 1e308})
            assert f"{name}=1e+308: should be less than" in message, message
        for loss in ({"kind": "x"}, {}, {"kind": "dpo", "beta": 1e-300}, {"kind": "mse", "norm_constant": 1e-320}):
            await refused(BadSpec, step, loss=loss)
        for optimizer in ({"lr": 1e30}, {"lr": 1, "eps": 1e-320}, {"lr": 1, "weight_decay": 1e308}, {"lr": math.nan}):
            await refused(ValidationError, step, optimizer=optimizer)
        for temperature in NO_TEMPERATURES:
            await refused(ValidationError, step, temperature=temperature)
        for plan in ({"epochs": 10**18}, {"size": 10**30}, {"shuffle_seed": 10**400}):
            await refused(ValidationError, step, minibatches=plan)
        # The old logprobs of a forward pass are those of a step with one update.
        several = commit_batch(store, start, [row([10, 11], [20, 21], **SCORED_LOSS)] * 2, shard=1)
        for plan in ({"epochs": 2}, {"size": 1}):
            request = request_after(
                start, several, loss={"kind": "grpo"}, old_logprobs="forward", minibatches=MinibatchPlan(**plan)
            )
            message = await refused(BadSpec, engine.take_gradient_step, request)
            assert "old_logprobs='forward' needs a step of one update, and this step has 2" in message
        await refused(ValidationError, step, old_logprobs="x")
        await refused(ValidationError, step, controllers_in={"kl_beta": math.inf})
        await refused(ValidationError, step, cursor_out={"row": 1 << 63})
        await refused(ValidationError, step, max_tokens=1 << 31)
        assert Chain.of(store, start).record(1) is None
        assert len(await score(engine, start)) == 3

    async def test_a_batch_that_is_none_is_refused(
        self, engine: Engine, store: ObjectStore, start: PolicyRef, tiny_folder: Path
    ) -> None:
        model = await engine.import_model(str(tiny_folder), provenance=PROVENANCE)
        checkpoint = await engine.save_checkpoint(start, provenance=PROVENANCE)
        for other in (model, checkpoint, model.model_copy(update={"key": "models/none/x"})):
            with pytest.raises((PermanentEngineError, StorageError)):
                await engine.take_gradient_step(request_after(start, other))
        assert Chain.of(store, start).record(1) is None

    # -- roots -------------------------------------------------------------------------------------------------

    async def test_a_root_that_can_never_work_is_refused_and_does_not_take_the_run_key(
        self, engine: Engine, store: ObjectStore, start: PolicyRef, tiny_folder: Path, scalar_folder: Path
    ) -> None:
        base = await engine.import_model(str(tiny_folder), provenance=PROVENANCE)
        scalar = await engine.import_model(str(scalar_folder), provenance=PROVENANCE)
        checkpoint = await engine.save_checkpoint(start, provenance=PROVENANCE)
        unknown = start.model_copy(update={"step": 1})

        def root(base: ArtifactRef, **changes: Any) -> dict[str, Any]:
            return {"base": base, "base_digest": base.sha256} | changes

        # Trainable parts, then digests, then models, then starts.
        wrong: list[tuple[dict[str, Any], str]] = [
            (root(base, trainable={"kind": "x"}), "kind"),
            (root(base, trainable={"kind": "lora", "rank": 0}), "rank"),
            (root(base, trainable={"kind": "lora", "rank": 1 << 40}), "rank"),
            (root(base, trainable={"kind": "lora", "alpha": 1e308}), "alpha"),
            (root(base, base_digest="0" * 64), "000000000000"),
            (root(base.model_copy(update={"sha256": "0" * 64})), "000000000000"),
            (root(base.model_copy(update={"key": "models/none/0"})), "no model models/none/0"),
            (root(checkpoint), "no model runs/"),
            (root(scalar), "scalar head"),
            ({"base_digest": base.sha256}, "exactly one"),
            (root(base, start=start), "exactly one"),
            ({"start": unknown, "base_digest": unknown.state}, "no committed step 1"),
            ({"start": start, "base_digest": base.sha256}, "base_digest"),
            ({"start": start, "base_digest": start.state, "trainable": {"kind": "lora"}}, "train the same part"),
        ]
        for fields, message in wrong:
            spec = PolicySpec(run="fresh", stage="0-s", model="policy", root=Root(**fields))
            assert message in await refused((BadSpec, UnknownPolicy), engine.create_policy, spec)
        # No refusal has left an object under the run key.
        assert not list(store.list("runs/fresh"))
        policy = await new_policy(engine, tiny_folder, run="fresh")  # the key is free
        assert policy.step == 0

    # -- policies in memory ------------------------------------------------------------------------------------

    async def test_a_step_of_another_state_is_unknown_even_if_that_state_is_in_memory(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        record = await engine.take_gradient_step(request_after(start, commit_batch(store, start)))
        for held in (start, record.policy):
            await score(engine, held)
            await draw(engine, held)
        for state, wrong_step in ((start.state, 1), (start.state, 7), (record.state, 0), (record.state, 7)):
            wrong = start.model_copy(update={"step": wrong_step, "state": state})
            with pytest.raises(UnknownPolicy):
                await score(engine, wrong)
            with pytest.raises(UnknownPolicy):
                await draw(engine, wrong)
            with pytest.raises(UnknownPolicy):
                await engine.values(LogprobsRequest(wrong, [SCORED]))
            with pytest.raises(UnknownPolicy):
                await engine.export_model(wrong, "m", provenance=PROVENANCE)
