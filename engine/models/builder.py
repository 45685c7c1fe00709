"""From a key to a spawned model: `Model(key).to_builder(ctx)`, how it will be, `spawn_train` or `spawn_inference`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from engine.errors import BadSpec
from engine.models.inference_model import HasWorkspace, InferenceModel
from engine.models.openai_model import SCHEME, OpenAIModel
from engine.models.scores import check_head
from engine.models.training_model import TrainingModel
from engine.protocol import SamplingParams
from engine.specs.adapters import FullSpec, LoraSpec, parse_trainable
from engine.text.rendering import Renderer
from engine.text.stored_models import context_length_of, renderer_of
from engine.workspace import Workspace
from storage.chain.records import Root
from storage.store import keys
from storage.store.artifacts import ArtifactRef

WHOLE = FullSpec()


@dataclass(frozen=True)
class Model:
    """A model by registry key (`name` or `name@version`), by local Hugging Face folder, or, for inference only, behind
    an OpenAI-compatible endpoint: `openai://NAME` (engine.models.openai_model)."""

    key: str

    def to_builder(
        self,
        ctx: HasWorkspace,
        tp: int | None = None,
        kv_cache_len: int | None = None,
        tokens_to_generate: int = 2048,
    ) -> ModelBuilder:
        """`tp`: as `.tp(n)`. `kv_cache_len` is accepted as in the documents: the memory of a sampler's cache is the
        engine's own configuration. `tokens_to_generate`: where completions are cut, unless a view says otherwise."""
        builder = ModelBuilder(self.key, ctx.workspace, tokens_to_generate, on_spawn=getattr(ctx, "spawned", None))
        return builder if tp is None else builder.tp(tp)


@dataclass(frozen=True)
class ModelBuilder:
    """How a model will be spawned. Awaiting it gives the builder itself, so both spellings of the docs work."""

    key: str
    workspace: Workspace
    tokens_to_generate: int
    trainable: FullSpec | LoraSpec = WHOLE
    tensor_parallel: int | None = None
    on_spawn: Callable[[TrainingModel], None] | None = None
    """A recipe's context hears of the models that it trains."""

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
        return self.training(parse_trainable({"kind": "lora", "rank": rank, "alpha": alpha, "target_modules": names}))

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
        """A trainable instance. `max_batch_size`: tokens of one packed forward, and so of the longest trainable
        sequence; the engine's `max_tokens_per_forward` by default. A larger one is followed as far as the model's
        context; a pass that the device's memory does not hold is an OutOfMemory when it is made."""
        keys.validate_name(name)
        if self.key.startswith(SCHEME):
            raise BadSpec(f"{self.key!r} is behind an endpoint, which gives no gradients; use spawn_inference")
        if max_batch_size is not None and max_batch_size < 1:
            raise BadSpec(f"max_batch_size={max_batch_size}; give a number of tokens, 1 or more")
        limit = (await self.workspace.connect().info()).numerics.max_tokens
        base, renderer = await self._base()
        workspace = self.workspace
        if max_batch_size is not None:
            context = context_length_of(workspace.open_store(), base) or max_batch_size
            # beyond the engine's own limit only as far as a sequence of the model can reach
            size = min(max_batch_size, max(limit, context))
            workspace = workspace.model_copy(update={"max_tokens": size})
        check_head(self.workspace.open_store(), base, self.trainable.head)
        sampling = SamplingParams(max_new_tokens=self.tokens_to_generate)
        # a full dump: a default that is spelt out and one that is left out are the same chain
        trainable = self.trainable.model_dump(mode="json")
        root = Root(base=base, base_digest=base.sha256, trainable=trainable, init_seed=init_seed)
        model = TrainingModel(workspace, name, renderer, sampling, base, workspace.max_tokens or limit, root)
        model.tensor_parallel = self.tensor_parallel
        if self.on_spawn is not None:
            self.on_spawn(model)
        return model

    async def spawn_inference(self, name: str) -> InferenceModel | OpenAIModel:
        """A frozen instance: policy 0 of a chain that never moves. A scoring model must be one already."""
        if self.key.startswith(SCHEME):
            if self.trainable.head == "scalar":
                raise BadSpec(f"{self.key!r} is behind an endpoint, which gives no scores; use a registered model")
            sampling = SamplingParams(max_new_tokens=self.tokens_to_generate)
            return OpenAIModel.of(self.key, keys.validate_name(name), sampling)
        base, _ = await self._base()
        check_head(self.workspace.open_store(), base, self.trainable.head, frozen=True)
        model = await replace(self, on_spawn=None).spawn_train(name)
        return await model.clone_inf()

    async def _base(self) -> tuple[ArtifactRef, Renderer]:
        base = await self.workspace.connect().import_model(self.key, provenance=self.workspace.provenance)
        return base, renderer_of(self.workspace.open_store(), base)
