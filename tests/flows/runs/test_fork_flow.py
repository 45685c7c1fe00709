"""Tests of forks: a fork continues from its step, with the same config to the same bytes, and with another config to
other weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from flows.promotion.model_card import render_card
from storage.chain.fork import fork_run
from storage.chain.records import Chain
from storage.errors import ForkRefused
from storage.inspect.audit import audit_store
from storage.inspect.lineage import lineage_of
from storage.store import keys
from tests.fixtures.runs.toy_run import ToyRun


@pytest.fixture
def toy(toy_run: ToyRun, tmp_path: Path, prefect_server: str) -> ToyRun:
    return toy_run.copied(tmp_path / "copy")


async def run_on(toy: ToyRun, run: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **changes: Any) -> list[int]:
    """Runs the toy flow under that key; returns the steps that its loop started from."""
    log = tmp_path / f"{run}.log"
    monkeypatch.setenv("OSTINATO_WORKLOG", str(log))
    await grpo(GRPOConfig.model_validate(toy.config | {"run": run} | changes))
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [event["resumed_from"] for event in events if event["event"] == "start"]


async def test_the_same_config_ends_with_the_same_bytes(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fork_run(toy.store, "toy", "same", step=2, code_version="test")
    assert await run_on(toy, "same", monkeypatch, tmp_path) == [2]
    same = Chain(toy.store, "same", "0-grpo", "policy")
    for mine, theirs in zip(same.records(0, 4), toy.chain.records(0, 4), strict=True):
        assert (mine.state, mine.weights_digest) == (theirs.state, theirs.weights_digest)
    weights = list((toy.folder / "models" / "toy").glob("*/model.safetensors"))
    assert len(weights) == 1  # the fork published the same version: equal content, equal name
    assert "toy/0-grpo@2" in toy.store.get(keys.report("same")).decode()
    metrics = list(toy.store.list(keys.step_metrics_prefix("same", "0-grpo")))
    assert len(metrics) == 4
    assert audit_store(toy.store).problems == ()


@pytest.mark.slow
async def test_another_rate_changes_what_comes_after_the_fork(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fork_run(toy.store, "toy", "hotter", step=2, code_version="test")
    optimizer = toy.config["optimizer"] | {"lr": 3e-3}
    assert await run_on(toy, "hotter", monkeypatch, tmp_path, optimizer=optimizer) == [2]
    hotter = list(Chain(toy.store, "hotter", "0-grpo", "policy").records(0, 4))
    cooler = list(toy.chain.records(0, 4))
    assert [mine.state == theirs.state for mine, theirs in zip(hotter, cooler, strict=True)] == [True] * 2 + [False] * 2
    assert [mine.request.optimizer.lr for mine in hotter] == [1e-3, 1e-3, 3e-3, 3e-3]
    # the third batch is still the same: it was sampled by the shared policy
    assert hotter[2].request.batch.sha256 == cooler[2].request.batch.sha256
    assert hotter[2].request.batch.key != cooler[2].request.batch.key
    assert hotter[2].weights_digest != cooler[2].weights_digest
    (segment,) = lineage_of(toy.store, "hotter").segments
    assert segment.runs == (("toy", 1, 2), ("hotter", 3, 4))
    assert [part.learning_rates for part in segment.forked] == [(1e-3, 1e-3), (3e-3, 3e-3)]
    assert [part.settings for part in segment.forked] == [{"optimizer.lr": 1e-3}, {"optimizer.lr": 3e-3}]
    name, _, version = json.loads(toy.store.get(keys.result_json("hotter")))["model"].partition("@")
    card = render_card(toy.store, name, version)
    assert "| `toy` | `0-grpo` | grpo | 1–2 | 0.001 |" in card
    assert "| `hotter` | `0-grpo` | grpo | 3–4 | 0.003 |" in card
    assert "| optimizer.lr | 0.001 | 0.003 |" in card
    assert audit_store(toy.store).problems == ()


async def test_an_unfinished_fork_is_not_opened(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fork_run(toy.store, "toy", "torn", step=2, code_version="test")
    toy.store.delete(keys.chain_record("torn", "0-grpo", "policy", 2))
    with pytest.raises(ForkRefused, match="finish it with: ostinato fork toy --step 2"):
        await run_on(toy, "torn", monkeypatch, tmp_path)
    assert not toy.store.exists(keys.run_json("torn"))
