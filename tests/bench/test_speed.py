"""Tests of bench/speed: operations and bytes by hand, ratios, tables, texts of a given length, and one whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.flops import Work
from bench.speed import report
from bench.speed.data import Row, fitted
from bench.speed.roofline import bound_seconds, decode_parts, score_parts, train_parts, work_of
from bench.speed.turns import ArmFailed, Setting, Turns, take_turns
from engine.memory_plan.shape import ModelShape

SHAPE = ModelShape(
    name="by hand", hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, intermediate=3, vocabulary=10, context=32,
    parameters=200, tied=True,
)  # fmt: skip
LAYER = 4 * 4 + 4 * 2 + 4 * 2 + 4 * 4 + 3 * (4 * 3)
"""Elements of a layer's matrices: queries, keys, values, output, and the three matrices of the MLP."""
HEAD = 10 * 4


def forward(tokens: int, pairs: int, trained: int) -> int:
    """2 operations per element and token; 4 per pair and feature of the queries, in each layer."""
    return 2 * 2 * LAYER * tokens + 4 * 2 * 4 * pairs + 2 * HEAD * trained


# -- operations and bytes --------------------------------------------------------------------------------------


def test_work_counts_a_shared_prompt_once() -> None:
    # group a: prompt of 3 and completions of 2 and 1; group b: prompt of 1 and a completion of 2
    work = work_of([("a", 5, 2), ("a", 4, 1), ("b", 3, 2)])
    prompts = 6 + 1
    completions = (2 * 3 + 3) + (1 * 3 + 1) + (2 * 1 + 3)
    assert work == Work(tokens=3 + 2 + 1 + 1 + 2, pairs=prompts + completions, trained=5)


def test_training_needs_three_forward_passes_and_an_update() -> None:
    passes, update = train_parts(SHAPE, [("a", 5, 2)])
    assert passes == {"flops": 3 * forward(5, 15, 2), "bytes": 0}
    # AdamW reads weight, gradient and two moments, and writes weight and moments: 7 float32 numbers
    assert update == {"flops": 0, "bytes": 7 * 4 * 200}


def test_logprobs_need_one_forward_pass() -> None:
    assert score_parts(SHAPE, [("a", 5, 2)]) == [{"flops": forward(5, 15, 2), "bytes": 0}]


def test_decoding_reads_all_weights_and_the_cache_in_every_step() -> None:
    # two rows share a prompt of 3 tokens, and each samples 3 tokens: one by the prefill, two by decoding steps
    prefill, decoding = decode_parts(SHAPE, [3, 3], 3, prompts_once=2)
    assert prefill == {"flops": forward(3, 6, 1), "bytes": 0}
    # the first step attends to 3 tokens and itself, the second to 4 and itself, in both rows
    pairs = 2 * (4 + 5)
    assert decoding["flops"] == forward(4, pairs, 4)
    # keys and values have 2 features each; all elements have 2 bytes
    assert decoding["bytes"] == 2 * (2 * (2 * LAYER + HEAD) + pairs * 2 * 2 * 2)


def test_the_bound_is_the_slower_of_operations_and_bytes_in_each_part() -> None:
    parts = [{"flops": 100.0, "bytes": 1.0}, {"flops": 10.0, "bytes": 30.0}]
    assert bound_seconds(parts, peak=10, bandwidth=5) == 100 / 10 + 30 / 5


# -- results ---------------------------------------------------------------------------------------------------


def turn(tokens: int, cpu: float, *, peak_gb: float = 1.0, phases: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"tokens": tokens, "cpu": cpu, "wall": 2 * cpu, "peak_gb": peak_gb, "phases": phases or {}}


def a_result() -> report.Result:
    phases = {"take_gradient_step": {"cpu": 3.0, "parts": [{"flops": 1.5e9, "bytes": 0.0}]}}
    machine = {"bfloat16 8x4x4": 1e9, "bfloat16 8x4x3": 5e8, "float32 8x4x4": 2e8, "read sum": 4e9}
    return {
        "workload": "sft",
        "title": "SFT",
        "unit": "tokens",
        "arms": {
            "ostinato": [turn(400, 4.0, phases=phases), turn(1200, 4.0, phases=phases)],
            "slow": [turn(100, 4.0), turn(100, 4.0)],
            "fast": [turn(400, 4.0, peak_gb=2.0), turn(400, 4.0, peak_gb=2.5)],
            "machine": [turn(0, 1.0, phases=machine)],
        },
    }


