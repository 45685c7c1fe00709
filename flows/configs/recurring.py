"""The config of the `recurring` flow: what is trained again when there is new data, and how it is judged."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from flows.catalogue import LanguageTraining
from flows.configs.common import FlowConfig
from flows.configs.evaluation import PromptSuite, checked_name
from flows.configs.forms import FormConfig
from flows.configs.validation import checked_run
from flows.promotion.gate import GateConfig, checked_target
from storage.serialization import Frozen


class ApprovalConfig(Frozen):
    """Whether a person must approve a challenger that passed the gate."""

    required: bool = False
    """Wait for a person's answer to the form on the flow run's page."""
    timeout_seconds: float = Field(24 * 3600.0, gt=0)
    """Time to wait for an answer, in seconds. Without an answer the challenger is not promoted."""


class RecurringConfig(FormConfig):
    """`ostinato recurring`: when there is new data, train, evaluate, judge, and promote or hold."""

    model: str
    """Registry name of the model whose champion this flow maintains. Trained models are published under it."""
    training: LanguageTraining
    """How a challenger is trained: the flow (any but reward_model, whose model answers no prompt) and its config.
    `config.run` and `config.model.publish_as` stay empty; the store and the engine of this config are those of the
    whole flow."""
    start_from: Literal["champion", "base"] = "champion"
    """Model that a challenger starts from. champion: the champion, or the base model when there is none. base: always
    `training.config.model`. What a challenger is compared with does not depend on it while there is a champion or a
    published version of the name."""
    suite: PromptSuite
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
        checked_run(self.run_key)
        checked_target(self.gate, self.suite.cells())
        return self

    @property
    def run_key(self) -> str:
        """The run key of the flow. The runs that it trains are below it: `run_key/<digest>`."""
        return f"recurring-{self.model}"

    @property
    def title(self) -> str:
        """The name of its flow runs."""
        return f"recurring {self.model}"

    @property
    def place(self) -> FlowConfig:
        """The config whose store and engine the flow uses."""
        return self.training.config
