"""The embedded sampler: batched decoding over a preallocated KV cache, one random stream per completion.

A token is drawn by Gumbel-max, argmax(log p - log E) with E ~ Exp(1) from the completion's own generator
(equivalent to a categorical draw; Maddison et al., arXiv:1411.0030). Unlike an inverse CDF it does not hinge on
the rounding of a cumulative sum, so in float32 a completion does not depend on what it was batched with.

Axes: B row still decoding · T packed prompt token · V vocabulary · H hidden
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
from engine.backends.torch.packing import Fan
from engine.models.images import Images
from engine.protocol import Completion, OnToken, SamplingParams, StopReason, TokenIds

COMPACT_BELOW = 0.75
"""Finished rows are dropped from the batch once fewer than this share of it still decodes."""


class _Prompt(NamedTuple):
    """What is continued: equal ones are computed once."""

    ids: tuple[int, ...]
    images: Images


@dataclass(slots=True)
class _Row:
    """A completion in the making."""

    place: int
    generator: torch.Generator
    tokens: TokenIds = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: StopReason | None = None


class TorchSampler:
    """Samples from a `CausalLM`. `max_rows` completions decode together; `max_tokens` prompt tokens prefill at once.

    How its weights follow a trainer's is up to subclasses (engine.backends.torch.weight_following); by itself it holds
    one model that does not move."""

    def __init__(self, model: CausalLM, *, max_rows: int = 64, max_tokens: int = 8192) -> None:
        self.model, self.max_rows, self.max_tokens = model, max_rows, max_tokens
        self.holds: str | None = None

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        images: Sequence[Images] | None = None,
    ) -> list[Completion]:
        """One completion per (prompt, seed), in order; `images` are those of each prompt. `on_token` hears of each
        token as it is drawn, in this thread; what it raises ends the call.

        Raises:
            BadSpec: empty prompts, ids outside the vocabulary, unequal numbers of prompts and seeds, or stop tokens
                that leave nothing to draw.
            SampleTooLong: a prompt and `max_new_tokens` do not fit the model's context.
            UnsupportedFragment: images, and the model takes text only.
        """
        check_prompts(
            prompts,
            seeds,
            params,
            vocab_size=self.model.vocab_size,
            context_length=self.model.context_length,
            eos_token_ids=self.model.eos_token_ids(),
        )
        whole = [
            _Prompt(tuple(ids), own) for ids, own in zip(prompts, images or [()] * len(prompts), strict=True)
        ]
        done: list[Completion] = []
        for start in range(0, len(prompts), self.max_rows):
            chunk = slice(start, start + self.max_rows)
            hear = None if on_token is None else _from_row(on_token, start)
            done += self._sample_rows(whole[chunk], seeds[chunk], params, hear)
        return done

    @property
    def accepts_images(self) -> bool:
        return self.model.accepts_images

    def close(self) -> None:
        """The weights go with the object."""

    def _sample_rows(
        self,
        prompts: Sequence[_Prompt],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None,
    ) -> list[Completion]:
        device = self.model.device
        rows = [_Row(place, torch.Generator(device=device).manual_seed(seed)) for place, seed in enumerate(seeds)]
        longest = max(len(prompt.ids) for prompt in prompts)
        layout = DecodeLayout(rows=len(rows), capacity=longest + params.max_new_tokens, device=device)
        logits_BV = self._prefill(prompts, layout)
        live = list(rows)
        while True:
            self._draw(live, logits_BV, params, on_token)
            running = [i for i, row in enumerate(live) if row.stop is None]
            if not running:
                break
            if len(running) < COMPACT_BELOW * len(live):
                live = [live[i] for i in running]
                layout.keep(torch.tensor(running, device=device))
            tokens_B1 = torch.tensor([[row.tokens[-1]] for row in live], device=device)
            positions_B = layout.advance()
            hidden_B1H = self.model.hidden(tokens_B1, positions_B.unsqueeze(1), layout)
            logits_BV = self.model.logits(hidden_B1H[:, 0])
        return [Completion(row.tokens, row.logprobs, row.stop or "length") for row in rows]

    def _prefill(self, prompts: Sequence[_Prompt], layout: DecodeLayout) -> Tensor:
        """Runs every distinct prompt once and fills the cache; returns the first logits of every row (B, V)."""
        rows_of: dict[_Prompt, list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows_of.setdefault(prompt, []).append(row)
        logits_BV: Tensor | None = None
        for batch in _batches(list(rows_of), self.max_tokens):
            fans, images, start = [], [], 0
            for ids, own in batch:
                fans.append(Fan(start, len(ids)))
                images += [replace(image, start=start + image.start) for image in own]
                start += len(ids)
            device = self.model.device
            prefill = PrefillLayout(fans, device=device)
            tokens_T = torch.tensor([t for ids, _ in batch for t in ids], device=device)
            positions_T = torch.tensor([p for ids, _ in batch for p in range(len(ids))], device=device)
            ids_1T, positions_1T = tokens_T.unsqueeze(0), positions_T.unsqueeze(0)
            hidden_TH = self.model.hidden(ids_1T, positions_1T, prefill, tuple(images))[0]
            last = torch.tensor([fan.start + fan.prefix - 1 for fan in fans], device=device)
            first_logits = self.model.logits(hidden_TH[last])
            spans = {row: (f.start, f.prefix) for p, f in zip(batch, fans, strict=True) for row in rows_of[p]}
            layout.fill(prefill, spans)
            if logits_BV is None:
                logits_BV = first_logits.new_empty(len(prompts), first_logits.shape[1])
            for index, prompt in enumerate(batch):
                logits_BV[rows_of[prompt]] = first_logits[index]
        assert logits_BV is not None  # _check refused empty prompts; sample() never passes an empty chunk
        return logits_BV

    def _draw(
        self, live: list[_Row], logits_BV: Tensor, params: SamplingParams, on_token: OnToken | None
    ) -> None:
        """Appends one token to every running row and marks the rows that end."""
        eos = self.model.eos_token_ids()
        drawn = len(next(row for row in live if row.stop is None).tokens)
        if drawn < params.min_new_tokens:
            ending = [token for token in (*eos, *params.stop_token_ids) if 0 <= token < logits_BV.shape[1]]
            logits_BV[:, ending] = -torch.inf  # a model's config may name an end-of-sequence id that it does not have
        logprobs_BV = processed_logprobs(logits_BV, params)
        scores_BV = logprobs_BV
        if params.temperature > 0:
            noise_BV = torch.empty_like(logprobs_BV)
            for row, noise_V in zip(live, noise_BV, strict=True):
                if row.stop is None:
                    noise_V.uniform_(generator=row.generator)
            scores_BV = logprobs_BV - noise_BV.log_().neg_().log_()
        tokens_B = scores_BV.argmax(-1)
        picked_B = logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
        for row, token, logprob in zip(live, tokens_B.tolist(), picked_B.tolist(), strict=True):
            if row.stop is not None:
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if on_token is not None:
                on_token(row.place, token, logprob)
            if token in eos and not params.ignore_eos:
                row.stop = "eos"
            elif token in params.stop_token_ids:
                row.stop = "stop"
            elif len(row.tokens) >= params.max_new_tokens:
                row.stop = "length"


def _from_row(on_token: OnToken, start: int) -> OnToken:
    """For a chunk of prompts that begins with prompt `start` of the call."""
    return lambda place, token, logprob: on_token(start + place, token, logprob)


def processed_logprobs(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Log-probabilities of the distribution that is sampled: temperature first, then top-k, then top-p."""
    logits_BV = logits_BV / params.temperature if params.temperature > 0 else logits_BV
    if 0 < params.top_k < logits_BV.shape[1]:
        kth_B1 = logits_BV.topk(params.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    if params.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        before_BV = _running_sum(sorted_BV.softmax(-1)) - sorted_BV.softmax(-1)
        dropped_BV = before_BV >= params.top_p
        dropped_BV[:, 0] = False  # a top_p below the smallest float32 is 0 here, and would keep no token
        drop_BV = torch.zeros_like(dropped_BV).scatter(1, order_BV, dropped_BV)
        logits_BV = logits_BV.masked_fill(drop_BV, -torch.inf)
    return logits_BV.log_softmax(-1)


def _running_sum(x_BV: Tensor) -> Tensor:
    """On the CPU where equal bytes are asked of a GPU, which torch does not promise for this sum, and so refuses."""
    if x_BV.is_cuda and torch.are_deterministic_algorithms_enabled():
        return x_BV.cpu().cumsum(-1).to(x_BV.device)
    return x_BV.cumsum(-1)


def _batches(prompts: list[_Prompt], max_tokens: int) -> list[list[_Prompt]]:
    """Prompts in runs of at most `max_tokens` tokens (a longer prompt runs alone)."""
    runs: list[list[_Prompt]] = [[]]
    used = 0
    for prompt in prompts:
        if runs[-1] and used + len(prompt.ids) > max_tokens:
            runs.append([])
            used = 0
        runs[-1].append(prompt)
        used += len(prompt.ids)
    return runs
