"""Losses of distillation: a divergence of the student from the teacher at every trained token, over the teacher's K
most probable tokens and one bucket with the mass of all others (GKD, arXiv:2306.13649).

The reverse KL divergence to the teacher has no loss here: it is part of the advantages (tasks.batches.rl).

p is the distribution of the teacher, q that of the student. With K the whole vocabulary, the divergence is exact; with
less, it is a lower bound, because the tokens in the bucket are not told apart.

Axes: N trained token · K most probable token of the teacher
"""

from __future__ import annotations

from abc import abstractmethod
from math import log, log1p
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from engine.losses.base import NormalisedLossSpec, TokenLoss
from storage.serialization import Positive

if TYPE_CHECKING:
    from torch import Tensor

    from engine.losses.inputs import LossInputs

MIN_REST = 1e-6
"""Smallest mass of the bucket. Below it, float32 cannot tell the mass from the rounding of the other probabilities."""


class BaseDivergenceSpec(NormalisedLossSpec):
    """Base class of the losses that compare the distributions of teacher and student."""

    uses_sampling_temperature: ClassVar[bool] = True
    weight: Positive = 1.0
    """Factor of the loss."""

    @property
    def needs_teacher_top(self) -> bool:
        return True

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """weight · D(p, q) of each token, the sum of the terms of the K tokens and of the bucket."""
        student_NK, teacher_NK = inputs.require("top_NK"), inputs.require("teacher_top_NK")
        divergence_N = self._terms(teacher_NK, student_NK).sum(1) + self._terms(_rest(teacher_NK), _rest(student_NK))
        return TokenLoss(self.weight * divergence_N, {"divergence_sum": divergence_N.detach().sum()})

    @abstractmethod
    def _terms(self, teacher: Tensor, student: Tensor) -> Tensor:
        """The term of each token, from its logprobs log p and log q."""


class ForwardKLSpec(BaseDivergenceSpec):
    """The forward KL divergence KL(p || q): the student covers what the teacher finds probable."""

    kind: Literal["forward_kl"] = "forward_kl"

    def _terms(self, teacher: Tensor, student: Tensor) -> Tensor:
        """p·(log p - log q)."""
        return teacher.exp() * (teacher - student)


class JSDSpec(BaseDivergenceSpec):
    """The generalised Jensen-Shannon divergence β·KL(p || m) + (1 - β)·KL(q || m), m = βp + (1 - β)q (GKD, eq. 1)."""

    kind: Literal["jsd"] = "jsd"
    beta: float = Field(0.5, gt=0, lt=1)
    """Weight β of the teacher in the mixture. Near 0 the gradient is that of the forward KL divergence, near 1 that of
    the reverse one."""

    def _terms(self, teacher: Tensor, student: Tensor) -> Tensor:
        """β·p·(log p - log m) + (1 - β)·q·(log q - log m)."""
        mixture = (teacher + log(self.beta)).logaddexp(student + log1p(-self.beta))
        of_teacher = self.beta * teacher.exp() * (teacher - mixture)
        return of_teacher + (1 - self.beta) * student.exp() * (student - mixture)


def _rest(logprobs_NK: Tensor) -> Tensor:
    """(N,): log(1 - Σ exp(logprobs)), the logprob of the bucket, at least log(MIN_REST)."""
    total_N = logprobs_NK.logsumexp(1).clamp(max=log1p(-MIN_REST))
    return total_N.expm1().neg().log()


DistillationSpec = ForwardKLSpec | JSDSpec
"""Every loss of this module. A new one is added here."""
