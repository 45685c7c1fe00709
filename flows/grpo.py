"""GRPO (arXiv:2402.03300): the policy learns from the grades of its own completions, compared within a group.

Several completions of each prompt are sampled and graded. Completions that are better than their group become more
probable, worse ones less, and a group of equal grades teaches nothing. The ratio of the new to the old policy is
clipped, so that a step changes no token's probability by much. Choose it when a grader can tell good answers from bad
and the policy sometimes finds a good one; it needs no value model.

Departures from the paper: the loss is a mean over the tokens of the whole minibatch (`loss_norm`), and the old
log-probabilities are the trainer's, so that a sampler in another precision cannot bias the ratio. With one update per
batch, they come from the update's own forward pass (`old_logprobs_of_step`). The loop is `GRPO.run`; the flow around it
is `grpo`.

    ostinato run grpo --config examples/demo.yaml --set algorithm.steps=30
"""

from __future__ import annotations

from typing import Any, Unpack

from engine.handles import TrainingModel
from engine.text.threads import StringThread
from flows.configs.common import GRPOConfig
from flows.runs.checked_flow import checked_flow
from flows.training.arguments import accept_aliases
from flows.training.options import GRPOOptions
from flows.training.rollout_flow import train_on_rollouts
from flows.training.rollout_loop import RolloutLoop
from flows.training.rollout_sources import RolloutSource
from flows.training.training_steps import training_steps
from storage.chain.records import PolicyRef
from tasks.batches.rl import prepare_batch
from tasks.datasets.load import LoadedDataset
from tasks.graders.base import BaseGrader
from tasks.graders.spec import GraderSpec
from tasks.plans import Grading
from tasks.train import take_gradient_step


@accept_aliases()
class GRPO(RolloutLoop):
    """Trains `model` in place on graded rollouts of `dataset`. `await GRPO(...).run()` continues an interrupted run.

    `dataset`: threads, or a loaded prompt dataset. `grader`: a BaseGrader (in-process), the spec of an importable one,
    or another RolloutSource. Sampling follows the model's view (`model.temperature(0.7).max_gen_len(64)`). `samples_*`
    count completions.

    Without `max_num_grpo_steps` and `epochs`, the run is one pass over `dataset`; see RolloutLoop. The other arguments
    are those of flows.training.options.GRPOOptions; their defaults are in flows.configs.common.GRPOAlgorithm.
    """

    stage = "grpo"
    length = "max_num_grpo_steps"
    options_type = GRPOOptions

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        grader: BaseGrader | GraderSpec | Grading | RolloutSource,
        *,
        max_num_grpo_steps: int | None = None,
        **options: Unpack[GRPOOptions],
    ) -> None:
        super().__init__(dataset, model, grader, options, max_steps=max_num_grpo_steps, lr=options.get("lr"))

    async def run(self) -> PolicyRef:
        """The loop. The result of each line is committed before the next line begins, so a crash repeats one line."""
        workspace = self.model.workspace
        # begin or resume the stage
        start = await self.open()
        data = self.load_dataset()
        order = self.prepare_order(data)
        total_steps = self.count_steps(order)
        async with (
            training_steps(self, total_steps, data=data) as steps,
            self.lookahead(data, order, steps) as lookahead,
        ):
            async for step in steps:
                # sample and grade, with max_staleness for later steps as well
                collected = await lookahead.rollouts_for(step.policy)
                # the batch: advantages, and the log-probabilities that are needed before the step
                kl_beta = self.next_kl_beta(steps)
                plan = self.batch_plan(start, kl_beta)
                batch = await prepare_batch(
                    workspace, step.policy, collected.rollouts, collected.graded, plan, step=step.index
                )
                # the gradient step
                request = self.policy_request(
                    step.policy, batch, plan, collected, kl_beta=kl_beta, total_steps=total_steps
                )
                policy = await take_gradient_step(
                    workspace, request, step=step.index,
                    sampled_later=lookahead.samples_later_from(step.index),
                    sampled_next=lookahead.samples_next_from(step.index),
                )  # fmt: skip
                step.complete(policy, collected=collected)
        return steps.policy


@checked_flow()
async def grpo(config: GRPOConfig) -> dict[str, Any]:
    """Trains a model with GRPO, evaluates it before and after on held-out prompts, publishes it and reports.

    Args:
        config: what to train, on what, graded how.
    """
    return await train_on_rollouts(config, GRPO)
