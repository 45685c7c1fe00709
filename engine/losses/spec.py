"""The union of all loss specs, as step requests and configs carry it, and reading one from a request. Importing it does
not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, JsonValue, TypeAdapter, ValidationError

from engine.errors import BadSpec
from engine.losses.distillation import DistillationSpec
from engine.losses.likelihood import LikelihoodSpec
from engine.losses.pairs import PreferenceSpec
from engine.losses.policy_gradient import PolicyGradientSpec
from engine.losses.values import ValueSpec
from engine.validation_messages import describe_errors

LossSpec = Annotated[
    LikelihoodSpec | PolicyGradientSpec | DistillationSpec | PreferenceSpec | ValueSpec, Field(discriminator="kind")
]

_LOSS: TypeAdapter[LossSpec] = TypeAdapter(LossSpec)


def parse_loss(settings: Mapping[str, JsonValue]) -> LossSpec:
    """The loss that a step request describes. Raises BadSpec for a loss or a setting that does not exist."""
    try:
        return _LOSS.validate_python(settings)
    except ValidationError as error:
        raise BadSpec(f"the loss {settings.get('kind')}: {describe_errors(error.errors(), settings)}") from error
