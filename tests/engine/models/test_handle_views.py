"""Tests of further features of model handles: answers as classes, stop strings, live views, loading, and models behind
endpoints."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import BadSpec, EngineBusy, EngineUnreachable, NotAuthenticated, UnsupportedFragment
from engine.handles import InferenceModel, MalformedAnswer, Model, OpenAIModel, TrainingModel
from engine.models.inference_model import _GenerationCounts
from engine.protocol import Completion, LogprobsRequest, SamplingParams
from engine.text.answers import constrained_schema
from engine.text.fragments import ImageFragment, TextFragment
from engine.text.threads import StringThread
from tests.fixtures.servers.openai_server import running_openai_server
from tests.fixtures.spawning import Context, language_model

PROMPT = StringThread(turns=[("user", "2+3?")])
ANSWERED = PROMPT.assistant("5")


class Sum(BaseModel):
    total: int = Field(ge=0)


# -- answers as classes ----------------------------------------------------------------------------------------


def scripted(model: InferenceModel, *answers: str) -> list[StringThread]:
    """Makes the model say these; returns the list of what it is asked."""
    asked: list[StringThread] = []

    async def said(thread: StringThread) -> StringThread:
        asked.append(thread)
        return thread.assistant(answers[len(asked) - 1])

    model._reply = said  # type: ignore[method-assign]
    return asked


async def test_an_answer_is_parsed_out_of_what_the_model_says(model: TrainingModel) -> None:
    prompts = scripted(model, 'Well: {"a": 1} {"total": 5}.')
    assert await model.generate(PROMPT, Sum) == Sum(total=5)
    assert prompts == [PROMPT]


async def test_an_answer_that_does_not_fit_is_shown_to_the_model_once(model: TrainingModel) -> None:
    prompts = scripted(model, '{"total": -1}', '{"total": 1}')
    assert await model.generate(PROMPT, Sum) == Sum(total=1)
    shown = prompts[1].turns
    assert shown[: len(PROMPT.turns)] == PROMPT.turns and shown[-2].text == '{"total": -1}'
    assert "total: Input should be greater than or equal to 0" in shown[-1].text and '"minimum": 0' in shown[-1].text


async def test_a_model_that_stays_with_its_answer_is_an_error_that_holds_it(model: TrainingModel) -> None:
    prompts = scripted(model, "five", "5, I said")
    with pytest.raises(MalformedAnswer, match="no usable Sum.*no JSON object") as caught:
        await model.generate(PROMPT, Sum)
    assert caught.value.text == "5, I said" and len(prompts) == 2
    scripted(model, "five")
    with pytest.raises(MalformedAnswer):
        await model.answer(PROMPT, Sum)


class Verdict(BaseModel):
    why: str = Field(max_length=10)
    result: Literal["PASS", "FAIL"]


class Report(BaseModel):
    """An answer with parts that may be of any length."""

    why: str
    parts: list[Literal["one", "two"]]
    result: Literal["PASS", "FAIL"]


async def test_an_untrained_model_answers_in_the_form_of_a_class(model: TrainingModel) -> None:
    verdicts = [await model.max_gen_len(128).seed(seed).answer(PROMPT, Verdict) for seed in range(6)]
    assert {verdict.result for verdict in verdicts} == {"PASS", "FAIL"}
    # an answer that is cut has no form
    with pytest.raises(MalformedAnswer):
        await model.max_gen_len(3).generate(PROMPT, Verdict)


class Unbounded(BaseModel):
    """A class whose JSON schema has no grammar."""

    model_config = ConfigDict(json_schema_extra={"not": {"type": "string"}})
    total: int


async def test_a_class_without_a_grammar_is_answered_without_a_constraint(
    model: TrainingModel, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(MalformedAnswer, match="no JSON object"):
        await model.max_gen_len(4).answer(PROMPT, Unbounded)
    assert "answers in the form of Unbounded without a constraint" in caplog.text


def test_the_schema_of_a_constrained_answer_is_bounded() -> None:
    schema = json.loads(constrained_schema(Report, max_new_tokens=100))
    assert schema["properties"]["why"]["maxLength"] == 50
    assert schema["properties"]["parts"]["maxItems"] == 32
    assert schema["additionalProperties"] is False
    assert "maxLength" not in schema["properties"]["result"]
    assert "maxLength" not in schema["properties"]["parts"]["items"]
    assert schema["required"] == ["why", "parts", "result"]


def test_the_bound_of_a_string_is_not_below_what_its_class_asks_for() -> None:
    class Long(BaseModel):
        why: str = Field(min_length=80)

    schema = json.loads(constrained_schema(Long, max_new_tokens=100))
    assert schema["properties"]["why"]["maxLength"] == 80


# -- stop strings ----------------------------------------------------------------------------------------------


async def test_a_completion_ends_at_a_stop_string(model: TrainingModel) -> None:
    """The same draws, up to the token that completes the string."""
    decode, long = model.renderer.tokenizer.decode, model.max_gen_len(12)
    for seed in range(20):
        whole = await long.seed(seed).generate_tokens(PROMPT)
        ids = whole.token_ids[-whole.len_last_turn() :]
        stop = decode(ids[1:2])
        if len(ids) > 2 and stop.isascii() and stop.isprintable() and stop not in decode(ids[:1]):
            break
    else:
        pytest.fail("no draw has an ASCII character in second place")
    stopped = await long.stop(stop).seed(seed).generate_tokens(PROMPT)
    assert stopped.token_ids == whole.token_ids[: -len(ids)] + ids[:2]
    assert stopped.logprobs == whole.logprobs[:2]
    assert stop not in (await long.stop(stop).seed(seed).generate(PROMPT)).last_content()


async def test_the_text_of_an_answer_ends_before_the_stop(
    model: TrainingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = model.renderer.tokenizer.encode("one two")

    async def generate(request: Any, *, epoch: int = 0) -> Any:
        return [Completion(ids, [-1.0] * len(ids), "stop") for _ in request.prompts]

    monkeypatch.setattr(model.engine, "generate", generate)
    view = model.stop("two", "!")
    assert (await view.generate(PROMPT)).last_content() == "one "
    tokens = await view.generate_tokens(PROMPT)
    assert (await model.detokenize_thread(tokens)).last_content() == "one two"
    assert view.sampling.stop == ("two", "!")
    assert view.with_sampling(SamplingParams()).sampling.stop == view.stop().sampling.stop == ()
    assert (await model.generate(PROMPT)).last_content() == "one two"
    for string, message in [("", "empty"), ("\ufffd", r"U\+FFFD"), ("\ud800", "unicode")]:
        with pytest.raises(BadSpec, match=rf"stop\.1.*{message}"):
            model.stop("a", string)


@pytest.mark.parametrize(
    ("sampled", "stops", "min_new_tokens", "text"),
    [
        ("one two", ("two", " t"), 0, "one"),
        ("one", ("two",), 0, "one"),
        ("a\nbbb\n", ("\n",), 3, "a\nbbb"),  # the first one is in the 2nd token, before the minimum
        ("a\n", ("\n",), 3, "a\n"),
    ],
)
async def test_stop_strings_within_the_minimum_length_stay_in_the_text(
    model: TrainingModel,
    sampled: str,
    stops: tuple[str, ...],
    min_new_tokens: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokenizer has one token per byte."""
    ids = model.renderer.tokenizer.encode(sampled)
    assert len(ids) == len(sampled)

    async def generate(request: Any, *, epoch: int = 0) -> Any:
        return [Completion(ids, [-1.0] * len(ids), "stop") for _ in request.prompts]

    monkeypatch.setattr(model.engine, "generate", generate)
    view = model.stop(*stops).min_gen_len(min_new_tokens)
    assert (await view.generate(PROMPT)).last_content() == text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([""], "an empty stop string would end every completion"),
        (["a"] * 17, "at most 16 items"),
        (["a" * 1001], "at most 1000 characters"),
        (["\ufffd"], r"U\+FFFD"),
        (5, "valid tuple"),
    ],
)
def test_stop_strings_of_a_config_are_checked(value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SamplingParams.model_validate({"stop": value})


def test_a_config_without_stop_strings_has_no_such_field() -> None:
    """So that the digests of configs and evaluations are those of before."""
    assert "stop" not in SamplingParams().model_dump()
    one = SamplingParams.model_validate({"stop": "</answer>"})
    assert one == SamplingParams(stop=("</answer>",)) and one.model_dump(mode="json")["stop"] == ["</answer>"]


# -- counts of generations -------------------------------------------------------------------------------------


def test_the_count_of_a_prompt_takes_few_bytes_and_ends_with_its_policy() -> None:
    """The text of 1,000 token ids takes over 5,000 bytes. A handle serves 10,000 steps of 128 prompts."""
    counts = _GenerationCounts()
    prompts = [str([number, *range(10_000, 11_000)]) for number in range(500)]
    assert len(prompts[0]) > 5000
    tracemalloc.start()
    grown = []
    for step in range(20):
        assert [counts.add(f"state-{step}", prompt) for prompt in prompts] == [1] * len(prompts)
        grown.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert grown[0] < 250 * len(prompts)  # a digest, a number and a place in the table
    assert grown[-1] < 1.2 * grown[5]  # later policies take the place of earlier ones
    assert counts.add("state-19", prompts[0]) == 2
    assert counts.add("state-18", prompts[0]) == 2  # a call that began before the step


# -- serialising, scoring --------------------------------------------------------------------------------------


async def test_a_thread_is_serialized_as_its_tokens(model: TrainingModel) -> None:
    tokenized = await model.tokenize_thread(ANSWERED)
    tokens, patches, weights = await model.serialize_thread(ANSWERED)
    assert (tokens, patches, weights) == (tokenized.token_ids, None, tokenized.weights)
    image = StringThread(turns=[("user", [TextFragment(text="what?"), ImageFragment(url="data:image/png;base64,")])])
    for call in (model.serialize_thread, model.generate, model.logprobs):
        with pytest.raises(UnsupportedFragment, match="turn 0 holds an image"):
            await call(image)


async def test_sequences_that_begin_alike_are_told_to_the_engine(
    model: TrainingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[LogprobsRequest] = []
    logprobs = model.engine.logprobs

    async def spy(request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]:
        requests.append(request)
        return await logprobs(request, epoch=epoch)

    monkeypatch.setattr(model.engine, "logprobs", spy)
    for thread in (ANSWERED, PROMPT.assistant("6"), StringThread().user("4+4?").assistant("5")):
        await model.logprobs(thread)
    groups = [request.sequences[0].group for request in requests]
    assert groups[0] == groups[1] != groups[2] and all(groups)


# -- copies, loading, letting go -------------------------------------------------------------------------------


async def test_a_live_view_moves_with_its_model_and_cannot_train(model: TrainingModel) -> None:
    live, frozen = model.temperature(0.5).inf(), await model.clone_inf()
    assert live.sampling.temperature == 0.5 and not hasattr(live, "optim_step")
    before = await frozen.logprobs(ANSWERED)
    model.train_language_modelling(ANSWERED)
    await model.optim_step(1e-2)
    assert await live.temperature(1.0).logprobs(ANSWERED) == await model.logprobs(ANSWERED) != before
    assert await frozen.logprobs(ANSWERED) == before


async def test_a_model_goes_on_from_another_ones_weights(ctx: Context, model: TrainingModel, tiny_folder: Path) -> None:
    model.train_language_modelling(ANSWERED)
    await model.optim_step(1e-2)
    taught = await model.logprobs(ANSWERED)
    key = await model.save("taught")
    other = await language_model(ctx, tiny_folder, "other")
    assert await other.logprobs(ANSWERED) != taught
    start = await other.load(key)
    assert (start.stage, start.step) == ("1-load", 0)
    assert await other.logprobs(ANSWERED) == taught
    other.train_language_modelling(ANSWERED)
    await other.optim_step(1e-3)
    assert (await other.policy()).step == 1 and await other.logprobs(ANSWERED) > taught


async def test_a_model_of_another_head_cannot_be_loaded(model: TrainingModel, scalar_folder: Path) -> None:
    before = await model.logprobs(ANSWERED)
    with pytest.raises(BadSpec, match="scalar head"):
        await model.load(str(scalar_folder))
    assert await model.logprobs(ANSWERED) == before


async def test_what_was_let_go_of_comes_back(model: TrainingModel) -> None:
    model.train_language_modelling(ANSWERED)
    await model.optim_step(1e-2)
    before = await model.logprobs(ANSWERED)
    await model.dealloc()
    assert await model.logprobs(ANSWERED) == before


# -- behind an endpoint ----------------------------------------------------------------------------------------

Answers = Callable[[dict[str, Any]], tuple[int, Any]]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], list[httpx.Request]]:
    """Makes every request be answered by a function of its body; returns the requests."""
    plain = httpx.AsyncClient

    def answered(answers: Answers) -> list[httpx.Request]:
        requests: list[httpx.Request] = []

        def handle(request: httpx.Request) -> httpx.Response:
            requests.append(request)
            status, body = answers(json.loads(request.content))
            return httpx.Response(status, json=body)

        transport = httpx.MockTransport(handle)
        monkeypatch.setattr("engine.models.openai_model.httpx.AsyncClient", lambda **_: plain(transport=transport))
        return requests

    return answered


