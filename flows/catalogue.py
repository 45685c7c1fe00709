"""The catalogue of the training flows. What needs a list of them derives it from here: the commands of `ostinato run`,
the configs of `recurring` and `sweep`, child runs, recorded configs, and the deployments (prefect.yaml).

What a training reads, computes and measures is said by methods of its config class (flows.configs.common).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union

from pydantic import Field, create_model

from engine.models.hub import hub_repo_of_key
from flows.configs.common import GRPOConfig, SFTConfig, TrainingConfig
from flows.configs.env_ppo import ENVPPOConfig
from flows.configs.environments import ENVGRPOConfig, ENVGSPOConfig
from flows.configs.gspo import GSPOConfig
from flows.configs.ppo import PPOConfig
from flows.configs.preferences import DPOConfig, RewardModelConfig
from flows.configs.sft_to_gspo import SFTToGSPOConfig
from storage.registry.hub import resolve_commit
from storage.serialization import Frozen
from storage.store.objects import ObjectStore
from tasks.datasets.spec import DatasetUse

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from prefect import Flow


class ChosenTraining(Frozen):
    """A training flow with its config, in the config of `recurring` or `sweep`. Each flow has a subclass."""

    kind: str
    config: TrainingConfig

    def with_full_versions(self, store: ObjectStore) -> Self:
        """A copy with the full versions of its registered datasets, and with commits in place of branches of the hub,
        so that all child runs use the same. Raises DatasetError, HubError, BadModelFolder."""
        data: Any = self.config.data
        uses: dict[str, DatasetUse] = {"heldout": data.heldout_use}
        for name, (_, use) in data.inputs.items():
            uses["train" if name == "dataset" else name] = use
        sources = {name: getattr(data, name) for name in uses}
        resolved = {
            name: source.resolved(store, uses[name]) for name, source in sources.items() if source is not None
        }
        model = self.config.model
        repo = hub_repo_of_key(model.key)
        if repo is not None:
            model = model.model_copy(update={"key": resolve_commit(repo).uri})
        changes = {"model": model, "data": data.model_copy(update=resolved)}
        return self.model_copy(update={"config": self.config.model_copy(update=changes)})


@dataclass(frozen=True)
class Training:
    """A training flow."""

    config: type[TrainingConfig]
    """Its config class, which has the flow's name."""
    summary: str
    """What it does: the help of its command, and the description of its deployment and of its choice in a form."""
    tag: str
    """The tag of its deployment besides "ostinato" and "training"."""

    @property
    def name(self) -> str:
        """The name of its flow, of the flow's module in `flows`, and of its command and deployment."""
        return self.config.flow

    def import_flow(self) -> Flow[[Any], Coroutine[Any, Any, dict[str, Any]]]:
        """Imports the flow, and Prefect with it, which takes seconds."""
        return getattr(import_module(f"flows.{self.name}"), self.name)  # type: ignore[no-any-return]

    def choice(self) -> type[ChosenTraining]:
        """The subclass of `ChosenTraining` for this flow. `GRPOConfig` gives `GRPOTraining`."""
        fields: dict[str, Any] = {"kind": (Literal[self.name], self.name), "config": (self.config, ...)}
        name = self.config.__name__.removesuffix("Config") + "Training"
        return create_model(name, __base__=ChosenTraining, __module__=__name__, __doc__=self.summary, **fields)


_TRAININGS = (
    Training(GRPOConfig, "Reinforcement learning from graded rollouts (GRPO).", "rl"),
    Training(SFTConfig, "Supervised fine-tuning on conversations (SFT).", "sft"),
    Training(DPOConfig, "Direct preference optimisation on pairs of answers (DPO).", "preference"),
    Training(GSPOConfig, "Reinforcement learning from graded rollouts, one ratio per completion (GSPO).", "rl"),
    Training(PPOConfig, "Reinforcement learning from graded rollouts with a value model (PPO).", "rl"),
    Training(SFTToGSPOConfig, "SFT, then GSPO, on one model in one run.", "rl"),
    Training(ENVGRPOConfig, "Reinforcement learning from episodes with an environment (GRPO).", "rl"),
    Training(ENVGSPOConfig, "Reinforcement learning from episodes with an environment (GSPO).", "rl"),
    Training(ENVPPOConfig, "Reinforcement learning from episodes with an environment and a value model (PPO).", "rl"),
    Training(RewardModelConfig, "A model that scores conversations, from preferences or ratings.", "preference"),
)
TRAININGS = {training.name: training for training in _TRAININGS}
"""Every training flow, by its name."""

if TYPE_CHECKING:
    AnyTraining = ChosenTraining
    LanguageTraining = ChosenTraining
else:
    _CHOICES = {training: training.choice() for training in _TRAININGS}
    _LANGUAGE = [choice for training, choice in _CHOICES.items() if not training.config.has_scalar_head]
    AnyTraining = Annotated[Union[tuple(_CHOICES.values())], Field(discriminator="kind")]  # noqa: UP007
    """Every training flow with its config."""
    LanguageTraining = Annotated[Union[tuple(_LANGUAGE)], Field(discriminator="kind")]  # noqa: UP007
    """The training flows of models that generate text, which an evaluation suite can judge."""
