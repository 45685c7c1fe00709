"""`InferenceModel`: the handle that generates with a policy, and computes its logprobs or scores."""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, Protocol, Self, TypeVar, cast, overload

from pydantic import BaseModel, ValidationError

from engine.errors import BadSpec, UnsupportedSchema
from engine.models.call_batching import CallBatcher
from engine.models.images import Images, image_digests, images_or_none
from engine.models.scores import ScoringMixin
from engine.models.tape import prompt_group
from engine.protocol import Completion, GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from engine.text.answer_builder import AnswerBuilder
from engine.text.answers import answer_once, answer_repaired, constrained_schema
from engine.text.rendering import Renderer
from engine.text.stored_models import context_length_of
from engine.text.threads import StringThread, TokenizedThread
from engine.validation_messages import describe_errors
from engine.workspace import Workspace, derive_seed
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef

Answer = TypeVar("Answer", bound=BaseModel)

COUNTED_STATES = 4
"""Policies whose generations a handle counts. Calls that began before a step may count after it."""


def changed_sampling(sampling: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """Returns the parameters with other values of some fields. Raises BadSpec for values that a field does not take."""
    try:
        # model_validate rather than model_copy, so that the new values are checked.
        return SamplingParams.model_validate(sampling.model_dump() | dict(changes))
    except ValidationError as error:
        raise BadSpec(describe_errors(error.errors(), changes)) from error


logger = logging.getLogger("ostinato.models")


@lru_cache(maxsize=64)
def _warn_unconstrained_answer(model: str, schema: str, problem: str) -> None:
    """Logs a warning. The latest 64 different warnings of a process are not repeated, since a judge is asked thousands
    of times."""
    logger.warning("the model %r answers in the form of %s without a constraint: %s", model, schema, problem)


class HasWorkspace(Protocol):
    """A context that has a workspace, which is all that a builder needs."""

    @property
    def workspace(self) -> Workspace: ...


class _GenerationCounts:
    """How often a handle has generated for each prompt at its latest policies.

    A prompt is kept as a digest of 16 bytes, because its text takes kilobytes."""

    def __init__(self) -> None:
        self._by_state: OrderedDict[str, Counter[bytes]] = OrderedDict()

    def add(self, state: str, prompt_id: str) -> int:
        """Counts one more generation, and returns its number for this policy and prompt, from 1."""
        counts = self._by_state.setdefault(state, Counter())
        self._by_state.move_to_end(state)
        if len(self._by_state) > COUNTED_STATES:
            self._by_state.popitem(last=False)
        key = blake2b(prompt_id.encode(), digest_size=16).digest()
        counts[key] += 1
        return counts[key]


class InferenceModel(ScoringMixin):
    """Generates with one policy and computes logprobs; or computes scores, for a model with a scalar head.

    Sampling views such as `model.temperature(0.7)` are shallow copies of the handle with other settings."""

    def __init__(
        self,
        workspace: Workspace,
        name: str,
        renderer: Renderer,
        sampling: SamplingParams,
        base: ArtifactRef,
        policy: PolicyRef | None,
    ) -> None:
        self.workspace, self.name, self.base = workspace, name, base
        self.renderer: Renderer = renderer
        self.sampling: SamplingParams = sampling
        self.tensor_parallel: int | None = None
        self.engine = workspace.connect()
        # A sampling view is a shallow copy, so all views of a handle share these objects.
        self._policy = policy
        self._generation_counts = _GenerationCounts()
        self._generations: CallBatcher[tuple[TokenSequence, int], Completion] = CallBatcher(self._generate)
        self._scorings: CallBatcher[TokenSequence, list[float]] = CallBatcher(self._score)
        self._values: CallBatcher[TokenSequence, list[float]] = CallBatcher(self._read_values)
        self._seed: int | None = None

    async def policy(self) -> PolicyRef:
        """The policy that this handle uses now."""
        if self._policy is None:
            raise BadSpec(f"the model {self.name!r} has no policy yet")
        return self._policy

    async def dealloc(self) -> None:
        """Lets the engine evict this run's weights first when it needs memory.

        Nothing is lost, and all handles of the run stay valid: a later call loads the weights again."""
        policy = await self.policy()
        await self.engine.release(policy.run, epoch=self.workspace.epoch)

    # -- sampling views ----------------------------------------------------------------------------------------

    def _view(self, **changes: Any) -> Self:
        view = copy(self)
        view.sampling = changed_sampling(self.sampling, changes)
        return view

    def with_sampling(self, sampling: SamplingParams) -> Self:
        """Returns a view with all sampling parameters replaced."""
        view = copy(self)
        view.sampling = sampling
        return view

    def temperature(self, value: float) -> Self:
        """Returns a view that samples at this temperature. 0: the most likely token is always taken."""
        return self._view(temperature=value)

    def top_p(self, value: float) -> Self:
        """Returns a view that samples from the likeliest tokens whose probabilities sum up to `value`. 1: from all."""
        return self._view(top_p=value)

    def top_k(self, value: int) -> Self:
        """Returns a view that samples from the `value` most likely tokens. 0: from all."""
        return self._view(top_k=value)

    def max_gen_len(self, tokens: int) -> Self:
        """Returns a view whose completions have at most this number of tokens."""
        return self._view(max_new_tokens=tokens)

    def fitted(self, thread: StringThread) -> Self:
        """Returns a view that generates no more tokens than the model's context has left after `thread`.

        It is this handle if `max_gen_len` tokens fit, and also if not even one token fits."""
        context = context_length_of(self.workspace.open_store(), self.base)
        if context is None:
            return self
        # If nothing fits, the engine raises an error that names the lengths.
        room = context - len(self.renderer.prompt_sequence(thread).token_ids)
        if room >= self.sampling.max_new_tokens or room < 1:
            return self
        return self.max_gen_len(room)

    def min_gen_len(self, tokens: int) -> Self:
        """Returns a view whose completions have at least this number of tokens."""
        return self._view(min_new_tokens=tokens)

    def stop(self, *strings: str) -> Self:
        """Returns a view whose completions also end at the first of these strings, after `min_gen_len` tokens.

        Without arguments, completions end at no string. The sampled tokens, and the answers of rollouts and episodes,
        include the token that completes the string. The text of `generate` ends before the string."""
        return self._view(stop=strings)

    def seed(self, value: int) -> Self:
        """Returns a view that samples with seed `value` instead of the run's. Each new view repeats the same
        samples."""
        view = copy(self)
        view._seed, view._generation_counts = value, _GenerationCounts()
        return view

    # -- text --------------------------------------------------------------------------------------------------

    async def tokenize_thread(self, thread: StringThread) -> TokenizedThread:
        return self.renderer.tokenize(thread)

    async def detokenize_thread(self, tokenized: TokenizedThread) -> StringThread:
        return self.renderer.detokenize(tokenized)

    async def serialize_thread(self, thread: StringThread) -> tuple[list[int], Images | None, list[float]]:
        """Returns (token ids, placed images, weights) of a text conversation, as `serialize_tokenized_thread` does."""
        return await self.serialize_tokenized_thread(self.renderer.tokenize(thread))

    async def serialize_tokenized_thread(
        self, tokenized: TokenizedThread
    ) -> tuple[list[int], Images | None, list[float]]:
        """Returns (token ids, placed images, weights). Token ids and weights have equal lengths.

        The placed images are None, or one engine.models.images.PlacedImage per image. Its placeholder tokens are
        [start, start + tokens), and `data` holds the bytes of the image file, which the engine decodes."""
        sequence = self.renderer.sequence(tokenized)
        return tokenized.token_ids, sequence.images or None, tokenized.weights

    # -- reading -----------------------------------------------------------------------------------------------

    @overload
    async def generate(self, thread: StringThread) -> StringThread: ...

    @overload
    async def generate(self, thread: StringThread, schema: type[Answer]) -> Answer: ...

    async def generate(self, thread: StringThread, schema: type[Answer] | None = None) -> StringThread | Answer:
        """Returns the thread with the model's answer appended.

        With a pydantic class as `schema`, the answer is constrained to its JSON schema
        (SamplingParams.json_schema), and returned as an instance of it: the first JSON object in the text that fits. If
        none fits, as when `max_gen_len` cuts the answer, the model is asked once more, with the error and the JSON
        schema. Raises MalformedAnswer if the second answer does not fit either."""
        if schema is not None:
            return await answer_repaired(partial(self._reply_in_json, schema), thread, schema)
        return await self._reply(thread)

    async def answer(self, thread: StringThread, schema: type[Answer]) -> Answer:
        """`generate(thread, schema)` without the second try."""
        return await answer_once(partial(self._reply_in_json, schema), thread, schema)

    async def _reply_in_json(self, schema: type[BaseModel], thread: StringThread) -> StringThread:
        """The thread with an answer that is constrained to the schema, as far as the sampler can."""
        described = constrained_schema(schema, self.sampling.max_new_tokens)
        try:
            return await self._view(json_schema=described, min_new_tokens=0)._reply(thread)
        except UnsupportedSchema as error:
            _warn_unconstrained_answer(self.name, schema.__name__, str(error))
            return await self._reply(thread)

    async def _reply(self, thread: StringThread) -> StringThread:
        tokenized = await self.generate_tokens(thread)
        answered = self.renderer.detokenize(tokenized)
        if not self.sampling.stop:
            return answered

        # The text ends before the stop string at which the sampler ended the completion.
        answer = AnswerBuilder(
            self.renderer.tokenizer, stop=self.sampling.stop, min_tokens=self.sampling.min_new_tokens
        )
        sampled = tokenized.turns[-1]
        for token, logprob in zip(sampled.token_ids[sampled.header :], sampled.logprobs or (), strict=True):
            answer.feed(token, logprob)
        answer.close("stop")
        turns = [*answered.turns[:-1], ("assistant", answer.text)]
        return StringThread(turns, answered.metadata, answered.weights, answered.tools)

    async def generate_tokens(self, thread: StringThread | TokenizedThread) -> TokenizedThread:
        """Returns the tokenized thread with one sampled turn appended. Its token ids are the sampler's."""
        prompt = self.renderer.prompt(thread)
        sequence = self.renderer.sequence(prompt)
        policy = await self.policy()

        # The seed depends on the prompt, and on how often this handle has generated for it at this policy.
        prompt_id = str(prompt.token_ids)
        if sequence.images:
            prompt_id = str([prompt.token_ids, *image_digests(sequence.images)])
        count = self._generation_counts.add(policy.state, prompt_id)
        base_seed = self.workspace.seed if self._seed is None else self._seed
        seed = derive_seed(base_seed, policy.stage, policy.step, prompt_id, count)

        # Concurrent calls with the same policy and sampling become one call of the engine.
        completion = await self._generations.submit((policy, self.sampling), (sequence, seed))
        return self.renderer.with_completion(prompt, completion.token_ids, completion.logprobs)

    async def logprobs_per_token(self, tokenized: TokenizedThread) -> list[float]:
        """Returns the logprob in nats of each trained token (weight > 0), computed by the trainer at the view's
        temperature."""
        sequence = self.renderer.sequence(tokenized)
        key = (await self.policy(), self.sampling.temperature or 1.0)
        return await self._scorings.submit(key, replace(sequence, group=prompt_group(sequence)))

    async def logprobs(self, thread: StringThread) -> float:
        """Returns the summed logprob in nats of the thread's trained tokens."""
        return math.fsum(await self.logprobs_per_token(self.renderer.tokenize(thread)))

    async def _generate(self, key: Hashable, items: list[tuple[TokenSequence, int]]) -> list[Completion]:
        policy, sampling = cast(tuple[PolicyRef, SamplingParams], key)
        prompts, seeds = [prompt.token_ids.tolist() for prompt, _ in items], [seed for _, seed in items]
        images = images_or_none(prompt.images for prompt, _ in items)
        request = GenerateRequest(policy, prompts, seeds, sampling, self.tensor_parallel, images)
        return await self.engine.generate(request, epoch=self.workspace.epoch)

    async def _score(self, key: Hashable, items: list[TokenSequence]) -> list[list[float]]:
        policy, temperature = cast(tuple[PolicyRef, float], key)
        request = LogprobsRequest(policy, items, temperature=temperature, max_tokens=self.workspace.max_tokens)
        return await self.engine.logprobs(request, epoch=self.workspace.epoch)


class LiveView(InferenceModel):
    """An inference model that always uses the current policy of a training model."""

    def __init__(
        self,
        workspace: Workspace,
        name: str,
        renderer: Renderer,
        sampling: SamplingParams,
        base: ArtifactRef,
        current: Callable[[], Awaitable[PolicyRef]],
    ) -> None:
        super().__init__(workspace, name, renderer, sampling, base, None)
        self._current = current

    async def policy(self) -> PolicyRef:
        return await self._current()
