"""Tests of policies with a scalar head: their digests, the initial head, training and checkpoints."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig, BertLMHeadModel

from engine.backends.protocol import Objective
from engine.backends.torch.scalar_lm import initial_head_weight, is_scalar
from engine.backends.torch.trainer import TorchTrainer
from engine.errors import BadModelFolder, BadSpec
from engine.local.engine import LocalEngine
from engine.local.verify import verify_run
from engine.losses.values import MSESpec
from engine.models.samples import Sample
from engine.protocol import LogprobsRequest, PolicySpec, TokenSequence
from engine.specs.adapters import FullSpec, LoraSpec, parse_trainable
from storage.chain.records import OptimizerSpec, PolicyRef, Root
from storage.serialization import canonical_json
from storage.store.objects import open_store
from tests.fixtures.adapters import TOKENS, WHOLE, backend, logprobs, state_of, train
from tests.fixtures.engines import (
    DETERMINISTIC,
    PROVENANCE,
    commit_batch,
    hugging_face_scores,
    new_policy,
    request_after,
    row,
)

SCALAR, SCALAR_LORA = FullSpec(head="scalar"), LoraSpec(rank=4, alpha=6.0, head="scalar")
MSE = Objective(MSESpec())
RETURNS = [row([10, 11, 12], [50, 51], returns=1.0), row([20, 21], [22, 23, 24], returns=-1.0)]


def values(trainer: TorchTrainer, sequences: list[TokenSequence] = TOKENS) -> list[list[float]]:
    return [row.tolist() for row in trainer.values(sequences, max_tokens=WHOLE)]


def fit(trainer: TorchTrainer, *, updates: int = 3) -> None:
    """Towards a value of 1 in the first conversation, -1 in the other."""
    samples = [
        Sample(row["token_ids"], row["loss_mask"], group=str(index), returns=row["returns"])
        for index, row in enumerate(RETURNS)
    ]
    for _ in range(updates):
        trainer.update(samples, MSE, OptimizerSpec(lr=1e-3), max_tokens=WHOLE)


# -- the spec --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "seed", "dumped", "state"),
    [
        (FullSpec(), 0, {"kind": "full"}, "0ea127b31c3d56d681fbddacf6581d7d83df0b3bcbfede728bd92cfe95fed27c"),
        (FullSpec(), 2**64 - 1, {"kind": "full"}, "53e3b00b2520299d3a9e8ccdccb6eeede809327935bae441d444d7b77b4f2abb"),
        (
            LoraSpec(),
            3,
            {"alpha": 32.0, "kind": "lora", "rank": 16, "target_modules": "all-linear", "use_rslora": False},
            "5d446d3ac291b8c6330077f5d87f096055ea3fb914313913f45b8b8c55f7c009",
        ),
    ],
    ids=["full", "large seed", "lora"],
)
def test_states_of_chains_of_language_models_are_unchanged(
    spec: FullSpec | LoraSpec, seed: int, dumped: dict[str, Any], state: str
) -> None:
    """The expected states are from the version of this repository before trainable specs had a `head`."""
    trainable = spec.model_dump(mode="json")
    assert canonical_json(trainable) == canonical_json(dumped)
    assert Root(base_digest="0" * 64, trainable=trainable, init_seed=seed).state() == state
    assert parse_trainable(trainable | {"head": "lm"}) == spec


@pytest.mark.parametrize("spec", [SCALAR, SCALAR_LORA], ids=["full", "lora"])
def test_a_scalar_head_is_another_chain(spec: FullSpec | LoraSpec) -> None:
    scalar = spec.model_dump(mode="json")
    assert scalar["head"] == "scalar"
    assert parse_trainable(scalar) == spec
    plain = {name: value for name, value in scalar.items() if name != "head"}
    states = {Root(base_digest="0" * 64, trainable=trainable).state() for trainable in (scalar, plain)}
    assert len(states) == 2


def test_an_unknown_head_is_refused_and_forms_do_not_ask_for_one() -> None:
    with pytest.raises(BadSpec, match=r"head.*'lm' or 'scalar'"):
        parse_trainable({"kind": "full", "head": "value"})
    assert "head" not in LoraSpec.model_json_schema()["properties"]


# -- the head --------------------------------------------------------------------------------------------------


def test_a_new_head_is_drawn_by_its_seed_alone() -> None:
    head = initial_head_weight(4096, 7)
    assert torch.equal(head, initial_head_weight(4096, 7))
    assert not torch.equal(head, initial_head_weight(4096, 8))
    assert head.shape == (1, 4096)
    assert head.std().item() == pytest.approx(0.02, rel=0.05)
    assert head.abs().max().item() <= 0.02 * sqrt(3)
    assert abs(head.mean().item()) <= 4 * 0.02 / sqrt(4096)


def test_a_language_model_keeps_its_decoder_and_loses_its_head(tiny_folder: Path, tmp_path: Path) -> None:
    decoder = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).state_dict()
    del decoder["lm_head.weight"]
    scalar = backend().load(tiny_folder, head="scalar", init_seed=7)
    weights = dict(scalar.weights())
    assert set(weights) == {*decoder, "score.weight"}
    assert all(torch.equal(weights[name], tensor) for name, tensor in decoder.items())
    assert torch.equal(weights["score.weight"], initial_head_weight(weights["score.weight"].shape[1], 7))
    scalar.export(tmp_path / "export")
    scalar.write_config(tmp_path / "config")
    assert is_scalar(tmp_path / "export") and is_scalar(tmp_path / "config")
    scores = hugging_face_scores(tmp_path / "export", TOKENS[0].token_ids)
    assert values(scalar)[0] == pytest.approx(scores[2:6], abs=1e-5)


def test_the_first_update_reaches_the_decoder(tiny_folder: Path) -> None:
    trainer = backend().load(tiny_folder, head="scalar")
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    fit(trainer, updates=1)
    moved = {name for name, tensor in trainer.weights() if not torch.equal(tensor, before[name])}
    assert "score.weight" in moved
    assert "model.layers.0.self_attn.q_proj.weight" in moved


def test_a_scalar_folder_keeps_its_own_head(scalar_folder: Path, tmp_path: Path) -> None:
    expected = hugging_face_scores(scalar_folder, TOKENS[0].token_ids)[2:6]
    for seed in (0, 9):
        trainer = backend().load(scalar_folder, head="scalar", init_seed=seed)
        assert values(trainer)[0] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(BadSpec, match=r"scalar head.*into_scoring_model"):
        backend().load(scalar_folder)
    with pytest.raises(BadSpec, match=r"scalar head.*into_scoring_model"):
        backend().adapter(backend().load_base(scalar_folder), LoraSpec(), init_seed=0)


def test_values_are_computed_by_the_head_in_its_own_precision(tiny_folder: Path) -> None:
    """Where the decoder computes in bfloat16, the values are still no bfloat16 numbers."""
    rounded = torch.tensor(values(backend("bfloat16").load(tiny_folder, head="scalar"))[0])
    assert not torch.equal(rounded, rounded.bfloat16().float())
    exact = torch.tensor(values(backend().load(tiny_folder, head="scalar"))[0])
    assert (rounded - exact).abs().max() <= 0.05


def test_an_architecture_without_a_scalar_head_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """BERT's head for classification is no `score` on a decoder."""
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, is_decoder=True
    )
    BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(BadModelFolder):
        backend().load(tmp_path / "bert", head="scalar")


