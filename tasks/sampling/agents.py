"""Runs the agents of a shard of prompts, and records their calls.

Each answered call is committed before the agent gets the answer, and its seed follows from the run, the step, the
prompt, the episode and the content of the call. So an agent that is started again, after its own crash or that of the
worker, gets the same answers, in whatever order it asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain

from pydantic import JsonValue

from engine.errors import TextError
from engine.http.openai.policies import ResolvedPolicy
from engine.http.openai.sessions import (
    CallContent,
    SampledAnswer,
    Session,
    SessionLimits,
    SessionServer,
    serving_sessions,
)
from engine.protocol import Completion, GenerateRequest, SamplingParams, StopReason
from engine.text.stored_models import context_length_of, renderer_of
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.errors import CorruptArtifact, ObjectNotFound
from storage.failpoints import failpoint
from storage.serialization import Frozen, canonical_json, digest
from storage.store import keys
from storage.store.objects import ObjectStore
from storage.worklog import log_work
from tasks.batches.truncation import shortest
from tasks.environments.agents import AgentAttempt, AgentFailed
from tasks.environments.episodes import EpisodeSegment, Trajectory
from tasks.plans import AgentPlan, PromptShard
from tasks.reports.clock import timed
from tasks.sampling.segments import InFlightSampler


class CommittedCall(Frozen):
    """The record of an answered call."""

    prompt_id: str
    completion: int
    """Number of the episode among those of the prompt."""
    policies: list[PolicyRef]
    """The policies that sampled it, in order: several if the weights changed at a token."""
    policy_tokens: list[int]
    """Number of tokens of each of these policies."""
    prompt: list[int]
    sampling: SamplingParams
    seed: int
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason

    def to_bytes(self) -> bytes:
        body = canonical_json(self)
        return canonical_json({"sha256": digest(body), "call": self.model_dump(mode="json")})

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> CommittedCall:
        """Raises CorruptArtifact if the record is not what was written."""
        try:
            stored = _StoredCall.model_validate_json(data)
        except ValueError as error:
            problem = f"{key} is no record of a call ({error}); delete it to make the call again"
            raise CorruptArtifact(problem) from error
        if digest(canonical_json(stored.call)) != stored.sha256:
            raise CorruptArtifact(f"{key} does not have the digest that it names; delete it to make the call again")
        return stored.call

    @property
    def answer(self) -> SampledAnswer:
        completion = Completion(self.token_ids, self.logprobs, self.stop_reason)
        return SampledAnswer(completion, self.policies, self.policy_tokens)


class _StoredCall(Frozen):
    sha256: str
    call: CommittedCall


class AgentRunner:
    """Runs the agents of one shard."""

    def __init__(
        self,
        workspace: Workspace,
        policy: PolicyRef,
        shard: PromptShard,
        sampling: SamplingParams,
        plan: AgentPlan,
        *,
        seeds: tuple[str | int, ...],
        rollouts: str | None,
        in_flight: InFlightSampler | None,
    ) -> None:
        """`rollouts` is the key of the table that the episodes are for. None: calls are not committed, and a run that
        was killed plays the episodes again. `in_flight` samples the answers if their policy may change at a token."""
        self.workspace, self.policy, self.shard, self.sampling = workspace, policy, shard, sampling
        self.plan, self.seeds, self.rollouts, self.in_flight = plan, seeds, rollouts, in_flight
        self.store: ObjectStore = workspace.open_store()
        self.renderer = renderer_of(self.store, shard.base)
        context = context_length_of(self.store, shard.base)
        self.served = ResolvedPolicy(policy, shard.base, context)
        self.limits = SessionLimits(plan.max_calls, shortest(context, plan.max_tokens, workspace.max_tokens))
        self._policies: dict[str, PolicyRef] = {}
        """The policies of the answers, by their states."""
        self._free = asyncio.Semaphore(plan.concurrency)

    async def play(self, trajectories: list[Trajectory]) -> None:
        """Runs an agent for each trajectory to its end. An agent that fails masks its trajectory.

        Raises the errors of the engine and of the store, which ends all agents.
        """
        async with serving_sessions() as server:
            tasks = [asyncio.create_task(self._play_one(server, trajectory)) for trajectory in trajectories]
            try:
                await asyncio.gather(*tasks)
            finally:
                # The first error ends the others, and their processes must end before the server.
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if self.in_flight is not None:
            # The sampler has also counted answers of attempts that failed, and of masked episodes.
            self.in_flight.count_tokens(self._tokens_of(trajectories))

    def _tokens_of(self, trajectories: Sequence[Trajectory]) -> dict[PolicyRef, int]:
        """The number of tokens that each policy sampled of the trajectories that are not masked."""
        tokens: dict[PolicyRef, int] = {}
        kept = [trajectory.segments for trajectory in trajectories if trajectory.status == "ok"]
        for segment in chain.from_iterable(kept):
            for state, count in zip(segment.policy_states, segment.policy_tokens, strict=True):
                policy = self._policies[state]
                tokens[policy] = tokens.get(policy, 0) + count
        return tokens

    async def _play_one(self, server: SessionServer, trajectory: Trajectory) -> None:
        async with self._free:
            problems: list[str] = []
            while True:
                try:
                    await self._attempt(server, trajectory, attempt=len(problems))
                    return
                except AgentFailed as error:
                    problems.append(str(error))
                    trajectory.failed_attempts += 1
                    log_work("agent_failed", prompt=trajectory.row["id"], completion=trajectory.number)
                if len(problems) > self.plan.retries:
                    first = f" (the first: {problems[0]})" if len(problems) > 1 else ""
                    trajectory.end("masked", f"{problems[-1]} ({len(problems)} attempts{first})")
                    return

    async def _attempt(self, server: SessionServer, trajectory: Trajectory, *, attempt: int) -> None:
        """Runs the agent once, and takes over what it sampled. Raises AgentFailed."""
        row, plan = trajectory.row, self.plan
        prompt = StringThread.from_json(str(row["thread"]))

        async def answer(content: CallContent, name: str, occurrence: int) -> SampledAnswer:
            return await self._answer(trajectory, content, name, occurrence)

        session = Session(
            self.served, self.renderer, self.sampling, self.limits, answer, metadata=dict(prompt.metadata)
        )
        task: dict[str, JsonValue] = {
            "id": row["id"],
            "completion": trajectory.number,
            "attempt": attempt,
            "seed": self.workspace.seed_for("agent", *self.seeds, row["id"], trajectory.number),
            "prompt": prompt.turns[-1].text if prompt.turns else "",
            "messages": prompt.messages(),  # type: ignore[dict-item]  # JSON values
            "metadata": dict(prompt.metadata),
            "model": self.served.model_id,
        }
        try:
            with server.opened(session) as url:
                process = AgentAttempt(plan.agent, session, url, seconds=plan.seconds, memory_mib=plan.memory_mib)
                ending, grade = await process.run(task)
        finally:
            _take_segments(trajectory, session)
        if not trajectory.segments:
            raise AgentFailed("the agent made no call to the model; call OPENAI_BASE_URL")
        if grade is None:
            trajectory.end("masked", f"a limit ended the agent ({ending}), and it had posted no reward")
            return
        # The reward is of the whole episode. Its place is the last turn.
        trajectory.segments[-1].grades[trajectory.turn - 1] = grade
        trajectory.end(ending)

    async def _answer(
        self, trajectory: Trajectory, content: CallContent, name: str, occurrence: int
    ) -> SampledAnswer:
        """The committed answer to a call, or a new one, which is then committed."""
        row_id, number = str(trajectory.row["id"]), trajectory.number
        key = None
        if self.rollouts is not None:
            identity = [self.policy.uri, *self.seeds, row_id, number, name, occurrence]
            key = keys.agent_call(self.rollouts, digest(canonical_json(identity)))
            with timed("storage"):
                committed = await asyncio.to_thread(_find_call, self.store, key)
            if committed is not None:
                return self._remembered(committed)

        failpoint("trajectory.turn")
        seed = self.workspace.seed_for(*self.seeds, row_id, number, name, occurrence)
        completion, policies, lengths = await self._sample(
            GenerateRequest(self.policy, [content.prompt], [seed], content.sampling)
        )
        if not completion.token_ids:
            raise TextError("the sampler returned no token; shorten the prompt")
        call = CommittedCall(
            prompt_id=row_id, completion=number, policies=policies, policy_tokens=lengths,
            prompt=content.prompt, sampling=content.sampling, seed=seed, token_ids=completion.token_ids,
            logprobs=completion.logprobs, stop_reason=completion.stop_reason,
        )  # fmt: skip
        if key is not None:
            with timed("storage"):
                stored = await asyncio.to_thread(self.store.put_if_absent, key, call.to_bytes())
            # Another process may have been faster.
            call = CommittedCall.from_bytes(stored.data, key)
            log_work("call", prompt=row_id, completion=number)
            failpoint("trajectory.call")
        return self._remembered(call)

    async def _sample(self, request: GenerateRequest) -> SampledAnswer:
        """Samples one answer."""
        if self.in_flight is not None:
            (sampled,) = await self.in_flight.sample(request)
            return SampledAnswer(sampled.completion(), sampled.policies, sampled.lengths)
        with timed("rollout"):
            (completion,) = await self.workspace.connect().generate(request, epoch=self.workspace.epoch)
        return SampledAnswer(completion, [self.policy], [len(completion.token_ids)])

    def _remembered(self, call: CommittedCall) -> SampledAnswer:
        """The answer of a call, whose policies are remembered."""
        answer = call.answer
        self._policies |= {policy.state: policy for policy in answer.policies}
        return answer


def _find_call(store: ObjectStore, key: str) -> CommittedCall | None:
    try:
        return CommittedCall.from_bytes(store.get(key), key)
    except ObjectNotFound:
        return None


def _take_segments(trajectory: Trajectory, session: Session) -> None:
    """Replaces the segments of the trajectory by those of the session."""
    trajectory.segments, trajectory.turn = [], 0
    for sequence in session.segments():
        segment = EpisodeSegment(sequence.tokenized, first_turn=trajectory.turn)
        for call in sequence.calls:
            completion = call.answer.completion
            segment.turn_tokens.append(len(completion.token_ids))
            segment.stop_reasons.append(completion.stop_reason)
            segment.policy_states += [policy.state for policy in call.answer.policies]
            segment.policy_tokens += call.answer.policy_tokens
        trajectory.turn += len(sequence.calls)
        trajectory.segments.append(segment)
