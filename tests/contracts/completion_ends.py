"""The contract of stop strings, for any sampler of the tiny model, whose tokens are single bytes; and a model whose
files name different ends of turn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.backends.protocol import Sampler
from engine.protocol import Completion, SamplingParams, StopReason, TokenIds
from engine.text.tokenizers import Tokenizer

PROMPT: TokenIds = [40]
SEEDS = list(range(32))
FREE = SamplingParams(max_new_tokens=48)


def with_other_end(model_folder: Path, folder: Path, *, end: int) -> Path:
    """A copy of the model whose configs name another end-of-sequence id than its tokenizer and its template."""
    shutil.copytree(model_folder, folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {"eos_token_id": end}))
    return folder


def check_stop_strings(sampler: Sampler, tokenizer: Tokenizer) -> None:
    """Checks strings of several tokens, a character of several tokens, several strings, and the limits of lengths."""
    prompts = [PROMPT] * len(SEEDS)
    free = sampler.sample(prompts, SEEDS, FREE)
    two_letters, character = _ascii_pair(free, tokenizer), _long_character(free, tokenizer)

    cases: list[tuple[list[str], SamplingParams]] = []
    for strings in ([two_letters], [character], ["never said", two_letters, character], ["never said"]):
        cases += [(strings, FREE), (strings, SamplingParams(max_new_tokens=48, min_new_tokens=3))]
    for strings, params in cases:
        whole = sampler.sample(prompts, SEEDS, params)
        heard = [0] * len(SEEDS)

        def count(index: int, token: int, logprob: float, heard: list[int] = heard) -> None:
            heard[index] += 1

        stopped = sampler.sample(prompts, SEEDS, params.model_copy(update={"stop": tuple(strings)}), count)
        for one, other in zip(stopped, whole, strict=True):
            _check_cut(one, other, strings, tokenizer, params.min_new_tokens)
        assert heard == [len(completion.token_ids) for completion in stopped]  # nothing was sampled after the cut
    assert any(completion.stop_reason == "stop" for completion in sampler.sample(prompts, SEEDS, _with([two_letters])))
    _check_at_the_last_token(sampler, free, two_letters, tokenizer)
    _check_string_that_begins_in_the_prompt(sampler, tokenizer)


def _with(strings: Sequence[str], **changes: int) -> SamplingParams:
    return FREE.model_copy(update={"stop": tuple(strings), **changes})


def _cut(ids: TokenIds, strings: Sequence[str], tokenizer: Tokenizer, at_least: int) -> int | None:
    """The definition: the least number of tokens whose text, without the first `at_least`, contains a string."""
    for length in range(at_least + 1, len(ids) + 1):
        text = tokenizer.decode(ids[at_least:length], skip_special=False)
        if any(string in text for string in strings):
            return length
    return None


def _check_cut(
    stopped: Completion, whole: Completion, strings: Sequence[str], tokenizer: Tokenizer, at_least: int
) -> None:
    length = _cut(whole.token_ids, strings, tokenizer, at_least)
    reason: StopReason = whole.stop_reason if length is None else "stop"
    assert (stopped.token_ids, stopped.stop_reason) == (whole.token_ids[:length], reason)
    assert stopped.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-4)


def _check_at_the_last_token(sampler: Sampler, free: list[Completion], string: str, tokenizer: Tokenizer) -> None:
    """A string that is completed by the last token of the limit ends the completion as a stop, not by its length."""
    cuts = [_cut(completion.token_ids, [string], tokenizer, 0) for completion in free]
    index = next(index for index, cut in enumerate(cuts) if cut is not None)
    limit = cuts[index]
    assert limit is not None
    (stopped,) = sampler.sample([PROMPT], [SEEDS[index]], _with([string], max_new_tokens=limit))
    assert (stopped.token_ids, stopped.stop_reason) == (free[index].token_ids[:limit], "stop")


def _check_string_that_begins_in_the_prompt(sampler: Sampler, tokenizer: Tokenizer) -> None:
    """The string is the last letter of the prompt and the first of the completion, which is not cut there."""
    (letter,) = tokenizer.encode("q")
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    for seed, whole in zip(SEEDS, sampler.sample([[*PROMPT, letter]] * len(SEEDS), SEEDS, params), strict=True):
        first = tokenizer.decode(whole.token_ids[:1])
        if first.isascii() and first.isprintable() and first != "q":
            stopping = params.model_copy(update={"stop": (f"q{first}",)})
            (drawn,) = sampler.sample([[*PROMPT, letter]], [seed], stopping)
            assert (drawn.token_ids, drawn.stop_reason) == (whole.token_ids, "length")
            return
    raise AssertionError("no completion begins with a letter")


def _ascii_pair(completions: list[Completion], tokenizer: Tokenizer) -> str:
    """Two printable letters that follow each other in a completion, not at its start."""
    for completion in completions:
        for start in range(4, len(completion.token_ids) - 1):
            text = tokenizer.decode(completion.token_ids[start : start + 2])
            if len(text) == 2 and text.isascii() and text.isprintable():
                return text
    raise AssertionError("no completion has two letters in a row")


def _long_character(completions: list[Completion], tokenizer: Tokenizer) -> str:
    """A character of two bytes, each of which is a token."""
    for completion in completions:
        for start in range(4, len(completion.token_ids) - 1):
            text = tokenizer.decode(completion.token_ids[start : start + 2])
            if len(text) == 1 and not text.isascii() and text != "\N{REPLACEMENT CHARACTER}":
                return text
    raise AssertionError("no completion has a character of two bytes")