# -- with an adapter -----------------------------------------------------------------------------------------


def test_an_adapter_starts_with_the_values_of_the_whole_model(tiny_folder: Path, scalar_folder: Path) -> None:
    for folder in (tiny_folder, scalar_folder):
        whole = backend().load(folder, head="scalar", init_seed=5)
        adapter = backend().adapter(backend().load_base(folder), SCALAR_LORA, init_seed=5)
        assert values(adapter) == values(whole)
        assert [name for name, _ in adapter.trained_parameters() if "lora" not in name] == ["score.weight"]


def test_scalar_and_language_adapters_share_one_base(tiny_folder: Path, tmp_path: Path) -> None:
    base = backend().load_base(tiny_folder)
    off = backend().adapter_off(base)
    untouched, held = logprobs(off), base.nbytes()
    policy = backend().adapter(base, LoraSpec(rank=4), init_seed=0)
    critics = [backend().adapter(base, SCALAR_LORA, init_seed=seed) for seed in range(2)]
    assert base.nbytes() == held
    train(policy, 60)
    fit(critics[0])
    train(policy, 61)
    alone = backend().adapter(backend().load_base(tiny_folder), LoraSpec(rank=4), init_seed=0)
    train(alone, 60)
    train(alone, 61)
    assert state_of(policy, tmp_path / "p") == state_of(alone, tmp_path / "a")
    assert logprobs(off) == untouched
    fresh = backend().adapter(backend().load_base(tiny_folder), SCALAR_LORA, init_seed=1)
    assert values(critics[1]) == values(fresh)


