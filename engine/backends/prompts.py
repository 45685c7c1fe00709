"""What every sampler refuses before it draws."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import BadSpec, SampleTooLong
from engine.protocol import SamplingParams, TokenIds


def check_prompts(
    prompts: Sequence[TokenIds], seeds: Sequence[int], params: SamplingParams, *, vocab_size: int, context_length: int
) -> None:
    """Raises:
    BadSpec: empty prompts, ids outside the vocabulary, or unequal numbers of prompts and seeds.
    SampleTooLong: a prompt and `max_new_tokens` do not fit the context.
    """
    if len(prompts) != len(seeds):
        raise BadSpec(f"{len(prompts)} prompts were given with {len(seeds)} seeds; give one seed per prompt")
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
                f"model's context of {context_length}; truncate the prompt or ask for fewer tokens"
            )
