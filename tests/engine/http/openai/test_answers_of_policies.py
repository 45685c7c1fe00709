"""The `openai` package calls a policy in training over a real server: answers and stop strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from engine.http.openai.api import POLICY_HEADER
from engine.text.tokenizers import BROKEN
from tests.fixtures.engines import (
    hugging_face_logprobs,
)
from tests.fixtures.servers.openai_calls import ASK, IDS, RENDERED, OpenAIRun, chat, client_of, complete, text_of
from tests.fixtures.servers.openai_server import SamplerEngine, running_openai_server


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


# -- answers ----------------------------------------------------------------------------------------------------


def test_a_chat_is_rendered_by_the_models_template_and_answered_by_its_weights(
    client: openai.OpenAI, openai_run: OpenAIRun
) -> None:
    answer = chat(client, temperature=0, max_tokens=5, extra_body=IDS)
    prompt = openai_run.tokenizer.encode(RENDERED)
    assert answer.prompt_token_ids == [prompt]
    assert answer.choices[0].token_ids == greedy(openai_run.folder, prompt, 5)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == openai_run.tokenizer.decode(answer.choices[0].token_ids)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(prompt), 5, len(prompt) + 5)


def test_text_and_token_ids_are_continued_as_they_stand(client: openai.OpenAI, openai_run: OpenAIRun) -> None:
    prompt = openai_run.tokenizer.encode("Once")
    by_text = complete(client, temperature=0, max_tokens=5, extra_body=IDS)
    assert by_text.choices[0].token_ids == greedy(openai_run.folder, prompt, 5)
    assert complete(client, temperature=0, max_tokens=5, prompt=prompt).choices[0].text == by_text.choices[0].text


def test_every_prompt_has_n_answers_and_is_counted_once(client: openai.OpenAI) -> None:
    answer = complete(client, prompt=["ab", "abcd"], n=3, max_tokens=4, extra_body={"min_tokens": 4})
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert len({choice.text for choice in answer.choices}) == 6
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2 + 4, 6 * 4)


def test_the_answer_says_which_policy_gave_it(client: openai.OpenAI, openai_run: OpenAIRun) -> None:
    raw = client.chat.completions.with_raw_response.create(model="r", messages=ASK, max_tokens=1)
    answer, policy = raw.parse(), openai_run.policy
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


def test_the_end_is_told_from_the_limit(client: openai.OpenAI, openai_run: OpenAIRun) -> None:
    answer = chat(client, n=32, max_tokens=100, extra_body=IDS)
    (end,) = openai_run.tokenizer.eos_token_ids
    for choice in answer.choices:
        ended = choice.token_ids[-1] == end
        assert choice.finish_reason == ("stop" if ended else "length")
        assert ended or len(choice.token_ids) == 100
    assert {choice.finish_reason for choice in answer.choices} == {"stop", "length"}
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)


def test_min_tokens_keep_the_end_away(client: openai.OpenAI) -> None:
    answer = chat(client, n=32, max_completion_tokens=100, max_tokens=openai.omit, extra_body={"min_tokens": 100})
    assert {choice.finish_reason for choice in answer.choices} == {"length"}


def test_logprobs_are_those_of_the_sampled_tokens(client: openai.OpenAI, openai_run: OpenAIRun) -> None:
    answer = chat(client, logprobs=True, extra_body=IDS)
    ids = answer.choices[0].token_ids
    prompt = openai_run.tokenizer.encode(RENDERED)
    expected = hugging_face_logprobs(openai_run.folder, [*prompt, *ids])[len(prompt) - 1 :]
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(expected, abs=1e-3)
    assert [entry.token for entry in content] == [openai_run.tokenizer.decode([i], skip_special=False) for i in ids]
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content if entry.bytes is not None)
    text = complete(client, prompt=prompt, logprobs=0, extra_body=IDS).choices[0]
    assert (text.token_ids, text.logprobs.token_logprobs) == (ids, [entry.logprob for entry in content])


def decodable_part(text: str) -> str:
    """Two characters in a row, within the text, of tokens that are whole characters."""
    pairs = [text[start : start + 2] for start in range(5, len(text) - 1)]
    return next(pair for pair in pairs if BROKEN not in pair)


# -- stop strings -----------------------------------------------------------------------------------------------


def test_a_stop_string_over_several_tokens_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = chat(client, max_tokens=60, extra_body={"min_tokens": 60}).choices[0].message.content
    stop = decodable_part(whole)
    cut = chat(client, max_tokens=60, stop=["never said", stop], extra_body=IDS)
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert 2 <= cut.usage.completion_tokens == len(cut.choices[0].token_ids) < 60
    streamed = list(chat(client, max_tokens=60, stop=["never said", stop], stream=True))
    assert text_of(streamed) == [cut.choices[0].message.content]


def test_a_stop_string_of_one_token_ends_the_sampling(client: openai.OpenAI, openai_run: OpenAIRun) -> None:
    whole = complete(client, max_tokens=60, extra_body=IDS).choices[0]
    stop = next(c for c in whole.text if c.isascii() and c.isprintable())
    (token,) = openai_run.tokenizer.encode(stop)
    cut = complete(client, max_tokens=60, stop=stop, extra_body=IDS).choices[0]
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")


def test_sampling_ends_when_every_answer_has_met_a_stop_string(openai_run: OpenAIRun, tiny_folder: Path) -> None:
    engine = SamplerEngine(tiny_folder, openai_run.local)
    with running_openai_server(engine, openai_run.store) as url, client_of(url) as client:
        whole = chat(client, max_tokens=40, extra_body={"min_tokens": 40}).choices[0].message.content
        answer = chat(client, max_tokens=4000, stop=decodable_part(whole))
    assert engine.drawn == [40, answer.usage.completion_tokens] and engine.drawn[1] < 1000
