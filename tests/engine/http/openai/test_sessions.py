"""Sessions of agents: the `openai` package calls them over a real server. Answers are scripted, so that the tests know
every id."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.errors import BadSpec, EngineBusy
from engine.http.guard import MAX_JSON_BYTES
from engine.http.openai.policies import ResolvedPolicy
from engine.http.openai.sessions import (
    RETRY_HEADER,
    CallContent,
    SampledAnswer,
    Session,
    SessionLimits,
    SessionServer,
    serving_sessions,
)
from engine.protocol import Completion, SamplingParams
from engine.text.fragments import ToolCallFragment
from engine.text.rendering import Renderer
from engine.text.tokenizers import BROKEN, load_tokenizer
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tests.fixtures.tool_models import ADD, MODELS

POLICY = PolicyRef(run="r", stage="0-env_grpo", model="policy", step=3, state="a" * 64)
BASE = ArtifactRef(kind="model", key="models/tiny/1", sha256="b" * 64, bytes=1, rows=None, parents=())
RUN = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=8, stop=("###",))
Message = dict[str, str]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Script:
    """Answers a call by its content, whenever it comes: with the bytes of its digest, most of which are no text."""

    def __init__(self) -> None:
        self.asked: list[tuple[CallContent, str, int]] = []
        self.answers: list[list[int]] = []
        """Ids of the next answers, if they are given."""
        self.error: Exception | None = None

    async def __call__(self, content: CallContent, name: str, occurrence: int) -> SampledAnswer:
        self.asked.append((content, name, occurrence))
        if self.error is not None:
            raise self.error
        if self.answers:
            ids = self.answers.pop(0)
            return SampledAnswer(Completion(ids, [-0.5] * len(ids), "eos"), [], [])
        key = hashlib.sha256(f"{name} {occurrence}".encode()).digest()
        # ids of single bytes from 0x80 on, which are no characters alone
        ids = [140 + byte % 40 for byte in key[: content.sampling.max_new_tokens]]
        return SampledAnswer(Completion(ids, [-0.5] * len(ids), "length"), [], [])


class Talk:
    """A session with its client."""

    def __init__(self, server: SessionServer, session: Session, url: str, script: Script) -> None:
        self.server, self.session, self.url, self.script = server, session, url, script
        self.client = openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=120)
        self.tokenizer = session.renderer.tokenizer

    async def ask(self, *messages: Message, **options: Any) -> str:
        response = await self.client.chat.completions.create(model="any", messages=list(messages), **options)  # type: ignore[arg-type]
        return response.choices[0].message.content or ""

    def sampled(self) -> list[list[int]]:
        """The ids of each answer, in the order of the calls."""
        return [call.answer.completion.token_ids for call in self.session.calls]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


@asynccontextmanager
async def talking(renderer: Renderer, sampling: SamplingParams = RUN, **limits: Any) -> AsyncIterator[Talk]:
    script = Script()
    bounds = SessionLimits(**{"calls": 20, "tokens": 500} | limits)
    served = ResolvedPolicy(POLICY, BASE, 512)
    session = Session(served, renderer, sampling, bounds, script, metadata={"n": 1})
    async with serving_sessions() as server:
        with server.opened(session) as url:
            talk = Talk(server, session, url, script)
            async with talk.client:
                yield talk


@pytest.fixture
async def talk(tiny_folder: Path) -> AsyncIterator[Talk]:
    async with talking(Renderer(load_tokenizer(tiny_folder))) as talk:
        yield talk


OPEN, CLOSE, ANSWER = "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n"
"""Parts of the tiny model's ChatML template, written by hand."""


async def test_what_was_sampled_is_not_tokenised_again(talk: Talk) -> None:
    first = await talk.ask(user("q"))
    assert BROKEN in first  # encoding this text would give other ids
    await talk.ask(user("q"), assistant(first), user("more"))
    (segment,) = talk.session.segments()
    answer, second = talk.sampled()
    expected = [
        (talk.encode(f"{OPEN}q{CLOSE}{ANSWER}"), 0.0), (answer, 1.0),
        (talk.encode(f"{CLOSE}{OPEN}more{CLOSE}{ANSWER}"), 0.0), (second, 1.0),
    ]  # fmt: skip
    assert segment.tokenized.token_ids == [token for ids, _ in expected for token in ids]
    assert segment.tokenized.weights == [weight for ids, weight in expected for _ in ids]
    assert talk.script.asked[1][0].prompt == [token for ids, _ in expected[:3] for token in ids]
    assert segment.tokenized.metadata == {"n": 1}
    assert [len(call.answer.completion.token_ids) for call in segment.calls] == [8, 8]


