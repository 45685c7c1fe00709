"""The config of the `env_ppo` flow: that of `env_grpo`, and a value model."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from flows.configs.defaults import default_of
from flows.configs.environments import ENVGRPOConfig, EpisodeRegularisation
from flows.configs.ppo import CreditConfig, PPOAlgorithm, PPORegularisation, ValueModelConfig, check_valued_run
from flows.configs.reinforcement import KLPlace
from flows.configs.titles import training_title


class ENVPPOAlgorithm(PPOAlgorithm):
    """The algorithm PPO (arXiv:1707.06347) over the policy's own tokens of an episode. `samples_*` count episodes."""


class ENVPPORegularisation(EpisodeRegularisation):
    """Further terms and variants of the policy loss."""

    kl_in: KLPlace = default_of(PPORegularisation, "kl_in")  # type: ignore[assignment]  # every token has a reward of its own
    """Where the KL term is: subtracted from the reward of each token, or in the loss."""


class ENVPPOConfig(ENVGRPOConfig):
    """`ostinato run env_ppo`: reinforcement learning from episodes with an environment, with a value model."""

    value_model: ValueModelConfig = ValueModelConfig()
    algorithm: ENVPPOAlgorithm = ENVPPOAlgorithm()  # type: ignore[assignment]  # its advantages are the value model's
    credit: CreditConfig = CreditConfig()
    regularisation: ENVPPORegularisation = ENVPPORegularisation()

    @property
    def title(self) -> str:
        """The name of the flow run."""
        return training_title("env_ppo", self.model.key, self.data.train, self.seed)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_valued_run(self.model, self.value_model, self.algorithm, self.credit, self.optimizer)
        return self
