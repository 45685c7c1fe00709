"""PPO (arXiv:1707.06347): the policy learns from grades, with a value model that says which token earned them.

The value model predicts, at each token, the reward still to come. A token whose outcome is better than predicted
becomes more probable, within the clip range. Choose it over GRPO when rewards come late or in parts (long episodes,
penalties per token) or when only one completion of a prompt can be afforded: it costs a second model to train.

A run is two chains. Each iteration is a step of the policy and a step of the value model over one committed batch, and
is done when both are committed. A token's reward is -beta (l - q), and the grade on the last token, as in
arXiv:2203.02155; advantages are GAE's (arXiv:1506.02438), returns the discounted sums of the rewards. While the value
model alone is trained, the policy's steps make no update, which the paper does not have.

    ostinato run ppo --config examples/ppo.yaml
"""

from __future__ import annotations

from typing import Any, Unpack

from engine.handles import TrainingModel
from engine.text.threads import StringThread
from flows.configs.ppo import PPOAlgorithm, PPOConfig, PPORegularisation
from flows.runs.checked_flow import checked_flow
from flows.training.arguments import PPO_ALIASES, accept_aliases
from flows.training.critic import Critic, check_ppo_options
from flows.training.options import PPOOptions
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
from tasks.train import take_gradient_step, take_value_step


@accept_aliases(also=PPO_ALIASES)
class PPO(RolloutLoop):
    """Trains `model` and `value_model` in place on graded rollouts of `dataset`.

    `value_model` has a scalar head (`builder.into_scoring_model()`), and another name within the run than `model`. A
    prompt has one completion, unless `completions_per_sample` says otherwise. The other arguments are those of
    flows.training.options.PPOOptions; their defaults are in flows.configs.ppo. `value_weight_decay`, `value_betas`,
    `value_eps` and `value_max_grad_norm` are the policy's where they are None.
    """

    stage = "ppo"
    length = "max_num_ppo_steps"
    options_type = PPOOptions
    algorithm_type = PPOAlgorithm
    regularisation_type = PPORegularisation

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        value_model: TrainingModel,
        grader: BaseGrader | GraderSpec | Grading | RolloutSource,
        *,
        max_num_ppo_steps: int | None = None,
        **options: Unpack[PPOOptions],
    ) -> None:
        check_ppo_options(model, value_model, options)
        super().__init__(dataset, model, grader, options, max_steps=max_num_ppo_steps, lr=options.get("lr_policy"))
        if self.rules.dynamic_sampling:
            raise ValueError("dynamic_sampling compares the completions of a group, and PPO has none; leave it out")
        self.critic = Critic(value_model, options, self.optimizer)
        if self.critic.follows_progress:
            self.end_with_the_data()

    async def run(self) -> PolicyRef:
        """The loop. The result of each line is committed before the next line begins, so a crash repeats one line."""
        workspace, critic = self.model.workspace, self.critic
        # begin or resume the stage of both models
        start = await self.open()
        await critic.open(start, self.model.chain_of(start), restarted=self.restart_from is not None)
        data = self.load_dataset()
        order = self.prepare_order(data)
        total_steps = self.count_steps(order)
        value_only_steps = critic.value_only_steps(total_steps)
        async with (
            training_steps(self, total_steps, further_models=[critic.model], data=data) as steps,
            self.lookahead(data, order, steps) as lookahead,
        ):
            async for step in steps:
                policy, value = step.policies
                # sample and grade, with max_staleness for later steps as well
                collected = await lookahead.rollouts_for(policy)
                # the batch: advantages, and the log-probabilities that are needed before the step
                kl_beta = self.next_kl_beta(steps)
                plan = self.batch_plan(start, kl_beta)
                batch = await prepare_batch(
                    workspace, policy, collected.rollouts, collected.graded, plan, critic.plan(value), step=step.index
                )
                # both models take a step on the batch
                request = self.policy_request(
                    policy, batch, plan, collected,
                    kl_beta=kl_beta, total_steps=total_steps, value_only_steps=value_only_steps,
                )  # fmt: skip
                policy = await take_gradient_step(
                    workspace, request, step=step.index,
                    sampled_later=lookahead.samples_later_from(step.index),
                    sampled_next=lookahead.samples_next_from(step.index),
                )  # fmt: skip
                request = self.value_request(critic, value, batch, collected, total_steps=total_steps)
                value = await take_value_step(critic.model.workspace, request, step=step.index)
                step.complete(policy, value, collected=collected)
        return steps.policy


@checked_flow()
async def ppo(config: PPOConfig) -> dict[str, Any]:
    """Trains a model with PPO and a value model, evaluates it before and after on held-out prompts, publishes it and
    reports.

    Args:
        config: what to train, on what, graded how.
    """
    return await train_on_rollouts(config, PPO)
