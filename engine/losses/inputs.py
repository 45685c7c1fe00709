"""What a loss takes and gives. Axes: N trained token of one micro-batch · S its sequence · P its pair."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from engine.errors import BadSpec


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a forward gave for the trained tokens, with gradient."""

    logprobs_N: Tensor | None = None
    """Nats, under the weights in training."""
    values_N: Tensor | None = None
    """Of a scalar head, at the position before each trained token."""
    entropy_N: Tensor | None = None
    """Nats, of the distribution that each trained token was drawn from; only when the loss reads it."""

    @property
    def any_N(self) -> Tensor:
        """Whichever there is: for its length, dtype and device."""
        found = self.logprobs_N if self.logprobs_N is not None else self.values_N
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Flat over the micro-batch's trained tokens, sequence after sequence; what the batch does not have is None."""

    outputs: Outputs
    lengths_S: tuple[int, ...] = ()
    """Trained tokens of each sequence; they add up to N."""
    old_N: Tensor | None = None
    """Under the policy that is being improved on."""
    reference_N: Tensor | None = None
    sampler_N: Tensor | None = None
    """Under the distribution that was sampled from."""
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None
    """What a value should be."""
    old_values_N: Tensor | None = None
    tangents_N: Tensor | None = None
    preferred_P: Tensor | None = None
    """Sequence of each pair that is preferred; its other one stands in dispreferred_P."""
    dispreferred_P: Tensor | None = None

    def needed(self, name: str) -> Tensor:
        """The column of that name. Raises BadSpec when the batch has none."""
        column = getattr(self.outputs if hasattr(self.outputs, name) else self, name)
        if column is None:
            raise BadSpec(
                f"the loss needs {_SAID[name]}, and the batch has none; prepare the batch for this loss"
            )
        return column  # type: ignore[no-any-return]


_SAID = {
    "logprobs_N": "logprobs",
    "values_N": "values of a scalar model",
    "entropy_N": "entropies",
    "old_N": "old logprobs",
    "reference_N": "reference logprobs",
    "sampler_N": "the sampler's logprobs",
    "advantages_N": "advantages",
    "returns_N": "returns",
    "old_values_N": "old values",
    "tangents_N": "tangents",
    "preferred_P": "pairs, one of each preferred",
    "dispreferred_P": "pairs, one of each preferred",
}


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss per trained token. Metrics are sums, so that they add over micro-batches: a name that ends in `_sum` becomes
    a mean over the tokens that had a pass, one in `_per_pair` a mean over the pairs."""

    values_N: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PairLoss:
    """Loss per pair; metrics as in TokenLoss."""

    values_P: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
