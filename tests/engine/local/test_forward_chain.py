"""Chains whose old logprobs come from the forward pass of each step are redone to the bit, and a step whose batch is in
memory is the step whose batch is read from the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import storage.store.tables
from engine.local.engine import LocalEngine
from engine.local.replay import replay_step
from engine.local.verify import verify_run
from engine.models.images import images_to_rows
from engine.protocol import LogprobsRequest, TokenSequence
from storage.chain.records import Chain, CommitRecord, PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore, open_store
from storage.store.tables import RecentTables, TableWriter
from tests.engine.torch.test_vision_lm import rows as vision_rows
from tests.fixtures.engines import DETERMINISTIC, PROVENANCE, commit_batch, new_policy, request_after, row

LOSS: dict[str, Any] = {
    "kind": "grpo", "clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "entropy_coef": 0.05, "importance_cap": 1.01,
}  # fmt: skip
SETTINGS: dict[str, Any] = {"loss": LOSS, "old_logprobs": "forward", "temperature": 0.8, "lr": 1e-2}
SHAPES = [([10, 11, 12], 4, "a"), ([10, 11, 12], 1, "a"), ([40, 41], 12, "b"), ([40, 41], 7, "b"), ([50], 3, "")]
"""(prompt, trained tokens, group): unequal lengths, two shared prompts."""


async def policy_rows(engine: LocalEngine, sampled_from: PolicyRef, step: int) -> list[dict[str, Any]]:
    """Rows with advantages, and with the logprobs of the policy that they were sampled from."""
    rows = []
    for place, (prompt, trained, group) in enumerate(SHAPES):
        ids = [(37 * step + 11 * place + 5 * token) % 250 for token in range(trained)]
        sequence = TokenSequence(prompt + ids, [0.0] * len(prompt) + [1.0] * trained)
        request = LogprobsRequest(sampled_from, [sequence], temperature=SETTINGS["temperature"])
        (logprobs,) = await engine.logprobs(request)
        rows.append(row(prompt, ids, group=group, advantages=1.0 - place / 2, sampler_logprobs=logprobs))
    return rows


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
async def test_a_chain_is_redone_to_the_bit(url: str, tiny_folder: Path, compute_dtype: str) -> None:
    """Two steps, of which the second has rows of the policy before the one that it trains. The rows are 33 packed
    tokens, so that a step has several micro-batches."""
    engine = LocalEngine(url, DETERMINISTIC.model_copy(update={"compute_dtype": compute_dtype, "deterministic": False}))
    policy = stale = await new_policy(engine, tiny_folder)
    records: list[CommitRecord] = []
    for step in range(2):
        batch = commit_batch(engine.store, policy, await policy_rows(engine, stale, step))
        records.append(await engine.take_gradient_step(request_after(policy, batch, max_tokens=16, **SETTINGS)))
        policy, stale = records[-1].policy, policy
    await engine.close()
    # The step's own forward pass, its entropy and the stale logprobs all matter.
    assert records[1].metrics["ratio_mean"] == pytest.approx(1) and records[1].metrics["entropy_mean"] > 0
    assert records[1].metrics["logprob_gap_mean"] > 10 * records[0].metrics["logprob_gap_mean"]

    store = open_store(url)
    (chain,) = verify_run(store, "r").chains
    assert (chain.redone, chain.digests, chain.problems) == (2, 2, ())
    report = replay_step(Chain.of(store, policy), 2)
    assert report.weights_equal and report.metrics_equal


# -- batches in memory -------------------------------------------------------------------------------------------------


def written_in_parts(store: ObjectStore, policy: PolicyRef, rows: list[dict[str, Any]]) -> ArtifactRef:
    """The batch, written row by row, so that the table in memory has several chunks."""
    with TableWriter("batch") as writer:
        for one in rows:
            writer.write([one])
        key = keys.step_artifact(policy.run, policy.stage, policy.step, "batch", 0)
        return writer.commit(store, key, provenance=PROVENANCE)


@pytest.mark.parametrize(
    ("commit", "with_images"), [(commit_batch, False), (written_in_parts, False), (written_in_parts, True)]
)
async def test_a_step_of_a_batch_in_memory_is_that_of_the_store(
    engine: LocalEngine, tiny_folder: Path, vision_folder: Path, commit: Any, with_images: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    reads: list[str] = []
    get = ObjectStore.get
    monkeypatch.setattr(ObjectStore, "get", lambda self, key: (reads.append(key), get(self, key))[1])
    digests = []
    for run in ("memory", "store"):
        policy = await new_policy(engine, vision_folder if with_images else tiny_folder, run=run)
        rows = await policy_rows(engine, policy, 0)
        if with_images:
            for own, sequence in zip(rows, vision_rows(vision_folder), strict=True):
                own |= {"token_ids": sequence.token_ids.tolist(), "loss_mask": sequence.loss_mask.tolist()}
                own |= {name: [own[name][0]] * sequence.trained for name in ("advantages", "sampler_logprobs")}
                own |= {"group": sequence.group, "images": images_to_rows(sequence.images)}
        batch = commit(engine.store, policy, rows)
        if run == "store":
            monkeypatch.setattr(storage.store.tables, "RECENT", RecentTables())
        reads.clear()
        record = await engine.take_gradient_step(request_after(policy, batch, **SETTINGS))
        assert any(key.endswith(".parquet") for key in reads) == (run == "store")
        digests.append(record.weights_digest)
    assert digests[0] == digests[1] is not None
