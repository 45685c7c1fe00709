"""Logprobs of the tokens of a prompt (`echo`), over a real server, and the scores of answers that the
lm-evaluation-harness makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from tests.fixtures.servers.openai_calls import OpenAIRun, client_of, complete
from tests.fixtures.servers.openai_server import SamplerEngine, running_openai_server

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def local_url(openai_run: OpenAIRun) -> Iterator[str]:
    """The address of a server over the engine itself."""
    with running_openai_server(openai_run.local, openai_run.store) as url:
        yield url


@pytest.fixture
def local(local_url: str) -> Iterator[openai.OpenAI]:
    with client_of(local_url) as client:
        yield client


def by_transformers(run: OpenAIRun, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [place after the first, token], by plain transformers."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return module(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
def test_the_logprobs_of_a_prompt_are_those_of_the_weights(
    local: openai.OpenAI, openai_run: OpenAIRun, as_ids: bool
) -> None:
    ids = openai_run.tokenizer.encode(PROMPT)
    (choice,) = complete(
        local, prompt=ids if as_ids else PROMPT, echo=True, max_tokens=0, logprobs=3, temperature=0
    ).choices
    expected = by_transformers(openai_run, ids)
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == PROMPT and len(logprobs.tokens) == len(ids)
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    chosen = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert logprobs.token_logprobs[1:] == pytest.approx(chosen.tolist(), abs=1e-4)
    for place, (top, token) in enumerate(zip(logprobs.top_logprobs[1:], ids[1:], strict=True)):
        values, tokens = expected[place].topk(3)
        assert list(top.values())[:3] == pytest.approx(values.tolist(), abs=1e-4)
        for key, other in zip(top, tokens.tolist(), strict=False):
            assert key in (openai_run.tokenizer.decode([other], skip_special=False), f"token_id:{other}")
        # the token itself, also if it is none of the most probable
        assert len(top) == (3 if token in tokens.tolist() else 4)
        assert openai_run.tokenizer.decode([token], skip_special=False) in top
    # a byte-level tokenizer: a token is a character here
    assert logprobs.text_offset == list(range(len(ids)))


def test_the_sampled_tokens_follow_those_of_the_prompt(local: openai.OpenAI, openai_run: OpenAIRun) -> None:
    options: dict[str, Any] = {"max_tokens": 4, "logprobs": 0, "temperature": 0}
    plain = complete(local, prompt=[PROMPT, "x"], n=2, **options)
    echoed = complete(local, prompt=[PROMPT, "x"], n=2, echo=True, **options | {"logprobs": 1})
    prompts = [PROMPT, PROMPT, "x", "x"]
    for prompt, without, with_prompt in zip(prompts, plain.choices, echoed.choices, strict=True):
        assert with_prompt.text == prompt + without.text
        ids, logprobs = openai_run.tokenizer.encode(prompt), with_prompt.logprobs
        assert logprobs.tokens[len(ids) :] == without.logprobs.tokens
        assert logprobs.token_logprobs[len(ids) :] == without.logprobs.token_logprobs
        assert logprobs.top_logprobs[len(ids) :] == [None] * 4
        assert logprobs.text_offset[len(ids) :] == [len(prompt) + offset for offset in without.logprobs.text_offset]
    assert echoed.usage == plain.usage
    # without logprobs, the text alone
    (choice,) = complete(local, echo=True, max_tokens=1).choices
    assert choice.text.startswith("Once") and choice.logprobs is None


@pytest.mark.parametrize(
    ("options", "param"),
    [({"logprobs": 1}, "logprobs"), ({"max_tokens": 0}, "max_tokens"), ({"echo": True, "stream": True}, "echo"),
     ({"echo": True, "logprobs": 6}, "logprobs"), ({"echo": True, "max_tokens": 0}, "max_tokens"),
     ({"echo": True, "logprobs": 1, "prompt": ""}, "prompt")],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(local: openai.OpenAI, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(local, **options)
    assert refused.value.param == param


def test_an_engine_that_only_samples_says_so(openai_run: OpenAIRun) -> None:
    engine = SamplerEngine(openai_run.folder, openai_run.local)
    with running_openai_server(engine, openai_run.store) as url, client_of(url) as client:
        with pytest.raises(openai.BadRequestError, match="this engine gives no logprobs of prompts"):
            complete(client, echo=True, logprobs=1)
        assert complete(client, echo=True).choices[0].text.startswith("Once")


def test_the_harness_scores_answers_by_the_endpoint(
    local_url: str, openai_run: OpenAIRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of an answer's logprobs, and whether each of its tokens is the most probable one."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    encode = openai_run.tokenizer.encode
    context = encode("2+3=")
    greedy: list[int] = []
    for _ in range(3):
        greedy.append(int(by_transformers(openai_run, [*context, *greedy, 0])[-1].argmax()))
    model = LocalCompletionsAPI(
        base_url=f"{local_url}/completions", model="r", tokenizer_backend="huggingface",
        tokenizer=str(openai_run.folder), max_length=128, num_concurrent=2, max_retries=1,
    )  # fmt: skip
    answers = [encode("5"), encode("six"), greedy]
    requests = [("loglikelihood", context, answer) for answer in answers]
    results = model._loglikelihood_tokens([((str(n), ""), *request[1:]) for n, request in enumerate(requests)])
    for answer, (total, is_greedy) in zip(answers, results, strict=True):
        places = by_transformers(openai_run, [*context, *answer])[len(context) - 1 :]
        chosen = places.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert total == pytest.approx(float(chosen.sum()), abs=1e-3)
        assert is_greedy == bool((places.argmax(1) == torch.tensor(answer)).all())
    assert results[2][1] and not math.isnan(results[0][0])
    # by the texts of a task
    instance = Instance(request_type="loglikelihood", doc={}, arguments=("2+3=", "5"), idx=0)
    ((total, _),) = model.loglikelihood([instance])
    assert total == pytest.approx(results[0][0], abs=1e-6)
