"""The sampler in the engine's process: continuous batching over a pool of keys and values, with one random stream per
completion.

In float32 the tokens of a completion do not depend on the other completions of its batch
(engine.backends.torch.decoding.drawing). The last bits of its logprobs do.

Axes: B row that is decoded · T packed prompt token · V vocabulary · H hidden
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from engine.backends.protocol import Interrupted, check_prompts
from engine.backends.torch.attention import PrefillLayout
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.decoding.drawing import NoiseStream, draw_tokens
from engine.backends.torch.decoding.kv_cache import DecodeLayout, PromptKeys, should_share
from engine.backends.torch.packing import PrefixGroup
from engine.models.images import Images, PlacedImage
from engine.protocol import Completion, OnToken, SamplingParams, StopReason, TokenIds
from engine.text.json_grammar import JsonMatcher
from engine.text.stops import CompletionEnd, stop_strings
from engine.text.tokenizers import Tokenizer

REFILL_SHARE = 8
"""Waiting rows enter when at least 1/REFILL_SHARE of the places are free. The prompts of several rows are computed in
one forward pass, which reads the weights once."""


class _Prompt(NamedTuple):
    """A prompt. Equal prompts are computed once."""

    ids: tuple[int, ...]
    images: Images


@dataclass(slots=True)
class _PromptUse:
    """What the rows of one prompt have in common."""

    waiting: int = 0
    """Number of rows that have not entered the batch."""
    unfinished: int = 0
    """Number of rows that wait or are decoded."""
    shared: bool = False
    """Whether the keys of the prompt are stored once for all rows."""
    keys: PromptKeys | None = None
    """None before the prompt is computed, and when no row needs them any more."""
    logits_V: Tensor | None = None
    """Logits of the first token."""


@dataclass(slots=True)
class _Row:
    """A completion that is being sampled."""

    index: int
    """Index of the completion within the call."""
    prompt: _Prompt
    seed: int
    end: CompletionEnd
    matcher: JsonMatcher | None = None
    """What may follow by the JSON schema. None without a schema."""
    noise: NoiseStream | None = None
    """None while the row is not in the batch."""
    tokens: TokenIds = field(default_factory=list)
    """The whole completion: the first `earlier` tokens are those of earlier calls."""
    earlier: int = 0
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens of this call."""
    stop: StopReason | None = None

    def completion(self) -> Completion:
        return Completion(self.tokens[self.earlier :], self.logprobs, self.stop or "interrupted")


class TorchSampler:
    """Samples from a `CausalLM`. At most `max_rows` completions are decoded together: when some have finished, others
    take their places. At most `max_prefill_tokens` prompt tokens are computed in one forward pass.

    This class has one model whose weights do not change. How the weights follow a trainer's is defined by subclasses
    (engine.backends.torch.trainer_samplers)."""

    def __init__(
        self, model: CausalLM, *, max_rows: int = 64, max_prefill_tokens: int = 8192, tokenizer: Tokenizer | None = None
    ) -> None:
        """`tokenizer` tells which ids end a turn and finds stop strings. Without one, completions end at the ids of the
        model's configs, and stop strings are refused."""
        self.model, self.max_rows, self.max_prefill_tokens = model, max_rows, max_prefill_tokens
        self.tokenizer = tokenizer
        self.eos_token_ids = tokenizer.eos_token_ids if tokenizer else model.eos_token_ids()
        # A subclass may compute with another form of the same model.
        self.forward_model = model
        self.loaded_state: str | None = None

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        images: Sequence[Images] | None = None,
        *,
        sampled: Sequence[TokenIds] | None = None,
        interrupted: Interrupted | None = None,
    ) -> list[Completion]:
        """One completion per (prompt, seed), in order. `images` are those of each prompt. `on_token` is called for each
        token when it is drawn, in this thread; an exception from it ends the call. For `sampled` and `interrupted`, see
        engine.backends.protocol.Sampler.

        Raises:
            UnsupportedSchema: json_schema, without a tokenizer or with a schema that has no grammar.
            BadSpec: empty prompts, ids outside the vocabulary, unequal numbers of prompts and seeds, stop tokens that
                leave nothing to draw, stop strings without a tokenizer, or a completion that has ended.
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
            eos_token_ids=self.eos_token_ids,
            sampled=sampled,
        )
        none_yet: list[Any] = [()] * len(prompts)
        rows = self._rows(prompts, seeds, params, images or none_yet, sampled or none_yet)
        if rows:
            _Call(self, rows, params, on_token).run(interrupted or (lambda: False))
        return [row.completion() for row in rows]

    def _rows(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        images: Sequence[Images],
        sampled: Sequence[Sequence[int]],
    ) -> list[_Row]:
        """The completions before their first token of this call. Raises as `sample`."""
        stops = stop_strings(self.tokenizer, params)
        matcher = JsonMatcher.of(
            self.tokenizer, params, vocab_size=self.model.vocab_size, eos_token_ids=self.eos_token_ids
        )
        rows: list[_Row] = []
        for ids, seed, of_prompt, earlier in zip(prompts, seeds, images, sampled, strict=True):
            # The model computes the tokens that the completion has like further tokens of the prompt.
            prompt = _Prompt((*ids, *earlier), of_prompt)
            end = CompletionEnd(params, self.eos_token_ids, stops, earlier)
            of_row = matcher and matcher.copy()
            if of_row is not None:
                for token in earlier:
                    of_row.advance(token)
            rows.append(_Row(len(rows), prompt, seed, end, of_row, tokens=list(earlier), earlier=len(earlier)))
        return rows

    @property
    def base_group(self) -> None:
        """None: another policy's weights take the place of the loaded ones."""

    def in_same_group(self) -> NoReturn:
        raise NotImplementedError("a torch sampler has no base group")

    @property
    def accepts_images(self) -> bool:
        return self.model.accepts_images

    def close(self) -> None:
        """Does nothing: the weights are freed with the object."""


