"""Tests of completions that are sampled in segments: whose tokens they are, and that a task that runs again goes on
from the committed segments."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from engine.errors import EngineBusy
from engine.local.engine import LocalEngine
from engine.models.samples import as_loss_mask, as_token_ids
from engine.protocol import Completion, GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from engine.workspace import derive_seed
from storage.chain.records import Chain, PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, read_manifest
from storage.store.tables import SCHEMAS, commit_table
from tasks.datasets.spec import FileDataset
from tasks.environments.spec import environment_spec
from tasks.plans import EpisodePlan, PromptShard
from tasks.sampling.completions import generate_rollouts
from tasks.sampling.episodes import play_episodes
from tasks.task_runs import work_of
from tests.fixtures.engines import PROVENANCE, commit_batch, request_after
from tests.fixtures.runs.batch_workspace import STAGE, BatchWorkspace, prompt_ids, sampled_ids

SAMPLING = SamplingParams(max_new_tokens=16, ignore_eos=True)
Call = Callable[[GenerateRequest], Awaitable[None]]
Generate = Callable[..., Awaitable[list[Completion]]]


@pytest.fixture
async def batches(tmp_path: Path, tiny_folder: Path) -> BatchWorkspace:
    batches = await BatchWorkspace.create(tmp_path, tiny_folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("0", "1")))
    batches.dataset = batches.load(FileDataset(path=str(prompts)))
    return batches


class CutEngine:
    """An engine whose interruptible calls are cut after some tokens: a script in place of timers and new weights."""

    def __init__(self, batches: BatchWorkspace, monkeypatch: pytest.MonkeyPatch, cuts: list[int]) -> None:
        engine = batches.workspace.connect()
        assert isinstance(engine, LocalEngine)
        self.engine, self.cuts = engine, cuts
        self.generate: Generate = engine.generate
        self.requests: list[GenerateRequest] = []
        self.after_cut: Call | None = None
        """Called after each call that was cut."""
        monkeypatch.setattr(engine, "generate", self._generate)

    async def _generate(self, request: GenerateRequest, *, epoch: int = 0) -> list[Completion]:
        self.requests.append(request)
        completions = await self.generate(request, epoch=epoch)
        if not self.cuts or not request.interruptible:
            return completions
        cut = self.cuts.pop(0)
        if self.after_cut is not None:
            await self.after_cut(request)
        shorter = []
        for completion in completions:
            if len(completion.token_ids) > cut:
                completion = Completion(completion.token_ids[:cut], completion.logprobs[:cut], "interrupted")
            shorter.append(completion)
        return shorter


async def sample(batches: BatchWorkspace, *, step: int = 0, index: int = 0, seconds: float | None = 60) -> ArtifactRef:
    assert batches.dataset is not None
    shard = PromptShard(
        base=batches.base, dataset=batches.dataset, index=index, rows=(0, 1), completions=2, segment_seconds=seconds
    )
    return await work_of(generate_rollouts)(batches.workspace, batches.policy, shard, SAMPLING, step=step)


def segment_ref(batches: BatchWorkspace, number: int, *, step: int = 0) -> ArtifactRef | None:
    return find_artifact(batches.store, keys.segment(batches.workspace.run, STAGE, step, 0, number))


async def take_step(engine: LocalEngine, policy: PolicyRef) -> PolicyRef:
    record = await engine.take_gradient_step(
        request_after(policy, commit_batch(engine.store, policy), lr=0.05), epoch=1
    )
    return record.policy


async def test_without_a_cut_the_completions_are_those_of_whole_calls(batches: BatchWorkspace) -> None:
    # The seeds do not depend on the index of the shard.
    whole = batches.rows(await sample(batches, index=1, seconds=None))
    rows = batches.rows(await sample(batches))
    for row, expected in zip(rows, whole, strict=True):
        assert row.pop("policy_states") == [batches.policy.state] and row.pop("policy_tokens") == [16]
        assert row == expected
    assert segment_ref(batches, 0) is None


async def test_every_segment_is_of_the_newest_policy_and_has_its_logprobs(
    batches: BatchWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 0, 1 and 2 are taken meanwhile. Rollouts of the 0-based step 2 may come from policies 0 to 2."""
    cutting = CutEngine(batches, monkeypatch, [5, 4, 3])
    policies = [batches.policy]

    async def after_cut(_: GenerateRequest) -> None:
        policies.append(await take_step(cutting.engine, policies[-1]))

    cutting.after_cut = after_cut
    ref = await sample(batches, step=2)
    assert [request.policy for request in cutting.requests] == [*policies[:3], policies[2]]
    assert [request.steps_ahead for request in cutting.requests] == [2, 1, 0, 0]
    states = [policy.state for policy in policies]
    for row in batches.rows(ref):
        assert row["policy_tokens"] == [5, 4, 3, 4] and row["policy_state"] == states[0]
        assert row["policy_states"] == [*states[:3], states[2]]
        tokens, start = sampled_ids(row), 0
        for policy, length in zip([*policies[:3], policies[2]], row["policy_tokens"], strict=True):
            before = [*prompt_ids(row), *tokens[:start]]
            part = tokens[start : start + length]
            mask = as_loss_mask([False] * len(before) + [True] * length, len(before) + length, "a completion")
            sequence = TokenSequence(as_token_ids([*before, *part], "a completion"), mask)
            (forced,) = await cutting.engine.logprobs(LogprobsRequest(policy, [sequence]), epoch=1)
            assert row["logprobs"][start : start + length] == pytest.approx(forced, abs=1e-5)
            start += length
    counts = {policies[0].uri: 20, policies[1].uri: 16, policies[2].uri: 28}
    manifest = read_manifest(batches.store, ref.key)
    assert manifest.extra["policies"] == counts and manifest.extra["completion_tokens"] == 64
    assert manifest.parents[0] == batches.policy.uri


