"""GSPO (arXiv:2507.18071): GRPO with one ratio per completion, exp of the mean over its tokens of the change in
log-probability. The loop is GRPO's.

    ostinato run gspo --config examples/gspo.yaml
"""

from __future__ import annotations

from typing import Any, Literal

from prefect import flow

from engine.handles import TrainingModel
from engine.losses.base import LossNorm
from engine.losses.policy_gradient import GSPOSpec
from engine.text.threads import StringThread
from flows.configs.gspo import GSPOConfig, check_has_gspo
from flows.display.terminal import TerminalProgress
from flows.grpo import GRPO, reward_arguments, train_on_rewards
from flows.ops.hooks import ON_END
from flows.runs.session import open_run
from flows.training.aliases import accept_aliases
from tasks.datasets.load import LoadedDataset
from tasks.graders.base import BaseGrader
from tasks.graders.spec import GraderSpec
from tasks.sampling.grading import Grading


@accept_aliases()
class GSPO(GRPO):
    """Trains `model` in place on graded rollouts of `dataset`, as GRPO does; its other arguments are GRPO's.

    `clip_range` is of a whole completion's ratio, a mean over its tokens, and so much narrower than GRPO's.
    """

    stage = "gspo"
    length = "max_num_gspo_steps"

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        grader: BaseGrader | GraderSpec | Grading,
        *,
        max_num_gspo_steps: int | None = None,
        clip_range: float = 0.01,
        loss_norm: LossNorm = "sequence_mean",
        dual_clip: None = None,
        policy_loss: Literal["clip"] = "clip",
        **options: Any,
    ) -> None:
        check_has_gspo(dual_clip, policy_loss)
        super().__init__(
            dataset,
            model,
            grader,
            max_num_grpo_steps=max_num_gspo_steps,
            clip_range=clip_range,
            loss_norm=loss_norm,
            **options,
        )
        self.loss = GSPOSpec.model_validate(self.loss.model_dump(exclude={"kind", "dual_clip"}))


@flow(name="gspo", flow_run_name="{config.title}", **ON_END)
async def gspo(config: GSPOConfig) -> dict[str, Any]:
    """Trains a model with GSPO, evaluates it before and after on held-out prompts, publishes it and reports.

    Args:
        config: what to train, on what, graded how.
    """
    logger = TerminalProgress()
    async with open_run("gspo", config, logger, use="prompt") as session:
        if session.result is not None:
            return session.result
        arguments = await reward_arguments(config, session, logger)
        return await train_on_rewards(config, session, GSPO(**arguments, max_num_gspo_steps=config.algorithm.steps))
