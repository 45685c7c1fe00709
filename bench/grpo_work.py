"""One GRPO step for the benches: the calls of the flow, without Prefect and graders.

Prompts, seeds and rewards depend only on the shape and the step. So two engines with equal weights do equal work.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

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
    """Completions of each prompt. In a group of one, every advantage is 0, and the weights do not change."""
    prompt_tokens: int = 60
    new_tokens: int = 32
    vocabulary: int = 256
    """Token ids of prompts are below this number."""
    seed: int = 0
    """Another seed gives other prompts and completions."""

    def __post_init__(self) -> None:
        if self.completions < 2:
            raise SystemExit(f"{self.completions} completions of a prompt have no advantages; give 2 or more")


def require_model(path: Path) -> Path:
    """Returns the path. Ends the program if it is not a model folder."""
    if not (path / "config.json").is_file():
        raise SystemExit(f"{path} is no model folder; `make demo` puts {SMOLLM} there, or give --model FOLDER")
    return path


def number(*names: object) -> int:
    """Returns a number of at most 60 bits that depends only on the names."""
    return int(hashlib.sha256(repr(names).encode()).hexdigest()[:15], 16)


def prompts_of(shape: Shape, step: int) -> list[TokenIds]:
    """Returns prompts of random token ids. They are 20 or larger, because the special ids of a tokenizer are
    smaller."""

    def token(prompt: int, position: int) -> int:
        return 20 + number(shape.seed, step, prompt, position) % (shape.vocabulary - 20)

    return [[token(prompt, n) for n in range(shape.prompt_tokens)] for prompt in range(shape.prompts)]


async def new_policy(engine: Engine, model: Path, run: str) -> PolicyRef:
    """Imports the model folder, and returns policy 0 of a new chain that starts from it."""
    base = await engine.import_model(str(model), provenance=PROVENANCE)
    root = Root(base=base, base_digest=base.sha256, trainable={"kind": "full"})
    return await engine.create_policy(PolicySpec(run=run, stage=STAGE, model="policy", root=root))


async def grpo_step(
    engine: Engine, store: ObjectStore, policy: PolicyRef, start: PolicyRef, shape: Shape
) -> CommitRecord:
    """Takes one GRPO step after `policy`. `start` is the reference policy of the KL term."""
    # sample the completions
    prompts: list[TokenIds] = []
    for prompt in prompts_of(shape, policy.step):
        prompts += [prompt] * shape.completions
    sampling = SamplingParams(max_new_tokens=shape.new_tokens, min_new_tokens=shape.new_tokens)
    seeds = [number("completion", shape.seed, policy.step, n) for n in range(len(prompts))]
    completions = await engine.generate(GenerateRequest(policy, prompts, seeds, sampling))

    # score them under the policy and under the reference
    sequences = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        weights = [0.0] * len(prompt) + [1.0] * len(completion.token_ids)
        group = str(index // shape.completions)
        sequences.append(TokenSequence([*prompt, *completion.token_ids], weights, group=group))
    old = await engine.logprobs(LogprobsRequest(policy, sequences))
    reference = await engine.logprobs(LogprobsRequest(start, sequences))

    # commit the batch, and take the step
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
    """Commits the batch of the step after `policy`. The reward of a completion is its share of even token ids."""
    rewards = []
    for completion in completions:
        even = [token for token in completion.token_ids if token % 2 == 0]
        rewards.append(len(even) / len(completion.token_ids))
    rows = []
    for n, (sequence, completion) in enumerate(zip(sequences, completions, strict=True)):
        # the advantage is the reward minus the mean of the group
        first = n // shape.completions * shape.completions
        mean = sum(rewards[first : first + shape.completions]) / shape.completions
        rows.append(
            {
                "group": sequence.group,
                "completion": n % shape.completions,
                "token_ids": sequence.token_ids,
                "loss_mask": sequence.loss_mask,
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


def bootstrap_interval(ratios: list[float], *, draws: int = 10_000) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval of the mean ratio over the pairs of a bench."""
    random = Random(0)
    means = sorted(statistics.fmean(random.choices(ratios, k=len(ratios))) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws)]
