"""Handles for people: `Model(key)` -> builder -> `TrainingModel` / `InferenceModel`.

A handle holds references, never weights. `TrainingModel` moves along its chain; `train_*` calls are written on a
tape, and `optim_step` commits the tape as a batch and takes one step through the same door as every training class.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self, cast

from engine.adapters import FullSpec, LoraSpec, trainable_of
from engine.coalesce import Coalescer
from engine.errors import BadSpec, PermanentEngineError, SampleTooLong
from engine.protocol import Completion, GenerateRequest, LogprobsRequest, PolicySpec, SamplingParams, TokenSequence
from engine.scores import Scores, check_head
from engine.tape import Enqueued, Tape
from engine.text.rendering import Renderer
from engine.text.threads import StringThread, TokenizedThread
from engine.text.tokenizers import renderer_of
from engine.workspace import Workspace, derive_seed
from storage import keys
from storage.artifacts import ArtifactRef
from storage.chain import Chain, CommitRecord, OptimizerSpec, PolicyRef, Root, StepRequest
from storage.models import canonical_json
from storage.registry import free_name, registered_key

WHOLE = FullSpec()


class HasWorkspace(Protocol):
    """What a builder needs of a context."""

    @property
    def workspace(self) -> Workspace: ...


@dataclass(frozen=True)
class Model:
    """A model by registry key (`name` or `name@version`), or by local Hugging Face folder."""

    key: str

    def to_builder(self, ctx: HasWorkspace, *, tokens_to_generate: int = 2048) -> ModelBuilder:
        return ModelBuilder(self.key, ctx.workspace, tokens_to_generate)


@dataclass(frozen=True)
class ModelBuilder:
    """How a model will be spawned. Awaiting it gives the builder itself, so both spellings of the docs work."""

    key: str
    workspace: Workspace
    tokens_to_generate: int
    trainable: FullSpec | LoraSpec = WHOLE
    tensor_parallel: int | None = None

    def tp(self, devices: int) -> Self:
        """A builder whose models sample with their weights split over `devices` devices (tensor parallel); the vLLM
        sampler does it, the torch sampler refuses all but 1 at the first generation."""
        if devices < 1:
            raise BadSpec(f"tp({devices}) was asked for; give the number of devices that share a model, 1 or more")
        return replace(self, tensor_parallel=devices)

    def with_adapter(
        self, rank: int = 16, alpha: float = 32.0, targets: Sequence[str] | Literal["all-linear"] = "all-linear"
    ) -> Self:
        """A builder whose models train a LoRA adapter (arXiv:2106.09685) in peft's format: the weights of the base are
        in memory once for all runs that adapt it. `targets`: names of linear layers, like "q_proj"."""
        names = targets if isinstance(targets, str) else tuple(targets)
        return self.training(trainable_of({"kind": "lora", "rank": rank, "alpha": alpha, "target_modules": names}))

    def training(self, trainable: FullSpec | LoraSpec) -> Self:
        """A builder whose models train just this part of the weights. A scalar head that was asked for stays."""
        builder = replace(self, trainable=trainable)
        return builder.into_scoring_model() if self.trainable.head == "scalar" else builder

    def into_scoring_model(self) -> Self:
        """A builder whose models have a scalar head, and give scores instead of tokens: reward and value models. A
        language model's head is replaced by a new one, drawn from `init_seed`, which training must shape."""
        return replace(self, trainable=self.trainable.model_copy(update={"head": "scalar"}))

    def __await__(self) -> Generator[Any, None, Self]:
        return self
        yield

    async def spawn_train(self, name: str, max_batch_size: int | None = None, *, init_seed: int = 0) -> TrainingModel:
        """A trainable instance. `max_batch_size`: longest trainable sequence, in tokens; at most the engine's
        `max_tokens_per_forward`, which is also the default."""
        keys.validate_name(name)
        limit = (await self.workspace.connect().info()).numerics.max_tokens
        if max_batch_size is not None and max_batch_size > limit:
            raise BadSpec(
                f"max_batch_size={max_batch_size} tokens, but one packed forward of this engine takes {limit}; "
                "raise engine.max_tokens_per_forward or lower max_batch_size"
            )
        base, renderer = await self._base()
        check_head(self.workspace.open_store(), base, self.trainable.head)
        sampling = SamplingParams(max_new_tokens=self.tokens_to_generate)
        # a full dump: a default that is spelt out and one that is left out are the same chain
        trainable = self.trainable.model_dump(mode="json")
        root = Root(base=base, base_digest=base.sha256, trainable=trainable, init_seed=init_seed)
        model = TrainingModel(self.workspace, name, renderer, sampling, base, max_batch_size or limit, root)
        model.tensor_parallel = self.tensor_parallel
        return model

    async def spawn_inference(self, name: str) -> InferenceModel:
        """A frozen instance: policy 0 of a chain that never moves. A scoring model must be one already."""
        base, _ = await self._base()
        check_head(self.workspace.open_store(), base, self.trainable.head, frozen=True)
        model = await self.spawn_train(name)
        return await model.clone_inf()

    async def _base(self) -> tuple[ArtifactRef, Renderer]:
        base = await self.workspace.connect().import_model(self.key, provenance=self.workspace.provenance)
        return base, renderer_of(self.workspace.open_store(), base)


