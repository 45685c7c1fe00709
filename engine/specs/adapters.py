"""The trainable part of a model: all weights, or a low-rank adapter on a frozen base model. Plain data, without torch.

The spec is part of the state of a chain's root, so two chains that train different parts never share a policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.json_schema import SkipJsonSchema

from engine.errors import BadSpec
from engine.validation_messages import describe_errors
from storage.serialization import Frozen, Positive

ALL_LINEAR: Final = "all-linear"
MAX_RANK = 1 << 16
"""Largest rank of an adapter. No layer of a model is wider than this."""


Head = Literal["lm", "scalar"]
"""The output layer of a model. lm: logits over the vocabulary. scalar: one number per position, for the values of PPO
and the scores of reward models (`Engine.values`). The number of a position depends on the tokens up to that
position."""


class _Headed(Frozen):
    """Base class of the trainable parts, which all have a head."""

    head: SkipJsonSchema[Head] = Field("lm", exclude_if=lambda head: head == "lm")  # absent from older states
    """Output layer of the model: lm (a language head) or scalar. A new scalar head is initialised from the root's
    `init_seed`. With an adapter, the scalar head is trained as a whole, as peft's `modules_to_save` does. Forms do not
    show this field, because each training class sets the head that it trains."""


class FullSpec(_Headed):
    """Every weight is trained."""

    kind: Literal["full"] = "full"


class LoraSpec(_Headed):
    """LoRA (arXiv:2106.09685): each target layer W becomes W + scale * B @ A with A (rank, in), B (out, rank).

    A is drawn from a generator seeded by the root's `init_seed` and the layer's name, B is zero: policy 0 is the base.
    """

    kind: Literal["lora"] = "lora"
    rank: int = Field(16, ge=1, le=MAX_RANK)
    """Rank of the adapter's matrices. A higher rank can learn more and takes more memory."""
    alpha: Positive = 32.0
    """Strength of the adapter: its output is multiplied by alpha / rank, or by alpha / sqrt(rank) with use_rslora."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | Literal["all-linear"] = ALL_LINEAR
    """Linear layers that get an adapter: full names or last parts of names ("q_proj"), as in peft. "all-linear": every
    linear layer except the language head."""
    use_rslora: bool = False
    """Use rank-stabilised LoRA (arXiv:2312.03732): multiply the adapter's output by alpha / sqrt(rank) instead of
    alpha / rank."""
    use_dora: bool = Field(False, exclude_if=lambda value: not value)  # absent from older states
    """Use DoRA (arXiv:2402.09353): train the length of each row of a layer's weight on its own, besides the matrices,
    which then change only the direction of the row. It often learns more at a low rank, and each step takes longer."""
    load_in_4bit: bool = Field(False, exclude_if=lambda value: not value)  # absent from older states
    """Hold the linear layers of the frozen base model in 4 bits (QLoRA, arXiv:2305.14314): 4.5 bits per weight in
    bitsandbytes' NF4 instead of 16 or 32. Each step takes longer. Needs the torch trainer and the torch sampler."""

    @property
    def scale(self) -> float:
        """The factor by which the adapter's output is multiplied."""
        # With alpha / rank the gradient shrinks as the rank grows. The square root keeps it stable.
        divisor = self.rank**0.5 if self.use_rslora else self.rank
        return self.alpha / divisor


TrainableSpec = Annotated[FullSpec | LoraSpec, Field(discriminator="kind")]

_PARSER: TypeAdapter[FullSpec | LoraSpec] = TypeAdapter(TrainableSpec)


def parse_trainable(trainable: Mapping[str, Any]) -> FullSpec | LoraSpec:
    """Parses the trainable part of a chain's root (`storage.chain.records.Root.trainable`).

    A root holds the full dump (`model_dump(mode="json")`), so that a default that is given and a default that is left
    out make the same state.

    Raises:
        BadSpec: an unknown kind or field, or a value out of range.
    """
    try:
        return _PARSER.validate_python(dict(trainable))
    except ValidationError as error:
        problems = describe_errors(error.errors(), dict(trainable))
        raise BadSpec(
            f"trainable {dict(trainable)} was given: {problems}. Expected {{'kind': 'full'}}, or {{'kind': 'lora'}} "
            "with rank >= 1 (16), alpha > 0 (32), target_modules ('all-linear' or names of layers), use_rslora "
            "(false), use_dora (false), load_in_4bit (false); both with head 'lm' or 'scalar'"
        ) from error
