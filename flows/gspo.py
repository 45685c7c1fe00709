"""GSPO (arXiv:2507.18071): GRPO with one ratio per completion.

The ratio is exp of the mean over the completion's tokens of the change in log-probability, so a completion is clipped
or kept as a whole. A single token that became much more probable cannot dominate the step, which makes long completions
and mixtures of experts more stable than GRPO's ratio per token does. Choose it there; with short answers the two are
much alike. The clip range is small (`clip`), since the mean of many tokens moves little. It departs from the paper as
GRPO does (flows/grpo.py). The loop is GRPO's.

    ostinato run gspo --config examples/gspo.yaml
"""

from __future__ import annotations

from typing import Any, Unpack

from engine.handles import TrainingModel
from engine.losses.policy_gradient import GSPOSpec
from engine.text.threads import StringThread
from flows.configs.ppo import GSPOAlgorithm, GSPOConfig
from flows.grpo import GRPO
from flows.ops.run_names import flow_run_title
from flows.runs.checked_flow import checked_flow
from flows.training.arguments import accept_aliases
from flows.training.options import GRPOOptions
from flows.training.rollout_flow import train_on_rollouts
from flows.training.rollout_sources import RolloutSource
from tasks.datasets.load import LoadedDataset
from tasks.graders.base import BaseGrader
from tasks.graders.spec import GraderSpec
from tasks.plans import Grading


@accept_aliases()
class GSPO(GRPO):
    """Trains `model` in place on graded rollouts of `dataset`, as GRPO does; its other arguments are GRPO's.

    `clip_range` bounds the ratio of a whole completion, a mean over its tokens, and is so much narrower than GRPO's.
    The defaults are in flows.configs.ppo.GSPOAlgorithm.
    """

    stage = "gspo"
    length = "max_num_gspo_steps"
    algorithm_type = GSPOAlgorithm
    policy_losses = {"clip": GSPOSpec}

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        grader: BaseGrader | GraderSpec | Grading | RolloutSource,
        *,
        max_num_gspo_steps: int | None = None,
        **options: Unpack[GRPOOptions],
    ) -> None:
        super().__init__(dataset, model, grader, max_num_grpo_steps=max_num_gspo_steps, **options)


@checked_flow(name="gspo", flow_run_name=flow_run_title)
async def gspo(config: GSPOConfig) -> dict[str, Any]:
    """Trains a model with GSPO, evaluates it before and after on held-out prompts, publishes it and reports.

    Args:
        config: what to train, on what, graded how.
    """
    return await train_on_rollouts(config, GSPO)
