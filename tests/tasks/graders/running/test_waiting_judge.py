"""Tests of a judge that waits for its engine, which does not count against its timeout, and of one with a small
context."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.handles import InferenceModel, Model
from engine.models.call_batching import CallBatcher
from engine.protocol import Completion, GenerateRequest
from engine.text.threads import StringThread
from storage.serialization import canonical_json
from tasks.graders import judge_models
from tasks.graders.base import BaseGrader, FunctionGrader, Grade
from tasks.graders.judges import BinaryJudgeGrader
from tasks.graders.running.grade_threads import grade_threads
from tests.fixtures.spawning import Context, context, own_engines

ANSWERED = StringThread([("user", "2+3?"), ("assistant", "5")])
LIMIT = 0.05


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[Context]:
    with own_engines():
        yield context(tmp_path)


async def spawned(ctx: Context, tiny_folder: Path, **options: Any) -> InferenceModel:
    model = await Model(str(tiny_folder)).to_builder(ctx, **options).spawn_inference("judge")
    assert isinstance(model, InferenceModel)
    return model


class Scripted:
    """Stands before the engine of a judge: every answer is a verdict."""

    def __init__(self, model: InferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[GenerateRequest] = []
        self.free = asyncio.Event()
        tokenizer, reply = model.renderer.tokenizer, canonical_json({"result": "PASS"}).decode()
        self.ids = [*tokenizer.encode(reply), tokenizer.eos_token_ids[0]]
        monkeypatch.setattr(model.engine, "generate", self.generate)

    async def generate(self, request: GenerateRequest, *, epoch: int = 0) -> list[Completion]:
        self.asked.append(request)
        await self.free.wait()
        return [Completion(self.ids, [0.0] * len(self.ids), "eos") for _ in request.prompts]


class Hung(BaseGrader):
    """Never answers, and does not wait for any engine."""

    async def grade(self, thread: StringThread) -> Grade:
        await asyncio.Event().wait()
        raise AssertionError


class Then(BaseGrader):
    """Asks the judge, and then hangs."""

    def __init__(self, judge: BaseGrader) -> None:
        super().__init__("then")
        self.judge = judge

    async def grade(self, thread: StringThread) -> Grade:
        await self.judge.grade(thread)
        return await Hung("hung").grade(thread)


async def test_waiting_for_the_engine_does_not_count(
    ctx: Context, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await spawned(ctx, tiny_folder)
    engine = Scripted(model, monkeypatch)
    judge = BinaryJudgeGrader("j", model, "Is it right?")
    judged = asyncio.ensure_future(grade_threads(judge, [ANSWERED], timeout_seconds=LIMIT, retries=0))
    # the same limit has passed for a grader that began later: only then the judge's engine answers
    while not engine.asked:
        await asyncio.sleep(0)
    (late,) = await grade_threads(Hung("hung"), [ANSWERED], timeout_seconds=LIMIT, retries=0)
    assert late.status == "masked" and "no grade after 0.05 s" in late.reason
    engine.free.set()
    (outcome,) = await judged
    assert (outcome.status, outcome.reward) == ("ok", 1.0)


async def test_the_clock_runs_again_after_the_answer(
    ctx: Context, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await spawned(ctx, tiny_folder)
    engine = Scripted(model, monkeypatch)
    engine.free.set()
    grader = Then(BinaryJudgeGrader("j", model, "Is it right?"))
    (outcome,) = await grade_threads(grader, [ANSWERED], timeout_seconds=LIMIT, retries=0)
    assert outcome.status == "masked" and "no grade after 0.05 s" in outcome.reason
    assert len(engine.asked) == 1


async def test_the_limit_holds_for_a_function_that_waits_in_a_thread_and_then_hangs() -> None:
    hung = threading.Event()

    async def answers(_: Any, items: list[int]) -> list[int]:
        await asyncio.sleep(6 * LIMIT)
        return items

    def ask_and_hang(_: StringThread) -> float:
        asyncio.run(CallBatcher(answers).submit("key", 1))
        return float(hung.wait(20))

    grader = FunctionGrader("f", ask_and_hang)
    async with asyncio.timeout(10):
        (outcome,) = await grade_threads(grader, [ANSWERED], timeout_seconds=LIMIT, retries=0)
    hung.set()
    assert outcome.status == "masked" and "no grade after 0.05 s" in outcome.reason


async def test_an_answer_keeps_to_what_the_context_has_left(
    ctx: Context, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tiny model's context is 4,096 tokens, and bytes are tokens."""
    judge_models._warn_of_cut_answers.cache_clear()
    model = await spawned(ctx, tiny_folder)  # 2,048 tokens for an answer, as in the documents
    engine = Scripted(model, monkeypatch)
    engine.free.set()
    judge = BinaryJudgeGrader("j", model, "Is it right?")
    long = StringThread([("user", "x" * 2000), ("assistant", "5")])
    with caplog.at_level(logging.WARNING, logger="ostinato.graders"):
        for thread in (long, ANSWERED, long):
            assert (await judge.grade(thread)).value == 1.0
    room = [4096 - len(request.prompts[0]) for request in engine.asked]
    assert room[0] < 2048 < room[1]
    assert [request.sampling.max_new_tokens for request in engine.asked] == [room[0], 2048, room[2]]
    messages = [record.getMessage() for record in caplog.records if "no room" in record.getMessage()]
    assert len(messages) == 1 and "'judge' may answer with 2048 tokens" in messages[0]