def says(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


async def behind(ctx: Context, key: str = "openai://judge@http://host/v1") -> OpenAIModel:
    model = await Model(key).to_builder(ctx, tokens_to_generate=7).spawn_inference("judge")
    assert isinstance(model, OpenAIModel)
    return model._with(first_wait_seconds=0.0)


async def test_an_endpoint_is_asked_as_its_api_says(
    ctx: Context, endpoint: Callable[[Answers], list[httpx.Request]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    requests = endpoint(lambda _: (200, says("It is 5.")))
    model = (await behind(ctx)).temperature(0.5).top_p(0.9).stop("!").seed(3)
    assert (await model.generate(PROMPT)) == PROMPT.assistant("It is 5.")
    assert str(requests[0].url) == "http://host/v1/chat/completions"
    assert requests[0].headers["authorization"] == "Bearer secret"
    assert json.loads(requests[0].content) == {
        "model": "judge", "messages": [{"role": "user", "content": "2+3?"}], "temperature": 0.5, "top_p": 0.9,
        "max_tokens": 7, "stop": ["!"], "seed": 3,
    }  # fmt: skip


async def test_an_endpoint_is_asked_for_json_and_once_more_when_it_gives_none(
    ctx: Context, endpoint: Callable[[Answers], list[httpx.Request]]
) -> None:
    requests = endpoint(lambda body: (200, says('{"total": 4}' if len(body["messages"]) > 1 else "four")))
    assert await (await behind(ctx)).generate(PROMPT, Sum) == Sum(total=4)
    schema = json.loads(requests[0].content)["response_format"]["json_schema"]
    assert schema == {"name": "Sum", "schema": Sum.model_json_schema()}


async def test_an_endpoint_without_json_schemas_is_asked_without(
    ctx: Context, endpoint: Callable[[Answers], list[httpx.Request]]
) -> None:
    endpoint(lambda body: (400, {}) if "response_format" in body else (200, says('{"total": 4}')))
    assert await (await behind(ctx)).answer(PROMPT, Sum) == Sum(total=4)
    endpoint(lambda _: (400, {"error": "no such model"}))
    with pytest.raises(BadSpec, match="no such model"):
        await (await behind(ctx)).answer(PROMPT, Sum)


async def test_an_engine_of_ours_answers_as_an_endpoint(
    ctx: Context, model: TrainingModel
) -> None:
    """Over a real server: the run's policy, greedily, says what its own handle says."""
    expected = (await model.temperature(0).generate(PROMPT)).last_content()
    with running_openai_server(model.engine, ctx.workspace.open_store()) as url:
        there = (await behind(ctx, f"openai://r@{url}")).max_gen_len(6).temperature(0)
        assert (await there.generate(PROMPT)).last_content() == expected
        with pytest.raises(MalformedAnswer):
            await there.generate(PROMPT, Sum)
        with pytest.raises(BadSpec, match="refused the request with 404"):
            await (await behind(ctx, f"openai://unknown@{url}")).generate(PROMPT)


async def test_an_endpoint_that_is_busy_is_asked_again_and_one_that_refuses_is_not(
    ctx: Context, endpoint: Callable[[Answers], list[httpx.Request]]
) -> None:
    model, left = await behind(ctx), [503, 429]
    requests = endpoint(lambda _: (left.pop(), {}) if left else (200, says("5")))
    assert (await model.generate(PROMPT)).last_content() == "5" and len(requests) == 3
    for status, error, calls in ((500, EngineBusy, 4), (401, NotAuthenticated, 1), (400, BadSpec, 1)):
        requests = endpoint(lambda _, status=status: (status, {"error": "no"}))
        with pytest.raises(error, match=str(status)):
            await model.generate(PROMPT)
        assert len(requests) == calls
    endpoint(lambda _: (200, {"odd": 1}))
    with pytest.raises(BadSpec, match="expected an OpenAI chat completion"):
        await model.generate(PROMPT)


async def test_a_line_that_breaks_is_a_transient_error(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route")

    plain = httpx.AsyncClient
    transport = httpx.MockTransport(broken)
    monkeypatch.setattr("engine.models.openai_model.httpx.AsyncClient", lambda **_: plain(transport=transport))
    with pytest.raises(EngineUnreachable, match="no route"):
        await (await behind(ctx)).generate(PROMPT)


async def test_what_an_endpoint_cannot_do_is_refused(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere/v1/")
    builder = Model("openai://judge").to_builder(ctx)
    with pytest.raises(BadSpec, match="no gradients"):
        await builder.spawn_train("policy")
    with pytest.raises(BadSpec, match="no scores"):
        await builder.into_scoring_model().spawn_inference("rm")
    model = await builder.spawn_inference("judge")
    assert isinstance(model, OpenAIModel) and model.url == "http://elsewhere/v1"
    for call in (model.top_k, model.min_gen_len):
        with pytest.raises(BadSpec, match="API has none"):
            call(3)
    for key in ("openai://", "openai://m@host/v1"):
        with pytest.raises(BadSpec, match="expected openai://NAME"):
            OpenAIModel.of(key, "judge", SamplingParams())


async def test_a_sequence_limit_beyond_the_models_context_is_as_good_as_the_context(
    ctx: Context, tiny_folder: Path
) -> None:
    # the tiny model's context is 4096 tokens: no sequence of it passes the engine's 8192
    model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy", max_batch_size=10_000)
    assert model.max_batch_size == 8192
