"""Samples completions in segments, between which the weights may change (`rules.weight_updates`).

A segment holds the tokens that one call of the engine sampled from one policy. When the engine interrupts the call, the
segment is committed, and the unfinished completions go on from their tokens, under the newest committed policy. So a
task that was killed loses at most the tokens since the last segment, and the committed segments are the journal of
where each completion was cut. The last segment is committed with the table of rollouts. Segments of the answers of
episodes are not committed: an episode whose task was killed is played again, because its environment is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from engine.protocol import Completion, GenerateRequest, StopReason, TokenIds
from engine.workspace import Workspace, segment_seed
from storage.chain.records import Chain, PolicyRef
from storage.failpoints import failpoint
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, require_parent
from storage.store.tables import SCHEMAS, commit_table, read_table
from storage.worklog import log_work
from tasks.plans import PromptShard
from tasks.reports.clock import timed


@dataclass(slots=True)
class SegmentedCompletion:
    """The tokens of one completion so far, and the policies that sampled them."""

    seed: int
    tokens: TokenIds = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: StopReason = "interrupted"
    policies: list[PolicyRef] = field(default_factory=list)
    """The policy of each segment that added tokens."""
    lengths: list[int] = field(default_factory=list)
    """Number of tokens of each of these segments."""

    @property
    def has_ended(self) -> bool:
        return self.stop_reason != "interrupted"

    @property
    def next_seed(self) -> int:
        return segment_seed(self.seed, len(self.tokens))

    def add(self, policy: PolicyRef, completion: Completion) -> None:
        self.tokens = self.tokens + completion.token_ids
        self.logprobs = self.logprobs + completion.logprobs
        self.stop_reason = completion.stop_reason
        if completion.token_ids:
            self.policies.append(policy)
            self.lengths.append(len(completion.token_ids))

    def completion(self) -> Completion:
        return Completion(self.tokens, self.logprobs, self.stop_reason)


class InFlightSampler:
    """Samples completions of one step, and goes on under the newest committed policy where the engine cuts them."""

    def __init__(self, workspace: Workspace, policy: PolicyRef, *, step: int, seconds: float | None) -> None:
        """`policy` is the oldest one that may sample for the 0-based `step`; a call ends after `seconds`."""
        self.workspace, self.step, self._seconds = workspace, step, seconds
        self._store = workspace.open_store()
        self._policy = policy
        self._tokens: dict[PolicyRef, int] = {}

    @property
    def tokens_by_policy(self) -> dict[str, int]:
        """The number of tokens that each policy sampled, by its URI, in the order of their steps."""
        return {policy.uri: self._tokens[policy] for policy in sorted(self._tokens, key=lambda policy: policy.step)}

    def count_tokens(self, tokens: dict[PolicyRef, int]) -> None:
        """Replaces the counts by those of the answers that are kept."""
        self._tokens = tokens

    async def sample(self, request: GenerateRequest) -> list[SegmentedCompletion]:
        """The completions that `request` asks for. The policy of the request has no effect."""
        completions = [SegmentedCompletion(seed) for seed in request.seeds]
        await self._resume(completions)
        seconds = self._seconds
        while not all(completion.has_ended for completion in completions):
            policy = await asyncio.to_thread(self._newest_policy)
            open_indices = [index for index, completion in enumerate(completions) if not completion.has_ended]
            rest = self._rest(request, policy, completions, open_indices, seconds)
            with timed("rollout"):
                new = await self.workspace.connect().generate(rest, epoch=self.workspace.epoch)
            if all(completion.stop_reason != "interrupted" for completion in new):
                for index, completion in zip(open_indices, new, strict=True):
                    completions[index].add(policy, completion)
            elif any(completion.token_ids for completion in new):
                await self._keep(policy, dict(zip(open_indices, new, strict=True)), rest.seeds, completions)
                seconds = self._seconds
            elif seconds is not None:
                seconds *= 2  # the samplers have so much to do that no token came in this time
        for sampled in completions:
            for policy, tokens in zip(sampled.policies, sampled.lengths, strict=True):
                self._tokens[policy] = self._tokens.get(policy, 0) + tokens
        return completions

    async def _resume(self, completions: Sequence[SegmentedCompletion]) -> None:
        """Adds what earlier attempts have sampled."""

    async def _keep(
        self,
        policy: PolicyRef,
        new: dict[int, Completion],
        seeds: Sequence[int],
        completions: Sequence[SegmentedCompletion],
    ) -> None:
        """Adds what a call that was cut has sampled, by the indices of the completions. `seeds` are those of the
        call."""
        for index, completion in new.items():
            completions[index].add(policy, completion)

    def _newest_policy(self) -> PolicyRef:
        """The policy after the last committed step, at most the one that this step trains."""
        chain = Chain.of(self._store, self._policy)
        while self._policy.step < self.step:
            record = chain.record(self._policy.step + 1)
            if record is None:
                break
            self._policy = record.policy
        return self._policy

    def _rest(
        self,
        request: GenerateRequest,
        policy: PolicyRef,
        completions: Sequence[SegmentedCompletion],
        indices: Sequence[int],
        seconds: float | None,
    ) -> GenerateRequest:
        """Asks for the rest of the completions with these indices, for at most `seconds`."""
        sampled = [completions[index].tokens for index in indices]
        return replace(
            request,
            policy=policy,
            prompts=[request.prompts[index] for index in indices],
            seeds=[completions[index].next_seed for index in indices],
            images=request.images and [request.images[index] for index in indices],
            sampled=sampled if any(sampled) else None,
            interruptible=True,
            interrupt_after=seconds,
            steps_ahead=self.step - policy.step,
        )


class ShardSegments(InFlightSampler):
    """Commits the segments of one shard, and begins with those that are committed."""

    def __init__(self, workspace: Workspace, policy: PolicyRef, shard: PromptShard, *, step: int) -> None:
        """As InFlightSampler."""
        super().__init__(workspace, policy, step=step, seconds=shard.segment_seconds)
        self.shard, self._oldest = shard, policy
        self.committed: list[ArtifactRef] = []
        """The committed segments, in order."""

    async def _resume(self, completions: Sequence[SegmentedCompletion]) -> None:
        with timed("storage"):
            await asyncio.to_thread(self._read_committed, completions)

    async def _keep(
        self,
        policy: PolicyRef,
        new: dict[int, Completion],
        seeds: Sequence[int],
        completions: Sequence[SegmentedCompletion],
    ) -> None:
        table = _segment_table(list(new), seeds, list(new.values()))
        with timed("storage"):
            await asyncio.to_thread(self._commit, policy, table, completions)

    def _next_key(self) -> str:
        policy = self._oldest
        return keys.segment(policy.run, policy.stage, self.step, self.shard.index, len(self.committed))

    def _read_committed(self, completions: Sequence[SegmentedCompletion]) -> None:
        """Adds the segments of earlier attempts to the completions."""
        while (ref := find_artifact(self._store, self._next_key())) is not None:
            self._add(ref, completions)

    def _commit(self, policy: PolicyRef, table: pa.Table, completions: Sequence[SegmentedCompletion]) -> None:
        """Commits a segment and adds it to the completions. If another process has committed this segment first, adds
        that one."""
        number = len(self.committed)
        ref = commit_table(
            self._store,
            self._next_key(),
            table,
            kind="segments",
            parents=tuple(dict.fromkeys((self._oldest.uri, policy.uri))),
            provenance=self.workspace.provenance,
        )
        log_work("segment", stage=policy.stage, step=self.step, shard=self.shard.index, number=number)
        failpoint("segment.committed")
        self._add(ref, completions)

    def _add(self, ref: ArtifactRef, completions: Sequence[SegmentedCompletion]) -> None:
        policy = PolicyRef.from_uri(require_parent(ref, self._oldest.uri).parents[-1])
        if policy.step > self._policy.step:
            self._policy = policy
        for row in read_table(self._store, ref).to_pylist():
            completion = Completion(row["token_ids"], row["logprobs"], row["stop_reason"])
            completions[row["index"]].add(policy, completion)
        self.committed.append(ref)


def _segment_table(indices: Sequence[int], seeds: Sequence[int], completions: Sequence[Completion]) -> pa.Table:
    rows = []
    for index, seed, completion in zip(indices, seeds, completions, strict=True):
        rows.append(
            {
                "index": index,
                "seed": seed,
                "token_ids": completion.token_ids,
                "logprobs": completion.logprobs,
                "stop_reason": completion.stop_reason,
            }
        )
    return pa.Table.from_pylist(rows, schema=SCHEMAS["segments"])
