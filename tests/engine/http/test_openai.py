"""The `openai` package talks to a policy in training, over a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.http.openai.api import POLICY_HEADER
from engine.local.engine import LocalEngine
from engine.protocol import PolicySpec
from engine.text.tokenizers import Tokenizer, load_tokenizer
from storage.chain import leases
from storage.chain.records import PolicyRef, Root
from storage.store.objects import open_store
from tests.fixtures.engines import (
    DETERMINISTIC,
    commit_batch,
    hugging_face_logprobs,
    new_policy,
    request_after,
)
from tests.fixtures.openai_server import SamplerEngine, served

ASK: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]
RENDERED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
"""ASK by the tiny model's ChatML template, written out by hand."""
IDS = {"return_token_ids": True}


class Place:
    """A store with the run `r`, an engine over it, and a server over that."""

    def __init__(self, tmp: Path, folder: Path) -> None:
        self.local = LocalEngine(str(tmp / "data"), DETERMINISTIC)
        self.store = self.local.store
        self.folder = folder
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.policy = asyncio.run(new_policy(self.local, folder))

    def step(self, policy: PolicyRef) -> PolicyRef:
        """A gradient step large enough to change what is sampled."""
        request = request_after(policy, commit_batch(self.store, policy), lr=0.05)
        return asyncio.run(self.local.take_gradient_step(request)).policy


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("openai"), tiny_folder)
    yield place
    asyncio.run(place.local.close())


@pytest.fixture(scope="module", params=["local", "sampler"])
def url(request: pytest.FixtureRequest, place: Place) -> Iterator[str]:
    """Every engine: the embedded one, and one that certainly streams."""
    engine = place.local if request.param == "local" else SamplerEngine(place.folder, place.local)
    with served(engine, place.store) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as client:
        yield client


@pytest.fixture
def own(tmp_path: Path, tiny_folder: Path) -> Iterator[Place]:
    """For tests that move the run."""
    place = Place(tmp_path, tiny_folder)
    yield place
    asyncio.run(place.local.close())


def chat(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "r", "messages": ASK, "max_tokens": 24, "seed": 7, **options}
    return client.chat.completions.create(**given)


def complete(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "r", "prompt": "Once", "max_tokens": 24, "seed": 7, **options}
    return client.completions.create(**given)