def test_the_ratio_is_the_mean_over_the_pairs() -> None:
    # the pairs have the ratios 1 and 3; of all draws of two pairs, a quarter has the mean 1, a quarter has 3
    assert report.ratio(a_result(), "fast", "cpu") == (2.0, 1.0, 3.0)


def test_peers_are_ordered_by_speed() -> None:
    assert report.peers(a_result()) == ["fast", "slow"]


def test_the_tables_have_the_figures() -> None:
    text = report.tables([a_result()])
    assert "| SFT | fast | 200.0 | 100.0 | **2.00 (1.00 to 3.00)** | 2.00 | 1.0 / 2.5 |" in text
    assert "| SFT | slow | 200.0 | 25.0 | 8.00 (4.00 to 12.00) | 8.00 | 1.0 / 1.0 |" in text
    # 1.5e9 operations in 3 s at a peak of 1e9 a second
    assert "| SFT | take_gradient_step | 3.00 | 2 | 50% | 0.0 | 50% |" in text
    assert "| SFT | rest | 1.00 |  |  |  |  |" in text
    assert "| SFT | 1 | 0 | 4.0 |" in text


def test_a_result_without_peers_has_our_speed() -> None:
    result = a_result()
    del result["arms"]["slow"], result["arms"]["fast"]
    assert report.comparison_table([result]).splitlines()[2].startswith("| SFT |  | 200.0 |")


# -- data ------------------------------------------------------------------------------------------------------


def words(row: Row) -> int:
    return len(row["prompt"].split())


def test_a_text_is_cut_to_the_number_of_tokens() -> None:
    row = fitted(words, 3, lambda part: {"prompt": part}, "one two three four")
    assert row["prompt"].split() == ["one", "two", "three"]


def test_a_text_that_is_too_short_is_an_error() -> None:
    with pytest.raises(ValueError, match="10 tokens"):
        fitted(words, 10, lambda part: {"prompt": part}, "one two")


# -- turns -----------------------------------------------------------------------------------------------------


def noting_arm(setting: Setting, turns: Turns) -> None:
    """Notes its turns in a file that all arms share. Fails in the turn of the option `fails_in`."""
    name, notes = setting.options["name"], Path(setting.options["notes"])
    turn = 0
    while turns.begin():
        if turn == setting.options.get("fails_in"):
            raise ValueError("planted")
        with notes.open("a") as file:
            file.write(f"{name}{turn} ")
        torch.ones(8).cumsum(0)
        turn += 1
        turns.end(7)


def noting_arms(folder: Path, **options: dict[str, Any]) -> dict[str, tuple[str, Setting]]:
    arms = {}
    for name, own in options.items():
        all_options = {"name": name, "notes": str(folder / "notes")} | own
        setting = Setting("", str(folder / name), rows=[], rows_per_step=1, options=all_options)
        arms[name] = "tests.bench.test_speed:noting_arm", setting
    return arms


@pytest.mark.slow
def test_arms_take_turns_after_a_warm_up(tmp_path: Path) -> None:
    turns, profile = take_turns(noting_arms(tmp_path, a={}, b={}), 2, profiled="b")
    # the warm-ups, two pairs, and the profiled turn
    assert (tmp_path / "notes").read_text().split() == ["a0", "b0", "a1", "b1", "a2", "b2", "b3"]
    assert {name: [turn.tokens for turn in arm_turns] for name, arm_turns in turns.items()} == {
        "a": [7, 7],
        "b": [7, 7],
    }
    assert "aten::cumsum" in profile


@pytest.mark.slow
def test_the_error_of_an_arm_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ArmFailed, match="planted"):
        take_turns(noting_arms(tmp_path, a={}, b={"fails_in": 1}), 2, profiled="a")


# -- a whole run -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_a_workload_runs_on_both_sides_with_equal_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl")
    from bench.speed.__main__ import main
    from engine.backends.torch.tiny import build_tiny_model

    # main sets these for the processes that it starts
    for variable in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    model = build_tiny_model(tmp_path / "tiny", seed=0)
    main([name, "--pairs", "1", "--model", str(model), "--out", str(tmp_path)])

    (result,) = report.load([name], tmp_path)
    peer = {"sft": "TRL padded", "grpo": "TRL"}[name]
    tokens = {arm: [turn["tokens"] for turn in turns] for arm, turns in result["arms"].items()}
    assert tokens["ostinato"] == tokens[peer]
    assert "take_gradient_step" in result["arms"]["ostinato"][0]["phases"]
    assert "aten::mm" in (tmp_path / f"{name}.profile.txt").read_text()
    assert f"| {result['title']} | {peer} |" in capsys.readouterr().out
