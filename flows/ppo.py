"""PPO (arXiv:1707.06347) with a value model, as two chains: each iteration is a step of the policy and a step of the
value model over one committed batch, and is done when both are committed.

A token's reward is -beta (l - q), and the grade on the last token; advantages are GAE's (arXiv:1506.02438), returns the
discounted sums of the rewards. While the value model alone is trained, the policy's steps make no update.

    ostinato run ppo --config examples/ppo.yaml
"""

from __future__ import annotations

from typing import Any, Literal

from prefect import flow

from engine.handles import Model, TrainingModel
from engine.losses.kl import KLEstimator
from engine.losses.spec import LossSpec
from engine.losses.values import MSESpec, TrustRegionMSESpec
from engine.text.threads import StringThread
from flows.configs.env_ppo import ENVPPOConfig
from flows.configs.ppo import PPOConfig
from flows.configs.reinforcement import KLPlace
from flows.display.terminal import TerminalProgress
from flows.grpo import GRPO, reward_arguments, train_on_rewards
from flows.ops.hooks import ON_END
from flows.runs.session import RunSession, open_run
from flows.training.aliases import accept_aliases
from flows.training.checkpointing import Uploads
from flows.training.collection import Collected, Lookahead
from flows.training.journal import Journal, optimizer_at, steps
from flows.training.optimizer import optimizer_arguments
from flows.training.schedules import CosineScheduler, Schedule, is_fixed
from storage.chain.records import Chain, OptimizerSpec, PolicyRef, StepRequest
from storage.registry.models import registered_key
from storage.store.artifacts import ArtifactRef
from tasks.batches.ppo import Returns, ValuePlan
from tasks.batches.rl import BatchPlan
from tasks.datasets.load import LoadedDataset
from tasks.graders.base import BaseGrader
from tasks.graders.spec import GraderSpec
from tasks.prepare import prepare_ppo_batch
from tasks.sampling.grading import Grading
from tasks.train import take_gradient_step, take_value_step


