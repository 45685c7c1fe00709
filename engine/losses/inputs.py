"""Inputs of the losses: what a forward pass returned, the columns of the batch, and sums over sequences.

All per-token tensors are flat and unpadded: the trained tokens of one micro-batch, sequence after sequence.

Axes: N trained token of one micro-batch · S its sequence · P its pair
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from engine.errors import BadSpec


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of a forward pass for the trained tokens, with gradient. What the loss does not read is None."""

    logprobs_N: Tensor | None = None
    """Log-probability of each trained token under the weights in training, in nats."""
    values_N: Tensor | None = None
    """Number that a scalar head gives at the position before each trained token."""
    entropy_N: Tensor | None = None
    """Entropy of the distribution that each trained token was drawn from, in nats."""
    top_NK: Tensor | None = None
    """Log-probability of each of the teacher's most probable tokens under the weights in training, in nats."""

    @classmethod
    def of_choices(cls, logprobs_NC: Tensor) -> Outputs:
        """The outputs of a forward pass that reads the trained token, and then the K tokens of the teacher."""
        return cls(logprobs_N=logprobs_NC[:, 0], top_NK=logprobs_NC[:, 1:])

    @property
    def any_N(self) -> Tensor:
        """The logprobs, or else the values: for code that reads the length, dtype and device only."""
        tensor_N = self.values_N if self.logprobs_N is None else self.logprobs_N
        assert tensor_N is not None
        return tensor_N


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of one micro-batch's loss. A column that the batch does not have is None."""

    outputs: Outputs
    lengths_S: tuple[int, ...] = ()
    """Trained tokens of each sequence; they add up to N."""
    old_N: Tensor | None = None
    """Logprobs under the old policy, which the ratio of a policy gradient divides by."""
    old_is_sampler: bool = False
    """Whether `old_N` are the logprobs under the distribution that the tokens were sampled from."""
    reference_N: Tensor | None = None
    """Logprobs under the reference policy of the KL term."""
    sampler_N: Tensor | None = None
    """Logprobs under the distribution that the tokens were sampled from."""
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None
    """Targets of the values."""
    old_values_N: Tensor | None = None
    """Values of the value model before this step."""
    selected_N: Tensor | None = None
    """1 for the tokens that Clip-Cov or KL-Cov treats in its own way, 0 for the others."""
    tangents_N: Tensor | None = None
    """Derivative of an external loss with respect to each logprob."""
    teacher_top_NK: Tensor | None = None
    """Log-probabilities of the teacher's K most probable tokens under the teacher."""
    preferred_S: Tensor | None = None
    """Whether each sequence is preferred, or labelled as desirable."""
    baseline_S: Tensor | None = None
    """KL baseline of KTO, in nats: one number of the whole batch, repeated for each sequence."""
    preferred_P: Tensor | None = None
    """Index of the preferred sequence of each pair."""
    dispreferred_P: Tensor | None = None
    """Index of the other sequence of each pair."""

    def require(self, name: str) -> Tensor:
        """The output or column of that name, such as "old_N". Raises BadSpec when it is None."""
        owner = self.outputs if hasattr(self.outputs, name) else self
        column = getattr(owner, name)
        if column is None:
            raise BadSpec(
                f"the loss needs {_DESCRIPTIONS[name]}, and the batch has none; prepare the batch for this loss"
            )
        return column  # type: ignore[no-any-return]

    def sum_by_sequence(self, values_N: Tensor) -> Tensor:
        """(S,): the sum of each sequence's values; 0 for a sequence without trained tokens."""
        # index_add from zeros, because a sequence without trained tokens has no index and must still have a sum.
        sequences = len(self.lengths_S)
        zeros_S = torch.zeros(sequences, dtype=values_N.dtype, device=values_N.device)
        return zeros_S.index_add(0, self._sequence_of_token(values_N.device), values_N)

    def mean_by_sequence(self, values_N: Tensor) -> Tensor:
        """(S,): the mean of each sequence's values; 0 for a sequence without trained tokens."""
        lengths_S = torch.tensor(self.lengths_S, dtype=values_N.dtype, device=values_N.device).clamp(min=1)
        return self.sum_by_sequence(values_N) / lengths_S

    def spread(self, values_S: Tensor) -> Tensor:
        """(N,): the value of each token's sequence."""
        return values_S.index_select(0, self._sequence_of_token(values_S.device))

    def by_preference(self, values_S: Tensor) -> tuple[Tensor, Tensor]:
        """The values of the preferred and of the dispreferred sequences, (P,) each."""
        preferred_P, dispreferred_P = self.require("preferred_P"), self.require("dispreferred_P")
        return values_S.index_select(0, preferred_P), values_S.index_select(0, dispreferred_P)

    @staticmethod
    def log_sigmoid(values_P: Tensor) -> Tensor:
        """log σ(x), which tensors have no method for."""
        return logsigmoid(values_P)

    def _sequence_of_token(self, device: torch.device) -> Tensor:
        """(N,) index of each token's sequence."""
        lengths_S = torch.tensor(list(self.lengths_S), dtype=torch.long, device=device)
        return torch.repeat_interleave(torch.arange(len(lengths_S), device=device), lengths_S)


_DESCRIPTIONS = {
    "logprobs_N": "logprobs",
    "values_N": "values of a scalar model",
    "entropy_N": "entropies",
    "top_NK": "logprobs of the teacher's most probable tokens",
    "teacher_top_NK": "the teacher's most probable tokens and their logprobs",
    "old_N": "old logprobs",
    "reference_N": "reference logprobs",
    "sampler_N": "the sampler's logprobs",
    "advantages_N": "advantages",
    "returns_N": "returns",
    "old_values_N": "old values",
    "selected_N": "selected tokens",
    "tangents_N": "tangents",
    "preferred_S": "labels of the samples",
    "baseline_S": "a KL baseline",
    "preferred_P": "pairs with one preferred sample each",
    "dispreferred_P": "pairs with one preferred sample each",
}
