"""Loss, gradient and weights do not depend on the layout: torch x 1, and every ZeRO stage on one and two ranks, however
the batch is cut, give the same three updates, up to the rounding of float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.backends.protocol import Objective
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.weight_files.pieces import open_checkpoint
from engine.cluster.rank_group import RankGroup
from engine.errors import BadSpec, SampleTooLong
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.policy_gradient import GRPOSpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from storage.chain.records import OptimizerSpec
from tests.engine.deepspeed.conftest import (
    ADAMW,
    VALUE_TOLERANCE,
    OnRanks,
    assert_weights_close,
    planned_rows,
    some_samples,
    torch_trainer,
    whole,
)

WHOLE, SPLIT = 4096, 30  # 30 tokens: the longest sample
LOSSES = {
    "grpo": Objective(GRPOSpec(clip_low=0.2, clip_high=0.2, kl_beta=0.1)),
    "cross_entropy": Objective(CrossEntropySpec(norm="sequence_mean"), temperature=0.7),
}

Load = Callable[..., OnRanks]
Expected = tuple[Objective, list[dict[str, float]], TorchTrainer]
"""An objective, the metrics of three updates, and the torch trainer after them."""


@pytest.fixture(scope="module", params=list(LOSSES))
def expected(request: pytest.FixtureRequest, tiny_folder: Path) -> Expected:
    trainer = torch_trainer(tiny_folder)
    objective = LOSSES[request.param]
    reports = [trainer.update(some_samples(), objective, ADAMW, max_tokens=WHOLE) for _ in range(3)]
    return objective, [report.metrics for report in reports], trainer


def assert_equal_weights(trainer: OnRanks, expected: TorchTrainer) -> None:
    assert_weights_close(whole(open_checkpoint(trainer.checkpoint()).weights), dict(expected.weights()))


def three_updates(
    trainer: OnRanks, expected: Expected, max_tokens: int
) -> None:
    objective, metrics, reference = expected
    for expected_metrics in metrics:
        report = trainer.update(some_samples(), objective, ADAMW, max_tokens)
        assert not report.skipped and report.max_tokens == max_tokens
        assert report.metrics.keys() == expected_metrics.keys()
        assert report.metrics["loss"] == pytest.approx(expected_metrics["loss"], abs=VALUE_TOLERANCE)
        assert report.metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)
    assert_equal_weights(trainer, reference)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_train_as_the_torch_trainer_does(
    stage: int, expected: Expected, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path
) -> None:
    three_updates(on_ranks(two_ranks, tiny_folder, zero_stage=stage), expected, SPLIT)


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [SPLIT, 45, WHOLE])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_layout_trains_as_the_torch_trainer_does(
    ranks: int,
    stage: int,
    max_tokens: int,
    expected: Expected,
    request: pytest.FixtureRequest,
    on_ranks: Load,
    tiny_folder: Path,
) -> None:
    group = request.getfixturevalue({1: "one_rank", 2: "two_ranks"}[ranks])
    three_updates(on_ranks(group, tiny_folder, zero_stage=stage), expected, max_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [1, 2])
def test_a_rank_gets_only_the_rows_of_its_passes(
    sharing: int, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path
) -> None:
    trainer, samples = on_ranks(two_ranks, tiny_folder, zero_stage=1, sequence_parallel=sharing), some_samples()
    trainer.update(samples, LOSSES["grpo"], ADAMW, SPLIT)
    expected = planned_rows(samples, SPLIT, 2) if sharing == 1 else planned_rows(samples, SPLIT, 1) * 2
    assert trainer.call("rows_of_last_update") == expected


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_ranks_without_work_take_part(stage: int, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path) -> None:
    """One sample on two ranks, three micro-batches on two ranks, and a batch in which no sample has a gradient."""
    reference, trainer = torch_trainer(tiny_folder), on_ranks(two_ranks, tiny_folder, zero_stage=stage)
    grpo = Objective(GRPOSpec(kl_beta=0.0))
    silent = [replace(sample, advantages=[0.0] * sample.trained) for sample in some_samples()]
    for samples, micro_batches in ((some_samples([20]), 1), (some_samples([20, 19, 18]), 3), (silent, 0)):
        expected = reference.update(samples, grpo, ADAMW, max_tokens=20 if samples is not silent else WHOLE)
        report = trainer.update(samples, grpo, ADAMW, 20 if samples is not silent else WHOLE)
        if samples is silent:
            assert report.micro_batches == micro_batches and report.metrics["loss"] == 0.0
        assert report.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-4, abs=1e-7)
    assert_equal_weights(trainer, reference)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_gradient_is_clipped_by_its_global_norm(
    stage: int, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path
) -> None:
    """An eps at which the size of the clipped gradient has an effect: otherwise AdamW would hide a wrong scale."""
    clipped = OptimizerSpec(lr=1e-3, max_grad_norm=0.01, eps=1e-3)
    reference, trainer = torch_trainer(tiny_folder), on_ranks(two_ranks, tiny_folder, zero_stage=stage)
    objective = Objective(CrossEntropySpec())
    for optimizer in (clipped, OptimizerSpec(lr=1e-3, max_grad_norm=1e6, eps=1e-3)):
        expected = reference.update(some_samples(), objective, optimizer, max_tokens=SPLIT)
        report = trainer.update(some_samples(), objective, optimizer, SPLIT)
        assert report.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-4)
    assert_equal_weights(trainer, reference)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_logprobs_are_those_of_the_torch_trainer(
    stage: int, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path
) -> None:
    sequences = [TokenSequence(token_ids=s.token_ids, loss_mask=s.loss_mask) for s in some_samples([9, 31, 12])]
    expected = torch_trainer(tiny_folder).logprobs(sequences, temperature=0.8, max_tokens=WHOLE)
    trainer = on_ranks(two_ranks, tiny_folder, zero_stage=stage)
    for max_tokens in (31, WHOLE):
        values_by_sequence = trainer.trainer.logprobs(sequences, temperature=0.8, max_tokens=max_tokens)
        assert [len(values) for values in values_by_sequence] == [len(values) for values in expected]
        for left, right in zip(values_by_sequence, expected, strict=True):
            assert left == pytest.approx(right, abs=VALUE_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("spare", ["recompute", "offload", "offload_optimizer", "offload_parameters"])
def test_saving_memory_changes_nothing(
    stage: int, spare: str, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path
) -> None:
    if spare == "offload_parameters" and stage != 3:
        pytest.skip("only ZeRO 3 shards weights")
    spec = {spare: "cpu"} if spare.startswith("offload_") else {"activation_checkpointing": spare}
    objective = Objective(CrossEntropySpec())
    plain = on_ranks(two_ranks, tiny_folder, zero_stage=stage)
    sparing = on_ranks(two_ranks, tiny_folder, zero_stage=stage, **spec)
    runs = []
    for trainer in (plain, sparing):
        trainer.call("count_layer_runs")
        trainer.update(some_samples([20, 20]), objective, ADAMW, 20)
        runs.append(trainer.call("layer_runs"))
    assert runs == [1, 2 if "activation_checkpointing" in spec else 1]
    for trainer in (plain, sparing):
        trainer.update(some_samples(), objective, ADAMW, SPLIT)
    left, right = (whole(open_checkpoint(trainer.checkpoint()).weights) for trainer in (plain, sparing))
    assert_weights_close(left, right)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_computes_on_float32_masters(
    stage: int, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path
) -> None:
    reference = torch_trainer(tiny_folder, torch.bfloat16)
    trainer = on_ranks(two_ranks, tiny_folder, zero_stage=stage, dtype="bfloat16")
    assert trainer.digest() == reference.weights_digest()[0]  # masters are not made of rounded weights
    tiny = OptimizerSpec(lr=1e-6)  # far below what bfloat16 weights of 0.02 would notice
    objective = Objective(CrossEntropySpec())
    expected = reference.update(some_samples(), objective, tiny, max_tokens=WHOLE)
    before = whole(open_checkpoint(trainer.checkpoint()).weights)
    report = trainer.update(some_samples(), objective, tiny, WHOLE)
    assert report.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=5e-3)
    after = whole(open_checkpoint(trainer.checkpoint()).weights)
    moved = (after["lm_head.weight"] - before["lm_head.weight"]).abs().max().item()
    assert 0.9e-6 < moved < 1.1e-6  # the first step of AdamW moves by its rate
    facts = trainer.call("facts")
    assert all(rank["masters"] == rank["moments"] == {"torch.float32"} for rank in facts)
    assert {rank["computes"] for rank in facts} == {"torch.float32" if stage == 0 else "torch.bfloat16"}
    total = sum(parameter.numel() for _, parameter in reference.trained_parameters())
    assert sum(rank["elements"] for rank in facts) == (2 if stage == 0 else 1) * total


@pytest.mark.slow
def test_two_runs_on_two_ranks_are_equal_to_the_byte(two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path) -> None:
    digests = []
    for _ in range(2):
        trainer = on_ranks(two_ranks, tiny_folder, zero_stage=2)
        for _ in range(2):
            trainer.update(some_samples(), LOSSES["grpo"], ADAMW, SPLIT)
        digests.append(trainer.digest())
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_what_a_rank_would_refuse_is_refused_by_all(two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path) -> None:
    """A rank that raises alone would leave the other one waiting for it."""
    trainer = on_ranks(two_ranks, tiny_folder, zero_stage=3)
    before = trainer.digest()
    long, other = some_samples([20, 19])
    bare = Sample(other.token_ids, other.loss_mask, advantages=other.advantages)
    with pytest.raises(BadSpec, match="some samples of the batch have old_logprobs"):
        trainer.update([long, bare], LOSSES["grpo"], ADAMW, 20)
    with pytest.raises(BadSpec, match="needs old logprobs"):
        trainer.update([bare], LOSSES["grpo"], ADAMW, 20)
    with pytest.raises(SampleTooLong):
        trainer.update([long, other], LOSSES["grpo"], ADAMW, 19)
    assert trainer.digest() == before
