"""The sampler in the engine's process: batched decoding over a preallocated KV cache, with one random stream per
completion.

A token is drawn by Gumbel-max, argmax(log p - log E) with E ~ Exp(1) from the completion's own generator (equivalent to
a categorical draw; Maddison et al., arXiv:1411.0030). Unlike an inverse CDF, it does not depend on the rounding of a
cumulative sum. So in float32 a completion does not depend on the other completions of its batch.

Axes: B row that is still decoded · T packed prompt token · G distinct prompt · V vocabulary · H hidden
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.backends.prompt_checks import check_prompts
from engine.backends.torch.attention import DecodeLayout, PrefillLayout
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.packing import PrefixGroup
from engine.models.images import Images, PlacedImage
from engine.protocol import Completion, OnToken, SamplingParams, StopReason, TokenIds

COMPACT_BELOW = 0.75
"""Finished rows are dropped from the batch when a smaller share of it than this is still decoded."""


class _Prompt(NamedTuple):
    """A prompt. Equal prompts are computed once."""

    ids: tuple[int, ...]
    images: Images


@dataclass(slots=True)
class _Row:
    """A completion that is being sampled."""

    index: int
    """Index of the completion within the call."""
    generator: torch.Generator
    tokens: TokenIds = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: StopReason | None = None


class TorchSampler:
    """Samples from a `CausalLM`. At most `max_rows` completions are decoded together, and at most `max_prefill_tokens`
    prompt tokens are computed in one forward pass.

    This class has one model whose weights do not change. How the weights follow a trainer's is defined by subclasses
    (engine.backends.torch.trainer_samplers)."""

    def __init__(self, model: CausalLM, *, max_rows: int = 64, max_prefill_tokens: int = 8192) -> None:
        self.model, self.max_rows, self.max_prefill_tokens = model, max_rows, max_prefill_tokens
        self.loaded_state: str | None = None

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        images: Sequence[Images] | None = None,
    ) -> list[Completion]:
        """One completion per (prompt, seed), in order. `images` are those of each prompt. `on_token` is called for each
        token when it is drawn, in this thread; an exception from it ends the call.

        Raises:
            BadSpec: empty prompts, ids outside the vocabulary, unequal numbers of prompts and seeds, or stop tokens
                that leave nothing to draw.
            SampleTooLong: a prompt and `max_new_tokens` do not fit the model's context.
            UnsupportedFragment: images, and the model takes text only.
        """
        # Check everything before the first forward pass.
        check_prompts(
            prompts,
            seeds,
            params,
            vocab_size=self.model.vocab_size,
            context_length=self.model.context_length,
            eos_token_ids=self.model.eos_token_ids(),
        )
        images = images or [()] * len(prompts)
        with_images = [_Prompt(tuple(ids), of_prompt) for ids, of_prompt in zip(prompts, images, strict=True)]
        # Decode at most `max_rows` completions together.
        completions: list[Completion] = []
        for start in range(0, len(prompts), self.max_rows):
            chunk = slice(start, start + self.max_rows)
            on_chunk_token: OnToken | None = None
            if on_token is not None:
                on_chunk_token = _shifted(on_token, start)
            completions += self._sample_rows(with_images[chunk], seeds[chunk], params, on_chunk_token)
        return completions

    @property
    def accepts_images(self) -> bool:
        return self.model.accepts_images

    def close(self) -> None:
        """Does nothing: the weights are freed with the object."""

    def _sample_rows(
        self,
        prompts: Sequence[_Prompt],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None,
    ) -> list[Completion]:
        """The completions of prompts that are decoded together."""
        device = self.model.device
        # Each completion has a generator of its own, so that its tokens do not depend on the other rows.
        rows: list[_Row] = []
        for index, seed in enumerate(seeds):
            rows.append(_Row(index, torch.Generator(device=device).manual_seed(seed)))
        longest = max(len(prompt.ids) for prompt in prompts)
        layout = DecodeLayout(rows=len(rows), capacity=longest + params.max_new_tokens, device=device)
        logits_BV = self._prefill(prompts, layout)
        # `batch` are the rows that are still computed, in the order of the cache.
        batch = list(rows)
        while True:
            self._draw(batch, logits_BV, params, on_token)
            running = [place for place, row in enumerate(batch) if row.stop is None]
            if not running:
                break
            # Finished rows are computed further until enough of them can be dropped at once: to drop rows copies the
            # cache.
            if len(running) < COMPACT_BELOW * len(batch):
                batch = [batch[place] for place in running]
                layout.keep_rows(torch.tensor(running, device=device))
            tokens_B1 = torch.tensor([[row.tokens[-1]] for row in batch], device=device)
            positions_B = layout.advance()
            hidden_B1H = self.model.hidden(tokens_B1, positions_B.unsqueeze(1), layout)
            logits_BV = self.model.logits(hidden_B1H[:, 0])
        return [Completion(row.tokens, row.logprobs, row.stop or "length") for row in rows]

    def _prefill(self, prompts: Sequence[_Prompt], layout: DecodeLayout) -> Tensor:
        """Computes every distinct prompt once and fills the cache; returns the first logits of every row (B, V)."""
        # Equal prompts have one prefill.
        rows_of: dict[_Prompt, list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows_of.setdefault(prompt, []).append(row)
        logits_BV: Tensor | None = None
        for batch in _batches(list(rows_of), self.max_prefill_tokens):
            groups, first_logits_GV, prefill = self._forward(batch)
            # The keys, values and logits of a prompt go to all of its rows.
            spans: dict[int, tuple[int, int]] = {}
            for prompt, group in zip(batch, groups, strict=True):
                spans |= dict.fromkeys(rows_of[prompt], (group.start, group.prefix))
            layout.fill(prefill, spans)
            if logits_BV is None:
                logits_BV = first_logits_GV.new_empty(len(prompts), first_logits_GV.shape[1])
            for index, prompt in enumerate(batch):
                logits_BV[rows_of[prompt]] = first_logits_GV[index]
        assert logits_BV is not None  # check_prompts rejects empty prompts, and sample() passes no empty chunk
        return logits_BV

    def _forward(self, prompts: list[_Prompt]) -> tuple[list[PrefixGroup], Tensor, PrefillLayout]:
        """(place of each prompt in the packed row, logits (G, V) after each prompt, layout with keys and values)."""
        # Lay the prompts out in one packed row.
        groups: list[PrefixGroup] = []
        images: list[PlacedImage] = []
        tokens: list[int] = []
        positions: list[int] = []
        for prompt in prompts:
            start = len(tokens)
            groups.append(PrefixGroup(start, len(prompt.ids)))
            images += [replace(image, start=start + image.start) for image in prompt.images]
            tokens += prompt.ids
            positions += range(len(prompt.ids))
        # The logits after the last token of each prompt predict the first token of its completions.
        device = self.model.device
        prefill = PrefillLayout(groups, device=device)
        tokens_1T = torch.tensor(tokens, device=device).unsqueeze(0)
        positions_1T = torch.tensor(positions, device=device).unsqueeze(0)
        hidden_TH = self.model.hidden(tokens_1T, positions_1T, prefill, tuple(images))[0]
        last_G = torch.tensor([group.start + group.prefix - 1 for group in groups], device=device)
        return groups, self.model.logits(hidden_TH[last_G]), prefill

    def _draw(
        self, batch: list[_Row], logits_BV: Tensor, params: SamplingParams, on_token: OnToken | None
    ) -> None:
        """Appends one token to every running row, and sets the stop reason of the rows that end."""
        eos = self.model.eos_token_ids()
        tokens_drawn = len(next(row for row in batch if row.stop is None).tokens)
        if tokens_drawn < params.min_new_tokens:
            # A model's config may name an end-of-sequence id that the vocabulary does not have.
            ending = [token for token in (*eos, *params.stop_token_ids) if 0 <= token < logits_BV.shape[1]]
            logits_BV[:, ending] = -torch.inf

        # Draw by Gumbel-max, or take the argmax at temperature 0.
        logprobs_BV = processed_logprobs(logits_BV, params)
        scores_BV = logprobs_BV
        if params.temperature > 0:
            noise_BV = torch.empty_like(logprobs_BV)
            for row, noise_V in zip(batch, noise_BV, strict=True):
                if row.stop is None:
                    noise_V.uniform_(generator=row.generator)
            scores_BV = logprobs_BV - noise_BV.log_().neg_().log_()
        tokens_B = scores_BV.argmax(-1)
        token_logprobs_B = logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)

        # Record the tokens. Rows that have finished before are computed too, and their tokens are ignored.
        for row, token, logprob in zip(batch, tokens_B.tolist(), token_logprobs_B.tolist(), strict=True):
            if row.stop is not None:
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if on_token is not None:
                on_token(row.index, token, logprob)
            if token in eos and not params.ignore_eos:
                row.stop = "eos"
            elif token in params.stop_token_ids:
                row.stop = "stop"
            elif len(row.tokens) >= params.max_new_tokens:
                row.stop = "length"


def _shifted(on_token: OnToken, start: int) -> OnToken:
    """`on_token` for a chunk of prompts that begins with prompt `start` of the call."""
    return lambda index, token, logprob: on_token(start + index, token, logprob)


def processed_logprobs(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Log-probabilities of the distribution that is sampled from: temperature first, then top-k, then top-p."""
    logits_BV = logits_BV / params.temperature if params.temperature > 0 else logits_BV
    if 0 < params.top_k < logits_BV.shape[1]:
        kth_B1 = logits_BV.topk(params.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    if params.top_p < 1:
        # Top-p keeps the tokens before which less than top_p of the probability lies.
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        before_BV = _running_sum(sorted_BV.softmax(-1)) - sorted_BV.softmax(-1)
        dropped_BV = before_BV >= params.top_p
        dropped_BV[:, 0] = False  # a top_p below the smallest float32 is 0 here, and would keep no token
        drop_BV = torch.zeros_like(dropped_BV).scatter(1, order_BV, dropped_BV)
        logits_BV = logits_BV.masked_fill(drop_BV, -torch.inf)
    return logits_BV.log_softmax(-1)


def _running_sum(x_BV: Tensor) -> Tensor:
    """Cumulative sum. With deterministic algorithms it is computed on the CPU, because torch has no deterministic one
    for a GPU, and raises."""
    if x_BV.is_cuda and torch.are_deterministic_algorithms_enabled():
        return x_BV.cpu().cumsum(-1).to(x_BV.device)
    return x_BV.cumsum(-1)


def _batches(prompts: list[_Prompt], max_tokens: int) -> list[list[_Prompt]]:
    """The prompts in runs of at most `max_tokens` tokens. A longer prompt is a run of its own."""
    runs: list[list[_Prompt]] = [[]]
    used = 0
    for prompt in prompts:
        if runs[-1] and used + len(prompt.ids) > max_tokens:
            runs.append([])
            used = 0
        runs[-1].append(prompt)
        used += len(prompt.ids)
    return runs