async def test_a_rewritten_history_begins_another_sequence(talk: Talk) -> None:
    first = await talk.ask(user("q"))
    await talk.ask(user("q"), assistant(first.upper() + "!"), user("more"))
    segments = talk.session.segments()
    trained = [segment.tokenized.weights.count(1.0) for segment in segments]
    assert trained == [8, 8]
    # the agent's own text is context
    rewritten = talk.encode(f"{OPEN}q{CLOSE}{ANSWER}{first.upper()}!{CLOSE}{OPEN}more{CLOSE}{ANSWER}")
    assert segments[1].tokenized.token_ids == rewritten + talk.sampled()[1]


@pytest.mark.parametrize("words", [("a", "b", "c"), ("c", "b", "a")])
async def test_parallel_calls_are_branches_in_an_order_without_time(talk: Talk, words: tuple[str, ...]) -> None:
    first = await talk.ask(user("q"))
    for word in words:
        await talk.ask(user("q"), assistant(first), user(word))
    segments = talk.session.segments()
    assert len(segments) == 3
    # each answer is trained once: the first one in the branch that continues it, and context in the others
    assert [segment.tokenized.weights.count(1.0) for segment in segments] == [16, 8, 8]
    start = talk.encode(f"{OPEN}q{CLOSE}{ANSWER}") + talk.sampled()[0]
    assert all(segment.tokenized.token_ids[: len(start)] == start for segment in segments)
    by_digest = sorted(talk.session.calls[1:], key=lambda call: call.content)
    assert [segment.calls[-1] for segment in segments] == by_digest
    assert [len(segment.tokenized.logprobs) for segment in segments] == [16, 8, 8]


async def test_equal_calls_have_answers_of_their_own_and_a_repeated_request_has_the_same(talk: Talk) -> None:
    async def ids(**options: Any) -> list[Any]:
        response = await talk.client.chat.completions.create(
            model="any", messages=[user("q")], extra_body={"return_token_ids": True}, **options  # type: ignore[list-item]
        )
        return [choice.token_ids for choice in response.choices]  # type: ignore[attr-defined]

    (first,), (second,) = await ids(), await ids()
    assert first != second
    assert await ids(extra_headers={RETRY_HEADER: "1"}) == [second]
    assert [occurrence for _, _, occurrence in talk.script.asked] == [0, 1]
    third, fourth = await ids(n=2)
    assert talk.sampled() == [first, second, third, fourth]
    assert len({tuple(answer) for answer in talk.sampled()}) == len(talk.session.segments()) == 4


async def test_an_answer_that_a_client_did_not_wait_for_is_that_of_its_next_call(talk: Talk) -> None:
    arrived, release = asyncio.Event(), asyncio.Event()
    answer = talk.session._answer

    async def slow(content: CallContent, name: str, occurrence: int) -> SampledAnswer:
        arrived.set()
        await release.wait()
        return await answer(content, name, occurrence)

    talk.session._answer = slow
    asking = asyncio.create_task(talk.ask(user("q")))
    await arrived.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    while talk.session._waiting:
        await asyncio.sleep(0.01)
    release.set()
    await talk.ask(user("q"))
    assert [occurrence for _, _, occurrence in talk.script.asked] == [0]


async def test_the_run_decides_what_training_accounts_for(talk: Talk) -> None:
    await talk.ask(user("q"), temperature=0, top_p=0.1, max_tokens=5, seed=3, stop=["x", "###"])
    await talk.ask(user("q"), max_tokens=5000)
    sampling = [content.sampling for content, _, _ in talk.script.asked]
    assert sampling[0] == RUN.model_copy(update={"max_new_tokens": 5, "stop": ("###", "x")})
    assert sampling[1] == RUN
    with pytest.raises(openai.BadRequestError, match="17 stop strings"):
        await talk.ask(user("q"), stop=[str(number) for number in range(16)])


async def test_a_text_is_continued_by_its_ids(talk: Talk) -> None:
    first = await talk.client.completions.create(model="any", prompt="Once")
    text = first.choices[0].text
    await talk.client.completions.create(model="any", prompt=f"Once{text} then")
    by_ids = talk.session.segments()[0].tokenized.token_ids
    await talk.client.completions.create(model="any", prompt=[*by_ids, *talk.encode(" end")])
    (segment,) = talk.session.segments()
    answer, second, third = talk.sampled()
    once, then, end = talk.encode("Once"), talk.encode(" then"), talk.encode(" end")
    assert segment.tokenized.token_ids == [*once, *answer, *then, *second, *end, *third]
    assert segment.tokenized.weights.count(1.0) == 24


