"""`InferenceModel`: the handle that generates with a policy, and computes its logprobs or scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from copy import copy
from dataclasses import replace
from typing import Any, Protocol, Self, TypeVar, cast, overload

from pydantic import BaseModel

from engine.errors import BadSpec
from engine.models.call_batching import CallBatcher
from engine.models.images import Images, image_digests, images_or_none
from engine.models.scores import ScoringMixin
from engine.models.structured import answer_once, answer_repaired
from engine.models.tape import prompt_group
from engine.protocol import Completion, GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from engine.text.rendering import Renderer
from engine.text.stops import stop_token_ids, text_until_stop, tokens_until_stop
from engine.text.stored_models import context_length_of
from engine.text.threads import StringThread, TokenizedThread
from engine.workspace import Workspace, derive_seed
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef

Answer = TypeVar("Answer", bound=BaseModel)


class HasWorkspace(Protocol):
    """A context that has a workspace, which is all that a builder needs."""

    @property
    def workspace(self) -> Workspace: ...


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
        self.stops: tuple[str, ...] = ()
        self.tensor_parallel: int | None = None
        self.engine = workspace.connect()
        # A sampling view is a shallow copy, so all views of a handle share these objects.
        self._policy = policy
        self._generation_counts: Counter[tuple[str, str]] = Counter()
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
        # model_validate rather than model_copy, so that the new values are checked.
        view.sampling = SamplingParams.model_validate(self.sampling.model_dump() | changes)
        return view

    def with_sampling(self, sampling: SamplingParams) -> Self:
        """Returns a view with all sampling parameters replaced."""
        return self._view(**sampling.model_dump())

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

        Without arguments, completions end at no string. The sampled tokens include the one that completes the string.
        The text of `generate` ends before the string."""
        if any(not string for string in strings):
            raise BadSpec(f"stop strings {strings}: an empty one would end every completion; give text")
        view = self._view(stop_token_ids=stop_token_ids(self.renderer.tokenizer, strings))
        view.stops = strings
        return view

    def seed(self, value: int) -> Self:
        """Returns a view that samples with seed `value` instead of the run's. Each new view repeats the same
        samples."""
        view = copy(self)
        view._seed, view._generation_counts = value, Counter()
        return view

    # -- text --------------------------------------------------------------------------------------------------

    async def tokenize_thread(self, thread: StringThread) -> TokenizedThread:
        return self.renderer.tokenize(thread)

    async def detokenize_thread(self, tokenized: TokenizedThread) -> StringThread:
        return self.renderer.detokenize(tokenized)

    async def serialize_thread(self, thread: StringThread) -> tuple[list[int], Images | None, list[float]]:
        """Returns (token ids, image patches, weights) of a text conversation, as `serialize_tokenized_thread` does."""
        return await self.serialize_tokenized_thread(self.renderer.tokenize(thread))

    async def serialize_tokenized_thread(
        self, tokenized: TokenizedThread
    ) -> tuple[list[int], Images | None, list[float]]:
        """Returns (token ids, image patches, weights). Token ids and weights have equal lengths.

        Image patches are None, or one engine.models.images.PlacedImage per image. Its placeholder tokens are
        [start, start + tokens), and `data` holds the bytes of the image file, which the engine decodes."""
        sequence = self.renderer.sequence(tokenized)
        return tokenized.token_ids, sequence.images or None, tokenized.weights

    # -- reading -----------------------------------------------------------------------------------------------

    @overload
    async def generate(self, thread: StringThread) -> StringThread: ...

    @overload
    async def generate(self, thread: StringThread, schema: type[Answer]) -> Answer: ...

    async def generate(
        self, thread: StringThread, schema: type[Answer] | None = None
    ) -> StringThread | Answer:
        """Returns the thread with the model's answer appended.

        With a pydantic class as `schema`, returns the answer as an instance of it: the first JSON object in the text
        that fits. If none fits, the model is asked once more, with the error and the JSON schema. Raises
        MalformedAnswer if the second answer does not fit either."""
        if schema is not None:
            return await answer_repaired(self._reply, thread, schema)
        return await self._reply(thread)

    async def answer(self, thread: StringThread, schema: type[Answer]) -> Answer:
        """`generate(thread, schema)` without the second try."""
        return await answer_once(self._reply, thread, schema)

    async def _reply(self, thread: StringThread) -> StringThread:
        answered = self.renderer.detokenize(await self.generate_tokens(thread))
        if not self.stops:
            return answered
        answer = text_until_stop(answered.last_content(), self.stops)
        return StringThread([*answered.turns[:-1], ("assistant", answer)], answered.metadata, answered.weights)

    async def generate_tokens(self, thread: StringThread | TokenizedThread) -> TokenizedThread:
        """Returns the tokenized thread with one sampled turn appended. Its token ids are the sampler's."""
        prompt = self.renderer.prompt(thread)
        sequence = self.renderer.sequence(prompt)
        policy = await self.policy()

        # The seed depends on the prompt, and on how often this handle has generated for it at this policy.
        prompt_id = str(prompt.token_ids)
        if sequence.images:
            prompt_id = str([prompt.token_ids, *image_digests(sequence.images)])
        count_key = (policy.state, prompt_id)
        self._generation_counts[count_key] += 1
        base_seed = self.workspace.seed if self._seed is None else self._seed
        seed = derive_seed(base_seed, policy.stage, policy.step, prompt_id, self._generation_counts[count_key])

        # Concurrent calls with the same policy and sampling become one call of the engine.
        completion = await self._generations.submit((policy, self.sampling), (sequence, seed))
        length = tokens_until_stop(
            self.renderer.tokenizer, completion.token_ids, self.stops, at_least=self.sampling.min_new_tokens
        )
        return self.renderer.with_completion(prompt, completion.token_ids[:length], completion.logprobs[:length])

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
