"""Tests of bench/gpu: it runs on the CPU, its formulas follow the definitions, and a part that fails does not stop the
others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu.flops import Work, hardware_flops, model_flops, nominal_peak, pairs_of, work_of
from bench.gpu.rows import Row, row_of, table
from bench.gpu.run import LIMITS, cannot_run, rows_of, run_part, run_parts
from bench.gpu.setting import CONFIGS, grpo_samples, module_of, setting_of, sft_samples
from engine.backends.torch.packing import PrefixGroup, pack
from engine.memory_plan.shape import shape_of

QUICK = ["device", "correct", "packing", "train-small", "sampler", "sync", "determinism", "checkpoint", "redo"]
"""Parts without a process of their own and without a package that may be missing; train-large is train-small again."""


@pytest.mark.parametrize("part", QUICK)
def test_every_part_runs_on_the_cpu_and_finds_nothing_wrong(part: str) -> None:
    rows = list(rows_of(part, smoke=True))
    assert rows
    assert [row for row in rows if row.ok is False] == []
    assert all(row_of(row.line()) == row for row in rows)


def test_the_quick_parts_are_all_but_the_three_others() -> None:
    assert set(LIMITS) - set(QUICK) == {"train-large", "deepspeed", "vllm"}


# -- formulas --------------------------------------------------------------------------------------------------


def test_the_formula_counts_what_torch_counts() -> None:
    """torch's own counter over a plain forward and backward pass of one sequence: matrices only, and of attention the
    whole square, since the counter does not know that half of it is masked."""
    from torch.utils.flop_counter import FlopCounterMode

    tokens = 32
    module = module_of("1M", dtype=torch.float32, device=torch.device("cpu"))
    module.set_attn_implementation("eager")
    ids = torch.arange(3, 3 + tokens).unsqueeze(0)
    with FlopCounterMode(display=False) as counter:
        module(input_ids=ids, use_cache=False).logits.sum().backward()
    work = Work(tokens=tokens, pairs=tokens**2, trained=tokens)
    shape = shape_of(CONFIGS["1M"], "1M")
    # rotary frequencies are a matrix product in transformers, a billionth of the whole at real sizes
    assert counter.get_total_flops() == pytest.approx(model_flops(shape, work), rel=1e-3)


def test_six_flops_per_parameter_and_token_and_eight_with_recomputing() -> None:
    shape = shape_of(CONFIGS["0.5B"], "0.5B")
    matrices = shape.layers * shape.layer_linear + shape.embedding  # the head is the embedding's matrix
    work = Work(tokens=1000, pairs=0, trained=1000)
    assert model_flops(shape, work) == 6 * matrices * 1000
    again = hardware_flops(shape, work, recompute=True, chunked_head=True)
    assert again == 8 * matrices * 1000


def test_pairs_by_hand() -> None:
    # 3 tokens: 1 + 2 + 3; a prompt of 2 (1 + 2) with branches of 1 (2 + 1) and 2 (2 + 2 + 1 + 2)
    assert pairs_of([PrefixGroup(0, 3)]) == 6
    assert pairs_of([PrefixGroup(0, 2, ((2, 1), (3, 2)))]) == 3 + 3 + 7


def test_work_is_what_the_trainer_packs() -> None:
    samples = grpo_samples("1M", (2, 3, 12, 5, 20))
    packed = pack(samples, device=torch.device("cpu"))
    work = work_of(samples, max_tokens=10_000)
    assert (work.tokens, work.trained) == (len(packed.token_ids_T), len(packed.target_N))
    assert work.tokens == sum(len(s.token_ids) for s in samples) - 2 * 2 * 12  # two copies of each prompt are spared


def test_samples_are_equal_for_equal_seeds_and_within_their_sizes() -> None:
    samples = sft_samples("1M", (9, 20, 30))
    again = sft_samples("1M", (9, 20, 30))
    assert [s.token_ids.tolist() for s in samples] == [s.token_ids.tolist() for s in again]
    assert all(20 <= len(s.token_ids) <= 30 and min(s.token_ids) > 2 for s in samples)


def test_the_small_and_large_models_are_of_their_names_size() -> None:
    setting = setting_of(smoke=False) if torch.cuda.is_available() else None
    assert setting is None or setting.small == "0.5B"
    assert shape_of(CONFIGS["0.5B"], "x").parameters == pytest.approx(0.494e9, rel=0.01)
    assert shape_of(CONFIGS["1.5B"], "x").parameters == pytest.approx(1.54e9, rel=0.01)
    assert shape_of(CONFIGS["54M"], "x").parameters == pytest.approx(54e6, rel=0.02)


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("?", None)])
def test_the_peak_of_known_devices(name: str, peak: float | None) -> None:
    assert nominal_peak(name) == peak


# -- the runner ------------------------------------------------------------------------------------------------


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


ROW = Row("p", "one", 1.5, "s", ok=True)


def test_rows_of_a_part_that_fails_are_kept_with_its_last_words() -> None:
    text = f"print({ROW.line()!r}, flush=True); print('not a row', flush=True); raise SystemExit('out of luck')"
    heard: list[str] = []
    rows = run_part("p", script(text), 60, heard.append)
    assert rows == [ROW, Row("p", "failed", "status 1", "", "out of luck", False)]
    assert heard == [ROW.line(), "not a row", "out of luck"]


@pytest.mark.slow
def test_a_part_that_hangs_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    text = (
        "import subprocess, sys, pathlib\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        f"print({ROW.line()!r}, flush=True)\n"
        "child.wait()\n"
    )
    rows = run_part("p", script(text), 8, lambda line: None)
    assert rows == [ROW, Row("p", "stopped", "after 8 s", "", "", False)]
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] in "ZX"  # gone, or only waiting to be reaped


def test_no_part_starts_when_the_time_is_up_and_rows_go_to_the_file(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    rows = run_parts(["device", "vllm"], smoke=True, seconds=0, out=out)
    assert [(row.part, row.what, row.ok) for row in rows] == [("device", "not run", False), ("vllm", "not run", False)]
    assert [row_of(line.rstrip()) for line in out.read_text().splitlines()] == rows


def test_the_table_says_what_is_wrong() -> None:
    lines = table([ROW, Row("p", "two", "different", note="why", ok=False)]).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["p", "one", "1.5 s", "yes", ""]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == ["p", "two", "different", "NO", "why"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_script_says_so() -> None:
    done = subprocess.run(["bash", "bench/gpu/run.sh"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "torch sees no GPU here" in done.stderr


def test_an_engine_that_does_not_import_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho \"No module named 'pydantic'\" >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    assert cannot_run(smoke=True) == "the engine does not import here: No module named 'pydantic'"
