"""The config of the `env_ppo` flow: that of `env_grpo`, and a value model."""

from __future__ import annotations

from typing import ClassVar

from flows.configs.defaults import default_of
from flows.configs.environments import ENVGRPOConfig, EpisodeRegularisation
from flows.configs.ppo import CreditConfig, PPOAlgorithm, PPORegularisation, ValuedConfig, ValueModelConfig
from flows.configs.reinforcement import KLPlace


class ENVPPOAlgorithm(PPOAlgorithm):
    """The algorithm PPO (arXiv:1707.06347) over the policy's own tokens of an episode. `samples_*` count episodes."""


class ENVPPORegularisation(EpisodeRegularisation):
    """Further terms and variants of the policy loss."""

    kl_in: KLPlace = default_of(PPORegularisation, "kl_in")  # type: ignore[assignment]  # every token has a reward of its own
    """Where the KL term is: subtracted from the reward of each token, or in the loss."""


class ENVPPOConfig(ENVGRPOConfig, ValuedConfig):
    """`ostinato run env_ppo`: reinforcement learning from episodes with an environment, with a value model."""

    flow: ClassVar[str] = "env_ppo"

    value_model: ValueModelConfig = ValueModelConfig()
    algorithm: ENVPPOAlgorithm = ENVPPOAlgorithm()  # type: ignore[assignment]  # its advantages are the value model's
    credit: CreditConfig = CreditConfig()
    regularisation: ENVPPORegularisation = ENVPPORegularisation()
