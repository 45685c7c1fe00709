"""What the benches do to an engine: one GRPO step as the flow does it, without Prefect and graders.

Prompts, seeds and rewards are functions of shape and step alone, so that equal weights give equal work however the
engine is reached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from engine.losses.policy_gradient import GRPOSpec
from engine.protocol import (
    Completion,
    Engine,
    GenerateRequest,
    LogprobsRequest,
    PolicySpec,
    SamplingParams,
    TokenIds,
    TokenSequence,
)
from storage.chain.records import CommitRecord, OptimizerSpec, PolicyRef, Root, StepRequest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.objects import ObjectStore
from storage.store.tables import SCHEMAS, commit_table

SMOLLM = Path(".ostinato/models/smollm2-135m-instruct")
PROVENANCE = Provenance(code_version="bench", config_digest="0" * 64, seed=0)
STAGE = "0-bench"


@dataclass(frozen=True)
class Shape:
    """The size of one step."""

    prompts: int = 4
    completions: int = 8
    """Of each prompt; in a group of one every advantage is 0, and the weights stand still."""
    prompt_tokens: int = 60
    new_tokens: int = 32
    vocabulary: int = 256
    """Prompts are random ids below this."""
    seed: int = 0
    """Another seed: other prompts and completions."""

    def __post_init__(self) -> None:
        if self.completions < 2:
            raise SystemExit(f"{self.completions} completions of a prompt teach nothing; give 2 or more")


def found_model(path: Path) -> Path:
    """The model's folder. Ends the program when there is none."""
    if not (path / "config.json").is_file():
        raise SystemExit(f"{path} is no model folder; `make demo` puts {SMOLLM} there, or give --model FOLDER")
    return path


def number(*names: object) -> int:
    """63 bits that depend on the names alone."""
    return int(hashlib.sha256(repr(names).encode()).hexdigest()[:15], 16)


def prompts_of(shape: Shape, step: int) -> list[TokenIds]:
    """Token ids 20 and above: a tokenizer's special ids are below."""

    def token(prompt: int, position: int) -> int:
        return 20 + number(shape.seed, step, prompt, position) % (shape.vocabulary - 20)

    return [[token(prompt, n) for n in range(shape.prompt_tokens)] for prompt in range(shape.prompts)]


async def new_policy(engine: Engine, model: Path, run: str) -> PolicyRef:
    """Policy 0 of a chain over the imported folder."""
    base = await engine.import_model(str(model), provenance=PROVENANCE)
    root = Root(base=base, base_digest=base.sha256, trainable={"kind": "full"})
    return await engine.create_policy(PolicySpec(run=run, stage=STAGE, model="policy", root=root))


async def grpo_step(
    engine: Engine, store: ObjectStore, policy: PolicyRef, start: PolicyRef, shape: Shape
) -> CommitRecord:
    """Rollouts, old logprobs, reference logprobs of `start`, the committed batch, and the gradient step on it."""
    prompts = [prompt for prompt in prompts_of(shape, policy.step) for _ in range(shape.completions)]
    sampling = SamplingParams(max_new_tokens=shape.new_tokens, min_new_tokens=shape.new_tokens)
    seeds = [number("completion", shape.seed, policy.step, n) for n in range(len(prompts))]
    completions = await engine.generate(GenerateRequest(policy, prompts, seeds, sampling))
    sequences = [
        TokenSequence(
            [*prompt, *completion.token_ids],
            [0.0] * len(prompt) + [1.0] * len(completion.token_ids),
            group=str(n // shape.completions),
        )
        for n, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
    old = await engine.logprobs(LogprobsRequest(policy, sequences))
    reference = await engine.logprobs(LogprobsRequest(start, sequences))
    batch = commit_batch(store, policy, sequences, completions, old, reference, shape)
    return await engine.take_gradient_step(
        StepRequest(
            parent=policy,
            batch=batch,
            reference=start,
            loss=GRPOSpec().model_dump(),
            optimizer=OptimizerSpec(lr=1e-5),
        )
    )


def commit_batch(
    store: ObjectStore,
    policy: PolicyRef,
    sequences: Sequence[TokenSequence],
    completions: Sequence[Completion],
    old: Sequence[list[float]],
    reference: Sequence[list[float]],
    shape: Shape,
) -> ArtifactRef:
    """The batch of the step after `policy`, rewarded by its share of even token ids, centred in each group."""
    rewards = [sum(t % 2 == 0 for t in c.token_ids) / len(c.token_ids) for c in completions]
    rows = []
    for n, (sequence, completion) in enumerate(zip(sequences, completions, strict=True)):
        first = n // shape.completions * shape.completions
        mean = sum(rewards[first : first + shape.completions]) / shape.completions
        rows.append(
            {
                "group": sequence.group,
                "completion": n % shape.completions,
                "token_ids": sequence.token_ids,
                "weights": sequence.weights,
                "advantages": [rewards[n] - mean] * len(completion.token_ids),
                "old_logprobs": old[n],
                "reference_logprobs": reference[n],
                "sampler_logprobs": completion.logprobs,
                "reward": rewards[n],
            }
        )
    return commit_table(
        store,
        keys.step_artifact(policy.run, policy.stage, policy.step, "batch", 0),
        pa.Table.from_pylist(rows, schema=SCHEMAS["batch"]),
        kind="batch",
        parents=(policy.uri,),
        provenance=PROVENANCE,
    )
