"""A training flow with its config, for the configs of `recurring` and `sweep`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flows.configs.common import GRPOConfig, SFTConfig
from flows.configs.env_ppo import ENVPPOConfig
from flows.configs.environments import ENVGRPOConfig, ENVGSPOConfig
from flows.configs.gspo import GSPOConfig
from flows.configs.ppo import PPOConfig
from flows.configs.preferences import DPOConfig, RewardModelConfig
from flows.configs.sft_to_gspo import SFTToGSPOConfig
from storage.serialization import Frozen


class GRPOTraining(Frozen):
    """Fine-tuning by reinforcement learning from graded rollouts."""

    kind: Literal["grpo"] = "grpo"
    config: GRPOConfig


class SFTTraining(Frozen):
    """Fine-tuning on conversations."""

    kind: Literal["sft"] = "sft"
    config: SFTConfig


class DPOTraining(Frozen):
    """Fine-tuning on preferences."""

    kind: Literal["dpo"] = "dpo"
    config: DPOConfig


class GSPOTraining(Frozen):
    """Fine-tuning by reinforcement learning from graded rollouts, with one ratio per completion."""

    kind: Literal["gspo"] = "gspo"
    config: GSPOConfig


class PPOTraining(Frozen):
    """Reinforcement learning from graded rollouts, with a value model."""

    kind: Literal["ppo"] = "ppo"
    config: PPOConfig


class SFTToGSPOTraining(Frozen):
    """Fine-tuning on conversations, then GSPO."""

    kind: Literal["sft_to_gspo"] = "sft_to_gspo"
    config: SFTToGSPOConfig


class ENVGRPOTraining(Frozen):
    """Reinforcement learning from episodes with an environment, by GRPO."""

    kind: Literal["env_grpo"] = "env_grpo"
    config: ENVGRPOConfig


class ENVGSPOTraining(Frozen):
    """Reinforcement learning from episodes with an environment, by GSPO."""

    kind: Literal["env_gspo"] = "env_gspo"
    config: ENVGSPOConfig


class ENVPPOTraining(Frozen):
    """Reinforcement learning from episodes with an environment, by PPO."""

    kind: Literal["env_ppo"] = "env_ppo"
    config: ENVPPOConfig


class RewardModelTraining(Frozen):
    """Training of a reward model, which scores conversations."""

    kind: Literal["reward_model"] = "reward_model"
    config: RewardModelConfig


_Generative = (
    GRPOTraining | SFTTraining | DPOTraining | GSPOTraining | PPOTraining | SFTToGSPOTraining
    | ENVGRPOTraining | ENVGSPOTraining | ENVPPOTraining
)  # fmt: skip
LanguageTraining = Annotated[_Generative, Field(discriminator="kind")]
"""The training flows of models that generate text, which an evaluation suite can judge."""
AnyTraining = Annotated[_Generative | RewardModelTraining, Field(discriminator="kind")]
"""Every training flow."""
