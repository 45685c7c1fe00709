"""What of a model is trained: all of it, or low-rank adapters over a frozen base. Plain data, no torch.

The spec enters the state of a chain's root, so two chains that train different parts never share a policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, TypeAdapter, ValidationError, model_serializer
from pydantic.json_schema import SkipJsonSchema

from engine.errors import BadSpec
from engine.validation_messages import describe_errors
from storage.number_types import Positive
from storage.serialization import Frozen

ALL_LINEAR: Final = "all-linear"
MAX_RANK = 1 << 16
"""No layer of a model is wider."""


Head = Literal["lm", "scalar"]
"""lm: logits over the vocabulary, and logprobs. scalar: one number per position, the values of PPO and the scores of
reward models (`Engine.values`); the number of a position reads the tokens up to it."""


class _Headed(Frozen):
    head: SkipJsonSchema[Head] = "lm"
    """What the model gives. A scalar head that the model's folder does not have is drawn from a generator of its own,
    seeded by the root's `init_seed`; beside an adapter it is trained whole, as peft's `modules_to_save` does. Not in
    forms: each training class knows which head it trains."""

    @model_serializer(mode="wrap")
    def _without_the_usual_head(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A chain's state hashes this: "lm" is not spelt out, as it is not in chains from before there were others."""
        fields: dict[str, Any] = handler(self)
        if fields.get("head") == "lm":
            del fields["head"]
        return fields


class FullSpec(_Headed):
    """Every weight is trained."""

    kind: Literal["full"] = "full"


class LoraSpec(_Headed):
    """LoRA (arXiv:2106.09685): each target layer W becomes W + scale * B @ A with A (rank, in), B (out, rank).

    A is drawn from a generator seeded by the root's `init_seed` and the layer's name, B is zero: policy 0 is the base.
    """

    kind: Literal["lora"] = "lora"
    rank: int = Field(16, ge=1, le=MAX_RANK)
    """Of B @ A: more can learn more, and takes more memory."""
    alpha: Positive = 32.0
    """How strongly the adapter acts: scale = alpha / rank, unless use_rslora says otherwise."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | Literal["all-linear"] = ALL_LINEAR
    """Names of linear layers, whole or the last parts ("q_proj"), as peft reads them; "all-linear" is every linear
    layer but the language head."""
    use_rslora: bool = False
    """scale = alpha / sqrt(rank) (arXiv:2312.03732) instead of alpha / rank."""

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


TrainableSpec = Annotated[FullSpec | LoraSpec, Field(discriminator="kind")]

_PARSER: TypeAdapter[FullSpec | LoraSpec] = TypeAdapter(TrainableSpec)


def parse_trainable(trainable: Mapping[str, Any]) -> FullSpec | LoraSpec:
    """The spec that `storage.chain.records.Root.trainable` stands for. A root holds its full dump
    (`model_dump(mode="json")`), so that a default spelt out and a default left out give one state.

    Raises:
        BadSpec: an unknown kind or field, or a value out of range; names it and what is expected.
    """
    try:
        return _PARSER.validate_python(dict(trainable))
    except ValidationError as error:
        wrong = describe_errors(error.errors(), dict(trainable))
        raise BadSpec(
            f"trainable {dict(trainable)} was given: {wrong}. Expected {{'kind': 'full'}}, or {{'kind': 'lora'}} with "
            "rank >= 1 (16), alpha > 0 (32), target_modules ('all-linear' or names of layers), use_rslora (false); "
            "both with head 'lm' or 'scalar'"
        ) from error
