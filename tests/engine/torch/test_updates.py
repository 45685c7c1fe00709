"""Pairs stay together from the batch to the micro-batch, also after an out-of-memory error. Groups that are not pairs
are refused before any forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.deepspeed.passes import distribute
from engine.backends.protocol import Objective, UpdateReport
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.loading import load_model
from engine.backends.torch.packing import longest_unit, micro_batches
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.torch.updates import check_pairs, count_totals, has_gradient, update_metrics, validate_batch
from engine.errors import BadSpec, OutOfMemory, SampleTooLong
from engine.local.apply import apply_request
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.pairs import DPOSpec, RankingSpec
from engine.losses.policy_gradient import GRPOSpec
from engine.losses.spec import LossSpec
from engine.models.samples import Sample, minibatches
from storage.chain.records import MinibatchPlan, OptimizerSpec, PolicyRef, StepRequest
from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from storage.store.tables import SCHEMAS, commit_table

CPU = torch.device("cpu")
DPO = Objective(DPOSpec())
FREE = Objective(GRPOSpec(kl_beta=0.0))


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> CausalLM:
    return load_model(tiny_folder, dtype=torch.float64, compute_dtype=torch.float64, device=CPU)


def sample(group: str, preferred: bool | None, length: int = 4, **columns: Any) -> Sample:
    """A prompt of one token, then trained ones; at the reference unless told."""
    ids = [3, *range(10, 10 + length - 1)]
    columns = {"reference_logprobs": [-5.0] * (length - 1)} | columns
    return Sample(ids, [0.0] + [1.0] * (length - 1), group, preferred=preferred, **columns)


def pair(group: str, *lengths: int) -> list[Sample]:
    first, second = lengths or (4, 4)
    return [sample(group, True, first), sample(group, False, second)]


def update(model: CausalLM, samples: Sequence[Sample], objective: Objective, max_tokens: int = 64) -> UpdateReport:
    return TorchTrainer(model).update(samples, objective, OptimizerSpec(lr=0), max_tokens=max_tokens)


@pytest.fixture
def no_pass(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pass was made")

    monkeypatch.setattr(model, "logprobs", refuse)


# -- what is no pair -----------------------------------------------------------------------------------------------

NONE = replace(sample("b", False), loss_mask=[0.0] * 4, reference_logprobs=[])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([sample("b", True)], r"the group 'b' has 1 samples, preferred: \[True\]; a pair has two, one of each"),
        ([*pair("b"), sample("b", False)], "the group 'b' has 3 samples"),
        ([sample("b", True), sample("b", True)], r"the group 'b' has 2 samples, preferred: \[True, True\]"),
        ([sample("b", False), sample("b", False)], r"preferred: \[False, False\]"),
        ([sample("b", True), sample("b", None)], r"preferred: \[True, None\]"),
        ([sample("", True), sample("", False)], "2 samples belong to no group, and the loss is one of pairs"),
        ([sample("b", True), NONE], "the other sample of the pair 'b' has no trained token; leave the pair out"),
        ([replace(NONE, preferred=True), sample("b", False)], "the preferred sample of the pair 'b' has no trained"),
    ],
    ids=["one", "three", "both_preferred", "none_preferred", "unmarked", "no_group", "untrained", "untrained_first"],
)
@pytest.mark.parametrize("max_tokens", [8, 64])
def test_what_is_no_pair_is_refused_before_any_pass(
    model: CausalLM, no_pass: None, wrong: list[Sample], says: str, max_tokens: int
) -> None:
    with pytest.raises(BadSpec, match=says):
        update(model, [*pair("a"), *wrong, *pair("c")], DPO, max_tokens)


def test_a_mixed_column_is_refused_before_any_pass_however_the_samples_are_split(
    model: CausalLM, no_pass: None
) -> None:
    mixed = [*pair("a"), *(replace(s, reference_logprobs=None) for s in pair("b"))]
    for max_tokens in (8, 64):
        with pytest.raises(BadSpec, match="some samples of the batch have reference_logprobs and some have none"):
            update(model, mixed, DPO, max_tokens)


def test_a_column_that_the_loss_lacks_is_refused_before_any_pass(model: CausalLM, no_pass: None) -> None:
    bare = [replace(s, reference_logprobs=None) for s in pair("a")]
    with pytest.raises(BadSpec, match="the loss needs reference logprobs, and the batch has none"):
        update(model, bare, DPO)
    flat = [sample("a", None, advantages=[1.0] * 3)]
    with pytest.raises(BadSpec, match="the loss needs old logprobs"):
        update(model, flat, FREE)
    capped = Objective(GRPOSpec(kl_beta=0.0, importance_cap=2.0))
    with pytest.raises(BadSpec, match="the loss needs the sampler's logprobs"):
        update(model, [replace(flat[0], old_logprobs=[-5.0] * 3)], capped)


@pytest.mark.parametrize("loss", [RankingSpec()], ids=["ranking"])
def test_a_loss_on_values_is_refused_on_logprobs(model: CausalLM, no_pass: None, loss: LossSpec) -> None:
    with pytest.raises(BadSpec, match="gives logprobs, and the loss 'ranking' reads one number per token"):
        update(model, pair("a"), Objective(loss))


# -- pairs are not split -------------------------------------------------------------------------------------------


def test_a_pair_too_long_for_a_forward_is_named(model: CausalLM, no_pass: None) -> None:
    # one prompt token is shared, then 9 and 9: 19 packed tokens
    long = [sample("the long one", True, 10), sample("the long one", False, 10, reference_logprobs=[-5.0] * 9)]
    long[1] = replace(long[1], token_ids=[3, *range(50, 59)])
    with pytest.raises(SampleTooLong, match="2 sequences of the pair 'the long one'.*takes .18.; raise max_tokens_per"):
        update(model, [*pair("a"), *long], DPO, max_tokens=18)
    with pytest.raises(SampleTooLong, match="a sequence of the group 'the long one' has 10 tokens.*takes 9; raise"):
        update(model, [*pair("a"), *long], DPO, max_tokens=9)
    assert longest_unit(long, whole_groups=True) == 19
    assert longest_unit(long, whole_groups=False) == 10


@st.composite
def batches_of_pairs(draw: st.DrawFn) -> list[Sample]:
    """Pairs in any order, with equal or unlike prompts."""
    samples = []
    for number in range(draw(st.integers(1, 8))):
        shared = draw(st.lists(st.integers(3, 5), min_size=1, max_size=6))
        for preferred in (True, False):
            ids = shared + draw(st.lists(st.integers(3, 9), min_size=1, max_size=8))
            weights = [0.0] * len(shared) + [1.0] * (len(ids) - len(shared))
            samples.append(Sample(ids, weights, f"pair-{number}", preferred=preferred))
    return draw(st.permutations(samples))


@settings(max_examples=100, deadline=None)
@given(batches_of_pairs(), st.integers(0, 40), st.integers(1, 4))
def test_pairs_share_their_micro_batch_and_their_rank(samples: list[Sample], room: int, ranks: int) -> None:
    max_tokens = longest_unit(samples, whole_groups=True) + room
    passes = distribute(samples, max_tokens=max_tokens, ranks=ranks, whole_groups=True)
    of_ranks = [batch for row in passes for batch in row if batch]
    for batches in (micro_batches(samples, max_tokens=max_tokens, whole_groups=True), of_ranks):
        assert sorted(index for batch in batches for index in batch) == list(range(len(samples)))
        for batch in batches:
            check_pairs([samples[index] for index in batch])
    with pytest.raises(SampleTooLong):
        micro_batches(samples, max_tokens=longest_unit(samples, whole_groups=True) - 1, whole_groups=True)


@settings(max_examples=100, deadline=None)
@given(batches_of_pairs(), st.integers(1, 9), st.integers(1, 3), st.integers(0, 5))
def test_pairs_share_their_minibatch(samples: list[Sample], size: int, epochs: int, seed: int) -> None:
    plan = MinibatchPlan(size=size, epochs=epochs, shuffle_seed=seed)
    updates = list(minibatches(samples, plan, whole_groups=True))
    pairs = len(samples) // 2
    assert len(updates) == epochs * -(-pairs // size)
    for members in updates:
        check_pairs(members)
        assert len(members) <= 2 * size
    for epoch in range(epochs):
        per_epoch = updates[epoch * len(updates) // epochs : (epoch + 1) * len(updates) // epochs]
        visited = [(s.group, s.preferred) for members in per_epoch for s in members]
        assert sorted(visited) == sorted((s.group, s.preferred) for s in samples)


class Recorder:
    """A trainer that records the arguments of its updates."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[str, bool | None]]] = []

    def update(self, samples: Sequence[Sample], objective: Objective, *_: Any, **__: Any) -> UpdateReport:
        check_pairs(samples)
        self.seen.append([(s.group, s.preferred) for s in samples])
        return UpdateReport(metrics={"tokens": 1.0})