class _Call:
    """One call of a sampler: the rows that wait, the rows that are decoded, and the pool of their keys and values."""

    def __init__(
        self, sampler: TorchSampler, rows: list[_Row], params: SamplingParams, on_token: OnToken | None
    ) -> None:
        self._model, self._max_prefill_tokens = sampler.forward_model, sampler.max_prefill_tokens
        self._params, self._on_token = params, on_token
        self._eos = sampler.eos_token_ids
        self._waiting = deque(rows)
        self._batch: list[_Row] = []
        """The rows that are decoded, in the order of the pool."""
        # Equal prompts are computed once.
        self._uses: dict[_Prompt, _PromptUse] = {}
        for row in rows:
            use = self._uses.setdefault(row.prompt, _PromptUse())
            use.waiting += 1
            use.unfinished += 1
        # The pool's rows have room for the longest completion, and for the longest prompt that is not shared.
        device, longest = self._model.device, 0
        for prompt, use in self._uses.items():
            use.shared = should_share(use.unfinished, len(prompt.ids), device)
            if not use.shared:
                longest = max(longest, len(prompt.ids))
        self._places = min(sampler.max_rows, len(rows))
        self._layout = DecodeLayout(rows=self._places, capacity=longest + params.max_new_tokens, device=device)

    def run(self, interrupted: Interrupted) -> None:
        """Samples all rows, or some tokens of them until `interrupted` is true. It samples one token at least."""
        while self._waiting or self._batch:
            free = self._places - len(self._batch)
            if self._waiting and free >= min(max(1, self._places // REFILL_SHARE), len(self._waiting)):
                self._enter(free)
            else:
                self._decode()
            if interrupted():
                return

    def _enter(self, free: int) -> None:
        """Moves waiting rows into the free places of the batch, and draws their first tokens."""
        rows = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        # Neighbours of similar length attend together.
        rows.sort(key=lambda row: 0 if self._uses[row.prompt].shared else len(row.prompt.ids))
        new_prompts = [prompt for prompt in dict.fromkeys(row.prompt for row in rows) if not self._uses[prompt].keys]
        forward_passes = deque(_batches(new_prompts, self._max_prefill_tokens))
        logits = []
        for row in rows:
            use = self._uses[row.prompt]
            if use.keys is None:  # the next pass has this prompt, because the prompts are in the order of the rows
                self._compute(forward_passes.popleft())
            assert use.keys is not None and use.logits_V is not None  # computed now, or for an earlier row
            self._layout.enter(use.keys, shared=use.shared)
            logits.append(use.logits_V)
            # Each completion has noise of its own, so that its tokens do not depend on the other rows.
            row.noise = NoiseStream(row.seed, vocab_size=self._model.vocab_size, device=self._model.device)
            use.waiting -= 1
            self._free_prompt(use)
        self._batch += rows
        self._draw(rows, torch.stack(logits))
        self._drop_finished()

    def _decode(self) -> None:
        """Computes the last token of every row, and draws the next."""
        tokens_B1 = torch.tensor([[row.tokens[-1]] for row in self._batch], device=self._model.device)
        positions_B = self._layout.advance()
        hidden_B1H = self._model.hidden(tokens_B1, positions_B.unsqueeze(1), self._layout)
        self._draw(self._batch, self._model.logits(hidden_B1H[:, 0]))
        self._drop_finished()

    def _drop_finished(self) -> None:
        """Frees the places and the noise of finished rows."""
        for place in reversed(range(len(self._batch))):
            row = self._batch[place]
            if row.stop is None:
                continue
            # As in the pool, the last row takes the place.
            self._layout.leave(place)
            self._batch[place] = self._batch[-1]
            self._batch.pop()
            row.noise = None
            use = self._uses[row.prompt]
            use.unfinished -= 1
            self._free_prompt(use)

    @staticmethod
    def _free_prompt(use: _PromptUse) -> None:
        """Frees what no row needs any more: rows that do not share the keys have copied them when they entered."""
        if use.waiting == 0:
            use.logits_V = None
            if not use.shared or use.unfinished == 0:
                use.keys = None

    def _compute(self, prompts: list[_Prompt]) -> None:
        """Computes the keys, values and next logits of some prompts in one forward pass."""
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
        device = self._model.device
        prefill = PrefillLayout(groups, device=device)
        tokens_1T = torch.tensor(tokens, device=device).unsqueeze(0)
        positions_1T = torch.tensor(positions, device=device).unsqueeze(0)
        hidden_TH = self._model.hidden(tokens_1T, positions_1T, prefill, tuple(images))[0]
        last = [group.start + group.prefix - 1 for group in groups]
        logits_BV = self._model.logits(hidden_TH[torch.tensor(last, device=device)])
        for prompt, group, logits_V in zip(prompts, groups, logits_BV, strict=True):
            use = self._uses[prompt]
            use.keys, use.logits_V = PromptKeys.of(prefill, group.start, group.prefix), logits_V

    def _draw(self, rows: Sequence[_Row], logits_BV: Tensor) -> None:
        """Appends one token to every row, and sets the stop reason of the rows that end."""
        params, eos = self._params, self._eos
        early = [place for place, row in enumerate(rows) if len(row.tokens) < params.min_new_tokens]
        if early:
            # A model's config may name an end-of-sequence id that the vocabulary does not have.
            ending = [token for token in (*eos, *params.stop_token_ids) if 0 <= token < logits_BV.shape[1]]
            logits_BV[torch.tensor(early).unsqueeze(1), torch.tensor(ending, dtype=torch.long)] = -torch.inf
        matchers = [row.matcher for row in rows if row.matcher is not None]  # those of all rows, or none
        if matchers:
            allowed_BV = torch.from_numpy(JsonMatcher.allowed(matchers, logits_BV.shape[1])).to(logits_BV.device)
            logits_BV = logits_BV.masked_fill(~allowed_BV, -torch.inf)
        streams = [row.noise for row in rows if row.noise is not None]  # those of all rows
        tokens_B, logprobs_B = draw_tokens(logits_BV, params, streams)
        for row, token, logprob in zip(rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if self._on_token is not None:
                self._on_token(row.index, token, logprob)
            row.stop = row.end.after(token)
            if row.matcher is not None:
                row.matcher.advance(token)


def _batches(prompts: list[_Prompt], max_tokens: int) -> list[list[_Prompt]]:
    """The prompts in runs of at most `max_tokens` tokens. A longer prompt is a run of its own."""
    runs: list[list[_Prompt]] = []
    used = 0
    for prompt in prompts:
        if not runs or used + len(prompt.ids) > max_tokens:
            runs.append([])
            used = 0
        runs[-1].append(prompt)
        used += len(prompt.ids)
    return runs