def greedy(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    """The most probable continuation, by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(module(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# -- what is answered ----------------------------------------------------------------------------------------


def test_a_chat_is_rendered_by_the_models_template_and_answered_by_its_weights(
    client: openai.OpenAI, place: Place
) -> None:
    answer = chat(client, temperature=0, max_tokens=5, extra_body=IDS)
    prompt = place.tokenizer.encode(RENDERED)
    assert answer.prompt_token_ids == [prompt]
    assert answer.choices[0].token_ids == greedy(place.folder, prompt, 5)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == place.tokenizer.decode(answer.choices[0].token_ids)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(prompt), 5, len(prompt) + 5)


def test_text_and_token_ids_are_continued_as_they_stand(client: openai.OpenAI, place: Place) -> None:
    prompt = place.tokenizer.encode("Once")
    by_text = complete(client, temperature=0, max_tokens=5, extra_body=IDS)
    assert by_text.choices[0].token_ids == greedy(place.folder, prompt, 5)
    assert complete(client, temperature=0, max_tokens=5, prompt=prompt).choices[0].text == by_text.choices[0].text


def test_every_prompt_has_n_answers_and_is_counted_once(client: openai.OpenAI) -> None:
    answer = complete(client, prompt=["ab", "abcd"], n=3, max_tokens=4, extra_body={"min_tokens": 4})
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert len({choice.text for choice in answer.choices}) == 6
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2 + 4, 6 * 4)


def test_the_answer_says_which_policy_gave_it(client: openai.OpenAI, place: Place) -> None:
    raw = client.chat.completions.with_raw_response.create(model="r", messages=ASK, max_tokens=1)
    answer, policy = raw.parse(), place.policy
    assert raw.headers[POLICY_HEADER] == policy.uri
    assert answer.policy == policy.model_dump()
    assert answer.system_fingerprint == policy.state[:12]
    assert answer.model == "r/0-s/policy@0"
    assert chat(client).choices == chat(client, model=answer.model).choices  # it is a name of its own


@pytest.mark.parametrize("ask", [chat, complete])
def test_equal_seeds_give_equal_answers_and_others_do_not(client: openai.OpenAI, ask: Any) -> None:
    first, again, other = ask(client), ask(client), ask(client, seed=8)
    unseeded = [ask(client, seed=openai.omit).choices for _ in range(2)]
    assert first.choices == again.choices != other.choices
    assert unseeded[0] != unseeded[1]


def test_limits_of_probability_leave_one_token(client: openai.OpenAI) -> None:
    certain = chat(client, temperature=0).choices[0].message.content
    assert chat(client, extra_body={"top_k": 1}).choices[0].message.content == certain
    assert chat(client, top_p=1e-6).choices[0].message.content == certain
    assert chat(client).choices[0].message.content != certain


def test_the_end_is_told_from_the_limit(client: openai.OpenAI, place: Place) -> None:
    answer = chat(client, n=32, max_tokens=100, extra_body=IDS)
    (end,) = place.tokenizer.eos_token_ids
    for choice in answer.choices:
        ended = choice.token_ids[-1] == end
        assert choice.finish_reason == ("stop" if ended else "length")
        assert ended or len(choice.token_ids) == 100
    assert {choice.finish_reason for choice in answer.choices} == {"stop", "length"}
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)


def test_min_tokens_keep_the_end_away(client: openai.OpenAI) -> None:
    answer = chat(client, n=32, max_completion_tokens=100, max_tokens=openai.omit, extra_body={"min_tokens": 100})
    assert {choice.finish_reason for choice in answer.choices} == {"length"}


def test_logprobs_are_those_of_the_sampled_tokens(client: openai.OpenAI, place: Place) -> None:
    answer = chat(client, logprobs=True, extra_body=IDS)
    ids = answer.choices[0].token_ids
    prompt = place.tokenizer.encode(RENDERED)
    expected = hugging_face_logprobs(place.folder, [*prompt, *ids])[len(prompt) - 1 :]
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(expected, abs=1e-3)
    assert [entry.token for entry in content] == [place.tokenizer.decode([i], skip_special=False) for i in ids]
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content if entry.bytes is not None)
    text = complete(client, prompt=prompt, logprobs=0, extra_body=IDS).choices[0]
    assert (text.token_ids, text.logprobs.token_logprobs) == (ids, [entry.logprob for entry in content])


# -- stop strings --------------------------------------------------------------------------------------------


def test_a_stop_string_over_several_tokens_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = chat(client, max_tokens=60, extra_body={"min_tokens": 60}).choices[0].message.content
    stop = whole[10:13]
    cut = chat(client, max_tokens=60, stop=["never said", stop], extra_body=IDS)
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert 3 <= cut.usage.completion_tokens == len(cut.choices[0].token_ids) < 60
    streamed = list(chat(client, max_tokens=60, stop=["never said", stop], stream=True))
    assert text_of(streamed) == [cut.choices[0].message.content]


def test_a_stop_string_of_one_token_ends_the_sampling(client: openai.OpenAI, place: Place) -> None:
    whole = complete(client, max_tokens=60, extra_body=IDS).choices[0]
    stop = next(c for c in whole.text if c.isascii() and c.isprintable())
    (token,) = place.tokenizer.encode(stop)
    cut = complete(client, max_tokens=60, stop=stop, extra_body=IDS).choices[0]
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")


def test_sampling_ends_when_every_answer_has_met_a_stop_string(place: Place, tiny_folder: Path) -> None:
    engine = SamplerEngine(tiny_folder, place.local)
    with served(engine, place.store) as url, client_of(url) as client:
        whole = chat(client, max_tokens=40, extra_body={"min_tokens": 40}).choices[0].message.content
        chat(client, max_tokens=4000, stop=whole[5:7])
        assert engine.abandoned.wait(30)
    assert engine.drawn[0] == 40 and engine.drawn[1] < 1000


# -- streams -------------------------------------------------------------------------------------------------


def text_of(chunks: list[Any]) -> list[str]:
    """The text of every choice, put together."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
    return [texts[index] for index in sorted(texts)]


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI, seed: int) -> None:
    options = {"n": 3, "seed": seed, "max_tokens": 80, "logprobs": True, "extra_body": IDS}
    whole = chat(client, **options)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
    assert text_of(chunks) == [choice.message.content for choice in whole.choices]
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.model for chunk in chunks} == {whole.model}
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert parts[0].delta.role == "assistant"
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        ids = [i for part in parts for i in getattr(part, "token_ids", None) or []]
        logprobs = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
        assert (ids, logprobs) == (choice.token_ids, choice.logprobs.content)