@accept_aliases(also={"lr_scheduler_policy": "lr_scheduler", "lr_scheduler_value": "value_lr_scheduler"})
class PPO(GRPO):
    """Trains `model` and `value_model` in place. `value_model` has a scalar head: `builder.into_scoring_model()`; its
    name within the run is not the policy's. Arguments that are not here are GRPO's; a prompt has one completion, unless
    `completions_per_sample` says otherwise.
    """

    stage = "ppo"
    length = "max_num_ppo_steps"

    def __init__(  # noqa: PLR0913  a constructor like a config
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        value_model: TrainingModel,
        grader: BaseGrader | GraderSpec | Grading | None,
        *,
        max_num_ppo_steps: int | None = None,
        value_only_fraction: float = 0.25,
        lr_policy: float = 0.75e-6,
        lr_value: float = 1e-6,
        lr_scheduler: Schedule | None = None,
        value_lr_scheduler: Schedule | None = None,
        value_weight_decay: float | Schedule | None = None,
        value_betas: tuple[float, float] | None = None,
        value_max_grad_norm: float | None = None,
        completions_per_sample: int = 1,
        kl_beta: float = 0.1,
        kl_estimator: KLEstimator = "k1",
        kl_in: KLPlace = "reward",
        value_clip: float | None = None,
        gae_lambda: float = 0.95,
        gae_gamma: float = 1.0,
        returns: Returns = "rewards",
        whiten_advantages: bool = False,
        advantage_estimator: Literal["gae"] = "gae",
        **options: Any,
    ) -> None:
        """`value_weight_decay`, `value_betas`, `value_max_grad_norm`: None is as the policy's."""
        if not 0 <= value_only_fraction < 1:
            raise ValueError(f"value_only_fraction={value_only_fraction}; give a share of the run, 0 or more, below 1")
        if advantage_estimator != "gae":
            raise ValueError(f"advantage_estimator={advantage_estimator!r}: PPO's are the value model's; leave it out")
        if options.get("dynamic_sampling"):
            raise ValueError("dynamic_sampling compares the completions of a group, and PPO has none; leave it out")
        if model.name == value_model.name:
            raise ValueError(f"policy and value model are both named {model.name!r}; spawn them under two names")
        super().__init__(
            dataset,
            model,
            grader,
            max_num_grpo_steps=max_num_ppo_steps,
            lr_scheduler=lr_scheduler or CosineScheduler(lr_policy),
            completions_per_sample=completions_per_sample,
            kl_beta=kl_beta,
            kl_estimator=kl_estimator,
            kl_in=kl_in,
            **options,
        )
        self.value_model = value_model
        self.value_schedule = value_lr_scheduler or CosineScheduler(lr_value)
        self.value_optimizer = self.optimizer | _given(
            weight_decay=value_weight_decay, max_grad_norm=value_max_grad_norm,
            beta1=value_betas and value_betas[0], beta2=value_betas and value_betas[1],
        )  # fmt: skip
        self.value_loss: LossSpec = MSESpec() if value_clip is None else TrustRegionMSESpec(clip=value_clip)
        self.value_only_fraction = value_only_fraction
        self.credit = dict(gamma=gae_gamma, lam=gae_lambda, returns=returns, whiten_advantages=whiten_advantages)
        if value_only_fraction > 0 or not is_fixed(self.value_schedule, self.value_optimizer["weight_decay"]):
            self._end_with_the_data()

    def _value_start(self, start: PolicyRef) -> PolicyRef | None:
        """Where the policy restarts from a checkpoint of PPO: the value model of the same iteration."""
        root = self.model.chain_of(start).root()
        if self.restart_from is None or root is None or root.start is None:
            return None
        values = Chain(self.model.workspace.open_store(), root.start.run, root.start.stage, self.value_model.name)
        return None if values.root() is None else values.policy(root.start.step)

    def value_only_steps(self, total_steps: int | None) -> int:
        """Iterations that train the value model alone: while k / N < value_only_fraction. Raises ValueError when none
        is left for the policy."""
        if total_steps is None:
            return 0
        alone = sum(step / total_steps < self.value_only_fraction for step in range(total_steps))
        if alone == total_steps:
            raise ValueError(
                f"value_only_fraction={self.value_only_fraction} of {total_steps} iterations leaves none in which the "
                "policy is trained; lower it, or train longer"
            )
        return alone

    async def run(self) -> PolicyRef:
        """The loop. Every line's result is committed before the next begins; a crash costs at most one line."""
        workspace = self.model.workspace
        start = await self.open()
        stage = start.stage.partition("-")[2]  # with the policy's name, where another model has the stage's plain name
        await self.value_model.begin_stage(stage, start=self._value_start(start))
        policy, value = await self.model.policy(), await self.value_model.policy()
        policies, values = self.model.chain_of(policy), self.value_model.chain_of(value)
        data = self._load()
        total_steps = self._total_steps(data)
        self._say_length(total_steps)
        alone = self.value_only_steps(total_steps)
        done = min(policy.step, value.step)  # an iteration is done when both chains have it
        policy, value = policies.policy(done), values.policy(done)
        async with (
            Uploads(workspace, retention=self.checkpoints.retention) as uploads,
            Journal(self.model, policy, self.logger, total_steps=total_steps, notifier=self.notifier) as journal,
            Lookahead(self._collector(data), journal.cursor(), total_steps, self.rules.max_staleness) as rollouts,
        ):
            if due := self.checkpoints.missed(done, total_steps, model=self.model.name):
                await uploads.start(policy, name=due.named)
            await journal.call(self.callbacks)
            for step in steps(done, total_steps):
                found = await rollouts.collected(policy)
                kl_beta = self.kl.next(journal.last, samples=self.samples_per_batch)
                plan = self._batch_plan(start, kl_beta)
                batch = await self._prepare_ppo_batch(policy, value, found, plan, step)
                common = {"batch": batch, **_cursors(found), "nan_policy": self.nan_policy}
                request = StepRequest(
                    parent=policy,
                    reference=plan.reference,
                    old_logprobs=self.old_logprobs,
                    loss=self._loss(kl_beta),
                    controllers_in=self.kl.state(kl_beta),
                    optimizer=self._policy_optimizer(step, alone, total_steps),
                    minibatches=self._shuffled(step, updates=step >= alone),
                    temperature=plan.temperature,
                    **common,
                )
                policy = await take_gradient_step(workspace, request, step=step)
                request = StepRequest(
                    parent=value,
                    loss=self.value_loss.model_dump(),
                    optimizer=optimizer_at(step, total_steps, lr=self.value_schedule, **self.value_optimizer),
                    minibatches=self._shuffled(step),
                    **common,
                )
                value = await take_value_step(self.value_model.workspace, request, step=step)
                self.model.set_policy(policy)
                self.value_model.set_policy(value)
                journal.record(policy, found.rollouts, found.graded)
                await journal.call(self.callbacks, found.rollouts, found.graded)
                if due := self.checkpoints.due(step, total_steps, model=self.model.name):
                    await uploads.start(policy, name=due.named)
                    await uploads.start(value)
            await uploads.start(policy)
            await uploads.start(value)
        return policy

    def _policy_optimizer(self, step: int, alone: int, total_steps: int | None) -> OptimizerSpec:
        """The policy's schedules run over the iterations that train it."""
        rest = None if total_steps is None else total_steps - alone
        return optimizer_at(max(0, step - alone), rest, lr=self.schedule, **self.optimizer)

    async def _prepare_ppo_batch(
        self, policy: PolicyRef, value: PolicyRef, found: Collected, plan: BatchPlan, step: int
    ) -> ArtifactRef:
        """The step's batch: an advantage and a return at every token."""
        return await prepare_ppo_batch(
            self.model.workspace, policy, found.rollouts, found.graded, plan, self._value_plan(value), step=step
        )

    def _value_plan(self, value: PolicyRef) -> ValuePlan:
        return ValuePlan(value=value, **self.credit)  # type: ignore[arg-type]


def _given(**settings: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def _cursors(found: Collected) -> dict[str, dict[str, int]]:
    return {"cursor_in": found.cursor_in.model_dump(), "cursor_out": found.cursor_out.model_dump()}


@flow(name="ppo", flow_run_name="{config.title}", **ON_END)
async def ppo(config: PPOConfig) -> dict[str, Any]:
    """Trains a model with PPO and a value model, evaluates it before and after on held-out prompts, publishes it and
    reports.

    Args:
        config: what to train, on what, graded how.
    """
    logger = TerminalProgress()
    async with open_run("ppo", config, logger, use="prompt") as session:
        if session.result is not None:
            return session.result
        arguments = await value_arguments(config, session) | await reward_arguments(config, session, logger)
        return await train_on_rewards(config, session, PPO(**arguments, max_num_ppo_steps=config.algorithm.steps))


async def value_arguments(config: PPOConfig | ENVPPOConfig, session: RunSession) -> dict[str, Any]:
    """What a training class with a value model is made with besides; the value model is spawned."""
    value = config.value_model
    own = optimizer_arguments(value.optimizer_over(config.optimizer))
    builder = Model(value.key or registered_key(session.base)).to_builder(session)
    builder = builder.training(value.trainable).into_scoring_model()
    return {
        "value_model": await builder.spawn_train(value.name, init_seed=config.seed),
        "value_lr_scheduler": own["lr_scheduler"],
        **{f"value_{name}": own[name] for name in ("weight_decay", "betas", "max_grad_norm")},
        **config.credit.model_dump(),
    }
