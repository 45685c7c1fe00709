"""Groups of the configs whose defaults fit most runs: the rules of a run, and the terms of a policy loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from engine import import_paths
from engine.losses.base import TermsNorm
from engine.losses.policy_gradient import POLICY_LOSSES, GRPOSpec, ImportanceMask, KLCovSpec, PolicyLoss, SAPOSpec
from engine.protocol import SamplingParams
from storage.chain.records import OldLogprobs, StepOldLogprobs
from storage.serialization import Coefficient, Divisor, Frozen, Positive, default_of
from tasks.batches.advantages import AdaptiveKL, Overlong, TokenSelection
from tasks.plans import BatchPlan, WeightUpdates

if TYPE_CHECKING:
    from flows.configs.common import GRPOAlgorithm

ImportPath = Annotated[str, Field(pattern=import_paths.PATTERN)]
KLPlace = Literal["loss", "reward"]
KLControl = Literal["fixed", "adaptive"]
RefillEnd = Literal["short", "fail"]
SEGMENT_SECONDS = 60.0
"""Default of `segment_seconds`."""


def check_weight_updates(max_staleness: int, weight_updates: WeightUpdates, segment_seconds: float) -> None:
    """Raises ValueError for rules of these names that have no effect together."""
    if weight_updates == "in_flight" and max_staleness == 0:
        raise ValueError(
            "weight_updates='in_flight' was given with max_staleness=0, with which no completion is sampled while a "
            "step is taken; give max_staleness of 1 or more, or leave weight_updates out"
        )
    if segment_seconds != SEGMENT_SECONDS and weight_updates == "between":
        raise ValueError(
            f"segment_seconds={segment_seconds:g} acts only with weight_updates='in_flight', and that is 'between'; "
            "set it, or leave segment_seconds out"
        )


def _is_none(value: object) -> bool:
    return value is None


ENDING_RULES = ("patience", "max_hours", "max_gpu_hours", "max_tokens_sampled")
"""The rules that end a run before its last step as finished. Its model is published, and a later start with other rules
continues it."""


class RunRules(Frozen):
    """Rules for when a run ends early."""

    max_idle_steps: int | None = Field(20, ge=1)
    """Number of steps in a row without a gradient (all rewards of each group equal, or a learning rate of 0) that end
    the run as failed, without publishing its model. None: no such limit."""
    patience: int | None = Field(None, ge=1, exclude_if=_is_none)
    """Number of measurements on held-out rows in a row that are not better than the best one before them, after which
    the run ends and publishes its last policy. The score is the mean reward, or the loss where nothing is sampled. A
    start with a larger number, or null, continues the run. None: no such limit."""
    max_hours: Positive | None = Field(None, exclude_if=_is_none)
    """Hours of training after which the run ends, evaluates and publishes its last policy, added up over all its
    processes and those of the run that it was forked from. It ends with the step that reaches them. A start with more
    hours continues the run. None: no such limit."""
    max_gpu_hours: Positive | None = Field(None, exclude_if=_is_none)
    """The same in hours times the number of GPUs of the engine. None: no such limit."""


class SamplingRules(RunRules):
    """Rules for when a run that samples ends early."""

    max_tokens_sampled: int | None = Field(None, ge=1, exclude_if=_is_none)
    """Number of sampled tokens after which the run ends, like max_hours. None: no such limit."""


class BatchRules(SamplingRules):
    """Rules for which completions a step trains on, and which policy they are sampled from."""

    dynamic_sampling: bool = False
    """Leave out prompts whose completions all have the same reward, and draw other prompts instead (DAPO,
    arXiv:2503.14476)."""
    max_refill_rounds: int = Field(4, ge=0)
    """Largest number of further draws of prompts in a step, with dynamic_sampling."""
    refill_end: RefillEnd = "short"
    """What happens when max_refill_rounds draws did not fill the batch. short: a smaller batch is trained. fail: the
    run fails."""
    max_staleness: int = Field(0, ge=0)
    """Age in steps of the policy that completions are sampled from. Above 0, completions are sampled while earlier
    steps train, and the loss corrects for their age: by regularisation.importance_cap or importance_mask, or by
    algorithm.old_logprobs=sampler. Without any of them, importance_cap is 2."""
    weight_updates: WeightUpdates = Field("between", exclude_if=lambda value: value == "between")
    """When completions that are being sampled get newer weights. between: never, so that all tokens of a step come from
    the policy that is max_staleness steps old. in_flight: as soon as a step is committed. The tokens so far are
    committed as a segment, and the completions go on under the new policy; no token is older than max_staleness steps.
    Where completions are cut depends on the timing, and is recorded."""
    segment_seconds: Positive = Field(SEGMENT_SECONDS, exclude_if=lambda seconds: seconds == SEGMENT_SECONDS)
    """Seconds of sampling after which a segment is committed even if there are no newer weights, with
    weight_updates=in_flight. A crash loses at most this much of a completion. A sampler that shares the trainer's
    weights takes newer ones only then."""
    mask_truncated: bool = False
    """Leave completions that were cut at max_new_tokens out of the loss."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Number of last tokens before max_new_tokens over which a penalty on the length grows from 0 to overlong_penalty.
    None: no penalty."""
    overlong_penalty: Positive = default_of(Overlong, "penalty")
    """Penalty that the longest completions get, subtracted from their reward. Used with overlong_buffer."""
    max_skipped_steps: int = Field(5, ge=0)
    """Largest number of steps in a row in which no completion gets a grade, such as steps whose completions the judge
    declines. Such a step is sampled a second time and then skipped: it changes no weight. The run fails at the next
    one. It may change between attempts of a run."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        refill = changed(self, "max_refill_rounds", "refill_end")
        if refill and not self.dynamic_sampling:
            raise ValueError(f"{refill} act only with dynamic_sampling=true; set it, or leave them out")
        if changed(self, "overlong_penalty") and self.overlong_buffer is None:
            raise ValueError("overlong_penalty acts only with overlong_buffer; give it in tokens, or leave both out")
        check_weight_updates(self.max_staleness, self.weight_updates, self.segment_seconds)
        return self

    @property
    def in_flight(self) -> bool:
        return self.weight_updates == "in_flight"


