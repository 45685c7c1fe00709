"""An engine whose ranks train a LoRA adapter: the torch sampler draws from it, another engine continues the chain on
the torch trainer, and the published model is merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.local.engine import LocalEngine
from engine.protocol import GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from engine.specs.adapters import LoraSpec
from engine.specs.engine import LocalEngineSpec
from storage.chain.rebase import rebase_in_effect
from storage.chain.records import Chain, PolicyRef
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore, open_store
from tests.engine.deepspeed.conftest import VALUE_TOLERANCE
from tests.fixtures.adapters import DORA, LORA
from tests.fixtures.engines import PROVENANCE, commit_batch, new_policy, request_after

SCORED = TokenSequence([10, 11, 12, 20, 21, 22], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
PROMPTS, SEEDS = [[10, 11, 12], [20, 21]], [1, 2]


def engine_with(url: str, *, sampler: str = "torch", **trainer: Any) -> LocalEngine:
    keys: dict[str, Any] = {"compute_dtype": "float32", "device": "cpu", "threads": 1, "trainer": trainer}
    if sampler == "vllm":
        keys["sampler"] = {"kind": "vllm", "kv_cache_gib": 0.25}
    return LocalEngine(url, LocalEngineSpec.model_validate(keys))


async def step(engine: LocalEngine, store: ObjectStore, policy: PolicyRef) -> PolicyRef:
    return (await engine.take_gradient_step(request_after(policy, commit_batch(store, policy)))).policy


async def check_draws(
    engine: LocalEngine, policy: PolicyRef, *, tolerance: float = VALUE_TOLERANCE
) -> list[float]:
    """Completions have the logprobs that the trainer gives their tokens. Returns the logprobs of `SCORED`."""
    drawn = await engine.generate(GenerateRequest(policy, PROMPTS, SEEDS, SamplingParams(max_new_tokens=6)))
    sequences = []
    for prompt, completion in zip(PROMPTS, drawn, strict=True):
        mask = [0.0] * len(prompt) + [1.0] * len(completion.token_ids)
        sequences.append(TokenSequence([*prompt, *completion.token_ids], mask))
    scored = await engine.logprobs(LogprobsRequest(policy, [*sequences, SCORED]))
    for completion, logprobs in zip(drawn, scored[:-1], strict=True):
        assert completion.logprobs == pytest.approx(logprobs, abs=tolerance)
    return scored[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "spec"), [(2, LORA), (3, DORA)], ids=["lora", "dora"])
async def test_an_adapter_goes_from_the_ranks_to_the_torch_trainer_and_back(
    stage: int, spec: LoraSpec, tiny_folder: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store"
    store = open_store(url)
    ranks: dict[str, Any] = {"kind": "deepspeed", "ranks": 2, "zero_stage": stage}
    engine = engine_with(url, **ranks)
    start = await new_policy(engine, tiny_folder, trainable=spec)
    first = await check_draws(engine, start)
    policy = await step(engine, store, start)
    trained = await check_draws(engine, policy)
    assert trained != pytest.approx(first, abs=10 * VALUE_TOLERANCE)
    # The base itself is the reference, on the same ranks.
    reference = (await engine.logprobs(LogprobsRequest(start, [SCORED])))[0]
    assert reference == pytest.approx(first, abs=VALUE_TOLERANCE)
    assert (await engine.info()).memory_used_bytes > 0
    await engine.close()

    # The torch trainer continues from the checkpoint of the ranks, and the ranks from that of the torch trainer.
    torch_engine = engine_with(url, kind="torch")
    assert await check_draws(torch_engine, policy) == pytest.approx(trained, abs=VALUE_TOLERANCE)
    policy = await step(torch_engine, store, policy)
    continued = await check_draws(torch_engine, policy)
    await torch_engine.close()
    rebase = rebase_in_effect(Chain.of(store, policy), policy.step)
    assert rebase is not None and rebase.exact

    engine = engine_with(url, **ranks)
    assert await check_draws(engine, policy) == pytest.approx(continued, abs=VALUE_TOLERANCE)
    exported = await engine.export_model(policy, "adapted", provenance=PROVENANCE)
    await engine.close()
    check_published(store, exported.key, continued, tiny_folder, tmp_path / "published")


@pytest.mark.vllm
@pytest.mark.parametrize("spec", [LORA, DORA], ids=["lora", "dora"])
async def test_vllm_samples_with_the_adapter_of_the_ranks(spec: LoraSpec, tiny_folder: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    engine = engine_with(url, sampler="vllm", kind="deepspeed", ranks=2, zero_stage=3)
    policy = await new_policy(engine, tiny_folder, trainable=spec)
    first = await check_draws(engine, policy, tolerance=1e-3)
    policy = await step(engine, open_store(url), policy)
    assert await check_draws(engine, policy, tolerance=1e-3) != pytest.approx(first, abs=1e-3)
    await engine.close()


def check_published(store: ObjectStore, key: str, expected: list[float], base: Path, folder: Path) -> None:
    """The merged model, and the base with the adapter in peft, have the expected logprobs."""
    from peft import PeftModel

    folder.mkdir()
    files = materialise_files(store, key, folder)
    adapter = files["adapter/adapter_config.json"].parent
    merged = AutoModelForCausalLM.from_pretrained(files["config.json"].parent)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    ids = torch.tensor([SCORED.token_ids])
    for model in (merged, adapted):
        with torch.no_grad():
            logprobs = model.eval()(ids).logits[0, 2:-1].log_softmax(-1)
        drawn = logprobs.gather(1, ids[0, 3:, None]).squeeze(1)
        assert drawn.tolist() == pytest.approx(expected, abs=1e-4)
