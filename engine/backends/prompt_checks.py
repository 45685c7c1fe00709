"""Checks of prompts and sampling parameters that every sampler makes before it samples."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.errors import BadSpec, SampleTooLong
from engine.models.folder import CONTEXT_SOURCE
from engine.protocol import SamplingParams, TokenIds


def check_prompts(
    prompts: Sequence[TokenIds],
    seeds: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    context_length: int,
    eos_token_ids: Collection[int],
) -> None:
    """Checks a request for completions.

    Raises:
        BadSpec: empty prompts, ids outside the vocabulary, unequal numbers of prompts and seeds, or stop tokens that
            leave nothing to sample.
        SampleTooLong: a prompt and `max_new_tokens` do not fit in the context.
    """
    # The request as a whole.
    if len(prompts) != len(seeds):
        raise BadSpec(f"{len(prompts)} prompts were given with {len(seeds)} seeds; give one seed per prompt")
    _check_stop_tokens(params, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    # Each prompt. The message names its index, since a call may have thousands.
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise BadSpec(f"prompt {index} has no tokens; there is nothing to continue")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise BadSpec(
                f"prompt {index} has token ids outside 0..{vocab_size - 1}; was it rendered with another model's "
                "tokenizer?"
            )
        if len(prompt) + params.max_new_tokens > context_length:
            raise SampleTooLong(
                f"prompt {index} has {len(prompt)} tokens; with max_new_tokens={params.max_new_tokens} it passes the "
                f"model's context of {context_length}{CONTEXT_SOURCE}; truncate the prompt or ask for fewer tokens"
            )


def _check_stop_tokens(params: SamplingParams, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    unknown = [token for token in params.stop_token_ids if not 0 <= token < vocab_size]
    if unknown:
        raise BadSpec(
            f"the stop token id {unknown[0]} is outside 0..{vocab_size - 1}; give ids of this model's tokenizer"
        )
    if params.min_new_tokens > 0 and len({*params.stop_token_ids, *eos_token_ids}) >= vocab_size:
        raise BadSpec(
            f"every token of the vocabulary of {vocab_size} ends a completion, and min_new_tokens="
            f"{params.min_new_tokens} forbids all of them; give fewer stop tokens, or min_new_tokens=0"
        )
