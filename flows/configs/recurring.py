"""Config of the `recurring` flow: what is trained again when there is new data, and who judges it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from flows.configs.common import FlowConfig
from flows.configs.evaluation import Suite, checked_name
from flows.configs.training import LanguageTraining
from flows.promotion.gate import GateConfig, checked_target
from storage.serialization import Frozen


class ApprovalConfig(Frozen):
    """Whether a person has the last word on what passed the gate."""

    required: bool = False
    """Wait for an answer to the form on the flow run's page."""
    timeout_seconds: float = Field(24 * 3600.0, gt=0)
    """Without an answer by then the challenger is held back."""


class RecurringConfig(Frozen):
    """`ostinato recurring`: is there new data? then train, evaluate, judge, and promote or hold."""

    model: str
    """Registry name whose champion this flow looks after. What it trains is published under it."""
    training: LanguageTraining
    """How a challenger is trained: the flow (any but reward_model, whose model answers no prompt) and its config.
    `config.run` and `config.model.publish_as` stay empty; its store and engine are those of the whole flow."""
    start_from: Literal["champion", "base"] = "champion"
    """What a challenger is trained from: the champion (the first one: the base), or always `training.config.model`."""
    suite: Suite
    gate: GateConfig = GateConfig()
    approval: ApprovalConfig = ApprovalConfig()

    _model = field_validator("model")(checked_name)

    @model_validator(mode="after")
    def _names_are_ours(self) -> Self:
        config = self.training.config
        if config.run or config.model.publish_as:
            raise ValueError(
                f"training.config.run={config.run!r} and training.config.model.publish_as={config.model.publish_as!r} "
                "are made by this flow; leave both out"
            )
        checked_target(self.gate, self.suite.cells())
        return self

    @property
    def place(self) -> FlowConfig:
        """Where it works."""
        return self.training.config
