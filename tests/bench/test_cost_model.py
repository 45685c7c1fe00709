"""Tests of the cost model of docs/scaling.md against sums done by hand with round numbers."""

from __future__ import annotations

import pytest

from bench.cost_model import (
    B8,
    B70,
    H100,
    STATE_BYTES,
    Cluster,
    Gpu,
    Shape,
    Split,
    Work,
    checkpoint_seconds,
    decode_seconds,
    gpu_hours,
    machines_table,
    recovery_seconds,
    running,
    sample_seconds,
    score_seconds,
    step_split,
    steps_table,
    sync_seconds,
    train_seconds,
)

ROUND = Gpu("round", flops=1e15, hbm=1e12, memory=100e9, nvlink=100e9, network=10e9)
TEN = Shape("10B", 10e9, 100_000)
WORK = Work(prompts=100, completions=10, prompt_tokens=1000, new_tokens=1000, scored=1)


def test_the_caches_of_the_models() -> None:
    # Llama 3: 8 key heads of 128, keys and values, bf16: 2 x 8 x 128 x 2 = 4,096 bytes a layer; 32 and 80 layers
    assert (B8.kv_bytes, B70.kv_bytes) == (4096 * 32, 4096 * 80)


def test_what_a_sampler_holds() -> None:
    # 90 GB less 20 GB of weights, over 2,000 tokens x 100 kB = 200 MB a sequence
    assert running(TEN, Cluster(ROUND, 1, 1), WORK) == 350
    with pytest.raises(ValueError, match="no room"):
        running(B70, Cluster(H100, 1, 1), WORK)  # 141 GB of weights


def test_a_decode_step_reads_the_weights_and_the_caches() -> None:
    # 20 GB + 10 rows x 1,500 tokens x 100 kB = 21.5 GB, at 60 % of 1 TB/s
    assert decode_seconds(TEN, Cluster(ROUND, 1, 1), WORK, 10) == pytest.approx(21.5e9 / 0.6e12)
    # two GPUs read half each
    assert decode_seconds(TEN, Cluster(ROUND, 1, 2, 2), WORK, 10) == pytest.approx(21.5e9 / 1.2e12)
    # without a cache many rows are bound by arithmetic: 2 x 10e9 x 1,000 operations at 40 % of 1e15
    assert decode_seconds(Shape("", 10e9, 0), Cluster(ROUND, 1, 1), WORK, 1000) == pytest.approx(0.05)


def test_sampling_goes_in_waves() -> None:
    # 1,000 rollouts on 1 sampler of 350 rows: 3 waves of 334; prefill of 100 prompts x 1,000 tokens: 2e15 / 4e14 = 5 s
    sampling_seconds = 3 * 1000 * (20e9 + 334 * 1500 * 1e5) / 0.6e12
    assert sample_seconds(TEN, Cluster(ROUND, 1, 1), WORK) == pytest.approx(5 + sampling_seconds)


def test_training_and_scoring() -> None:
    # 2e6 tokens; (6 + 2) x 10e9 x 2e6 = 1.6e17 operations on 2 x 4e14 a second; one forward pass is 4e16
    assert train_seconds(TEN, Cluster(ROUND, 2, 1), WORK) == pytest.approx(200)
    assert score_seconds(TEN, Cluster(ROUND, 2, 1), WORK) == pytest.approx(50)


def test_a_sync_moves_the_weights_once() -> None:
    assert sync_seconds(TEN, Cluster(ROUND, 4, 4)) == pytest.approx(20e9 / 70e9)  # NVLink at 70 %
    assert sync_seconds(TEN, Cluster(ROUND, 8, 8)) == pytest.approx(20e9 / 7e9)  # two nodes
    assert sync_seconds(TEN, Cluster(ROUND, 8, 8), bytes_per_second=1e9) == pytest.approx(20)


def test_a_checkpoint_is_transferred_by_all_ranks() -> None:
    assert STATE_BYTES == 12
    # 120 GB over four ranks
    four = Cluster(ROUND, 4, 4)
    assert checkpoint_seconds(TEN, four) == pytest.approx(30 / 0.33)
    # a start of 60 s, the download, an interval of 300 s between two uploads
    assert recovery_seconds(TEN, four) == pytest.approx(60 + 30 / 0.37 + 300 + 2 * 30 / 0.33)


def test_gpu_hours() -> None:
    split = Split(sample=1, score=2, train=3, sync=0.5, coordinator=0.7)
    assert split.total == pytest.approx(7.2)
    assert gpu_hours(split, Cluster(ROUND, 4, 4), steps=500) == pytest.approx(8)
    assert gpu_hours(split, Cluster(ROUND, 4, 4, shared=True), steps=500) == pytest.approx(4)


def test_the_step_is_the_sum_of_its_parts_and_is_printed() -> None:
    cluster, work = Cluster(H100, 4, 4), Work(128)
    split = step_split(B8, cluster, work)
    assert split.train == train_seconds(B8, cluster, work) and split.sample == sample_seconds(B8, cluster, work)
    assert f"| {split.total:,.1f} |" in steps_table()
    assert "| 8B, 4 + 4 H100, tp 1 |" in machines_table()
