"""The base of the training classes of reinforcement learning: their settings, and the shared parts of a step.

The loops themselves are GRPO.run (flows.grpo) and, with a value model, PPO.run (flows.ppo).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import JsonValue

from engine.handles import TrainingModel
from engine.losses.policy_gradient import POLICY_LOSSES, PolicyGradientSpec, load_own_loss
from engine.text.threads import StringThread
from flows.configs.common import GRPOAlgorithm
from flows.configs.inputs import PromptDataConfig
from flows.configs.ppo import check_has_gspo
from flows.configs.reinforcement import BatchRules, Regularisation, old_logprobs_of_step
from flows.training.arguments import check_one_length, whole_number
from flows.training.critic import Critic
from flows.training.options import PolicyOptions, read_options
from flows.training.rollout_collection import (
    CollectedRollouts,
    PromptShards,
    Refill,
    RolloutCollector,
    RolloutLookahead,
    TooManySkipped,
)
from flows.training.rollout_sources import RolloutSource, source_of
from flows.training.schedules import are_endless
from flows.training.training_loop import TrainingLoop
from flows.training.training_steps import TrainingSteps
from storage.chain.records import MinibatchPlan, PolicyRef, StepRequest
from storage.inspect.step_samples import missing_grade_hint
from storage.serialization import default_of
from storage.store.artifacts import ArtifactRef
from tasks.batches.advantages import AdaptiveKL, FixedKL, Overlong, RewardKL
from tasks.datasets.load import LoadedDataset
from tasks.datasets.load_order import RunOrder, load_order
from tasks.datasets.pools import PoolOrder
from tasks.datasets.spec import DatasetUse, InlineDataset
from tasks.graders.base import BaseGrader
from tasks.graders.spec import GraderSpec
from tasks.load import load_prompts
from tasks.plans import BatchPlan, Grading
from tasks.sampling.shards import SHARDS_AT_ONCE, rows_that_fit

COUNTS = ("samples_per_batch", "samples_per_mini_batch", "completions_per_sample", "mini_epochs_per_batch", "epochs")
"""Options that are whole numbers."""


class RolloutLoop(TrainingLoop):
    """A training class that trains on rollouts of prompts.

    If neither a number of steps nor `epochs` is given, the run makes one pass over `dataset`. If also no setting
    depends on the run's progress (lr_scheduler=ConstantScheduler(lr), and checkpoint_every_steps or
    checkpoint_frequency=None), the run has no end and must be cancelled.
    """

    length: ClassVar[str]
    """The argument that gives the number of steps."""
    algorithm_type: ClassVar[type[GRPOAlgorithm]] = GRPOAlgorithm
    """Holds the defaults and the bounds of the algorithm's options."""
    regularisation_type: ClassVar[type[Regularisation]] = Regularisation
    """Holds the defaults and the bounds of the loss's further terms."""
    policy_losses: ClassVar[Mapping[str, type[PolicyGradientSpec]]] = POLICY_LOSSES
    options_type = PolicyOptions
    per_trajectory: ClassVar[bool] = False
    """Whether every token of an episode has the advantage of its one grade."""

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        source: BaseGrader | GraderSpec | Grading | RolloutSource,
        options: PolicyOptions,
        *,
        max_steps: int | None,
        lr: float | None,
    ) -> None:
        super().__init__(model, options, lr=lr)
        self.dataset = dataset
        # the length of the run
        steps = whole_number(self.length, max_steps)
        check_one_length(self.length, steps, whole_number("epochs", options.get("epochs")))
        self.algorithm = _algorithm(self.algorithm_type, options, steps)
        self.max_steps, self.epochs = self.algorithm.steps, self.algorithm.epochs
        self.ends_with_the_data = False
        """Whether no length was given, and the run is one pass over the dataset."""
        # the algorithm
        self.regularisation = read_options(self.regularisation_type, options, options.get("regularisation"))
        self.rules: BatchRules = read_options(BatchRules, options, options.get("rules"))
        self.max_prompt_tokens = options.get("max_prompt_tokens")
        self.truncation = options.get("truncation", default_of(PromptDataConfig, "truncation"))
        algorithm = self.algorithm
        self.regularisation.check(algorithm, model.sampling, max_staleness=self.rules.max_staleness)
        self.regularisation = self.regularisation.corrected(algorithm.old_logprobs, self.rules.max_staleness)
        # what follows from them
        self.samples_per_batch = algorithm.samples_per_batch
        self.prompts_per_batch = algorithm.samples_per_batch // algorithm.completions_per_sample
        self.loss = policy_loss(self.policy_losses, algorithm, self.regularisation)
        self.kl = kl_controller(self.regularisation, algorithm.kl_beta)
        self.reward_kl: RewardKL | None = None
        if self.regularisation.kl_in == "reward" and algorithm.kl_beta > 0:
            self.reward_kl = RewardKL(beta=algorithm.kl_beta, estimator=algorithm.kl_estimator)
        size: int | None = algorithm.samples_per_mini_batch
        if algorithm.samples_per_mini_batch >= algorithm.samples_per_batch:
            size = None
        self.minibatches = MinibatchPlan(size=size, epochs=algorithm.mini_epochs_per_batch)
        # settings that depend on the run's progress need a length
        config = self.checkpoints.config
        checkpoints_follow_progress = config.frequency is not None and config.every_steps is None
        if checkpoints_follow_progress or not are_endless(self.schedule, self.optimizer.weight_decay):
            self.end_with_the_data()
        self.source = source_of(source)
        self.on_policy = 1.0
        """Probability that the completions of a prompt are sampled, and not the answer of its row."""

    async def run(self) -> PolicyRef:
        """Takes the steps that are left. Returns the last policy."""
        raise NotImplementedError

    def end_with_the_data(self) -> None:
        """Sets the length to one pass over the dataset if none was given. For settings that depend on the progress."""
        if self.max_steps is None and self.epochs is None:
            self.epochs, self.ends_with_the_data = 1, True

    def load_dataset(self) -> LoadedDataset:
        """Returns the dataset. A list of prompts is stored first."""
        if isinstance(self.dataset, LoadedDataset):
            return self.dataset
        use: DatasetUse = "prompt" if self.on_policy == 1 else "completion"
        return load_prompts(self.model.workspace, InlineDataset.of(self.dataset), use)

    def prepare_order(self, data: LoadedDataset) -> RunOrder:
        """Returns the order of the rows. Prompts that are dropped for their length are left out here, so that every
        batch is full."""
        workspace = self.model.workspace
        order = load_order(workspace.open_store(), data, seed=self.data_seed)
        if self.truncation == "drop" and not self.source.prompts_are_rows and isinstance(order, PoolOrder):
            raise ValueError(
                "order='pools' with data.truncation='drop': the environment writes the prompts, and one that is "
                "dropped would never be measured; take truncation='error', or leave order='pools' out"
            )
        if self.truncation != "drop" or not self.source.prompts_are_rows:
            return order
        rows = rows_that_fit(
            workspace,
            data,
            self.model.base,
            max_prompt_tokens=self.max_prompt_tokens,
            sampling=self.model.sampling,
            answered=self.on_policy < 1,
        )
        self.logger.note(f"{data.rows - len(rows)} of {data.rows} prompts are too long and left out")
        return order.only(rows)

    def count_steps(self, order: RunOrder) -> int | None:
        """The number of steps of the run, or None for a run without an end. Notes derived settings on the terminal."""
        total_steps = self.max_steps
        # rounded up: the last batch may contain rows of one further epoch
        if self.epochs is not None:
            total_steps = -(-self.epochs * order.rows // self.prompts_per_batch)
        # notes on settings that have no effect or follow from others
        one_update = self.minibatches.size is None and self.minibatches.epochs == 1
        if one_update and self.algorithm.old_logprobs == "trainer":
            self.logger.note("one update per batch: every ratio is 1, so clip_range cannot act")
        if self.ends_with_the_data:
            self.logger.note(
                f"neither {self.length} nor epochs was given: the run ends after one pass over the data, in "
                f"{total_steps} steps"
            )
        return total_steps

    def lookahead(self, data: LoadedDataset, order: RunOrder, steps: TrainingSteps) -> RolloutLookahead:
        """Creates the object that collects the rollouts of the steps, in this order of the dataset's rows, with dynamic
        sampling and staleness."""
        rules = self.rules
        prompts = PromptShards(
            model=self.model,
            data=data,
            prompts_per_step=self.prompts_per_batch,
            completions_per_prompt=self.algorithm.completions_per_sample,
            prompts_per_shard=self.algorithm.prompts_per_shard,
            order=order,
            max_prompt_tokens=self.max_prompt_tokens,
            truncation=self.truncation,
            segment_seconds=rules.segment_seconds if rules.in_flight else None,
            on_policy=self.on_policy,
        )
        refill = Refill(rules.max_refill_rounds, rules.refill_end) if rules.dynamic_sampling else None
        # In flight, max_staleness + 1 steps are collected at once.
        at_once = SHARDS_AT_ONCE // (rules.max_staleness + 1 if rules.in_flight else 1)
        collector = RolloutCollector(prompts, self.source, refill, max(1, at_once), rules.max_staleness)
        return RolloutLookahead(collector, steps.cursor, steps.total_steps, rules.max_staleness, rules.in_flight)

    def next_kl_beta(self, steps: TrainingSteps) -> float:
        """The coefficient of the KL term in the next step."""
        return self.kl.next(steps.last_record, samples=self.samples_per_batch)

    def batch_plan(self, start: PolicyRef, kl_beta: float) -> BatchPlan:
        """How the rollouts of a step become a batch. `start` is the policy that the stage began with."""
        rules = self.rules
        # the penalty of long completions counts from the end of the completion budget
        overlong: Overlong | None = None
        if rules.overlong_buffer:
            longest = self.model.sampling.max_new_tokens
            overlong = Overlong(limit=longest, buffer=rules.overlong_buffer, penalty=rules.overlong_penalty)
        estimator: str = self.algorithm.advantage_estimator
        # PPO takes its advantages from the critic's plan, so the estimator of this plan is not used
        if estimator == "gae":
            estimator = default_of(BatchPlan, "advantage_estimator")
        return BatchPlan(
            reference=start if self.loss.needs_reference or self.reward_kl else None,
            advantage_estimator=estimator,
            pass_k=self.algorithm.pass_k,
            gamma=self.regularisation.gamma,
            old_logprobs=old_logprobs_of_step(self.algorithm, self.regularisation),
            temperature=self.model.sampling.temperature,
            reward_kl=self.reward_kl and self.reward_kl.model_copy(update={"beta": kl_beta}),
            selection=self.regularisation.selection,
            overlong=overlong,
            mask_truncated=rules.mask_truncated,
            drop_equal_groups=rules.dynamic_sampling,
            max_staleness=rules.max_staleness,
            weight_updates=rules.weight_updates,
            per_trajectory=self.per_trajectory,
        )

    def policy_request(
        self,
        policy: PolicyRef,
        batch: ArtifactRef,
        plan: BatchPlan,
        collected: CollectedRollouts,
        *,
        kl_beta: float,
        total_steps: int | None,
        value_only_steps: int = 0,
    ) -> StepRequest:
        """Returns the request for the step that starts from `policy`. The first `value_only_steps` steps do not train
        it. Its schedules start after them. A step with an empty batch is skipped: it makes no update. Raises
        TooManySkipped."""
        if batch.rows == 0:
            self._check_skipped_steps(policy)
        # the schedules of the policy run over the steps that train it
        step = policy.step
        trained_steps = None if total_steps is None else total_steps - value_only_steps
        return StepRequest(
            parent=policy,
            batch=batch,
            reference=plan.reference,
            old_logprobs=plan.old_logprobs,
            loss=self._loss_settings(kl_beta),
            controllers_in=self.kl.state(kl_beta),
            optimizer=self.optimizer.at(max(0, step - value_only_steps), trained_steps, self.schedule),
            minibatches=self.minibatches_of(step, updates=step >= value_only_steps and batch.rows != 0),
            temperature=plan.temperature,
            cursor_in=collected.cursor_in.model_dump(),
            cursor_out=collected.cursor_out.model_dump(),
            nan_policy=self.nan_policy,
            used=self.use.read(),
        )

    def _check_skipped_steps(self, policy: PolicyRef) -> None:
        """Notes that the step from `policy` is skipped. Raises TooManySkipped if more than rules.max_skipped_steps
        steps in a row were."""
        chain, limit = self.model.chain_of(policy), self.rules.max_skipped_steps
        skipped = 1
        while skipped <= policy.step and skipped <= limit:
            if chain.committed_record(policy.step + 1 - skipped).request.batch.rows != 0:
                break
            skipped += 1
        number = policy.step + 1
        reasons = missing_grade_hint(chain.store, policy.run, policy.stage, number)
        problem = f"no completion of step {number} got a grade"
        if not self.rules.dynamic_sampling:
            problem += ", although its prompts were sampled twice"
        if skipped > limit:
            raise TooManySkipped(
                f"{problem}. It is step {skipped} in a row without a grade, and rules.max_skipped_steps={limit}. "
                f"{reasons}. Correct the grader, give it a stronger judge, or raise the limit"
            )
        self.logger.note(f"{problem}: the step is skipped. {reasons}")

    def value_request(
        self,
        critic: Critic,
        value: PolicyRef,
        batch: ArtifactRef,
        collected: CollectedRollouts,
        *,
        total_steps: int | None,
    ) -> StepRequest:
        """The step of the value model after `value`, in the minibatches of the policy's step."""
        return StepRequest(
            parent=value,
            batch=batch,
            loss=critic.loss.model_dump(),
            optimizer=critic.optimizer.at(value.step, total_steps, critic.schedule),
            minibatches=self.minibatches_of(value.step, updates=batch.rows != 0),
            cursor_in=collected.cursor_in.model_dump(),
            cursor_out=collected.cursor_out.model_dump(),
            nan_policy=self.nan_policy,
        )

    def minibatches_of(self, step: int, *, updates: bool = True) -> MinibatchPlan:
        """The minibatches of a step. Without `updates`, the step leaves the weights as they are."""
        seed = self.model.workspace.seed_for("minibatches", step)
        plan = self.minibatches.model_copy(update={"shuffle_seed": seed})
        if updates:
            return plan
        return plan.model_copy(update={"epochs": 0})

    def _loss_settings(self, kl_beta: float) -> dict[str, JsonValue]:
        """The loss with the coefficient of this step, if the KL term is in the loss."""
        if self.loss.kl_beta == 0:
            return self.loss.model_dump()
        return self.loss.model_copy(update={"kl_beta": kl_beta}).model_dump()


def _algorithm(
    algorithm_type: type[GRPOAlgorithm], options: PolicyOptions, steps: int | None
) -> GRPOAlgorithm:
    """The settings of the algorithm. Raises ValueError if a count is not a whole number, ConfigError if an option is
    invalid."""
    values: Mapping[str, Any] = options
    counts = {name: whole_number(name, values[name]) for name in COUNTS if name in values}
    if steps is not None:
        counts["steps"] = steps
    return read_options(algorithm_type, options, options.get("algorithm"), **counts)


def policy_loss(
    losses: Mapping[str, type[PolicyGradientSpec]],
    algorithm: GRPOAlgorithm,
    regularisation: Regularisation,
) -> PolicyGradientSpec:
    """The loss of the policy that these settings describe. Raises ValueError for a loss that the class does not have,
    and for a loss of one's own that cannot be loaded or has other settings."""
    name = regularisation.policy_loss
    arguments: dict[str, Any] = regularisation.policy_loss_arguments
    if losses is not POLICY_LOSSES:
        check_has_gspo(None, name)
    loss_type: type[PolicyGradientSpec]
    if name in losses:
        loss_type = losses[name]
    else:
        loss_type, source = load_own_loss(name)
        arguments = {"path": name, "source_digest": source, **arguments}
    terms: dict[str, Any] = {
        "kl_beta": algorithm.kl_beta if regularisation.kl_in == "loss" else 0.0,
        "kl_estimator": algorithm.kl_estimator,
        "norm": algorithm.loss_norm,
    }
    if algorithm.dual_clip:
        terms["dual_clip"] = algorithm.dual_clip
    if "clip_low" in loss_type.model_fields:
        # equal clips on both sides, unless the upper one is given
        high = algorithm.clip_range if algorithm.clip_range_high is None else algorithm.clip_range_high
        terms |= {"clip_low": algorithm.clip_range, "clip_high": high}
    elif algorithm.clip_range != default_of(type(algorithm), "clip_range") or algorithm.clip_range_high:
        raise ValueError(f"clip_range has no effect with policy_loss={name!r}, which has no clip_low; leave it out")
    if "cov_kl" in loss_type.model_fields and regularisation.covariance is not None:
        terms["cov_kl"] = regularisation.covariance.kl
    terms |= regularisation.model_dump(include=set(loss_type.model_fields))
    twice = sorted(terms.keys() & arguments.keys())
    if twice:
        raise ValueError(f"policy_loss_arguments has {twice}, which other settings of the config give; leave them out")
    return loss_type(**terms, **arguments)


def kl_controller(regularisation: Regularisation, beta: float) -> FixedKL | AdaptiveKL:
    """The controller of the KL coefficient, which starts at `beta`.

    Raises ValueError for an adaptive controller that starts at 0."""
    if regularisation.kl_controller == "fixed":
        return FixedKL(beta=beta)
    if beta == 0:
        raise ValueError(
            "kl_controller='adaptive' multiplies kl_beta, which stays 0 when it begins at 0; give a kl_beta above 0"
        )
    return AdaptiveKL(beta=beta, target=regularisation.kl_target, horizon=regularisation.kl_horizon)