def test_a_text_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    options = {"prompt": ["a", "b"], "n": 2, "logprobs": 0}
    whole = complete(client, **options)
    chunks = list(complete(client, stream=True, **options))
    assert text_of(chunks) == [choice.text for choice in whole.choices]
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        offsets = [at for part in parts if part.logprobs for at in part.logprobs.text_offset]
        assert offsets == choice.logprobs.text_offset


def test_tokens_arrive_while_others_are_still_drawn(place: Place, tiny_folder: Path) -> None:
    engine = SamplerEngine(tiny_folder, place.local)
    options = {"max_tokens": 2000, "extra_body": {"min_tokens": 2000}}
    with served(engine, place.store) as url, client_of(url) as client, chat(client, stream=True, **options) as stream:
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
        assert engine.drawn == []  # the call is under way


def test_only_what_must_be_heard_is_so_that_the_rest_can_share_a_batch(place: Place, tiny_folder: Path) -> None:
    engine = SamplerEngine(tiny_folder, place.local)
    with served(engine, place.store) as url, client_of(url) as client:
        for options in ({}, {"stop": ["a", "b"]}, {"stop": ["a", "bc"]}, {"stream": True}):
            list(chat(client, max_tokens=2, **options))
    assert engine.heard == [False, False, True, True]


