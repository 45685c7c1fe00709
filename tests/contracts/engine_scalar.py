"""The contract of `engine.protocol.Engine`: policies with a scalar head, and the losses that read values."""

from __future__ import annotations

from pathlib import Path
from statistics import pstdev
from typing import Any

import numpy as np
import pytest

from engine.errors import BadSpec
from engine.protocol import (
    Engine,
    GenerateRequest,
    LogprobsRequest,
    PolicySpec,
    RowsRequest,
    TableRows,
    TokenSequence,
)
from engine.specs.adapters import FullSpec
from storage.chain.records import Chain, PolicyRef
from storage.store.objects import ObjectStore
from tests.contracts.engine_fixtures import SCORED, SHORT, Connect, EngineFixtures, close, plain_folder
from tests.fixtures.engines import (
    PROVENANCE,
    commit_batch,
    hugging_face_scores,
    new_policy,
    request_after,
    row,
)

SCALAR = FullSpec(head="scalar")
UP, DOWN = ([10, 11, 12], [20, 21, 22]), ([40, 41], [50, 51, 52, 53])
"""(prompt, trained tokens)."""
BOTH = [TokenSequence([*p, *t], [0.0] * len(p) + [1.0] * len(t)) for p, t in (UP, DOWN)]


async def new_policy_like(engine: Engine, store: ObjectStore, policy: PolicyRef, *, run: str) -> PolicyRef:
    """Policy 0 of another chain from the same root."""
    root = Chain.of(store, policy).root()
    assert root is not None
    return await engine.create_policy(PolicySpec(run=run, stage=policy.stage, model=policy.model, root=root))


async def values_of(engine: Engine, policy: PolicyRef, sequences: list[TokenSequence] = BOTH) -> list[list[float]]:
    return await engine.values(LogprobsRequest(policy, sequences))


def pair(preferred: tuple[list[int], list[int]], other: tuple[list[int], list[int]]) -> list[dict[str, Any]]:
    """Two conversations as rows whose last token alone is trained."""
    rows = [row([*p, *t], [2], group="p") for p, t in (preferred, other)]
    return [rows[0] | {"preferred": True}, rows[1] | {"preferred": False}]