def test_a_scalar_adapter_comes_back_from_its_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    base = backend().load_base(tiny_folder)
    trained, restored = (backend().adapter(base, SCALAR_LORA, init_seed=seed) for seed in (0, 9))
    fit(trained)
    files = trained.write_checkpoint(tmp_path / "kept")
    restored.read_checkpoint(files, optimizer=True)
    assert restored.weights_digest() == trained.weights_digest()
    assert "score.weight" in trained.weights_digest()[1]
    for trainer in (trained, restored):
        fit(trainer, updates=1)
    assert state_of(restored, tmp_path / "b") == state_of(trained, tmp_path / "a")
    language = backend().adapter(base, LoraSpec(rank=4, alpha=6.0), init_seed=0)
    with pytest.raises(BadSpec, match="score.weight"):
        language.read_checkpoint(files, optimizer=False)


@pytest.mark.parametrize("start", ["language", "scalar"])
def test_peft_loads_a_scalar_adapter_and_transformers_the_merged_one(
    start: str, tiny_folder: Path, scalar_folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    folder = tiny_folder if start == "language" else scalar_folder
    adapter = backend().adapter(backend().load_base(folder, key="models/m/1"), SCALAR_LORA, init_seed=5)
    untrained = values(adapter)
    fit(adapter)
    files = adapter.export(tmp_path / "adapter")
    config = json.loads(files["adapter_config.json"].read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    plain = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    loaded: Any = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    loaded.config.pad_token_id = None
    ids = TOKENS[0].token_ids
    with torch.no_grad():
        theirs = [loaded(input_ids=torch.tensor([ids[:end]])).logits.item() for end in range(3, 7)]
    adapter.export_merged(tmp_path / "merged")
    assert hugging_face_scores(tmp_path / "merged", ids)[2:6] == pytest.approx(theirs, abs=1e-5)
    assert values(adapter)[0] == pytest.approx(theirs, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(values(adapter)[0], untrained[0], strict=True)) > 0.05


# -- on a chain ------------------------------------------------------------------------------------------------


async def step(engine: LocalEngine, policy: PolicyRef) -> PolicyRef:
    request = request_after(policy, commit_batch(engine.store, policy, RETURNS), lr=3e-4, loss={"kind": "mse"})
    return (await engine.take_gradient_step(request)).policy


@pytest.mark.parametrize("spec", [SCALAR, SCALAR_LORA], ids=["full", "lora"])
async def test_a_chain_of_values_is_redone_to_the_bit(
    spec: FullSpec | LoraSpec, tiny_folder: Path, tmp_path: Path
) -> None:
    """Two stages, a checkpoint in each, on engines that come and go; then all of it once more."""
    url = f"file://{tmp_path}/store"
    engine = LocalEngine(url, DETERMINISTIC)
    start = await new_policy(engine, tiny_folder, trainable=spec, init_seed=4)
    # First stage: three steps, with a checkpoint after the second.
    policy = await step(engine, await step(engine, start))
    await engine.save_checkpoint(policy, provenance=PROVENANCE)
    policy = await step(engine, policy)
    request = LogprobsRequest(policy, TOKENS)
    values_before = await engine.values(request)
    await engine.close(checkpoint=False)

    engine = LocalEngine(url, DETERMINISTIC)
    # Another engine rebuilds the values and begins a second stage from them.
    assert await engine.values(request) == values_before
    assert await engine.values(LogprobsRequest(start, TOKENS)) != values_before
    trainable = spec.model_dump(mode="json")
    root = Root(start=policy, base_digest=policy.state, trainable=trainable)
    second = await engine.create_policy(PolicySpec(run="r", stage="1-s", model="policy", root=root))
    assert await engine.values(LogprobsRequest(second, TOKENS)) == values_before
    await engine.save_checkpoint(await step(engine, second), provenance=PROVENANCE)
    await engine.close()
    # Verification redoes both stages.
    for from_checkpoints in (False, True):
        report = verify_run(open_store(url), "r", from_checkpoints=from_checkpoints)
        assert report.problems == []
        assert [(c.chain, c.redone) for c in report.chains] == [("r/0-s/policy", 3), ("r/1-s/policy", 1)]


async def test_a_stage_cannot_change_the_head(tiny_folder: Path, tmp_path: Path) -> None:
    engine = LocalEngine(f"file://{tmp_path}/store", DETERMINISTIC)
    start = await new_policy(engine, tiny_folder)
    root = Root(start=start, base_digest=start.state, trainable=SCALAR.model_dump(mode="json"))
    with pytest.raises(BadSpec, match="train the same part"):
        await engine.create_policy(PolicySpec(run="r", stage="1-s", model="policy", root=root))
    await engine.close()
