"""Adapters on a base in 4 bits (QLoRA) on an engine: what is refused, what is shared, and what a restart changes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.errors import BadSpec
from engine.local.engine import LocalEngine
from engine.local.verify import verify_run
from engine.models.folder import base_nbytes, parameter_count
from engine.protocol import LogprobsRequest, TokenSequence
from engine.specs.adapters import FullSpec, LoraSpec
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import Chain, PolicyRef
from tests.fixtures.engines import DETERMINISTIC, PROVENANCE, ROWS, commit_batch, new_policy, request_after

LORA = LoraSpec(rank=4)
QLORA = LoraSpec(rank=4, load_in_4bit=True)
SCORED = TokenSequence([10, 11, 12, 20, 21], [0.0, 0.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"trainer": {"kind": "deepspeed", "ranks": 2}}, "kind='deepspeed' was given; set engine.trainer.kind='torch'"),
        ({"sampler": {"kind": "vllm"}}, "kind='vllm' was given; set engine.sampler.kind='torch'"),
        ({"compute_dtype": "float64"}, "compute_dtype='float64' was given; set engine.compute_dtype='float32'"),
    ],
    ids=["deepspeed", "vllm", "float64"],
)
def test_an_engine_that_has_no_base_in_4_bits_says_so(keys: dict[str, Any], message: str) -> None:
    spec = LocalEngineSpec.model_validate(keys)
    spec.check_trainable(FullSpec())
    spec.check_trainable(LORA)
    with pytest.raises(BadSpec, match=f"load_in_4bit=true was given, .*{message}, or leave load_in_4bit out"):
        spec.check_trainable(QLORA)


async def test_it_is_refused_before_a_chain_begins(tmp_path: Path, tiny_folder: Path) -> None:
    engine = LocalEngine(f"file://{tmp_path}/store", LocalEngineSpec(threads=1, compute_dtype="float64"))
    with pytest.raises(BadSpec, match="load_in_4bit=true was given"):
        await new_policy(engine, tiny_folder, trainable=QLORA)
    assert Chain(engine.store, "r", "0-s", "policy").root() is None
    await engine.close()


# -- what follows needs the package ----------------------------------------------------------------------------


async def step(engine: LocalEngine, policy: PolicyRef) -> PolicyRef:
    request = request_after(policy, commit_batch(engine.store, policy, ROWS), lr=0.01)
    return (await engine.take_gradient_step(request)).policy


async def test_a_plain_base_and_one_in_4_bits_are_two(tmp_path: Path, tiny_folder: Path) -> None:
    pytest.importorskip("bitsandbytes")
    engine = LocalEngine(f"file://{tmp_path}/store", DETERMINISTIC)
    shown = []
    for run, spec in (("plain", LORA), ("small", QLORA), ("other", QLORA)):
        policy = await new_policy(engine, tiny_folder, run=run, trainable=spec)
        shown.append(await engine.logprobs(LogprobsRequest(policy, [SCORED])))
    assert shown[0] != shown[1] == shown[2]
    # The plain base is a whole model. What was reserved for each base is what it takes.
    plain, small = (loaded.nbytes() for loaded in engine.loaded_policies._bases.values())
    base = await engine.import_model(str(tiny_folder), provenance=PROVENANCE)
    reserved = partial(base_nbytes, engine.store, base, compute_bytes=4, master_bytes=4)
    assert plain == reserved(load_in_4bit=False) == 4 * parameter_count(engine.store, base)
    assert small == reserved(load_in_4bit=True)
    assert small < plain / 4
    await engine.close()


async def test_a_chain_goes_on_to_the_byte_after_its_engine_was_lost(tmp_path: Path, tiny_folder: Path) -> None:
    pytest.importorskip("bitsandbytes")
    url = f"file://{tmp_path}/store"
    engine = LocalEngine(url, DETERMINISTIC)
    policies = {run: await new_policy(engine, tiny_folder, run=run, trainable=QLORA) for run in ("whole", "lost")}
    for run, steps in (("whole", 3), ("lost", 2)):
        for _ in range(steps):
            policies[run] = await step(engine, policies[run])
    await engine.close(checkpoint=False)

    again = LocalEngine(url, DETERMINISTIC)
    lost = await step(again, policies["lost"])  # redone from the root
    ends = [Chain.of(again.store, policy).record(3) for policy in (policies["whole"], lost)]
    assert ends[0] and ends[1]
    assert ends[0].weights_digest == ends[1].weights_digest != None  # noqa: E711 - a chain of three
    # The published model is that of the redone weights.
    await again.export_model(lost, "small", provenance=PROVENANCE)
    await again.close()
    report = verify_run(again.store, "lost")
    assert report.problems == []
    assert [(chain.redone, chain.digests, chain.models) for chain in report.chains] == [(3, 3, 1)]