TAU_POSITIVE, TAU_NEGATIVE = default_of(SAPOSpec, "tau_positive"), default_of(SAPOSpec, "tau_negative")
STALE_IMPORTANCE_CAP = 2.0
"""`importance_cap` of runs with max_staleness above 0 and no correction of their own."""


_BY_COVARIANCE = ("clip_cov", "kl_cov")
"""Policy losses that select tokens by their covariance."""


class CovarianceSettings(Frozen):
    """The tokens that policy_loss=clip_cov or kl_cov selects, by the covariance of their log-probability and their
    advantage."""

    fraction: float = Field(default_of(TokenSelection, "fraction"), gt=0, le=1)
    """Fraction of a batch's tokens that is selected. The paper has 2e-4, and 2e-3 for kl_cov on a model of 7B."""
    low: float = Field(default_of(TokenSelection, "low"), allow_inf_nan=False)
    """Smallest covariance of the tokens of which clip_cov selects some at random."""
    high: float = Field(default_of(TokenSelection, "high"), allow_inf_nan=False)
    """Largest covariance of the tokens of which clip_cov selects some at random."""
    kl: Positive = default_of(KLCovSpec, "cov_kl")
    """Coefficient of the KL penalty of kl_cov on the selected tokens."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}; give the bounds in order")
        return self


class Regularisation(Frozen):
    """Further terms and variants of the policy loss."""

    policy_loss: PolicyLoss | ImportPath = "clip"
    """Policy loss. clip: the clipped ratio times the advantage. cispo: the clipped ratio, held constant, times the
    advantage and the log-probability (arXiv:2506.13585). gmpo: the geometric mean of a completion's ratios, whose
    logarithms are clipped at -clip_range and clip_range_high, times the advantage (arXiv:2507.20673). sapo: a smooth
    function of the ratio, without clips, times the advantage (arXiv:2511.20347). Both papers use
    loss_norm=sequence_mean. clip_cov: clip, without some of the tokens that would lower the entropy most. kl_cov: the
    ratio without clips, times the advantage, and a KL penalty on these tokens (both arXiv:2505.22617). Or a loss of
    your own: the import path package.module:name of a subclass of engine.losses.policy_gradient.OwnLossSpec."""
    policy_loss_arguments: dict[str, JsonValue] = Field({}, exclude_if=lambda arguments: not arguments)
    """Settings of a loss of your own, by name."""
    tau_positive: Positive = Field(TAU_POSITIVE, exclude_if=lambda tau: tau == TAU_POSITIVE)
    """Temperature of policy_loss=sapo for tokens with an advantage above 0. A larger one acts earlier."""
    tau_negative: Positive = Field(TAU_NEGATIVE, exclude_if=lambda tau: tau == TAU_NEGATIVE)
    """Temperature of policy_loss=sapo for the other tokens."""
    covariance: CovarianceSettings | None = Field(None, exclude_if=lambda settings: settings is None)
    """Settings of policy_loss=clip_cov and kl_cov: which tokens they select. None: their defaults."""
    entropy_coef: Coefficient = default_of(GRPOSpec, "entropy_coef")
    """Coefficient of the entropy bonus: this times the policy's entropy is subtracted from the loss."""
    importance_cap: Positive | None = None
    """Upper bound of importance weights that correct for differences between the probabilities of the policy before the
    step, as the trainer computes them, and those of the policy that sampled, as the sampler reported them (truncated
    importance weights). None: 2 with rules.max_staleness above 0, unless there is an importance_mask, whose weights
    then have no bound of their own, or algorithm.old_logprobs=sampler; no weights with max_staleness=0."""
    importance_mask: ImportanceMask | None = Field(None, exclude_if=lambda mask: mask is None)
    """Which tokens are left out of the policy's part of the loss because the policy is too far from the one that
    sampled them. The other tokens have importance weights. token_ratio: tokens whose ratio of the two probabilities is
    outside [low, high] (IcePop, arXiv:2510.18855). sequence_ratio: completions for which the geometric mean of these
    ratios is outside [low, high]. probability: tokens whose probability has moved by more than low or high in the
    direction of their advantage (DPPO, arXiv:2602.04879). None: none."""
    norm_constant: Divisor | None = None
    """Tokens per completion that loss_norm=constant divides by. None: sampling.max_new_tokens."""
    kl_in: KLPlace = "loss"
    """Where the KL term is: in the loss, or subtracted from the reward."""
    kl_importance: bool = default_of(GRPOSpec, "kl_importance")
    """Multiply the KL term of the loss by the ratio of new and old probability. With k3, its gradient is then an
    unbiased estimate of the KL divergence's (arXiv:2512.02556)."""
    kl_controller: KLControl = "fixed"
    """Controller of kl_beta. fixed: it does not change. adaptive: it changes so that the KL divergence approaches
    kl_target (arXiv:1909.08593)."""
    kl_target: Divisor = default_of(AdaptiveKL, "target")
    """KL divergence that the adaptive controller aims at, in nats per token."""
    kl_horizon: Positive = default_of(AdaptiveKL, "horizon")
    """Number of completions over which the adaptive controller may change kl_beta by a fifth."""
    terms_norm: TermsNorm | None = Field(None, exclude_if=lambda norm: norm is None)
    """Normalisation of the KL and entropy terms of the loss. The values are those of loss_norm. None: loss_norm."""
    gamma: float = Field(default_of(BatchPlan, "gamma"), gt=0, le=1, exclude_if=lambda gamma: gamma == 1)
    """Discount factor of later rewards, per token, with advantage_estimator=reinforce_plus_plus."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.policy_loss_arguments and self.policy_loss in POLICY_LOSSES:
            raise ValueError(
                f"policy_loss_arguments are settings of a loss of your own, and policy_loss is {self.policy_loss!r}; "
                "give its import path as policy_loss, or leave them out"
            )
        adaptive = changed(self, "kl_target", "kl_horizon")
        if adaptive and self.kl_controller != "adaptive":
            raise ValueError(f"{adaptive} act only with kl_controller='adaptive'; set it, or leave them out")
        taus = changed(self, "tau_positive", "tau_negative")
        if taus and self.policy_loss != "sapo":
            raise ValueError(
                f"{taus} act only with policy_loss='sapo', and that is {self.policy_loss!r}; set it, or leave them out"
            )
        if self.covariance is not None and self.policy_loss not in _BY_COVARIANCE:
            raise ValueError(
                f"covariance has no effect with policy_loss={self.policy_loss!r}; set clip_cov or kl_cov, or leave it "
                "out"
            )
        if self.kl_importance and self.kl_in != "loss":
            raise ValueError(f"kl_importance acts only with kl_in='loss', and that is {self.kl_in!r}; leave it out")
        return self

    @property
    def selection(self) -> TokenSelection | None:
        """The tokens that the policy loss treats in its own way. None: there are none."""
        if self.policy_loss not in _BY_COVARIANCE:
            return None
        settings = self.covariance or CovarianceSettings()
        return TokenSelection.model_validate({"kind": self.policy_loss, **settings.model_dump(exclude={"kl"})})

    def check_kl(self, kl_beta: float) -> None:
        """Raises ValueError for kl_importance without a KL term."""
        if self.kl_importance and kl_beta == 0:
            raise ValueError("regularisation.kl_importance acts only with algorithm.kl_beta above 0; leave it out")

    def check(self, algorithm: GRPOAlgorithm, sampling: SamplingParams, *, max_staleness: int) -> None:
        """Raises ValueError for a setting that has no effect with these settings of the algorithm, and for a loss whose
        ratios would not be those of the policy that sampled."""
        self.check_norm(algorithm.loss_norm)
        self.check_kl(algorithm.kl_beta)
        clips = changed(algorithm, "clip_range", "clip_range_high")
        if clips and self.policy_loss in ("sapo", "kl_cov"):
            raise ValueError(
                f"{clips} have no effect with policy_loss={self.policy_loss!r}, which does not clip; leave them out"
            )
        self._check_importance(algorithm.old_logprobs)
        self._check_sampler_logprobs(algorithm.old_logprobs, sampling, max_staleness)
        if self.gamma != 1 and algorithm.advantage_estimator != "reinforce_plus_plus":
            raise ValueError(
                f"regularisation.gamma={self.gamma} acts only with algorithm.advantage_estimator='reinforce_plus_plus',"
                f" and that is {algorithm.advantage_estimator!r}; leave it out (PPO's factor is credit.gae_gamma)"
            )

    def check_norm(self, loss_norm: str) -> None:
        """Raises ValueError for a norm_constant that the norm does not use."""
        if self.norm_constant is not None and loss_norm != "constant":
            raise ValueError(
                f"regularisation.norm_constant={self.norm_constant} acts only with algorithm.loss_norm='constant', and "
                f"that is {loss_norm!r}; set it, or leave the constant out"
            )

    def corrected(self, old_logprobs: OldLogprobs, max_staleness: int) -> Self:
        """These settings, with the importance weights of decoupled PPO (arXiv:2110.00641) if completions of an older
        policy would otherwise be trained as if the policy before the step had sampled them."""
        if max_staleness == 0 or old_logprobs == "sampler":
            return self
        if self.importance_cap is not None or self.importance_mask is not None:
            return self
        return self.model_copy(update={"importance_cap": STALE_IMPORTANCE_CAP})

    def _check_importance(self, old_logprobs: OldLogprobs) -> None:
        """Raises ValueError for a cap on importance weights that are all 1 or below it, and for a mask that keeps every
        token."""
        cap, mask = self.importance_cap, self.importance_mask
        ratio = "the ratio of the trainer's and the sampler's probability, and then both are the sampler's"
        if cap is not None and old_logprobs == "sampler":
            raise ValueError(
                f"importance_cap={cap} has no effect with old_logprobs='sampler': it bounds {ratio}; leave it out, or "
                "use old_logprobs='trainer'"
            )
        if mask is None:
            return
        if mask.kind != "probability" and old_logprobs == "sampler":
            raise ValueError(
                f"importance_mask of kind {mask.kind!r} has no effect with old_logprobs='sampler': it looks at "
                f"{ratio}; take the kind 'probability', or use old_logprobs='trainer'"
            )
        if mask.kind == "token_ratio" and cap is not None and cap >= mask.high:
            raise ValueError(
                f"importance_cap={cap} has no effect with importance_mask.high={mask.high}, which leaves out the "
                "tokens with larger weights; leave the cap out, or give one below it"
            )

    def _check_sampler_logprobs(
        self, old_logprobs: OldLogprobs, sampling: SamplingParams, max_staleness: int
    ) -> None:
        """Raises ValueError if the loss compares the trainer's logprobs, which are of the whole vocabulary, with those
        of a sampler that draws from a part of it."""
        names = changed(sampling, "top_p", "top_k", "json_schema")
        truncation = [f"{name}={getattr(sampling, name)!s:.40}" for name in names]
        used_by = None
        if old_logprobs == "sampler":
            used_by = "old_logprobs='sampler'"
        elif self.importance_cap is not None:
            used_by = f"importance_cap={self.importance_cap}"
        elif self.importance_mask is not None:
            used_by = f"importance_mask of kind {self.importance_mask.kind!r}"
        elif max_staleness > 0:
            used_by = f"the correction for max_staleness={max_staleness}"
        if truncation and used_by is not None:
            raise ValueError(
                f"{used_by} compares the trainer's probabilities with the sampler's, which {' and '.join(truncation)} "
                "raise: the ratios would be wrong; leave top_p and top_k out of the sampling (and json_schema), or use "
                "old_logprobs='trainer' with max_staleness=0, without importance_cap and importance_mask"
            )


def old_logprobs_of_step(algorithm: GRPOAlgorithm, regularisation: Regularisation) -> StepOldLogprobs:
    """Where a step takes the old logprobs from. The trainer's are those of the policy before the step, also where an
    older one sampled. They come from the step's own forward pass, unless a batch is several updates or the rewards need
    them before the step."""
    if algorithm.old_logprobs == "sampler":
        return "sampler"
    one_update = algorithm.samples_per_mini_batch >= algorithm.samples_per_batch
    one_update = one_update and algorithm.mini_epochs_per_batch == 1
    needed_before = regularisation.kl_in == "reward" and algorithm.kl_beta > 0
    needed_before = needed_before or regularisation.selection is not None
    return "forward" if one_update and not needed_before else "trainer"


def changed(group: Frozen, *names: str) -> list[str]:
    """The fields of these names that differ from their defaults. A form sends every field, so `model_fields_set` cannot
    tell which ones the user changed."""
    fields = type(group).model_fields
    return sorted(name for name in names if getattr(group, name) != fields[name].default)
