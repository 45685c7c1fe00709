"""The value model of PPO: how it is trained, and how it credits tokens with rewards."""

from __future__ import annotations

from dataclasses import replace

from engine.handles import TrainingModel
from engine.losses.spec import LossSpec
from engine.losses.values import MSESpec, TrustRegionMSESpec
from flows.configs.optimizer import OptimizerConfig
from flows.configs.ppo import CreditConfig, ValueModelConfig, value_only_steps
from flows.training.options import CriticOptions, PPOOptions, read_options
from flows.training.schedules import AdamW, are_endless, schedule_of
from storage.chain.records import Chain, PolicyRef
from tasks.plans import ValuePlan


class Critic:
    """The value model of a training class, with its optimizer and its loss.

    Without the option `value_optimizer`, `policy_optimizer` gives the settings that the options leave out.
    """

    def __init__(self, model: TrainingModel, options: CriticOptions, policy_optimizer: AdamW) -> None:
        self.model = model
        self.credit = read_options(CreditConfig, options, options.get("credit"))
        group = options.get("value_optimizer")
        rates = group or OptimizerConfig(lr=ValueModelConfig().lr)
        self.schedule = options.get("value_lr_scheduler") or schedule_of(rates, lr=options.get("lr_value"))
        self.optimizer = _optimizer(options, policy_optimizer if group is None else AdamW.of(group))
        clip = self.credit.value_clip
        norm, constant = self.credit.value_loss_norm, self.credit.value_norm_constant
        self.loss: LossSpec = MSESpec(norm=norm, norm_constant=constant)
        if clip is not None:
            self.loss = TrustRegionMSESpec(clip=clip, norm=norm, norm_constant=constant)

    @property
    def follows_progress(self) -> bool:
        """Whether something depends on the length of the run: a schedule, or the share in which it is trained alone."""
        return self.credit.value_only_fraction > 0 or not are_endless(self.schedule, self.optimizer.weight_decay)

    async def open(self, policy_start: PolicyRef, policy_chain: Chain, *, restarted: bool) -> None:
        """Opens the stage that the policy has opened at `policy_start`.

        `restarted`: the policy starts from a checkpoint of another run. The value model then starts from the same
        iteration of that run, if the run had a value model.
        """
        # a restart from a checkpoint continues the value model of the same iteration
        start: PolicyRef | None = None
        root = policy_chain.root()
        if restarted and root is not None and root.start is not None:
            values = Chain(policy_chain.store, root.start.run, root.start.stage, self.model.name)
            if values.root() is not None:
                start = values.policy(root.start.step)
        # without the number; the name may end with the policy's name, to tell two policies apart
        stage = policy_start.stage.partition("-")[2]
        await self.model.begin_stage(stage, start=start)

    def value_only_steps(self, total_steps: int | None) -> int:
        """The number of iterations that train only the value model. 0 for a run without an end. Raises ValueError if no
        iteration is left for the policy."""
        if total_steps is None:
            return 0
        return value_only_steps(self.credit.value_only_fraction, total_steps)

    def plan(self, value: PolicyRef) -> ValuePlan:
        """How the tokens of a batch are credited, with the values of `value` as the baseline."""
        credit = self.credit
        return ValuePlan(
            value=value,
            gamma=credit.gae_gamma,
            lam=credit.gae_lambda,
            returns=credit.returns,
            whiten_advantages=credit.whiten_advantages,
        )


def check_ppo_options(model: TrainingModel, value_model: TrainingModel, options: PPOOptions) -> None:
    """Raises ValueError for options that PPO does not have, and for two models with the same name."""
    if (estimator := options.get("advantage_estimator", "gae")) != "gae":
        raise ValueError(f"advantage_estimator={estimator!r}: PPO's are the value model's; leave it out")
    if model.name == value_model.name:
        raise ValueError(f"policy and value model are both named {model.name!r}; spawn them under two names")


def _optimizer(options: CriticOptions, policy: AdamW) -> AdamW:
    """The optimizer of the value model: the policy's, except for what the options set."""
    optimizer = policy
    if (decay := options.get("value_weight_decay")) is not None:
        optimizer = replace(optimizer, weight_decay=decay)
    if (betas := options.get("value_betas")) is not None:
        optimizer = replace(optimizer, betas=betas)
    if (eps := options.get("value_eps")) is not None:
        optimizer = replace(optimizer, eps=eps)
    if (norm := options.get("value_max_grad_norm")) is not None:
        optimizer = replace(optimizer, max_grad_norm=norm)
    return optimizer
