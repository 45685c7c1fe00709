"""Base classes of the loss specs, and the results that their functions return.

A loss spec is plain data: configs and step requests carry it, also where torch is not installed. Its method `compute`
is the loss, a pure function of `LossInputs`. So that both can be in one module, the modules of losses do not import
torch: `compute` calls methods of the tensors that it receives, and methods of `LossInputs`.

The estimators of KL(policy || reference) per token (joschu.net/blog/kl-approx.html) are here, too: l is the logprob of
a token under the policy, q under the reference.

Axes: N trained token of one micro-batch · P pair
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import ConfigDict, model_validator

from storage.serialization import Divisor, Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from engine.losses.inputs import LossInputs

LossNorm = Literal["token_mean", "sequence_mean", "token_sum", "constant"]
TermsNorm = Literal["token_mean", "sequence_mean", "token_sum"]
"""The norms that need no constant."""

KLEstimator = Literal["k1", "abs", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of each trained token, and metrics.

    Metrics are sums, so that they add up over micro-batches. A metric whose name ends in `_sum` is reported as a mean
    over the tokens that had a forward pass; one whose name ends in `_per_pair` is reported as a mean over the pairs,
    in `_per_preferred` and `_per_other` over the samples that are preferred, and over those that are not.
    """

    values_N: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    terms: tuple[Tensor, TermsNorm] | None = None
    """Further terms of the loss, (N,), that are not in `values_N` because they have the norm that is given here."""


@dataclass(frozen=True, slots=True)
class PairLoss:
    """The loss of each pair, by how much it favours the preferred sequence, and metrics as in TokenLoss."""

    values_P: Tensor
    margin_P: Tensor
    """Score of the preferred sequence minus that of the other one: above 0 where the model ranks the pair as given."""
    sums: dict[str, Tensor] = field(default_factory=dict)


class BaseLossSpec(Frozen):
    """Properties of a loss that the trainer reads before it runs a forward pass."""

    model_config = ConfigDict(allow_inf_nan=False)  # a request is JSON, which has no NaN and no infinity

    reads: ClassVar[Literal["logprobs", "values"]] = "logprobs"
    """Output of the model that the loss reads. "values" needs a model with a scalar head (engine.specs.adapters)."""
    pairwise: ClassVar[bool] = False
    """Whether the unit of the loss is a pair: two samples of one group, of which one is preferred. A pair always stays
    in one micro-batch."""
    labelled: ClassVar[bool] = False
    """Whether the loss reads a label of each sample, desirable or not, and the KL baseline of the whole batch."""
    uses_sampling_temperature: ClassVar[bool] = False
    """Whether the loss reads logprobs of the distribution that the policy samples from, so that a step divides the
    logits by the sampling temperature. Otherwise the step has temperature 1."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the logprobs of a reference policy, which the batch must have."""
        return False

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss reads the entropy of each trained token's distribution, which costs one pass more over the
        logits."""
        return False

    @property
    def needs_teacher_top(self) -> bool:
        """Whether the loss reads the logprobs of the teacher's most probable tokens, which the batch must have."""
        return False

    @property
    def zero_without_advantage(self) -> bool:
        """Whether a sample whose advantages are all 0 has a loss of exactly 0, so that it needs no forward pass."""
        return False

    @abstractmethod
    def compute(self, inputs: LossInputs) -> TokenLoss | PairLoss:
        """The loss of one micro-batch, before it is normalised over the minibatch."""


class NormalisedLossSpec(BaseLossSpec):
    """A loss per token that is normalised over the whole minibatch (engine.backends.torch.updates)."""

    norm: LossNorm = "token_mean"
    """How the losses of tokens become one number. token_mean: the mean over all trained tokens. sequence_mean: the mean
    over each sequence's tokens, then over sequences. token_sum: the sum. constant: the sum divided by the number of
    sequences and by norm_constant."""
    norm_constant: Divisor | None = None
    """Tokens per sequence that norm="constant" divides by, besides the number of sequences (arXiv:2503.20783)."""

    @model_validator(mode="after")
    def _constant_goes_with_its_norm(self) -> Self:
        if self.norm == "constant" and self.norm_constant is None:
            raise ValueError("norm='constant' divides by norm_constant tokens per sequence; give norm_constant")
        if self.norm != "constant" and self.norm_constant is not None:
            raise ValueError(
                f"norm={self.norm!r} does not use norm_constant, given {self.norm_constant}; leave it out, or set "
                "norm='constant'"
            )
        return self


def k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """l - q: unbiased; may be negative."""
    return logprobs_N - reference_N


def absolute(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """|l - q|: never negative; biased."""
    return (logprobs_N - reference_N).abs()


def k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """(l - q)² / 2: never negative; biased, with low variance."""
    return (logprobs_N - reference_N).square() / 2


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """exp(q - l) - (q - l) - 1: unbiased and never negative."""
    gap_N = reference_N - logprobs_N
    return gap_N.exp() - gap_N - 1


KL_ESTIMATORS: dict[KLEstimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