async def test_a_text_after_a_stop_string_is_encoded_as_it_is(talk: Talk) -> None:
    talk.script.answers = [talk.encode(" I look\nObs")]
    response = await talk.client.completions.create(model="any", prompt="Q", stop=["Obs"])
    assert response.choices[0].text == " I look\n"
    await talk.client.completions.create(model="any", prompt="Q I look\nObs: 42")
    assert talk.script.asked[1][0].prompt == talk.encode("Q I look\nObs: 42")
    assert len(talk.session.segments()) == 2


async def test_a_repeated_request_in_flight_leaves_one_answer(talk: Talk) -> None:
    body = {"model": "any", "messages": [user("q")]}
    async with httpx.AsyncClient() as client:
        url = f"{talk.url}/chat/completions"
        first = client.post(url, json=body)
        again = client.post(url, json=body, headers={RETRY_HEADER: "1"})
        replies = await asyncio.gather(first, again)
    assert replies[0].json()["choices"] == replies[1].json()["choices"]
    answer = replies[0].json()["choices"][0]["message"]["content"]
    await talk.ask(user("q"), assistant(answer), user("more"))
    (segment,) = talk.session.segments()
    assert [len(call.answer.completion.token_ids) for call in segment.calls] == [8, 8]


async def test_after_a_failure_no_other_answer_of_the_request_is_kept(talk: Talk) -> None:
    cancelled = 0

    async def answer(content: CallContent, name: str, occurrence: int) -> SampledAnswer:
        nonlocal cancelled
        if occurrence == 0:
            raise EngineBusy("full")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        raise AssertionError("the wait was not ended")

    talk.session._answer = answer
    with pytest.raises(openai.APIStatusError):
        await talk.ask(user("q"), n=3)
    assert cancelled == 2 and talk.session.calls == []


async def test_a_far_too_long_prompt_is_a_limit(talk: Talk) -> None:
    with pytest.raises(openai.BadRequestError):
        await talk.ask(user("q" * 200_000))
    assert talk.session.limit_reached == "tokens"


async def test_a_stream_is_the_whole_answer(talk: Talk) -> None:
    chunks = await talk.client.chat.completions.create(model="any", messages=[user("q")], stream=True)  # type: ignore[list-item]
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
    (call,) = talk.session.calls
    assert text == call.builder.text and BROKEN in text


async def test_forged_and_ended_sessions_are_unknown(talk: Talk) -> None:
    async with openai.AsyncOpenAI(base_url=f"{talk.server.address}/v1/sessions/forged", api_key="x") as forger:
        with pytest.raises(openai.NotFoundError) as caught:
            await forger.chat.completions.create(model="any", messages=[{"role": "user", "content": "q"}])
        assert caught.value.code == "session_not_found"
        with pytest.raises(openai.NotFoundError):
            await forger.post("/reward", body={"reward": 1}, cast_to=object)
    session = talk.session
    ended = Session(session.served, session.renderer, RUN, session.limits, talk.script, metadata={})
    with talk.server.opened(ended) as url:
        pass
    async with openai.AsyncOpenAI(base_url=url, api_key="x") as late:
        with pytest.raises(openai.NotFoundError, match="it never began, or it has ended"):
            await late.models.list()
    assert len(ended.id) >= 32 and ended.id != session.id


async def test_limits_are_errors_that_clients_do_not_repeat(tiny_folder: Path) -> None:
    async with talking(Renderer(load_tokenizer(tiny_folder)), calls=2) as talk:
        prompt = len(talk.encode(f"{OPEN}{'q' * 10}{CLOSE}{ANSWER}"))
        talk.session.limits = SessionLimits(calls=2, tokens=prompt + 3)
        with pytest.raises(openai.BadRequestError) as caught:
            await talk.ask(user("q" * 100))
        assert caught.value.code == "context_length_exceeded" and talk.session.limit_reached == "tokens"
        await talk.ask(user("q" * 10))
        assert len(talk.sampled()[0]) == 3  # what the limit leaves
        await talk.ask(user("r"))
        with pytest.raises(openai.BadRequestError, match="had 2 answers of at most 2") as caught:
            await talk.ask(user("s"))
        assert caught.value.code == "session_limit" and talk.session.limit_reached == "turns"


