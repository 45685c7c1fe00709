"""Ulysses: ranks that share each row train as the torch trainer does, also where a rank has no trained token of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.backends.protocol import Objective
from engine.backends.weight_files.pieces import open_checkpoint
from engine.cluster.rank_group import RankGroup
from engine.errors import BadSpec
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.policy_gradient import GRPOSpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from tests.engine.deepspeed.conftest import (
    ADAMW,
    VALUE_TOLERANCE,
    OnRanks,
    assert_weights_close,
    make_group,
    some_samples,
    torch_trainer,
    whole,
)

Load = Callable[..., OnRanks]
LAYOUTS = [
    pytest.param({"zero_stage": 3}),
    {"zero_stage": 0},
    {"zero_stage": 2},
    {"zero_stage": 3, "activation_checkpointing": "recompute"},
]


@pytest.mark.slow
@pytest.mark.parametrize("spec", LAYOUTS)
def test_ranks_that_share_rows_train_as_the_torch_trainer_does(
    spec: dict[str, object], two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path
) -> None:
    reference, trainer = torch_trainer(tiny_folder), on_ranks(two_ranks, tiny_folder, sequence_parallel=2, **spec)
    grpo = Objective(GRPOSpec(clip_low=0.2, clip_high=0.2, kl_beta=0.1))
    # 11 tokens: not a multiple of the ranks; of the last sample, the first rank has no trained token
    late = Sample([5] * 20 + [6, 7], [0.0] * 20 + [1.0] * 2)
    for samples, objective in (
        (some_samples(), grpo),
        (some_samples([11]), grpo),
        ([late], Objective(CrossEntropySpec())),
    ):
        expected = reference.update(samples, objective, ADAMW, max_tokens=30)
        report = trainer.update(samples, objective, ADAMW, 30)
        assert report.micro_batches == expected.micro_batches
        assert report.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
    weights = whole(open_checkpoint(trainer.checkpoint()).weights)
    assert_weights_close(weights, dict(reference.weights()))
    sequences = [TokenSequence(token_ids=s.token_ids, loss_mask=s.loss_mask) for s in [*some_samples([9, 31]), late]]
    values = zip(
        trainer.trainer.logprobs(sequences, temperature=0.8, max_tokens=64),
        reference.logprobs(sequences, temperature=0.8, max_tokens=64),
        strict=True,
    )
    for left, right in values:
        assert left == pytest.approx(right, abs=VALUE_TOLERANCE)


@pytest.mark.slow
def test_two_groups_of_two_ranks(on_ranks: Load, tiny_folder: Path) -> None:
    """Of four ranks, each pair shares its rows, and rows are distributed over the pairs."""
    group = make_group(4)
    try:
        reference = torch_trainer(tiny_folder)
        trainer = on_ranks(group, tiny_folder, sequence_parallel=2, zero_stage=2)
        for _ in range(2):
            expected = reference.update(some_samples(), Objective(CrossEntropySpec()), ADAMW, max_tokens=30)
            report = trainer.update(some_samples(), Objective(CrossEntropySpec()), ADAMW, 30)
            assert report.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
        weights = whole(open_checkpoint(trainer.checkpoint()).weights)
        assert_weights_close(weights, dict(reference.weights()))
        with pytest.raises(BadSpec, match="does not divide the model's 4 attention heads and 2 key heads"):
            on_ranks(group, tiny_folder, sequence_parallel=4, zero_stage=2)
    finally:
        group.close()