class InferenceModel(Scores):
    """Reads one policy: generation and logprobs, or scores. Sampling views (`.temperature(0.7)`) are shallow copies."""

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
        self._policy = policy
        self._calls: Counter[tuple[str, str]] = Counter()
        self._generations: Coalescer[tuple[list[int], int], Completion] = Coalescer(self._generate)
        self._scorings: Coalescer[TokenSequence, list[float]] = Coalescer(self._score)
        self._values: Coalescer[TokenSequence, list[float]] = Coalescer(self._read_values)
        self._seed: int | None = None

    async def policy(self) -> PolicyRef:
        """The policy this handle reads now."""
        if self._policy is None:
            raise BadSpec(f"the model {self.name!r} has no policy yet")
        return self._policy

    # -- sampling views ----------------------------------------------------------------------------------------

    def _view(self, **changes: Any) -> Self:
        view = copy(self)
        # model_validate, not model_copy: a view with a negative temperature must not come to be
        view.sampling = SamplingParams.model_validate(self.sampling.model_dump() | changes)
        return view

    def with_sampling(self, sampling: SamplingParams) -> Self:
        """A view with all sampling parameters replaced."""
        return self._view(**sampling.model_dump())

    def temperature(self, value: float) -> Self:
        return self._view(temperature=value)

    def top_p(self, value: float) -> Self:
        return self._view(top_p=value)

    def top_k(self, value: int) -> Self:
        return self._view(top_k=value)

    def max_gen_len(self, tokens: int) -> Self:
        return self._view(max_new_tokens=tokens)

    def min_gen_len(self, tokens: int) -> Self:
        return self._view(min_new_tokens=tokens)

    def seed(self, value: int) -> Self:
        """A view whose draws follow `value` instead of the run's seed; a new view begins them anew."""
        view = copy(self)
        view._seed, view._calls = value, Counter()
        return view

    # -- text --------------------------------------------------------------------------------------------------

    async def tokenize_thread(self, thread: StringThread) -> TokenizedThread:
        return self.renderer.tokenize(thread)

    async def detokenize_thread(self, tokenized: TokenizedThread) -> StringThread:
        return self.renderer.detokenize(tokenized)

    async def serialize_tokenized_thread(self, tokenized: TokenizedThread) -> tuple[list[int], None, list[float]]:
        """(token ids, image patches, weights): equal lengths; this engine has no images yet."""
        tokens, weights = self.renderer.serialize(tokenized)
        return tokens, None, weights

    # -- reading -----------------------------------------------------------------------------------------------

    async def generate(self, thread: StringThread) -> StringThread:
        """The thread with the model's answer appended."""
        return self.renderer.detokenize(await self.generate_tokens(thread))

    async def generate_tokens(self, thread: StringThread | TokenizedThread) -> TokenizedThread:
        """The tokenized thread with one sampled turn appended: its ids are the sampler's, never re-tokenised."""
        prompt = self.renderer.prompt(thread)
        prompt_ids = self.renderer.serialize(prompt)[0]
        policy = await self.policy()
        call = (policy.state, str(prompt_ids))
        self._calls[call] += 1
        parts = (policy.stage, policy.step, str(prompt_ids), self._calls[call])
        seed = derive_seed(self.workspace.seed if self._seed is None else self._seed, *parts)
        done = await self._generations.submit((policy, self.sampling), (prompt_ids, seed))
        return self.renderer.with_completion(prompt, done.token_ids, done.logprobs)

    async def logprobs_per_token(self, tokenized: TokenizedThread) -> list[float]:
        """Nats of each trained token (weight > 0), by the trainer's weights."""
        tokens, weights = self.renderer.serialize(tokenized)
        key = (await self.policy(), self.sampling.temperature or 1.0)
        return await self._scorings.submit(key, TokenSequence(tokens, weights))

    async def logprobs(self, thread: StringThread) -> float:
        """Summed nats of the thread's trained tokens."""
        return sum(await self.logprobs_per_token(self.renderer.tokenize(thread)))

    async def _generate(self, key: Hashable, items: list[tuple[list[int], int]]) -> list[Completion]:
        policy, sampling = cast(tuple[PolicyRef, SamplingParams], key)
        prompts, seeds = [prompt for prompt, _ in items], [seed for _, seed in items]
        request = GenerateRequest(policy, prompts, seeds, sampling, self.tensor_parallel)
        return await self.engine.generate(request, epoch=self.workspace.epoch)

    async def _score(self, key: Hashable, items: list[TokenSequence]) -> list[list[float]]:
        policy, temperature = cast(tuple[PolicyRef, float], key)
        request = LogprobsRequest(policy, items, temperature=temperature)
        return await self.engine.logprobs(request, epoch=self.workspace.epoch)


