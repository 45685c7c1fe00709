"""No token is older than the rules allow, whenever steps are committed and calls are cut."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import Completion, GenerateRequest
from storage.chain.records import Chain, CommitRecord, Numerics, OptimizerSpec, PolicyRef, Root, StepRequest
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore, open_store
from tasks.plans import PromptShard
from tasks.sampling.segments import ShardSegments
from tests.fixtures.engines import PROVENANCE

NUMERICS = Numerics(backend="b", device="cpu", compute_dtype="float32", threads=1, max_tokens=1)
REF = ArtifactRef(kind="threads", key="datasets/d/v/threads", sha256="0" * 64, bytes=1, rows=2, parents=())
LENGTH = 6


@dataclass
class Script:
    """A workspace whose engine takes `steps[n]` steps during call n and cuts each completion after `cuts[n]` tokens."""

    store: ObjectStore
    steps: list[int]
    cuts: list[list[int]]
    calls: list[PolicyRef] = field(default_factory=list)
    provenance = PROVENANCE
    epoch = 0

    def open_store(self) -> ObjectStore:
        return self.store

    def connect(self) -> Script:
        return self

    async def generate(self, request: GenerateRequest, *, epoch: int) -> list[Completion]:
        number = len(self.calls)
        self.calls.append(request.policy)
        chain = Chain.of(self.store, request.policy)
        for _ in range(self.steps[number] if number < len(self.steps) else 0):
            take_step(chain)
        completions = []
        for row in range(len(request.prompts)):
            left = LENGTH - len(request.sampled[row] if request.sampled else [])
            tokens = left if number >= len(self.cuts) else min(left, self.cuts[number][row])
            reason: Any = "length" if tokens == left else "interrupted"
            completions.append(Completion([request.policy.step] * tokens, [-1.0] * tokens, reason))
        return completions


def take_step(chain: Chain) -> PolicyRef:
    request = StepRequest(parent=chain.head(), batch=REF, loss={}, optimizer=OptimizerSpec(lr=1.0))
    record = CommitRecord(request=request, state=request.next_state(), updates=1, numerics=NUMERICS, weights_digest="0")
    return chain.commit(record).policy


@settings(deadline=None)
@given(
    step=st.integers(0, 5),
    staleness=st.integers(1, 3),
    ahead=st.integers(0, 3),
    steps=st.lists(st.integers(0, 3), max_size=6),
    cuts=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=6),
)
def test_every_token_is_of_a_policy_that_the_step_allows(
    step: int, staleness: int, ahead: int, steps: list[int], cuts: list[list[int]]
) -> None:
    store = open_store(f"memory://segments-{uuid4().hex}")
    chain = Chain(store, "r", "0-grpo", "policy")
    chain.create_root(Root(base_digest="0" * 64))
    oldest = max(0, step - staleness)
    for _ in range(oldest + ahead):  # the task may begin late
        take_step(chain)
    shard = PromptShard(base=REF, dataset=REF, index=0, rows=(0, 1), completions=1, segment_seconds=1.0)
    script = Script(store, steps, cuts)
    request = GenerateRequest(chain.policy(oldest), [[1], [2]], [5, 6])

    def sampler_of(script: Script) -> ShardSegments:
        return ShardSegments(script, chain.policy(oldest), shard, step=step)  # type: ignore[arg-type]

    sampler = sampler_of(script)
    completions = asyncio.run(sampler.sample(request))
    for completion in completions:
        # The engine writes the step of its policy as the token.
        assert len(completion.tokens) == LENGTH and completion.has_ended
        assert completion.tokens == sorted(completion.tokens)
        assert all(oldest <= token <= step for token in completion.tokens)
        named = zip(completion.policies, completion.lengths, strict=True)
        assert completion.tokens == [token for policy, length in named for token in [policy.step] * length]
    counts = {PolicyRef.from_uri(uri).step: tokens for uri, tokens in sampler.tokens_by_policy.items()}
    everything = [token for completion in completions for token in completion.tokens]
    assert counts == {step: everything.count(step) for step in set(everything)}
    # Another attempt gets the committed segments, and samples only what the last call of the first one added.
    again = Script(store, [], [])
    repeated = asyncio.run(sampler_of(again).sample(request))
    assert len(again.calls) <= 1
    for one, other in zip(repeated, completions, strict=True):
        kept = len(one.lengths) - 1  # the last part may be of the new call
        assert one.policies[:kept] == other.policies[:kept] and one.lengths[:kept] == other.lengths[:kept]
        assert len(one.tokens) == LENGTH and one.has_ended
