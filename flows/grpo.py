"""GRPO (arXiv:2402.03300) as a chain of committed steps. The loop is `GRPO.run`; the flow around it is `grpo`.

Departures from the paper: the loss is a mean over the tokens of the whole minibatch (`loss_norm`), and the old
logprobs are recomputed by the trainer, so that a sampler in another precision cannot bias the ratio.

    ostinato run grpo --config examples/demo.yaml --set algorithm.steps=30
"""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow
from pydantic import JsonValue

from engine.handles import Model, TrainingModel
from engine.losses.base import LossNorm
from engine.losses.kl import KLEstimator
from engine.losses.policy_gradient import CISPOSpec, GRPOSpec, GSPOSpec
from engine.text.threads import StringThread
from flows.configs.common import GRPOAlgorithm, GRPOConfig
from flows.configs.environments import ENVGRPOConfig
from flows.configs.reinforcement import PolicyLoss, Regularisation, groups_of
from flows.display.terminal import TerminalProgress
from flows.ops.hooks import ON_END
from flows.runs.session import RunSession, default_model_name, finish_run, open_run
from flows.training.aliases import accept_aliases
from flows.training.arguments import whole_number
from flows.training.base import Trainer
from flows.training.checkpointing import CheckpointSchedule, Uploads
from flows.training.collection import Collector, Lookahead, PromptBatch, Refill
from flows.training.graders import grading_of
from flows.training.held_out import Heldout
from flows.training.journal import Journal, optimizer_at, steps
from flows.training.optimizer import optimizer_arguments
from flows.training.schedules import is_fixed
from storage.chain.records import MinibatchPlan, OldLogprobs, PolicyRef, StepRequest
from storage.registry.models import registered_key
from storage.store.artifacts import ArtifactRef
from tasks.batches.rl import AdvantageEstimator, BatchPlan
from tasks.credit.kl_controllers import AdaptiveKL, FixedKL
from tasks.credit.rewards import Overlong, RewardKL
from tasks.datasets.load import LoadedDataset
from tasks.datasets.spec import InlineDataset
from tasks.grade import grade_rollouts
from tasks.graders.base import BaseGrader
from tasks.graders.spec import GraderSpec, grader_spec
from tasks.load import load_prompts
from tasks.prepare import prepare_batch
from tasks.publish import publish_model
from tasks.report import write_report
from tasks.rollout import generate_rollouts
from tasks.sampling.completions import PromptShard, Truncation
from tasks.sampling.grading import Grading
from tasks.train import take_gradient_step

POLICY_LOSSES: dict[PolicyLoss, type[GRPOSpec] | type[CISPOSpec]] = {"clip": GRPOSpec, "cispo": CISPOSpec}


