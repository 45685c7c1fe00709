"""The simulation of asynchronous rollouts, by hand where all completions have one length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import async_sim
from bench import cost_model as model
from bench.async_sim import RULES, Case, Rule, Simulation

CASE = Case(model.B8, model.Cluster(model.H100, 4, 4), model.Work(16, new_tokens=640), 0.0, 640, steps=12)
TOKEN, SYNC, TRAIN = 0.01, 1.0, 5.0
"""Seconds of a decoded token, of a weight sync and of a step."""


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "decode_seconds", lambda *_: TOKEN)
    monkeypatch.setattr(model, "sync_seconds", lambda *_: SYNC)
    monkeypatch.setattr(model, "FORWARD_FLOPS", 0)  # computing a KV cache again takes no time
    monkeypatch.setattr(Case, "train_seconds", lambda *_: TRAIN)


def test_synchronous_is_the_sum_of_its_parts() -> None:
    result = Simulation(CASE, Rule("synchronous", 0)).run()
    assert result.step_seconds == pytest.approx(SYNC + 640 * TOKEN + TRAIN)
    assert result.trainer_idle == pytest.approx((SYNC + 640 * TOKEN) / (SYNC + 640 * TOKEN + TRAIN))
    assert (result.mean_lag, result.max_lag) == (0, 0)


def test_between_updates_one_step_off_takes_as_long_as_the_longer_part() -> None:
    result = Simulation(CASE, Rule("one off", 1)).run()
    assert result.step_seconds == pytest.approx(SYNC + 640 * TOKEN)
    assert result.max_lag == 1


def test_in_flight_two_steps_share_a_sampler() -> None:
    """A step begins to be sampled when the second step before it is trained. So two steps take the time of sampling, of
    training, and of no to two syncs on the way."""
    result = Simulation(CASE, Rule("one off", 1, in_flight=True)).run()
    assert 640 * TOKEN + TRAIN <= 2 * result.step_seconds <= 640 * TOKEN + TRAIN + 2 * SYNC
    assert result.max_lag == 1


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("seed", range(3))
def test_every_token_is_trained_on_and_none_is_older_than_the_bound(rule: Rule, seed: int) -> None:
    case = replace(CASE, spread=1.0, longest=5000, seed=seed)
    simulation = Simulation(case, rule)
    result = simulation.run()
    assert result.tokens_lost == 0 and not simulation.unfinished.any()
    assert result.max_lag <= rule.max_staleness
    assert len(simulation.ends) == case.steps == len(simulation.train_spans)


def test_the_table_has_a_row_for_each_rule() -> None:
    results = [Simulation(CASE, rule).run() for rule in RULES]
    assert [line.split(" | ")[0].strip("| ") for line in async_sim.table(results).splitlines()[2:]] == [
        rule.name for rule in RULES
    ]
