"""Tests of credit over an episode by hand: the token that has a turn's grade, and the reach of the credit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from storage.chain.records import PolicyRef
from storage.store.tables import SCHEMAS
from tasks.batches.advantages import RewardKL
from tasks.batches.columns import TrainedRows
from tasks.batches.rl import credited
from tasks.plans import BatchPlan, ValuePlan
from tests.fixtures.episode_grades import grades_of

VALUE = PolicyRef(run="r", stage="0-env_ppo", model="value", step=0, state="s")


Played = tuple[str, int, list[int], dict[int, float]]


def episode(number: int, turn_tokens: list[int], grades: dict[int, float]) -> Played:
    return "p", number, turn_tokens, grades


def credited_episodes(
    table: pa.Table, played: list[Played], values_T: np.ndarray, plan: BatchPlan, values: ValuePlan
) -> pa.Table:
    """The batch with credit for the turns of the episodes."""
    tokens = np.array(list(chain.from_iterable(turn_tokens for _, _, turn_tokens, _ in played)))
    rows = TrainedRows({}, [], np.arange(len(tokens)), tokens)
    return credited(table, grades_of(played), rows, values_T, plan, values)


def batch(segments: Sequence[tuple[int, int]], gap: float = 0.0) -> pa.Table:
    """Rows of the prompt "p", one per (episode, trained tokens); `gap` is the policy's logprob less the reference's."""
    empty: dict[str, Any] = {name: None for name in SCHEMAS["batch"].names}
    rows = [
        empty | {
            "group": "p", "completion": number, "token_ids": [1] * (count + 1), "loss_mask": [False] + [True] * count,
            "advantages": [0.0] * count, "old_logprobs": [-1.0] * count, "reference_logprobs": [-1.0 - gap] * count,
        }
        for number, count in segments
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=SCHEMAS["batch"])


def flat(table: pa.Table, name: str) -> list[float]:
    return list(chain.from_iterable(table[name].to_pylist()))


def test_a_grade_is_on_the_last_token_of_its_turn() -> None:
    # with lambda 0 and values of 0, the advantage of a token is its reward
    no_values, plan = np.zeros(6), ValuePlan(value=VALUE, lam=0.0)
    played = [episode(0, [2, 1, 3], {0: 0.5, 1: -1.0, 2: 2.0})]
    table = credited_episodes(batch([(0, 6)]), played, no_values, BatchPlan(reference=None), plan)
    assert flat(table, "advantages") == [0, 0.5, -1.0, 0, 0, 2.0]
    played = [episode(0, [2, 2], {1: 1.0})]
    table = credited_episodes(batch([(0, 4)]), played, no_values[:4], BatchPlan(reference=None), plan)
    assert flat(table, "advantages") == [0, 0, 0, 1.0]


def test_credit_flows_over_turns_and_segments_and_stops_at_the_end_of_the_episode() -> None:
    # episode 0: turns of 2 and 1 tokens in one segment, then its history is rewritten, and a turn of 2 tokens
    # episode 1: one turn of 2 tokens
    played = [episode(0, [2, 1, 2], {1: 1.0, 2: 4.0}), episode(1, [2], {0: 8.0})]
    values_T = np.array([0.5, 0.25, 1.0, 2.0, 3.0, 5.0, 6.0])
    plan = ValuePlan(value=VALUE, gamma=0.5, lam=0.5)
    table = credited_episodes(batch([(0, 3), (0, 2), (1, 2)]), played, values_T, BatchPlan(reference=None), plan)
    # d_t = r_t + V_{t+1}/2 - V_t, from the last token: 4-3, 0+1.5-2, 1+1-1, 0+.5-.25, 0+.125-.5
    # A_t = d_t + A_{t+1}/4: 1, -.5+.25, 1-.0625, .25+.234375, -.375+.12109375
    assert flat(table, "advantages")[:5] == pytest.approx([-0.25390625, 0.484375, 0.9375, -0.25, 1.0], abs=1e-7)
    assert flat(table, "returns")[:5] == pytest.approx([0.5, 1.0, 2.0, 2.0, 4.0], abs=1e-7)
    # the second episode: 8-6, then 0+3-5, +2/4
    assert flat(table, "advantages")[5:] == pytest.approx([-1.5, 2.0], abs=1e-7)
    assert flat(table, "returns")[5:] == pytest.approx([4.0, 8.0], abs=1e-7)
    assert flat(table, "old_values") == pytest.approx(values_T.tolist())


def test_a_rewritten_episode_is_credited_as_the_same_tokens_in_one_segment() -> None:
    played = [episode(0, [2, 3], {0: 1.0, 1: -1.0})]
    values_T, plan = np.array([0.1, 0.2, 0.3, 0.4, 0.5]), ValuePlan(value=VALUE, gamma=0.9, lam=0.8)
    whole, cut = (
        credited_episodes(batch(segments), played, values_T, BatchPlan(reference=None), plan)
        for segments in ([(0, 5)], [(0, 2), (0, 3)])
    )
    for name in ("advantages", "returns"):
        assert flat(whole, name) == flat(cut, name)


@pytest.mark.parametrize(("estimator", "penalty"), [("k1", 0.2), ("k2", 0.02)])
def test_the_kl_penalty_is_on_every_trained_token(estimator: Any, penalty: float) -> None:
    played = [episode(0, [1, 2], {0: 1.0, 1: 2.0})]
    kl = BatchPlan(reference=VALUE, reward_kl=RewardKL(beta=0.5, estimator=estimator))
    table = credited_episodes(batch([(0, 3)], gap=0.2), played, np.zeros(3), kl, ValuePlan(value=VALUE))
    paid = 0.5 * penalty
    assert flat(table, "returns") == pytest.approx([3 - 3 * paid, 2 - 2 * paid, 2 - paid], abs=1e-6)


def test_what_a_value_should_be_can_be_the_advantage_and_the_value() -> None:
    played = [episode(0, [2], {0: 1.0})]
    plan = ValuePlan(value=VALUE, lam=0.95, returns="advantages")
    table = credited_episodes(batch([(0, 2)]), played, np.array([0.4, 0.2]), BatchPlan(reference=None), plan)
    assert flat(table, "returns") == pytest.approx([0.2 + 0.95 * 0.8, 1.0], abs=1e-6)
