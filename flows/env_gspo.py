"""GSPO (arXiv:2507.18071) on episodes with an environment: one ratio, and one grade, per episode.

An episode whose conversation was rewritten is several sequences, each with a ratio of its own and the episode's
advantage.

    ostinato run env_gspo --config examples/env_gspo.yaml
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from engine.handles import TrainingModel
from engine.losses.base import LossNorm
from engine.losses.policy_gradient import GSPOSpec
from engine.text.threads import StringThread
from flows.configs.environments import ENVGSPOConfig
from flows.configs.gspo import check_has_gspo
from flows.display.terminal import TerminalProgress
from flows.env_grpo import ENVGRPO, env_arguments, train_in_environment
from flows.ops.hooks import ON_END
from flows.runs.session import open_run
from tasks.datasets.load import LoadedDataset
from tasks.environments.base import EnvironmentFactory
from tasks.environments.spec import EnvironmentSpec


class ENVGSPO(ENVGRPO):
    """As ENVGRPO, with GSPO's loss. Raises tasks.batches.episodes.NotOneGrade when an episode does not have exactly
    one grade: grade the last turn, and in `on_limit` what a limit ends."""

    stage = "env_gspo"
    length = "max_num_gspo_steps"
    per_trajectory = True

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        environment_factory: EnvironmentFactory | EnvironmentSpec,
        *,
        max_num_gspo_steps: int | None = None,
        clip_range: float = 0.01,
        clip_range_high: float | None = None,
        loss_norm: LossNorm = "sequence_mean",
        **options: Any,
    ) -> None:
        check_has_gspo(options.pop("dual_clip", None), options.pop("policy_loss", "clip"))
        options |= {"clip_range": clip_range, "clip_range_high": clip_range_high, "loss_norm": loss_norm}
        super().__init__(dataset, model, environment_factory, max_num_grpo_steps=max_num_gspo_steps, **options)
        self.loss = GSPOSpec.model_validate(self.loss.model_dump(exclude={"kind", "dual_clip"}))


@flow(name="env_gspo", flow_run_name="{config.title}", **ON_END)
async def env_gspo(config: ENVGSPOConfig) -> dict[str, Any]:
    """Trains a model with GSPO on episodes with an environment, evaluates it before and after on held-out prompts,
    publishes it and reports.

    Args:
        config: what to train, on which prompts, in which environment.
    """
    logger = TerminalProgress()
    async with open_run("env_gspo", config, logger, use="prompt") as session:
        if session.result is not None:
            return session.result
        trainer = ENVGSPO(**await env_arguments(config, session, logger), max_num_gspo_steps=config.algorithm.steps)
        return await train_in_environment(config, session, trainer)
