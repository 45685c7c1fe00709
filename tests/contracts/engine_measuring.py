"""The contract of `engine.protocol.Engine`: measuring a loss of a committed batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import BadSpec
from engine.protocol import Engine, LogprobsRequest, MeasureRequest, TokenSequence
from engine.specs.adapters import FullSpec
from storage.chain.records import PolicyRef
from storage.store.objects import ObjectStore
from tests.contracts.engine_fixtures import EngineFixtures
from tests.fixtures.engines import commit_batch, new_policy, request_after, row

UP, DOWN = ([10, 11, 12], [20, 21, 22]), ([10, 11, 12], [50, 51, 52, 53])
"""(prompt, trained tokens)."""
FREE = {"kind": "grpo", "kl_beta": 0.0}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cross_entropy": ({"kind": "cross_entropy"}, {}),
    "grpo": ({"kind": "grpo", "clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.3}, {"reference_logprobs": -5.0}),
    "gspo": ({"kind": "gspo", "kl_beta": 0.0, "importance_cap": 2.0}, {"sampler_logprobs": -5.2}),
    "entropy": (FREE | {"entropy_coef": 0.1, "terms_norm": "token_sum"}, {}),
    "forward_kl": ({"kind": "forward_kl"}, {}),
    "jsd": ({"kind": "jsd", "beta": 0.3, "norm": "sequence_mean"}, {}),
    "dpo": ({"kind": "dpo", "beta": 0.5}, {"reference_logprobs": -5.0}),
    "simpo": ({"kind": "simpo"}, {}),
    "orpo": ({"kind": "orpo"}, {}),
    "kto": ({"kind": "kto"}, {"reference_logprobs": -5.0}),
    "mse": ({"kind": "mse"}, {"returns": 1.0}),
    "ranking": ({"kind": "ranking"}, {}),
}
SCALAR = ("mse", "ranking")
PAIRS = ("dpo", "simpo", "orpo", "ranking")


def rows_of(name: str) -> list[dict[str, Any]]:
    """Two rows of one group with every column that the loss needs."""
    columns = LOSSES[name][1]
    if name not in SCALAR:
        columns = columns | {"old_logprobs": -5.1, "advantages": 1.0}
    if name in ("dpo", "simpo", "orpo"):
        columns = LOSSES[name][1]
    up, down = row(*UP, group="g", **columns), row(*DOWN, group="g", **columns)
    if LOSSES[name][0]["kind"] in PAIRS:
        return [up | {"preferred": True}, down | {"preferred": False}]
    if name == "kto":
        return [up | {"preferred": True, "kl_baseline": 0.2}, down | {"preferred": False, "kl_baseline": 0.2}]
    if name in ("forward_kl", "jsd"):
        for line, tokens in ((up, UP[1]), (down, DOWN[1])):
            line["teacher_top_ids"] = [index for token in tokens for index in (token, 7)]
            line["teacher_top_logprobs"] = [-0.5, -2.0] * len(tokens)
    if "advantages" in columns:
        down["advantages"] = [-0.5] * len(DOWN[1])
    return [up, down]


class MeasuringContract(EngineFixtures):
    @pytest.mark.parametrize("name", LOSSES)
    async def test_a_loss_is_that_of_a_step_on_the_batch_and_nothing_changes(
        self, engine: Engine, store: ObjectStore, tiny_folder: Path, name: str
    ) -> None:
        loss, rows = LOSSES[name][0], rows_of(name)
        trainable = FullSpec(head="scalar" if name in SCALAR else "lm")
        policy = await new_policy(engine, tiny_folder, trainable=trainable, init_seed=7)
        batch = commit_batch(store, policy, rows)
        request = MeasureRequest(policy=policy, batch=batch, loss=loss, temperature=0.7)
        measured = await engine.measure(request)
        assert await engine.measure(request) == measured

        step = request_after(policy, batch, loss=loss, temperature=0.7)
        metrics = (await engine.take_gradient_step(step)).metrics
        of_a_gradient = {name: metrics.pop(name, None) for name in ("grad_norm", "informative_fraction")}
        assert of_a_gradient["grad_norm"] > 0
        assert measured.metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        assert await engine.measure(request) == measured  # of the policy before the step

        pairwise = loss["kind"] in PAIRS
        assert measured.tokens == ((7,) if pairwise else (3, 4))
        assert (measured.margins is None) != pairwise
        if pairwise:
            assert measured.losses == (pytest.approx(measured.metrics["loss"]),)

    async def test_the_losses_of_rows_are_in_their_order_and_those_without_trained_tokens_are_0(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        nothing = row([*UP[0], *UP[1]], [], group="")
        batch = commit_batch(store, start, [row(*DOWN, group="z"), nothing, row(*UP, group="a")])
        request = MeasureRequest(policy=start, batch=batch, loss={"kind": "cross_entropy"})
        measured = await engine.measure(request)
        assert measured.tokens == (4, 0, 3)
        for trained, loss in ((DOWN, measured.losses[0]), (UP, measured.losses[2])):
            mask = [0.0] * len(trained[0]) + [1.0] * len(trained[1])
            sequence = TokenSequence([*trained[0], *trained[1]], mask)
            (logprobs,) = await engine.logprobs(LogprobsRequest(start, [sequence]))
            assert loss == pytest.approx(-sum(logprobs), rel=1e-5)
        assert measured.losses[1] == 0
        assert measured.metrics["loss"] == pytest.approx(sum(measured.losses) / 7)

    async def test_what_does_not_fit_is_refused(
        self, engine: Engine, store: ObjectStore, start: PolicyRef
    ) -> None:
        batch = commit_batch(store, start, [row(*UP)])

        def measure(loss: dict[str, Any]) -> Any:
            return engine.measure(MeasureRequest(policy=start, batch=batch, loss=loss))

        with pytest.raises(BadSpec, match="the loss 'mse' reads one number per token"):
            await measure({"kind": "mse"})
        with pytest.raises(BadSpec, match="the loss needs old logprobs"):
            await measure(FREE)
        with pytest.raises(BadSpec, match="belong to no group"):
            await measure({"kind": "dpo"})
        with pytest.raises(BadSpec, match="nonsense"):
            await measure({"kind": "nonsense"})