def test_a_batch_table_of_pairs_reaches_the_trainer_as_pairs(tmp_path: Path) -> None:
    """The size of a minibatch counts pairs. The error of a pair with a sample without trained tokens names the pair."""
    store = open_store(str(tmp_path / "store"))
    parent = PolicyRef(run="r", stage="s", model="m", step=0, state="0" * 64)

    def run(samples: list[Sample]) -> Recorder:
        rows = [
            {
                "group": s.group, "completion": i, "token_ids": s.token_ids, "loss_mask": s.loss_mask,
                "reference_logprobs": s.reference_logprobs, "preferred": s.preferred,
            }
            for i, s in enumerate(samples)
        ]  # fmt: skip
        # Commit the samples as a batch, and apply a step over it.
        table = pa.Table.from_pylist(rows, schema=SCHEMAS["batch"])
        provenance = Provenance(code_version="abc", config_digest="0" * 64, seed=7)
        batch = commit_table(store, f"b{len(samples)}", table, kind="batch", provenance=provenance)
        request = StepRequest(
            parent=parent,
            batch=batch,
            loss=DPOSpec().model_dump(),
            optimizer=OptimizerSpec(lr=0),
            minibatches=MinibatchPlan(size=2, shuffle_seed=3),
        )
        recorder: Any = Recorder()
        apply_request(recorder, request, store, max_tokens=64)
        return recorder

    # Five pairs in another order: minibatches of two pairs have four samples.
    samples = [s for name in "abcde" for s in pair(name)]
    Random(0).shuffle(samples)
    assert [len(members) for members in run(samples).seen] == [4, 4, 2]
    with pytest.raises(BadSpec, match="the other sample of the pair 'b' has no trained token"):
        run([*pair("a"), sample("b", True), NONE])


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [1, 2])
def test_memory_that_fails_never_splits_a_pair(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Where half of the tokens would split a pair, the second and last try has room for the longest pair."""
    samples = [*pair("a", 6, 8), *pair("b", 6, 8)]
    longest = longest_unit(samples, whole_groups=True)
    trainer, left = TorchTrainer(model), failures
    inner = trainer._accumulate_micro_batch

    def small(*args: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        inner(*args)

    monkeypatch.setattr(trainer, "_accumulate_micro_batch", small)
    if failures == 1:
        report = trainer.update(samples, DPO, OptimizerSpec(lr=0), max_tokens=2 * longest - 2)
        assert (report.micro_batches, report.max_tokens) == (2, longest)
    else:
        with pytest.raises(OutOfMemory, match=f"longest pair {longest}.*CUDA out of memory"):
            trainer.update(samples, DPO, OptimizerSpec(lr=0), max_tokens=2 * longest - 2)


# -- what costs a pass, and the numbers of the report --------------------------------------------------------------


def test_what_costs_no_pass() -> None:
    flat = sample("a", None, advantages=[0.0] * 3)
    assert not has_gradient(flat, FREE)
    assert not has_gradient(replace(flat, loss_mask=[0.0] * 4, advantages=[], reference_logprobs=[]), FREE)
    for loss in (GRPOSpec(kl_beta=0.1), GRPOSpec(kl_beta=0.0, entropy_coef=0.1), CrossEntropySpec()):
        assert has_gradient(flat, Objective(loss))
    assert has_gradient(replace(flat, advantages=[0.0, 0.0, float("nan")]), FREE)  # it must not pass unseen
    assert has_gradient(NONE, DPO)  # the pair is refused instead


def test_a_rehearsal_of_nothing_and_of_what_is_right_says_nothing() -> None:
    validate_batch([], DPO)
    validate_batch([*pair("a"), *pair("b", 9, 2)], DPO)


def test_means_are_over_tokens_and_over_pairs() -> None:
    samples = [*pair("a", 3, 5), *pair("b", 2, 2)]  # 2 + 4 + 1 + 1 trained tokens
    totals = count_totals(samples)
    assert (totals.tokens, totals.sequences, totals.groups) == (8, 4, 2)
    sums = {"kl_sum": 4.0, "accuracy_per_pair": 1.0, "loss": 0.25}
    metrics = update_metrics(sums, forward_samples=samples, totals=totals) | {"grad_norm": 2.0}
    assert metrics == {"kl_mean": 0.5, "accuracy_mean": 0.5, "loss": 0.25, "grad_norm": 2.0, "tokens": 8.0}


def test_the_first_loss_of_dpo_is_ln_2(model: CausalLM) -> None:
    """The loss of a model that is its own reference, for any pairs."""
    from engine.protocol import TokenSequence

    pairs = [*pair("a", 3, 9), *pair("b", 5, 2), *pair("c", 4, 4)]
    sequences = [TokenSequence(token_ids=s.token_ids, loss_mask=s.loss_mask) for s in pairs]
    now = TorchTrainer(model).logprobs(sequences, temperature=1.0, max_tokens=64)
    on_policy = [replace(s, reference_logprobs=values) for s, values in zip(pairs, now, strict=True)]
    for max_tokens in (64, 13):
        report = update(model, on_policy, DPO, max_tokens)
        assert report.metrics["loss"] == pytest.approx(0.6931471805599453, rel=1e-12)
        assert report.metrics["reward_margin_mean"] == pytest.approx(0, abs=1e-12)
