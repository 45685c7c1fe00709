"""Public handles of models: `Model(key)` -> `ModelBuilder` -> `TrainingModel` or `InferenceModel`.

A handle holds references, never weights. A `TrainingModel` points to one policy of its chain. Its `train_*` calls
record samples on a tape. `optim_step` commits the tape as a batch and takes one step, with the same engine call that
the training classes use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from engine.errors import BadSpec
from engine.models.folder import router_loss_warning
from engine.models.inference_model import HasWorkspace, InferenceModel
from engine.models.openai_model import SCHEME, OpenAIModel
from engine.models.scores import check_head
from engine.models.training_model import TrainingModel
from engine.protocol import SamplingParams
from engine.specs.adapters import FullSpec, LoraSpec, parse_trainable
from engine.text.answers import MalformedAnswer
from engine.text.rendering import Renderer
from engine.text.stored_models import context_length_of, renderer_of
from engine.workspace import Workspace
from storage.chain.records import Root
from storage.store import keys
from storage.store.artifacts import ArtifactRef

__all__ = ["HasWorkspace", "InferenceModel", "MalformedAnswer", "Model", "ModelBuilder", "OpenAIModel", "TrainingModel"]


log = logging.getLogger(__name__)

FULL = FullSpec()


@dataclass(frozen=True)
class Model:
    """Names a model: by registry key (`name` or `name@version`), by local Hugging Face folder, or by its name on the
    hub (`owner/name`, `hf://owner/name@revision`).

    For inference only, `openai://NAME` names a model behind an OpenAI-compatible endpoint (engine.models.openai_model).
    """

    key: str

    def to_builder(
        self, ctx: HasWorkspace, tp: int | None = None, kv_cache_len: int | None = None, tokens_to_generate: int = 2048
    ) -> ModelBuilder:
        """Returns a builder for this model in the workspace of `ctx`.

        `tp` is the number of devices that share the model while it samples, as in `ModelBuilder.tp`. `kv_cache_len` is
        ignored. It is accepted only because published listings pass it; the engine's config sets the size of the KV
        cache. `tokens_to_generate` is the maximum length of completions, unless a view sets another."""
        on_spawn = getattr(ctx, "spawned", None)  # only the context of a recipe has it
        builder = ModelBuilder(self.key, ctx.workspace, tokens_to_generate, on_spawn=on_spawn)
        if tp is None:
            return builder
        return builder.tp(tp)


@dataclass(frozen=True)
class ModelBuilder:
    """The settings with which a model is spawned. Awaiting a builder returns the builder itself, so that listings with
    and without `await` work."""

    key: str
    workspace: Workspace
    tokens_to_generate: int
    trainable: FullSpec | LoraSpec = FULL
    tensor_parallel: int | None = None
    on_spawn: Callable[[TrainingModel], None] | None = None
    """Called with each model that is spawned for training, so that the context of a recipe knows its models."""

    def tp(self, devices: int) -> Self:
        """Returns a builder whose models sample with their weights split over `devices` devices (tensor parallelism).

        The vLLM sampler supports it. The torch sampler raises BadSpec at the first generation unless `devices` is 1."""
        if devices < 1:
            raise BadSpec(f"tp({devices}) was given; give the number of devices that share a model, 1 or more")
        return replace(self, tensor_parallel=devices)

    def with_adapter(
        self,
        rank: int = 16,
        alpha: float = 32.0,
        targets: Sequence[str] | Literal["all-linear"] = "all-linear",
        *,
        use_rslora: bool = False,
        use_dora: bool = False,
        load_in_4bit: bool = False,
    ) -> Self:
        """Returns a builder whose models train a LoRA adapter (arXiv:2106.09685) in peft's format.

        The weights of the base model are in memory once for all runs that adapt it. `targets` are names of linear
        layers, such as "q_proj". `use_rslora` scales the adapter by alpha / sqrt(rank) (arXiv:2312.03732), `use_dora`
        also trains the length of each row of a weight (arXiv:2402.09353). `load_in_4bit` holds the linear layers of the
        base model in 4 bits (QLoRA, arXiv:2305.14314)."""
        fields = {
            "rank": rank,
            "alpha": alpha,
            "target_modules": targets if isinstance(targets, str) else tuple(targets),
            "use_rslora": use_rslora,
            "use_dora": use_dora,
            "load_in_4bit": load_in_4bit,
        }
        return self.training(parse_trainable({"kind": "lora", **fields}))

    def training(self, trainable: FullSpec | LoraSpec) -> Self:
        """Returns a builder whose models train this part of the weights. An earlier `into_scoring_model` is kept."""
        builder = replace(self, trainable=trainable)
        if self.trainable.head == "scalar":
            return builder.into_scoring_model()
        return builder

    def into_scoring_model(self) -> Self:
        """Returns a builder whose models have a scalar head and return scores: reward models and value models.

        The head of a language model is replaced by a new one, initialised from `init_seed`, which must be trained."""
        return replace(self, trainable=self.trainable.model_copy(update={"head": "scalar"}))

    def __await__(self) -> Generator[Any, None, Self]:
        return self
        # The yield is never reached. It makes this method a generator, which `await` needs.
        yield

    async def spawn_train(self, name: str, max_batch_size: int | None = None, *, init_seed: int = 0) -> TrainingModel:
        """Spawns a model that can be trained.

        `max_batch_size` is the maximum number of tokens of one packed forward pass, and so of the longest trainable
        sequence. The default is the engine's `max_tokens_per_forward`. A larger value is limited to the model's
        context. A pass that does not fit in the device's memory raises OutOfMemory when it is made."""
        model = await self._spawn(name, max_batch_size, init_seed)
        warning = router_loss_warning(self.workspace.open_store(), model.base)
        if warning is not None:
            log.warning(warning)
        if self.on_spawn is not None:
            self.on_spawn(model)
        return model

    async def _spawn(self, name: str, max_batch_size: int | None = None, init_seed: int = 0) -> TrainingModel:
        # Check the arguments.
        keys.validate_name(name)
        if self.key.startswith(SCHEME):
            raise BadSpec(f"{self.key!r} is behind an endpoint, which gives no gradients; use spawn_inference")
        if not 0 <= init_seed < 2**64:
            shown = str(init_seed) if abs(init_seed) < 2**100 else "a longer number"
            raise BadSpec(f"init_seed: given {shown}; expected a whole number from 0 to 2**64 - 1")
        if max_batch_size is not None and max_batch_size < 1:
            raise BadSpec(f"max_batch_size={max_batch_size}; give a number of tokens, 1 or more")

        # Import the model, and check that it has the head to be trained.
        limit = (await self.workspace.connect().info()).numerics.max_tokens
        base, renderer = await self._base()
        workspace = self.workspace
        if max_batch_size is not None:
            # A limit above the engine's own is useful only up to the longest sequence of the model.
            context = context_length_of(workspace.open_store(), base) or max_batch_size
            size = min(max_batch_size, max(limit, context))
            workspace = workspace.model_copy(update={"max_tokens": size})
        check_head(self.workspace.open_store(), base, self.trainable.head)
        sampling = SamplingParams(max_new_tokens=self.tokens_to_generate)

        # The root holds the full dump, so that a default that is given and one that is left out make the same chain.
        trainable = self.trainable.model_dump(mode="json")
        root = Root(base=base, base_digest=base.sha256, trainable=trainable, init_seed=init_seed)
        model = TrainingModel(workspace, name, renderer, sampling, base, workspace.max_tokens or limit, root)
        model.tensor_parallel = self.tensor_parallel
        return model

    async def spawn_inference(self, name: str) -> InferenceModel | OpenAIModel:
        """Spawns a model that cannot be trained: policy 0 of a chain without steps.

        A scoring model must already have a scalar head."""
        if self.key.startswith(SCHEME):
            if self.trainable.head == "scalar":
                raise BadSpec(f"{self.key!r} is behind an endpoint, which gives no scores; use a registered model")
            sampling = SamplingParams(max_new_tokens=self.tokens_to_generate)
            return OpenAIModel.of(self.key, keys.validate_name(name), sampling)

        # An inference model is a training model that never takes a step.
        base, _ = await self._base()
        check_head(self.workspace.open_store(), base, self.trainable.head, frozen=True)
        return await (await self._spawn(name)).clone_inf()

    async def _base(self) -> tuple[ArtifactRef, Renderer]:
        key = self.workspace.pinned_model(self.key)
        base = await self.workspace.connect().import_model(key, provenance=self.workspace.provenance)
        return base, renderer_of(self.workspace.open_store(), base)