class ScalarContract(EngineFixtures):
    @pytest.fixture
    async def value_policy(self, engine: Engine, tiny_folder: Path) -> PolicyRef:
        return await new_policy(engine, tiny_folder, run="v", trainable=SCALAR, init_seed=7)

    async def test_values_are_those_before_each_trained_token(self, engine: Engine, scalar_folder: Path) -> None:
        start = await new_policy(engine, scalar_folder, trainable=SCALAR, init_seed=3)
        gaps = TokenSequence([10, 11, 12, 20, 21, 22], [0.0, 1.0, 0.0, 0.5, 0.0, 1.0])
        scored, some, nothing = await values_of(engine, start, [SCORED, gaps, TokenSequence([10, 11], [0.0, 0.0])])
        expected = hugging_face_scores(scalar_folder, SCORED.token_ids)
        assert pstdev(expected) > 1e-2  # the prefixes differ, so that a shift by one shows
        assert close(scored, expected[2:5])
        assert close(some, [expected[0], expected[2], expected[4]])
        assert nothing == []

    async def test_values_of_committed_rows_are_those_of_the_sequences(
        self, engine: Engine, store: ObjectStore, value_policy: PolicyRef
    ) -> None:
        batch = commit_batch(store, value_policy, [row(*UP), row(*DOWN)])
        first, second = await values_of(engine, value_policy)
        rows = RowsRequest(value_policy, [TableRows(batch, np.array([True, True]))])
        assert (await engine.values_of_rows(rows)).tolist() == [*first, *second]

    async def test_a_language_model_gets_the_head_that_its_seed_draws(
        self, engine: Engine, connect: Connect, store: ObjectStore, tiny_folder: Path, tmp_path: Path
    ) -> None:
        def policy(seed: int, run: str, on: Engine = engine) -> Any:
            return new_policy(on, tiny_folder, run=run, trainable=SCALAR, init_seed=seed)

        first = await policy(7, "a")
        values = await values_of(engine, first)
        rival = await connect()
        assert await values_of(rival, await policy(7, "b", rival)) == values
        assert await values_of(engine, await policy(8, "c")) != values
        assert len(set(values[0] + values[1])) == 7  # no two positions alike
        exported = await engine.export_model(first, "valued", provenance=PROVENANCE)
        folder = plain_folder(store, exported, tmp_path / "exported")
        expected = hugging_face_scores(folder, SCORED.token_ids)
        assert close(values[0], expected[2:5])

    async def test_each_head_refuses_what_the_other_gives(
        self, engine: Engine, start: PolicyRef, value_policy: PolicyRef
    ) -> None:
        with pytest.raises(BadSpec, match="no logprobs"):
            await engine.logprobs(LogprobsRequest(value_policy, BOTH))
        with pytest.raises(BadSpec, match="draws no tokens"):
            await engine.generate(GenerateRequest(value_policy, [[1]], [1], SHORT))
        with pytest.raises(BadSpec, match=r"no values.*into_scoring_model"):
            await values_of(engine, start)

    async def test_a_scalar_model_has_no_language_head_to_train(self, engine: Engine, scalar_folder: Path) -> None:
        with pytest.raises(BadSpec, match="into_scoring_model"):
            await new_policy(engine, scalar_folder)

    async def test_a_loss_goes_with_one_head(
        self, engine: Engine, store: ObjectStore, start: PolicyRef, value_policy: PolicyRef
    ) -> None:
        for policy, loss in ((value_policy, {"kind": "cross_entropy"}), (start, {"kind": "mse"})):
            batch = commit_batch(store, policy, [row(*UP, returns=1.0)])
            with pytest.raises(BadSpec, match="the loss"):
                await engine.take_gradient_step(request_after(policy, batch, loss=loss))

    async def test_values_are_fitted_to_returns(
        self, engine: Engine, connect: Connect, store: ObjectStore, value_policy: PolicyRef
    ) -> None:
        """One conversation is worth 1, the other -1. Another engine, which must redo the steps, has the same values."""
        policy, before = value_policy, await values_of(engine, value_policy)
        for _ in range(5):
            batch = commit_batch(store, policy, [row(*UP, returns=1.0), row(*DOWN, returns=-1.0)])
            request = request_after(policy, batch, lr=3e-4, loss={"kind": "mse"})
            policy = (await engine.take_gradient_step(request)).policy
        after = await values_of(engine, policy)

        def error(values: list[list[float]]) -> float:
            return sum((v - 1) ** 2 for v in values[0]) + sum((v + 1) ** 2 for v in values[1])

        assert error(after) < 0.2 * error(before)
        assert await values_of(engine, value_policy) == before
        assert await values_of(await connect(), policy) == after

    async def test_a_value_that_left_the_trust_region_is_pushed_no_further(
        self, engine: Engine, store: ObjectStore, value_policy: PolicyRef
    ) -> None:
        """With v = v_old + 1, beyond the clip of 0.2, and a return above v, the clipped branch is the larger one, and
        constant. At v = v_old it is not."""
        (values, _) = await values_of(engine, value_policy)
        norms = []
        for shard, shift in enumerate((1.0, 0.0)):
            columns = {"returns": [v + 2 for v in values], "old_values": [v - shift for v in values]}
            batch = commit_batch(store, value_policy, [row(*UP) | columns], shard=shard)
            request = request_after(value_policy, batch, loss={"kind": "trust_region_mse", "clip": 0.2})
            run = await new_policy_like(engine, store, value_policy, run=f"shift-{shard}")
            record = await engine.take_gradient_step(request.model_copy(update={"parent": run}))
            norms.append(record.metrics["grad_norm"])
        assert norms[0] == 0
        assert norms[1] > 0.1

    async def test_the_preferred_conversation_gains_on_the_other(
        self, engine: Engine, store: ObjectStore, tiny_folder: Path
    ) -> None:
        ends = [TokenSequence([*p, *t, 2], [0.0] * len([*p, *t]) + [1.0]) for p, t in (UP, DOWN)]
        leads = []
        for run, rows in (("up", pair(UP, DOWN)), ("down", pair(DOWN, UP))):
            policy = await new_policy(engine, tiny_folder, run=run, trainable=SCALAR)
            request = request_after(policy, commit_batch(store, policy, rows), loss={"kind": "ranking"})
            record = await engine.take_gradient_step(request)
            for at in (policy, record.policy):
                (up,), (down,) = await values_of(engine, at, ends)
                leads.append(up - down)
        before, raised, same, lowered = leads
        assert same == before
        assert raised > before + 0.01
        assert lowered < before - 0.01

    async def test_an_exported_value_model_goes_on_as_it_was(
        self, engine: Engine, store: ObjectStore, value_policy: PolicyRef, tmp_path: Path
    ) -> None:
        """Registered, it is the base of another chain with the same values; rounding may depend on how its file aligns
        them."""
        batch = commit_batch(store, value_policy, [row(*UP, returns=1.0), row(*DOWN, returns=-1.0)])
        record = await engine.take_gradient_step(request_after(value_policy, batch, loss={"kind": "mse"}))
        values = await values_of(engine, record.policy)
        exported = await engine.export_model(record.policy, "critic", provenance=PROVENANCE)
        folder = plain_folder(store, exported, tmp_path / "exported")
        again = await new_policy(engine, folder, run="again", trainable=SCALAR)
        for actual, expected in zip(await values_of(engine, again), values, strict=True):
            assert close(actual, expected, tolerance=1e-6)