@dataclass
class _Position:
    """Where a training model stands. Shared by all sampling views of it."""

    policy: PolicyRef | None = None
    stages: int = 0
    tape: Tape = field(default_factory=Tape)


class TrainingModel(InferenceModel):
    """A policy that can be trained: in place, one committed step at a time."""

    def __init__(
        self,
        workspace: Workspace,
        name: str,
        renderer: Renderer,
        sampling: SamplingParams,
        base: ArtifactRef,
        max_batch_size: int,
        root: Root,
    ) -> None:
        super().__init__(workspace, name, renderer, sampling, base, None)
        self.max_batch_size = max_batch_size
        self._root = root
        self._at = _Position()

    async def policy(self) -> PolicyRef:
        if self._at.policy is None:
            await self.begin_stage("recipe")
        assert self._at.policy is not None
        return self._at.policy

    async def begin_stage(self, name: str) -> PolicyRef:
        """Opens the next stage and returns its policy 0: the base model, or where the stage before ended.

        The handle then stands at the stage's last committed step, so that a resumed run goes on from there.
        """
        position = self._at.stages
        stage = f"{position}-{keys.validate_name(name)}"
        root = self._root
        if self._at.policy is not None:
            start_at = self._at.policy
            root = Root(start=start_at, base_digest=start_at.state, trainable=self._root.trainable)
        run = self.workspace.run
        start = await self.engine.create_policy(PolicySpec(run=run, stage=stage, model=self.name, root=root))
        body = {"start": start.model_dump(), "reference": start.model_dump(), "optimizer": "reset"}
        self.workspace.open_store().put_if_absent(keys.stage_json(run, stage), canonical_json(body))
        self._at.policy = self.chain_of(start).head()
        self._at.stages = position + 1  # calls that open the same stage concurrently open it once
        return start

    def chain_of(self, policy: PolicyRef) -> Chain:
        return Chain.of(self.workspace.open_store(), policy)

    def stand_at(self, policy: PolicyRef) -> None:
        """Moves the handle to a committed policy of its chain."""
        self._at.policy = policy

    async def clone_inf(self) -> InferenceModel:
        """A frozen copy of the policy as it is now."""
        frozen = InferenceModel(
            self.workspace, self.name, self.renderer, self.sampling, self.base, await self.policy()
        )
        frozen.tensor_parallel = self.tensor_parallel
        return frozen

    # -- primitives --------------------------------------------------------------------------------------------

    def train_language_modelling(self, thread: StringThread | TokenizedThread) -> Enqueued:
        """Adds the cross-entropy of the thread's trained tokens to the gradient of the next `optim_step`."""
        tokenized = self.renderer.tokenize(thread) if isinstance(thread, StringThread) else thread
        return self._add({"kind": "cross_entropy"}, tokenized)

    def train_grpo(
        self,
        tokenized: TokenizedThread,
        logprobs: list[float],
        ref_logprobs: list[float],
        advantages: list[float],
        clip_range: float,
        kl_beta: float,
    ) -> Enqueued:
        """Adds the GRPO loss of one sample (lists per trained token) to the gradient of the next `optim_step`."""
        loss = {"kind": "grpo", "clip_low": clip_range, "clip_high": clip_range, "kl_beta": kl_beta}
        return self._add(
            loss,
            tokenized,
            old_logprobs=list(logprobs),
            reference_logprobs=list(ref_logprobs),
            advantages=[float(a) for a in advantages],
        )

    def _add(self, loss: dict[str, Any], tokenized: TokenizedThread, **columns: list[float]) -> Enqueued:
        tokens, weights = self.renderer.serialize(tokenized)
        if len(tokens) > self.max_batch_size:
            raise SampleTooLong(
                f"the sample has {len(tokens)} tokens, but {self.name!r} was spawned with "
                f"max_batch_size={self.max_batch_size}; shorten the sample, or spawn with a larger max_batch_size"
            )
        return self._at.tape.add(loss, TokenSequence(tokens, weights), **columns)

    async def optim_step(
        self, lr: float, wd: float = 0.0, max_grad_norm: float = 1.0, skip_nan_gradients: bool = False
    ) -> dict[str, float]:
        """Commits the tape and takes one step: global-norm clipping, AdamW. Returns loss, grad_norm, tokens."""
        policy = await self.policy()
        loss, batch = self._at.tape.commit(self.workspace, policy)
        request = StepRequest(
            parent=policy,
            batch=batch,
            loss=loss,
            optimizer=OptimizerSpec(lr=lr, weight_decay=wd, max_grad_norm=max_grad_norm),
            # sampling at another temperature asks for its logprobs; the likelihood of a given text has none
            temperature=1.0 if loss["kind"] == "cross_entropy" else self.sampling.temperature or 1.0,
            nan_policy="skip" if skip_nan_gradients else "fail",
        )
        try:
            record = await self.take_step(request)
        except PermanentEngineError:
            self._at.tape.clear()  # these samples will never make this step; other ones may
            raise
        self._at.tape.clear()
        return record.metrics

    async def take_step(self, request: StepRequest) -> CommitRecord:
        """Takes a step exactly once and moves this handle to its result."""
        record = await self.engine.take_gradient_step(request, epoch=self.workspace.epoch)
        self._at.policy = record.policy
        return record

    # -- saving ------------------------------------------------------------------------------------------------

    async def save(
        self, model_name: str, inference_only: bool = True, ctx: HasWorkspace | None = None
    ) -> str:
        """Publishes the policy as a plain Hugging Face folder and returns its key, `name@version`.

        `inference_only=False` also writes a checkpoint with the optimizer's moments. `ctx` is accepted as in the
        docs; the handle's own workspace is what is used.
        """
        policy = await self.policy()
        provenance, epoch = self.workspace.provenance, self.workspace.epoch
        if not inference_only:
            await self.engine.save_checkpoint(policy, provenance=provenance, name=model_name, epoch=epoch)
        ref = await self.engine.export_model(policy, _registry_name(model_name), provenance=provenance, epoch=epoch)
        return registered_key(ref)

    async def save_model_safely(self, model_name: str, inference_only: bool = True) -> str:
        """`save` under a name that no other model has: `name`, else `name-2`, `name-3`, …"""
        name = free_name(self.workspace.open_store(), _registry_name(model_name), (await self.policy()).uri)
        return await self.save(name, inference_only)


def _registry_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise BadSpec(f"model name {name!r}: use letters, digits, '.', '_' and '-' (at most 128), no path")
    return name


