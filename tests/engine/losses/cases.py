"""The variants of every loss that the tests run, and samples with the columns that all of them read.

`VARIANTS` has an entry for each kind of the spec union: tests that walk it fail on a kind that it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from engine.backends.protocol import Objective
from engine.backends.torch.packing import Packed
from engine.backends.torch.updates import count_totals, micro_batch_loss
from engine.losses.distillation import ForwardKLSpec, JSDSpec
from engine.losses.inputs import Outputs
from engine.losses.likelihood import CrossEntropySpec, TangentsSpec
from engine.losses.pairs import DPOSpec, KTOSpec, ORPOSpec, RankingSpec, SimPOSpec
from engine.losses.policy_gradient import (
    CISPOSpec,
    ClipCovSpec,
    GMPOSpec,
    GRPOSpec,
    GSPOSpec,
    KLCovSpec,
    ProbabilityMask,
    SAPOSpec,
    SequenceRatioMask,
    TokenRatioMask,
)
from engine.losses.spec import LossSpec
from engine.losses.values import MSESpec, TrustRegionMSESpec
from engine.models.samples import Sample

_CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "kl_beta": 0.0}

_SEQUENCES = SequenceRatioMask(low=0.9, high=1.45)
_PROBABILITIES = ProbabilityMask(low=1e-3, high=1e-3)

VARIANTS: dict[str, dict[str, LossSpec]] = {
    "cross_entropy": {
        "token_mean": CrossEntropySpec(),
        "sequence_mean": CrossEntropySpec(norm="sequence_mean"),
    },
    "tangents": {"": TangentsSpec()},
    "grpo": {
        "kl": GRPOSpec(clip_low=0.2, clip_high=0.2, kl_beta=0.3),
        "dual_clip": GRPOSpec(**_CLIP, dual_clip=3.0, norm="constant", norm_constant=5),
        "k1": GRPOSpec(**_CLIP | {"kl_beta": 0.3}, kl_estimator="k1", norm="sequence_mean"),
        "abs": GRPOSpec(**_CLIP | {"kl_beta": 0.3}, kl_estimator="abs", norm="token_sum"),
        "k2": GRPOSpec(**_CLIP | {"kl_beta": 0.3}, kl_estimator="k2"),
        "kl_importance": GRPOSpec(**_CLIP | {"kl_beta": 0.3}, kl_importance=True),
        "entropy": GRPOSpec(**_CLIP, entropy_coef=0.5),
        "importance": GRPOSpec(**_CLIP, importance_cap=2.0),
        "token_mask": GRPOSpec(**_CLIP, importance_mask=TokenRatioMask(low=0.8, high=2.0)),
        "sequence_mask": GRPOSpec(**_CLIP, importance_mask=_SEQUENCES, norm="sequence_mean"),
        "probability_mask": GRPOSpec(**_CLIP | {"kl_beta": 0.3}, importance_mask=_PROBABILITIES, importance_cap=2.0),
        "all": GRPOSpec(**_CLIP | {"kl_beta": 0.3}, dual_clip=3.0, entropy_coef=0.5, importance_cap=2.0),
    },
    "gspo": {
        "kl": GSPOSpec(clip_low=0.1, clip_high=0.1, kl_beta=0.3),
        "kl_importance": GSPOSpec(clip_low=0.1, clip_high=0.1, kl_beta=0.3, kl_importance=True),
        "token_mean": GSPOSpec(**_CLIP, norm="token_mean"),
        "sequence_mask": GSPOSpec(**_CLIP, importance_mask=_SEQUENCES),
        "all": GSPOSpec(**_CLIP | {"kl_beta": 0.3}, entropy_coef=0.5, importance_cap=2.0),
    },
    "cispo": {
        "probability_mask": CISPOSpec(**_CLIP, importance_mask=_PROBABILITIES),
        "kl": CISPOSpec(clip_low=0.2, clip_high=0.2, kl_beta=0.3),
        "all": CISPOSpec(**_CLIP | {"kl_beta": 0.3}, entropy_coef=0.5, importance_cap=2.0, norm="sequence_mean"),
    },
    "gmpo": {
        "token_mask": GMPOSpec(**_CLIP, importance_mask=TokenRatioMask(low=0.8, high=2.0)),
        "kl": GMPOSpec(clip_low=0.2, clip_high=0.28, kl_beta=0.3),
        "all": GMPOSpec(**_CLIP | {"kl_beta": 0.3}, entropy_coef=0.5, importance_cap=2.0, norm="token_mean"),
    },
    "sapo": {
        "kl": SAPOSpec(kl_beta=0.3),
        "all": SAPOSpec(tau_negative=2.0, kl_beta=0.3, entropy_coef=0.5, importance_cap=2.0, norm="token_mean"),
    },
    "clip_cov": {
        "kl": ClipCovSpec(clip_low=0.2, clip_high=0.28, kl_beta=0.3),
        "token_mask": ClipCovSpec(**_CLIP, importance_mask=TokenRatioMask(low=0.8, high=2.0)),
    },
    "kl_cov": {"": KLCovSpec(kl_beta=0.0, cov_kl=0.7), "kl": KLCovSpec(kl_beta=0.3, norm="sequence_mean")},
    "forward_kl": {"": ForwardKLSpec(), "sequence_mean": ForwardKLSpec(norm="sequence_mean", weight=0.7)},
    "jsd": {"": JSDSpec(), "uneven": JSDSpec(beta=0.1, norm="token_sum", weight=2.0)},
    "dpo": {
        "sigmoid": DPOSpec(beta=0.3),
        "ipo": DPOSpec(beta=0.3, variant="ipo"),
        "cdpo": DPOSpec(beta=0.3, variant="cdpo", label_smoothing=0.1),
        "means": DPOSpec(beta=0.3, variant="ipo", length_normalised=True),
        "all": DPOSpec(beta=0.3, length_normalised=True, rpo_alpha=0.7, reference_free=True),
    },
    "simpo": {"": SimPOSpec()},
    "orpo": {"": ORPOSpec(beta=0.6)},
    "kto": {"": KTOSpec(beta=0.3), "weights": KTOSpec(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)},
    "ranking": {"": RankingSpec()},
    "mse": {"token_mean": MSESpec(), "sequence_mean": MSESpec(norm="sequence_mean")},
    "trust_region_mse": {"token_mean": TrustRegionMSESpec(clip=0.2)},
}

SPECS: dict[str, LossSpec] = {
    f"{kind}-{name}" if name else kind: spec for kind, named in VARIANTS.items() for name, spec in named.items()
}
ON_LOGPROBS = {name: spec for name, spec in SPECS.items() if spec.reads == "logprobs"}

SHAPES: list[tuple[list[int], list[float], str]] = [
    ([10, 11, 12, 13], [1.0] * 6, "a"),
    ([20, 21], [1.0, 1.0, 0.0, 0.0, 1.0], "b"),
    ([10, 11, 12, 13], [1.0] * 3, "a"),
    ([30, 31, 32], [1.0] * 4, "c"),
    ([20, 21], [1.0] * 1, "b"),
    ([40, 31], [1.0] * 7, "c"),
]
"""(prompt, weights after it, group): three pairs whose samples are not neighbours. One pair has unequal prompts."""

# e^gap stays clear of what is clipped at, 0.8, 0.9, 1.1, 1.2, 1.28 and 3; so do the caps and the values' trust region
_FROM_OLD = (0.05, -0.1, 0.5, -0.4, 1.5, -0.02, -1.3, 0.3)
_FROM_REFERENCE = (0.3, -0.2, 0.1, -0.6, 0.4)
_OLD_FROM_SAMPLER = (0.2, -0.3, 1.1)
_ADVANTAGES = (0.7, -1.2, 2.0, -0.4, -1.0, 1.5, -0.8)
_TANGENTS = (0.3, -0.7, 0.2, 1.1)
TEACHER_TOP = ((0.5, 0.2, 0.1), (0.9, 0.05, 0.01), (0.4, 0.3, 0.05))
"""Probabilities of the teacher's most probable tokens."""
_SELECTED = (0.0, 1.0, 0.0, 0.0, 1.0)
_VALUE_FROM_OLD = (0.05, 0.5, -0.1, -0.45, 0.3)
_VALUE_FROM_RETURN = (0.4, -0.7, 0.9, -0.2)