async def test_rewards_are_numbers(talk: Talk) -> None:
    for value in (0.5, {"reward": 2}, [1, 0.5]):
        await talk.client.post("/reward", body=value, cast_to=object)
        assert talk.session.reward == (value["reward"] if isinstance(value, dict) else value)
    for wrong in ("good", {"score": 1}, [], True, {"reward": None}):
        with pytest.raises(openai.BadRequestError, match="the reward is no number"):
            await talk.client.post("/reward", body=wrong, cast_to=object)
    async with httpx.AsyncClient() as client:
        for body in (b"{", b"[" * 100_000):
            assert (await client.post(f"{talk.url}/reward", content=body)).status_code == 400
        for number in ("NaN", "[1, -Infinity]", '{"reward": 1e999}', str(10**400)):
            refused = await client.post(f"{talk.url}/reward", content=number)
            assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
            assert "send a finite number" in refused.json()["error"]["message"]
    assert talk.session.reward == [1, 0.5]


async def test_the_models_are_the_policy_of_the_session(talk: Talk) -> None:
    assert [model.id async for model in talk.client.models.list()] == [POLICY.full_name]


async def test_a_large_body_is_refused(talk: Talk) -> None:
    async with httpx.AsyncClient() as client:
        response = await client.post(f"{talk.url}/chat/completions", content=b"x" * (MAX_JSON_BYTES + 1))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_an_error_of_the_engine_is_kept_for_the_task(talk: Talk) -> None:
    talk.script.error = BadSpec("token 99999")  # the prompt's
    with pytest.raises(openai.BadRequestError, match="token 99999"):
        await talk.ask(user("q"))
    assert talk.session.failure is None
    talk.script.error = EngineBusy("no room")
    with pytest.raises(openai.InternalServerError, match="no room"):
        await talk.ask(user("q"))
    assert talk.session.failure is talk.script.error and talk.session.calls == []


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "mistral"])
async def test_calls_of_tools_are_not_tokenised_again(name: str) -> None:
    model = MODELS[name]
    renderer = model.renderer()
    async with talking(renderer, RUN.model_copy(update={"max_new_tokens": 200, "stop": ()}), tokens=5000) as talk:
        call, answer = talk.encode(model.call), talk.encode(model.answer)
        talk.script.answers = [call, answer]
        messages: list[Any] = [user("1+1?")]
        response = await talk.client.chat.completions.create(model="any", messages=messages, tools=[ADD])  # type: ignore[list-item]
        (choice,) = response.choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        (called,) = choice.message.tool_calls
        assert called.type == "function" and called.function.name == "add"
        # the client's own id of nine characters, which is not the answer's
        message = choice.message.model_dump(exclude_none=True)
        message["tool_calls"][0]["id"] = "own000000"
        messages += [message, {"role": "tool", "tool_call_id": "own000000", "content": "2"}]
        response = await talk.client.chat.completions.create(model="any", messages=messages, tools=[ADD])  # type: ignore[list-item]
        assert (response.choices[0].message.content or "").strip() == "It is 2."
        (segment,) = talk.session.segments()
        first = talk.script.asked[0][0].prompt
        between = talk.encode(model.response.replace("call00000", "own000000"))
        assert segment.tokenized.token_ids == [*first, *call, *between, *answer]
        trained = [0.0] * len(first) + [1.0] * len(call) + [0.0] * len(between) + [1.0] * len(answer)
        assert segment.tokenized.weights == trained
        recorded = renderer.detokenize(segment.tokenized)
        assert list(recorded.tools) == [ADD]
        assert any(isinstance(part, ToolCallFragment) for part in recorded.turns[1].content)
        assert model.listed in talk.tokenizer.decode(first, skip_special=False)
        # without the tools, it is another conversation
        talk.script.answers = [answer]
        await talk.client.chat.completions.create(model="any", messages=[*messages[:1], assistant("2"), user("1+1?")])
        assert len(talk.session.segments()) == 2


@pytest.mark.parametrize("options", [{"echo": True}, {"logprobs": 2}, {"max_tokens": 0}])
async def test_options_of_prompts_are_refused(talk: Talk, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="scores no prompts"):
        await talk.client.completions.create(model="any", prompt="q", **options)


async def test_an_answer_is_not_constrained_to_a_call(talk: Talk) -> None:
    messages: list[Any] = [user("q")]
    with pytest.raises(openai.BadRequestError, match="samples without constraints"):
        await talk.client.chat.completions.create(
            model="any", messages=messages, tools=[ADD], tool_choice="required"  # type: ignore[list-item]
        )