async def test_the_answers_of_an_episode_are_cut_and_go_on_under_the_newest_policy(
    batches: BatchWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers of 16 tokens each for the 0-based step 2. Steps 0 and 1 are taken at the cuts, one in each answer."""
    cutting = CutEngine(batches, monkeypatch, [5, 16, 3])
    policies = [batches.policy]

    async def after_cut(_: GenerateRequest) -> None:
        if len(cutting.requests) != 2:
            policies.append(await take_step(cutting.engine, policies[-1]))

    cutting.after_cut = after_cut
    shard = PromptShard(
        base=batches.base, dataset=batches.dataset, index=0, rows=(0, 1), completions=1, segment_seconds=60
    )
    plan = EpisodePlan(environment=environment_spec("tests.fixtures.guessing:SayAgain"), max_turns=4)
    ref = await work_of(play_episodes)(batches.workspace, batches.policy, shard, SAMPLING, plan, step=2)
    first, second, third = policies
    assert [request.policy for request in cutting.requests] == [first, second, second, third]
    rows = batches.rows(ref)
    assert len(rows) == 2
    for row in rows:
        assert row["turn_tokens"] == [16, 16] and row["policy_state"] == first.state
        assert row["policy_states"] == [first.state, second.state, second.state, third.state]
        assert row["policy_tokens"] == [5, 11, 3, 13]
        sampled, start = [number for number, weight in enumerate(row["loss_mask"]) if weight], 0
        for policy, length in zip([first, second, second, third], row["policy_tokens"], strict=True):
            part = sampled[start : start + length]
            mask = as_loss_mask([number in part for number in range(part[-1] + 1)], part[-1] + 1, "an answer")
            sequence = TokenSequence(as_token_ids(row["token_ids"][: part[-1] + 1], "an answer"), mask)
            (forced,) = await cutting.engine.logprobs(LogprobsRequest(policy, [sequence]), epoch=1)
            assert row["logprobs"][start : start + length] == pytest.approx(forced, abs=1e-5)
            start += length
    manifest = read_manifest(batches.store, ref.key)
    assert manifest.extra["policies"] == {first.uri: 10, second.uri: 28, third.uri: 26}
    assert manifest.extra["completion_tokens"] == 64
    assert manifest.parents == (batches.policy.uri, shard.dataset.uri, second.uri, third.uri)


async def test_the_seed_of_a_segment_follows_from_its_completion_and_its_place(
    batches: BatchWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutting = CutEngine(batches, monkeypatch, [0, 5])
    rows = batches.rows(await sample(batches))
    first, again, rest = [request.seeds for request in cutting.requests]
    assert first == again == [row["seed"] for row in rows]  # a cut before the first token changes nothing
    assert rest == [derive_seed(row["seed"], 5) for row in rows]
    assert segment_ref(batches, 1) is None


async def test_a_task_that_runs_again_goes_on_from_the_committed_segments(
    batches: BatchWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutting = CutEngine(batches, monkeypatch, [5, 4])

    async def fail_in_the_third_call(_: GenerateRequest) -> None:
        if len(cutting.requests) == 3:
            raise EngineBusy("the engine is gone")

    cutting.cuts.append(3)
    cutting.after_cut = fail_in_the_third_call
    with pytest.raises(EngineBusy):
        await sample(batches)
    segments = []
    for number in range(2):
        ref = segment_ref(batches, number)
        assert ref is not None
        segments.append(batches.rows(ref))
    cutting.requests.clear()
    cutting.cuts.clear()
    rows = batches.rows(await sample(batches))
    (request,) = cutting.requests
    for index, row in enumerate(rows):
        kept = segments[0][index]["token_ids"] + segments[1][index]["token_ids"]
        assert request.sampled is not None and request.sampled[index] == kept and len(kept) == 9
        assert sampled_ids(row)[:9] == kept and row["policy_tokens"] == [5, 4, 7]
        assert row["logprobs"][:9] == segments[0][index]["logprobs"] + segments[1][index]["logprobs"]
    # and it is not sampled once more
    assert (await sample(batches)).rows == 4 and len(cutting.requests) == 1


async def test_a_segment_that_another_process_committed_first_is_the_one(
    batches: BatchWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutting = CutEngine(batches, monkeypatch, [5])
    others: list[dict[str, Any]] = [
        {"index": index, "seed": index, "token_ids": [60, 61], "logprobs": [-1.0, -2.0], "stop_reason": "interrupted"}
        for index in range(4)
    ]

    async def commit_others(request: GenerateRequest) -> None:
        commit_table(
            batches.store, keys.segment(batches.workspace.run, STAGE, 0, 0, 0),
            pa.Table.from_pylist(others, schema=SCHEMAS["segments"]),
            kind="segments", parents=(batches.policy.uri,), provenance=PROVENANCE,
        )  # fmt: skip

    cutting.after_cut = commit_others
    for row in batches.rows(await sample(batches)):
        assert sampled_ids(row)[:2] == [60, 61] and row["policy_tokens"] == [2, 14]
        assert row["logprobs"][:2] == [-1.0, -2.0]


async def test_completions_that_have_ended_are_not_in_later_segments(
    batches: BatchWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutting = CutEngine(batches, monkeypatch, [])
    sampled = cutting.generate

    async def ends_one(request: GenerateRequest, *, epoch: int = 0) -> list[Completion]:
        completions = await sampled(request, epoch=epoch)
        if len(cutting.requests) > 1:
            return completions
        ended = Completion(completions[1].token_ids[:3], completions[1].logprobs[:3], "eos")
        others = [Completion(other.token_ids[:5], other.logprobs[:5], "interrupted") for other in completions]
        return [others[0], ended, *others[2:]]

    cutting.generate = ends_one
    rows = batches.rows(await sample(batches))
    assert [len(request.prompts) for request in cutting.requests] == [4, 3]
    assert [row["policy_tokens"] for row in rows] == [[5, 11], [3], [5, 11], [5, 11]]
    assert [row["stop_reasons"] for row in rows] == [["length"], ["eos"], ["length"], ["length"]]
    assert Chain.of(batches.store, batches.policy).head() == batches.policy


async def test_a_call_that_brought_no_token_gets_more_time(
    batches: BatchWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samplers that have so much to do that no token comes in `segment_seconds` would else be asked for ever."""
    cutting = CutEngine(batches, monkeypatch, [0, 0, 4])
    rows = batches.rows(await sample(batches, seconds=3))
    assert [request.interrupt_after for request in cutting.requests] == [3, 6, 12, 3]
    assert all(len(sampled_ids(row)) == 16 for row in rows)
    assert segment_ref(batches, 0) is not None and segment_ref(batches, 1) is None