def sample(prompt: list[int], weights: list[float], group: str, **columns: Any) -> Sample:
    """A sample of the prompt and tokens 100, 101, … after it, which have these weights."""
    first = 100 + 7 * len(weights) + len(prompt)
    return Sample([*prompt, *range(first, first + len(weights))], [0.0] * len(prompt) + weights, group, **columns)


def samples_near(outputs_of: Callable[[Sample], list[float]], *, scalar: bool) -> list[Sample]:
    """Three pairs with every column that a loss reads, at fixed distances from the model's outputs for the trained
    tokens."""
    places = {numbers: cycle(numbers) for numbers in _USED}
    samples, seen = [], set()
    for prompt, weights, group in SHAPES:
        # Distances from the outputs come from fixed cycles, so that no value is at a bound.
        now = outputs_of(sample(prompt, weights, group))
        away = {numbers: list(islice(place, len(now))) for numbers, place in places.items()}

        def below(base: list[float], numbers: tuple[float, ...], away: dict = away) -> list[float]:
            return [value - gap for value, gap in zip(base, away[numbers], strict=True)]

        # A scalar loss reads returns and old values, a policy loss reads logprobs and advantages.
        old = below(now, _FROM_OLD)
        columns = {
            "returns": below(now, _VALUE_FROM_RETURN),
            "old_values": below(now, _VALUE_FROM_OLD),
        } if scalar else {
            "old_logprobs": old,
            "reference_logprobs": below(now, _FROM_REFERENCE),
            "sampler_logprobs": below(old, _OLD_FROM_SAMPLER),
            "advantages": away[_ADVANTAGES],
            "tangents": away[_TANGENTS],
            "selected": away[_SELECTED],
            **teacher_top(sample(prompt, weights, group)),
        }  # fmt: skip
        samples.append(sample(prompt, weights, group, preferred=group in seen, kl_baseline=0.4, **columns))
        seen.add(group)
    return samples


def teacher_top(bare: Sample) -> dict[str, Any]:
    """Three tokens before each trained token, of which the second is that token, and their logprobs."""
    ids, logprobs = [], []
    for place, token in enumerate(bare.token_ids[bare.loss_mask]):
        ids.append([3 + place if token != 3 + place else 50, int(token), 60 - place])
        logprobs.append([math.log(p) for p in TEACHER_TOP[place % 3]])
    return {"teacher_top_ids": ids, "teacher_top_logprobs": logprobs}


_USED = (
    _FROM_OLD, _FROM_REFERENCE, _OLD_FROM_SAMPLER, _ADVANTAGES, _TANGENTS, _SELECTED, _VALUE_FROM_OLD,
    _VALUE_FROM_RETURN,
)  # fmt: skip


def loss_of(spec: LossSpec, samples: list[Sample], outputs: Outputs) -> Tensor:
    """The engine's loss of a whole minibatch with these outputs, in the order of `samples`."""

    def given(_: Packed) -> Outputs:
        return outputs

    return micro_batch_loss(given, samples, Objective(spec), count_totals(samples), device=torch.device("cpu"))[0]