@accept_aliases()
class GRPO(Trainer):
    """Trains `model` in place on graded rollouts of `dataset`. `await GRPO(...).run()` resumes where the run stands.

    `dataset`: threads, or a loaded prompt dataset. `grader`: a BaseGrader (in-process) or the spec of an importable
    one. Sampling follows the model's view (`model.temperature(0.7).max_gen_len(64)`). `samples_*` count completions.

    Without `max_num_grpo_steps` and `epochs`, the run ends with the data, after one pass over `dataset`: the rate and
    `checkpoint_frequency` follow this progress. If nothing follows the progress (lr_scheduler=ConstantScheduler(lr),
    and checkpoint_every_steps or checkpoint_frequency=None), the run goes on until a person ends it.

    The other arguments are those of `Trainer`, and the fields of `Regularisation` and `BatchRules`
    (flows.configs.reinforcement).
    """

    stage = "grpo"
    length = "max_num_grpo_steps"
    """The argument that says how many steps there are."""
    ends_with_the_data = False
    """Whether no length was given, and the run is one pass over the dataset."""

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        grader: BaseGrader | GraderSpec | Grading | None,
        *,
        max_num_grpo_steps: int | None = None,
        epochs: int | None = None,
        completions_per_sample: int = 8,
        lr: float = 7.5e-7,
        samples_per_batch: int = 128,
        samples_per_mini_batch: int = 128,
        mini_epochs_per_batch: int = 1,
        clip_range: float = 0.1,
        clip_range_high: float | None = None,
        dual_clip: float | None = None,
        kl_beta: float = 0.01,
        kl_estimator: KLEstimator = "k3",
        loss_norm: LossNorm = "token_mean",
        advantage_estimator: AdvantageEstimator = "group",
        old_logprobs: OldLogprobs = "trainer",
        prompts_per_shard: int = 16,
        max_prompt_tokens: int | None = None,
        truncation: Truncation = "error",
        **options: Any,
    ) -> None:
        self.max_steps, self.epochs = whole_number(self.length, max_num_grpo_steps), whole_number("epochs", epochs)
        samples_per_batch = whole_number("samples_per_batch", samples_per_batch)
        samples_per_mini_batch = whole_number("samples_per_mini_batch", samples_per_mini_batch)
        completions_per_sample = whole_number("completions_per_sample", completions_per_sample)
        mini_epochs_per_batch = whole_number("mini_epochs_per_batch", mini_epochs_per_batch)
        _check_sizes(self.length, self.max_steps, self.epochs, samples_per_batch, completions_per_sample)
        regularisation, self.rules = groups_of(options)
        regularisation.check(loss_norm, kl_beta, old_logprobs)
        super().__init__(model, lr=lr, **options)
        self.dataset = dataset
        self._grading = None if grader is None else grading_of(grader)
        self.completions_per_sample = completions_per_sample
        self.samples_per_batch = samples_per_batch
        self.prompts_per_batch = samples_per_batch // completions_per_sample
        self.prompts_per_shard = prompts_per_shard
        self.max_prompt_tokens, self.truncation = max_prompt_tokens, truncation
        high = clip_range if clip_range_high is None else clip_range_high
        clip = {"clip_low": clip_range, "clip_high": high} | ({"dual_clip": dual_clip} if dual_clip else {})
        self.loss = policy_loss_of(
            regularisation, kl_beta=kl_beta, kl_estimator=kl_estimator, norm=loss_norm, **clip
        )  # fmt: skip
        self.kl = kl_control(regularisation, kl_beta)
        kl_off_reward = regularisation.kl_in == "reward" and kl_beta > 0
        self.reward_kl = RewardKL(beta=kl_beta, estimator=kl_estimator) if kl_off_reward else None
        self.old_logprobs, self.advantage_estimator = old_logprobs, advantage_estimator
        size = None if samples_per_mini_batch >= samples_per_batch else samples_per_mini_batch
        self.minibatches = MinibatchPlan(size=size, epochs=mini_epochs_per_batch)
        by_fraction = self.checkpoints.config.frequency is not None and self.checkpoints.config.every_steps is None
        if by_fraction or not is_fixed(self.schedule, self.optimizer["weight_decay"]):
            self._end_with_the_data()

    def _end_with_the_data(self) -> None:
        """Something follows the run's progress: a run whose length was not given is one pass over the dataset."""
        if self.max_steps is None and self.epochs is None:
            self.epochs, self.ends_with_the_data = 1, True

    async def run(self) -> PolicyRef:
        """The loop. Every line's result is committed before the next begins; a crash costs at most one line."""
        workspace = self.model.workspace
        if self.minibatches.size is None and self.minibatches.epochs == 1:
            self.logger.note("one update per batch: every ratio is 1, so clip_range cannot act")
        start = await self.open()
        policy = await self.model.policy()
        data = self._load()
        total_steps = self._total_steps(data)
        self._say_length(total_steps)
        async with (
            Uploads(workspace, retention=self.checkpoints.retention) as uploads,
            Journal(self.model, policy, self.logger, total_steps=total_steps, notifier=self.notifier) as journal,
            Lookahead(self._collector(data), journal.cursor(), total_steps, self.rules.max_staleness) as rollouts,
        ):
            if due := self.checkpoints.missed(policy.step, total_steps, model=self.model.name):
                await uploads.start(policy, name=due.named)
            await journal.call(self.callbacks)
            for step in steps(policy.step, total_steps):
                found = await rollouts.collected(policy)
                kl_beta = self.kl.next(journal.last, samples=self.samples_per_batch)
                plan = self._batch_plan(start, kl_beta)
                batch = await self._prepare(policy, found.rollouts, found.graded, plan, step)
                request = StepRequest(
                    parent=policy,
                    batch=batch,
                    reference=plan.reference,
                    old_logprobs=self.old_logprobs,
                    loss=self._loss(kl_beta),
                    controllers_in=self.kl.state(kl_beta),
                    optimizer=optimizer_at(step, total_steps, lr=self.schedule, **self.optimizer),
                    minibatches=self._shuffled(step),
                    temperature=plan.temperature,
                    cursor_in=found.cursor_in.model_dump(),
                    cursor_out=found.cursor_out.model_dump(),
                    nan_policy=self.nan_policy,
                )
                policy = await take_gradient_step(workspace, request, step=step)
                self.model.set_policy(policy)
                journal.record(policy, found.rollouts, found.graded)
                await journal.call(self.callbacks, found.rollouts, found.graded)
                if due := self.checkpoints.due(step, total_steps, model=self.model.name):
                    await uploads.start(policy, name=due.named)
            await uploads.start(policy)
        return policy

    def _say_length(self, total_steps: int | None) -> None:
        """Logs the length of a run that was given neither steps nor epochs."""
        if self.ends_with_the_data:
            asked = f"neither {self.length} nor epochs was given"
            self.logger.note(f"{asked}: the run ends after one pass over the data, in {total_steps} steps")

    async def _sample(
        self, policy: PolicyRef, shards: list[PromptShard], step: int
    ) -> tuple[list[ArtifactRef], list[ArtifactRef]]:
        """A step's completions and their grades, shard by shard."""
        workspace, sampling = self.model.workspace, self.model.sampling
        rollouts = await asyncio.gather(
            *(generate_rollouts(workspace, policy, shard, sampling, step=step) for shard in shards)
        )
        graded = await asyncio.gather(
            *(
                grade_rollouts(workspace, ref, self.grading, stage=policy.stage, step=step, shard=shard.index)
                for ref, shard in zip(rollouts, shards, strict=True)
            )
        )
        return rollouts, graded

    async def _prepare(
        self, policy: PolicyRef, rollouts: list[ArtifactRef], graded: list[ArtifactRef], plan: BatchPlan, step: int
    ) -> ArtifactRef:
        """The step's batch: advantages, old and reference logprobs."""
        return await prepare_batch(self.model.workspace, policy, rollouts, graded, plan, step=step)

    @property
    def grading(self) -> Grading:
        """Who rewards a completion."""
        if self._grading is None:
            raise ValueError("no grader was given, and nothing else rewards the completions; give one")
        return self._grading

    def _load(self) -> LoadedDataset:
        if isinstance(self.dataset, LoadedDataset):
            return self.dataset
        return load_prompts(self.model.workspace, InlineDataset.of(self.dataset), "prompt")

    def _total_steps(self, data: LoadedDataset) -> int | None:
        if self.epochs is None:
            return self.max_steps
        return -(-self.epochs * data.rows // self.prompts_per_batch)  # the last batch reaches into one epoch more

    def _collector(self, data: LoadedDataset) -> Collector:
        """What makes the rollouts of a step."""
        batch = PromptBatch(
            model=self.model,
            data=data,
            prompts=self.prompts_per_batch,
            completions=self.completions_per_sample,
            prompts_per_shard=self.prompts_per_shard,
            seed=self.data_seed,
            max_prompt_tokens=self.max_prompt_tokens,
            truncation=self.truncation,
        )
        rules = self.rules
        refill = Refill(rules.max_refill_rounds, rules.refill_end) if rules.dynamic_sampling else None
        return Collector(batch, self._sample, refill)

    def _shuffled(self, step: int, *, updates: bool = True) -> MinibatchPlan:
        """Without `updates`, the step leaves the weights as they are."""
        seed = self.model.workspace.seed_for("minibatches", step)
        plan = self.minibatches.model_copy(update={"shuffle_seed": seed})
        return plan if updates else plan.model_copy(update={"epochs": 0})

    def _loss(self, kl_beta: float) -> dict[str, JsonValue]:
        in_loss = self.loss.kl_beta > 0
        return self.loss.model_copy(update={"kl_beta": kl_beta}).model_dump() if in_loss else self.loss.model_dump()

    def _batch_plan(self, start: PolicyRef, kl_beta: float) -> BatchPlan:
        rules, buffer = self.rules, self.rules.overlong_buffer
        limit = self.model.sampling.max_new_tokens
        return BatchPlan(
            reference=start if self.loss.kl_beta > 0 or self.reward_kl else None,
            advantage_estimator=self.advantage_estimator,
            old_logprobs=self.old_logprobs,
            temperature=self.model.sampling.temperature,
            reward_kl=self.reward_kl and self.reward_kl.model_copy(update={"beta": kl_beta}),
            overlong=Overlong(limit=limit, buffer=buffer, penalty=rules.overlong_penalty) if buffer else None,
            mask_truncated=rules.mask_truncated,
            drop_equal_groups=rules.dynamic_sampling,
            max_staleness=rules.max_staleness,
        )


def policy_loss_of(regularisation: Regularisation, *, kl_beta: float, **terms: Any) -> GRPOSpec | GSPOSpec | CISPOSpec:
    """The loss that these settings and `terms` of every policy loss make."""
    names = ("entropy_coef", "importance_cap", "norm_constant", "kl_importance")
    own = {name: getattr(regularisation, name) for name in names}
    in_loss = kl_beta if regularisation.kl_in == "loss" else 0.0
    return POLICY_LOSSES[regularisation.policy_loss](**own, **terms, kl_beta=in_loss)


def kl_control(regularisation: Regularisation, beta: float) -> FixedKL | AdaptiveKL:
    """Raises ValueError when a controller has nothing to control."""
    if regularisation.kl_controller == "fixed":
        return FixedKL(beta=beta)
    if beta == 0:
        raise ValueError("kl_controller='adaptive' multiplies kl_beta, and kl_beta=0 stays 0; give it a start")
    return AdaptiveKL(beta=beta, target=regularisation.kl_target, horizon=regularisation.kl_horizon)


def _check_sizes(length: str, steps: int | None, epochs: int | None, samples: int, completions: int) -> None:
    if steps is not None and epochs is not None:
        raise ValueError(f"both {length}={steps} and epochs={epochs} were given; give one of them")
    if samples % completions:
        raise ValueError(
            f"samples_per_batch={samples} splits a group; use a multiple of completions_per_sample={completions}"
        )


@flow(name="grpo", flow_run_name="{config.title}", **ON_END)
async def grpo(config: GRPOConfig) -> dict[str, Any]:
    """Trains a model with GRPO, evaluates it before and after on held-out prompts, publishes it and reports.

    Args:
        config: what to train, on what, graded how.
    """
    logger = TerminalProgress()
    async with open_run("grpo", config, logger, use="prompt") as session:
        if session.result is not None:
            return session.result
        arguments = await reward_arguments(config, session, logger)
        return await train_on_rewards(config, session, GRPO(**arguments, max_num_grpo_steps=config.algorithm.steps))


def longest(tokens: float, algorithm: GRPOAlgorithm) -> float | None:
    """What the constant norm divides by; None for another."""
    return float(tokens) if algorithm.loss_norm == "constant" else None


async def reward_arguments(config: GRPOConfig, session: RunSession, logger: TerminalProgress) -> dict[str, Any]:
    """What a training class on graded completions is made with, but for the number of steps."""
    algorithm, grader = config.algorithm, config.grader
    builder = Model(registered_key(session.base)).to_builder(session).training(config.model.trainable)
    model = await builder.spawn_train(config.model.name)
    patience = grader.model_dump(exclude={"path", "arguments", "workers"})
    return {
        "dataset": session.data,
        "model": model.with_sampling(config.sampling),
        "grader": Grading(grader=grader_spec(grader.path, grader.arguments, workers=grader.workers), **patience),
        "logger": logger,
        **optimizer_arguments(config.optimizer),
        "checkpoints": CheckpointSchedule(config.checkpoints),
        "data_seed": config.seed,
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "truncation": config.data.truncation,
        **algorithm.model_dump(exclude={"steps"}),
        **config.regularisation.model_dump(),
        "norm_constant": longest(config.regularisation.norm_constant or config.sampling.max_new_tokens, algorithm),
        **config.rules.model_dump(),
    }


async def train_on_rewards(config: GRPOConfig, session: RunSession, trainer: GRPO) -> dict[str, Any]:
    """What the flows of all classes on graded completions do."""
    heldout = Heldout.load(session.workspace, config, session.base, trainer.grading)
    return await train_and_report(config, session, trainer, heldout)


async def train_and_report(
    config: GRPOConfig | ENVGRPOConfig, session: RunSession, trainer: GRPO, heldout: Heldout
) -> dict[str, Any]:
    """Evaluates, trains, evaluates, publishes and reports; in environments too."""
    workspace = session.workspace
    trainer.callbacks += heldout.callbacks(config.evaluation)
    start = await trainer.open()
    before = await heldout.evaluate(start) if config.evaluation.before else None
    policy = await trainer.run()
    after = await heldout.evaluate(policy)
    published = await publish_model(workspace, policy, config.model.publish_as or default_model_name(session.run))
    result = heldout.result(before, after) | {
        "run": session.run,
        "policy": policy.uri,
        "model": registered_key(published),
    }
    report = write_report(workspace, policy, before, after, result, samples_shown=config.evaluation.samples_shown)
    return finish_run(session, result | {"report": report})
