"""The union of all loss specs, as step requests and configs carry it. Importing it does not import torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from engine.losses.likelihood import LikelihoodSpec
from engine.losses.pairs import PairSpec
from engine.losses.policy_gradient import PolicyGradientSpec
from engine.losses.values import ValueSpec

LossSpec = Annotated[LikelihoodSpec | PolicyGradientSpec | PairSpec | ValueSpec, Field(discriminator="kind")]