def test_a_stream_begins_with_its_headers_and_ends_as_clients_expect(url: str, place: Place) -> None:
    body = {"model": "r", "messages": ASK, "max_tokens": 2, "stream": True}
    answer = httpx.post(f"{url}/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers[POLICY_HEADER] == place.policy.uri
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: {") for event in events[:-2])


def test_a_refused_stream_is_refused_by_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, stream=True, max_tokens=100_000)
    assert refused.value.code == "context_length_exceeded"


# -- clients that go away ------------------------------------------------------------------------------------


@pytest.mark.parametrize("heard", [{"stream": True}, {"stop": "never said"}])
def test_a_client_that_goes_away_ends_the_sampling(place: Place, tiny_folder: Path, heard: dict[str, Any]) -> None:
    engine = SamplerEngine(tiny_folder, place.local)
    body = {"model": "r", "messages": ASK, "max_tokens": 4000, "min_tokens": 4000, **heard}

    async def leave(url: str) -> None:
        async with httpx.AsyncClient() as http:
            call = asyncio.create_task(http.post(f"{url}/chat/completions", json=body, timeout=60))
            assert await asyncio.to_thread(engine.began.wait, 30)
            call.cancel()
            await asyncio.wait([call])

    with served(engine, place.store) as url:
        asyncio.run(leave(url))
        assert engine.abandoned.wait(30)
    assert engine.drawn[0] < 4000


# -- which policy --------------------------------------------------------------------------------------------


def test_the_next_answer_after_a_step_is_the_new_policys(own: Place) -> None:
    with served(own.local, own.store) as url, client_of(url) as client:
        before = chat(client)
        first = own.step(own.policy)
        after = chat(client)
        assert after.policy == first.model_dump() and after.policy["step"] == 1
        assert after.choices != before.choices
        assert chat(client, model="r@0").choices == before.choices
        for name in ("r/0-s/policy", "r/0-s/policy@1"):
            assert chat(client, model=name).choices == after.choices


def test_the_head_is_that_of_the_last_stage(own: Place) -> None:
    with served(own.local, own.store) as url, client_of(url) as client:
        assert chat(client, max_tokens=1).policy["stage"] == "0-s"
        for stage in ("1-next", "10-last", "2-between"):
            root = Root(start=own.policy, base_digest=own.policy.state)
            asyncio.run(own.local.create_policy(PolicySpec(run="r", stage=stage, model="policy", root=root)))
        assert chat(client, max_tokens=1).policy["stage"] == "10-last"


def test_a_head_is_believed_for_a_while_and_a_run_key_may_have_two_parts(own: Place) -> None:
    policy = asyncio.run(new_policy(own.local, own.folder, run="nightly/2026-01-01"))
    with served(own.local, own.store, recent_seconds=3600) as url, client_of(url) as client:
        assert chat(client, model="nightly/2026-01-01", max_tokens=1).policy == policy.model_dump()
        own.step(policy)
        assert chat(client, model="nightly/2026-01-01", max_tokens=1).policy["step"] == 0


def test_a_registered_model_is_served_from_a_chain_of_its_own(client: openai.OpenAI, place: Place) -> None:
    answer = chat(client, model="tiny")
    version = next(iter(place.store.list("models/tiny/claims/"))).key.rpartition("/")[2].removesuffix(".json")
    assert answer.policy["run"] == "served/tiny" and answer.policy["step"] == 0
    assert chat(client, model=f"tiny@{version}").policy == answer.policy == chat(client, model="served/tiny").policy
    assert answer.choices == chat(client).choices  # policy 0 of the run has the same weights


def test_models_are_listed_and_described(client: openai.OpenAI, place: Place) -> None:
    chat(client, model="tiny", max_tokens=1)  # what serves it is not listed
    cards = {card.id: card for card in client.models.list()}
    assert {name: card.owned_by for name, card in cards.items()} == {"r": "run", "tiny": "registry"}
    assert cards["r"].created > 0
    assert client.models.retrieve("r/0-s/policy@0").policy == place.policy.model_dump()  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")


def test_a_reader_acts_in_the_epoch_of_the_lease_and_never_ahead_of_it(own: Place) -> None:
    epoch = leases.acquire_lease(own.store, "r", {})
    with served(own.local, own.store, recent_seconds=3600) as url, client_of(url) as client:
        chat(client, max_tokens=1)
        request = request_after(own.policy, commit_batch(own.store, own.policy))
        first = asyncio.run(own.local.take_gradient_step(request, epoch=epoch)).policy  # not fenced by the reader
        successor = leases.acquire_lease(own.store, "r", {})
        second = request_after(first, commit_batch(own.store, first))
        asyncio.run(own.local.take_gradient_step(second, epoch=successor))
        assert chat(client, max_tokens=1).policy["step"] == 0  # heard of the new lease by being fenced


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 10}),
        ("top_logprobs", 3),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("store", True),
        ("reasoning_effort", "low"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("n", 0),
        ("n", 300),
        ("max_tokens", 0),
        ("stop", ""),
        ("stop", [""]),
        ("seed", 1 << 64),
        ("messages", []),
        ("messages", [{"role": "robot", "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
        ("messages", [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]),
        ("messages", [{"role": "user", "content": "\ud800"}]),
        ("messages", [{"role": "user", "content": "x", "name": "ann"}]),
        ("user", "\ud800"),
        ("min_tokens", 25),
        ("stream_options", {"include_usage": True}),
        ("nonsense", 1),
    ],
)
def test_what_cannot_be_heeded_is_refused_by_name(url: str, option: str, value: Any) -> None:
    body = {"model": "r", "messages": ASK, "max_tokens": 24, option: value}
    answer = httpx.post(
        f"{url}/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert option in f"{error['param']} {error['message']}" or error["code"] == "invalid_prompt"


@pytest.mark.parametrize(
    "harmless",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": [], "tool_choice": "none"},
        {"response_format": {"type": "text"}, "top_logprobs": 0, "store": False, "user": "me", "stop": None},
        {"temperature": None, "seed": None, "n": None, "stream": False},
    ],
)
def test_options_left_at_no_effect_are_fine(url: str, harmless: dict[str, Any]) -> None:
    body = {"model": "r", "messages": ASK, "max_tokens": 2, **harmless}
    assert httpx.post(f"{url}/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("option", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"logprobs": 5}, {"prompt": []}])
def test_text_options_that_cannot_be_heeded_are_refused(client: openai.OpenAI, option: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, **option)
    assert next(iter(option)) in f"{refused.value.param} {refused.value.message}"


@pytest.mark.parametrize("name", ["r@99", "nothing", "r/0-s/other", "r/9-s/policy", "tiny@nothing", "served/nothing"])
def test_what_nothing_is_called_is_not_found(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        chat(client, model=name)
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize(
    "name",
    ["../r", "r/../r", "/r", "r/", "r//policy", "a/b/c/d/e", ".", "r@", "r@../0", "r/stages", "r\x00", "ü", "r@0@1"],
)
def test_what_is_no_name_is_refused_and_touches_nothing(client: openai.OpenAI, place: Place, name: str) -> None:
    before = [info.key for info in place.store.list()]
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, model=name)
    assert refused.value.param == "model"
    assert [info.key for info in place.store.list()] == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 5000, b'{"model": 1}'])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_body_that_is_no_request_is_refused(url: str, path: str, content: bytes) -> None:
    answer = httpx.post(f"{url}/{path}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_token_ids_outside_the_vocabulary_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt=[5, 100_000])


def test_another_store_knows_nothing_of_it(tmp_path: Path, place: Place) -> None:
    with served(place.local, open_store(tmp_path / "empty")) as url, client_of(url) as client:
        assert list(client.models.list()) == []
        with pytest.raises(openai.NotFoundError):
            chat(client)
