"""The losses by the formulas of their papers, over plain forward passes of `transformers`, one sample at a time. The
engine's losses are compared with these, so they use no code of the engine.

Axes: T token of one sample · N trained token of it · V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.losses.spec import LossSpec
from engine.models.samples import Sample

EXACT = "tests_exact"


@dataclass
class Out:
    """The outputs for one sample's trained tokens."""

    logprobs: Tensor
    entropies: Tensor
    values: Tensor
    vocabulary: Tensor | None = None
    """Logprob of every token of the vocabulary, (N, V)."""


class Plain:
    """A load of the folder. `transformers` takes softmax and norms in float32 whatever the weights are; in float64
    both are replaced by what they mean."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, scalar: bool = False) -> None:
        auto: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
        self.scalar = scalar
        exact = dtype == torch.float64
        if exact:
            AttentionInterface.register(EXACT, _attend)
        self.module: nn.Module = auto.from_pretrained(
            folder, dtype=dtype, attn_implementation=EXACT if exact else "eager"
        ).eval()
        for norm in self.module.modules() if exact else ():
            if type(norm).__name__ == "LlamaRMSNorm":
                norm.forward = _norm_of(norm)  # type: ignore[method-assign]

    def out(self, sample: Sample, temperature: float = 1.0) -> Out:
        ids_T = torch.tensor(sample.token_ids)
        trained_T = torch.tensor(sample.loss_mask[1:]) > 0
        none = torch.zeros(0)
        if self.scalar:
            hidden_TH = self.module.model(input_ids=ids_T.unsqueeze(0), use_cache=False).last_hidden_state[0]  # type: ignore
            return Out(none, none, self.module.score(hidden_TH)[:-1, 0][trained_T])  # type: ignore
        logits_TV = self.module(input_ids=ids_T.unsqueeze(0), use_cache=False).logits[0, :-1]
        logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)) / temperature
        p_TV = torch.softmax(logits_TV, -1)
        log_p_TV = torch.log_softmax(logits_TV, -1)
        token_T = log_p_TV[torch.arange(len(ids_T) - 1), ids_T[1:]]
        return Out(token_T[trained_T], -(p_TV * log_p_TV).sum(-1)[trained_T], none, log_p_TV[trained_T])

    def numbers(self, sample: Sample) -> list[float]:
        with torch.no_grad():
            out = self.out(sample)
        return (out.values if self.scalar else out.logprobs).tolist()

    def loss_and_gradient(
        self, spec: LossSpec, samples: Sequence[Sample], temperature: float = 1.0
    ) -> tuple[float, dict[str, Tensor]]:
        loss = DEFINITIONS[spec.kind](spec, samples, [self.out(s, temperature) for s in samples])
        parameters = dict(self.module.named_parameters())
        grads = torch.autograd.grad(loss, list(parameters.values()))
        return loss.item(), dict(zip(parameters, grads, strict=True))


def _norm_of(norm: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: norm.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm.variance_epsilon)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal, one sequence without padding."""
    times, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query @ key.transpose(2, 3) * scaling
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -math.inf).softmax(-1) @ value).transpose(1, 2), None


# -- formulas ------------------------------------------------------------------------------------------------------


def normalised(spec: Any, values: Sequence[Tensor]) -> Tensor:
    """The loss of a minibatch, from the token losses of each sample."""
    if spec.norm == "token_mean":
        return sum(v.sum() for v in values) / sum(len(v) for v in values)  # type: ignore[return-value]
    if spec.norm == "sequence_mean":
        return sum(v.sum() / len(v) for v in values) / len(values)  # type: ignore[return-value]
    if spec.norm == "token_sum":
        return sum(v.sum() for v in values)  # type: ignore[return-value]
    return sum(v.sum() / spec.norm_constant for v in values) / len(values)  # type: ignore[return-value]


def _cross_entropy(spec: Any, samples: Sequence[Sample], outs: Sequence[Out]) -> Tensor:
    return normalised(spec, [-out.logprobs for out in outs])


def _tangents(_: Any, samples: Sequence[Sample], outs: Sequence[Out]) -> Tensor:
    terms = []
    for s, out in zip(samples, outs, strict=True):
        terms += [tangent * logprob for tangent, logprob in zip(s.tangents, out.logprobs, strict=True)]
    return torch.stack(terms).sum()


def _objective(spec: Any, ratio: Tensor, advantage: float) -> Tensor:
    """The clipped surrogate of one token, by cases: a ratio beyond its bound, on the side that the advantage
    favours, gains nothing more."""
    if advantage >= 0:
        return advantage * (ratio if ratio < 1 + spec.clip_high else torch.full_like(ratio, 1 + spec.clip_high))
    bound = getattr(spec, "dual_clip", None) or math.inf
    if ratio < 1 - spec.clip_low:
        return torch.full_like(ratio, advantage * (1 - spec.clip_low))
    return advantage * (ratio if ratio < bound else torch.full_like(ratio, bound))


def _kl(spec: Any, logprob: Tensor, reference: float) -> Tensor:
    gap = logprob - reference
    if spec.kl_estimator == "k1":
        return gap
    if spec.kl_estimator == "abs":
        return gap if gap > 0 else -gap
    if spec.kl_estimator == "k2":
        return gap**2 / 2
    return torch.exp(-gap) + gap - 1


def _bounded(spec: Any, gap: Tensor, advantage: float) -> Tensor:
    """The logarithm of a ratio, bounded on the side that the advantage favours."""
    if advantage > 0:
        return gap if gap < spec.clip_high else torch.full_like(gap, spec.clip_high)
    return gap if gap > -spec.clip_low else torch.full_like(gap, -spec.clip_low)


def _is_kept(mask: Any, s: Any, i: int, logprob: float) -> bool:
    """Whether a token is trained, from the definitions of the masks."""
    logs = [old - sampler for old, sampler in zip(s.old_logprobs, s.sampler_logprobs, strict=True)]
    if mask.kind == "token_ratio":
        return bool(mask.low <= math.exp(logs[i]) <= mask.high)
    if mask.kind == "sequence_ratio":
        return bool(mask.low <= math.prod(map(math.exp, logs)) ** (1 / len(logs)) <= mask.high)
    change = math.exp(logprob) - math.exp(s.sampler_logprobs[i])
    if s.advantages[i] > 0:
        return bool(change <= mask.high)
    return bool(s.advantages[i] == 0 or change >= -mask.low)


def _policy(spec: Any, samples: Sequence[Sample], outs: Sequence[Out]) -> Tensor:
    values = []
    for s, out in zip(samples, outs, strict=True):
        gaps = [logprob - old for logprob, old in zip(out.logprobs, s.old_logprobs, strict=True)]
        mine = []
        for i, logprob in enumerate(out.logprobs):
            if spec.kind == "gspo":
                gained = _objective(spec, torch.exp(sum(gaps) / len(gaps)), s.advantages[i])
            elif spec.kind == "gmpo":
                bounded = [_bounded(spec, gap, s.advantages[place]) for place, gap in enumerate(gaps)]
                gained = s.advantages[i] * torch.exp(sum(bounded) / len(bounded))
            elif spec.kind == "sapo":
                tau = spec.tau_positive if s.advantages[i] > 0 else spec.tau_negative
                gained = s.advantages[i] * 4 / tau / (1 + torch.exp(-tau * (torch.exp(gaps[i]) - 1)))
            elif spec.kind == "grpo":
                gained = _objective(spec, torch.exp(gaps[i]), s.advantages[i])
            elif spec.kind == "clip_cov":
                gained = _objective(spec, torch.exp(gaps[i]), s.advantages[i]) * (1 - s.selected[i])
            elif spec.kind == "kl_cov":
                gained = torch.exp(gaps[i]) * s.advantages[i] - spec.cov_kl * s.selected[i] * torch.abs(gaps[i])
            else:
                weight = min(max(math.exp(gaps[i].item()), 1 - spec.clip_low), 1 + spec.clip_high)
                gained = weight * s.advantages[i] * logprob
            if spec.importance_cap or spec.importance_mask:
                weight = math.exp(s.old_logprobs[i] - s.sampler_logprobs[i])
                kept = spec.importance_mask is None or _is_kept(spec.importance_mask, s, i, logprob.item())
                gained = gained * (min(weight, spec.importance_cap or math.inf) if kept else 0)
            kl = _kl(spec, logprob, s.reference_logprobs[i])
            if spec.kl_importance:
                kl = kl * torch.exp(sum(gaps) / len(gaps) if spec.kind == "gspo" else gaps[i])
            mine.append(-gained + spec.kl_beta * kl - spec.entropy_coef * out.entropies[i])
        values.append(torch.stack(mine))
    return normalised(spec, values)


def _divergence(spec: Any, samples: Sequence[Sample], outs: Sequence[Out]) -> Tensor:
    values = []
    for s, out in zip(samples, outs, strict=True):
        mine = []
        for row, ids, logprobs in zip(out.vocabulary, s.teacher_top_ids, s.teacher_top_logprobs, strict=True):
            others = [index for index in range(len(row)) if index not in ids]
            q = torch.stack([*(torch.exp(row[index]) for index in ids), torch.exp(row[others]).sum()])
            p = torch.tensor([math.exp(logprob) for logprob in logprobs], dtype=q.dtype)
            p = torch.cat([p, 1 - p.sum().unsqueeze(0)])
            if spec.kind == "forward_kl":
                mine.append(spec.weight * (p * torch.log(p / q)).sum())
                continue
            m = spec.beta * p + (1 - spec.beta) * q
            of_teacher, of_student = (p * torch.log(p / m)).sum(), (q * torch.log(q / m)).sum()
            mine.append(spec.weight * (spec.beta * of_teacher + (1 - spec.beta) * of_student))
        values.append(torch.stack(mine))
    return normalised(spec, values)


def _pairs(samples: Sequence[Sample], numbers: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    pairs = []
    for group in sorted({s.group for s in samples}):
        (good,) = (n for s, n in zip(samples, numbers, strict=True) if s.group == group and s.preferred)
        (bad,) = (n for s, n in zip(samples, numbers, strict=True) if s.group == group and not s.preferred)
        pairs.append((good, bad))
    return pairs


def _dpo(spec: Any, samples: Sequence[Sample], outs: Sequence[Out]) -> Tensor:
    leads = []
    for s, out in zip(samples, outs, strict=True):
        reference = 0.0 if spec.reference_free else sum(s.reference_logprobs)  # type: ignore[arg-type]
        leads.append((out.logprobs.sum() - reference) / (len(out.logprobs) if spec.length_normalised else 1))
    values = []
    for good, bad in _pairs(samples, leads):
        h = spec.beta * (good - bad)
        if spec.variant == "ipo":
            values.append((good - bad - 1 / (2 * spec.beta)) ** 2)
        else:
            wrong = spec.label_smoothing or 0
            values.append((1 - wrong) * torch.log1p(torch.exp(-h)) + wrong * torch.log1p(torch.exp(h)))
    taught = [good for good, _ in _pairs(samples, [-out.logprobs.mean() for out in outs])]
    return torch.stack(values).mean() + spec.rpo_alpha * torch.stack(taught).mean()


def _simpo(spec: Any, samples: Sequence[Sample], outs: Sequence[Out]) -> Tensor:
    values = []
    for good, bad in _pairs(samples, [out.logprobs.mean() for out in outs]):
        values.append(torch.log1p(torch.exp(spec.gamma - spec.beta * (good - bad))))
    return torch.stack(values).mean()


def _orpo(spec: Any, samples: Sequence[Sample], outs: Sequence[Out]) -> Tensor:
    values = []
    for good, bad in _pairs(samples, [torch.exp(out.logprobs.mean()) for out in outs]):
        ratio = good / (1 - good) / (bad / (1 - bad))
        values.append(-torch.log(good) - spec.beta * torch.log(1 / (1 + 1 / ratio)))
    return torch.stack(values).mean()


def _kto(spec: Any, samples: Sequence[Sample], outs: Sequence[Out]) -> Tensor:
    values = []
    for s, out in zip(samples, outs, strict=True):
        gain = spec.beta * (out.logprobs.sum() - sum(s.reference_logprobs) - s.kl_baseline)  # type: ignore[arg-type]
        sign, weight = (1, spec.desirable_weight) if s.preferred else (-1, spec.undesirable_weight)
        values.append(weight * (1 - 1 / (1 + torch.exp(-sign * gain))))
    return torch.stack(values).mean()


def _ranking(_: Any, samples: Sequence[Sample], outs: Sequence[Out]) -> Tensor:
    pairs = _pairs(samples, [out.values.sum() for out in outs])
    return torch.stack([torch.log1p(torch.exp(bad - good)) for good, bad in pairs]).mean()


def _mse(spec: Any, samples: Sequence[Sample], outs: Sequence[Out]) -> Tensor:
    values = []
    for s, out in zip(samples, outs, strict=True):
        values.append((out.values - torch.tensor(s.returns, dtype=out.values.dtype)) ** 2)
    return normalised(spec, values)


def _trust_region_mse(spec: Any, samples: Sequence[Sample], outs: Sequence[Out]) -> Tensor:
    values = []
    for s, out in zip(samples, outs, strict=True):
        mine = []
        for v, target, old in zip(out.values, s.returns, s.old_values, strict=True):
            far = v.item() - old
            near = v if abs(far) < spec.clip else torch.full_like(v, old + math.copysign(spec.clip, far))
            mine.append((v - target) ** 2 if abs(v - target) > abs(near - target) else (near - target) ** 2)
        values.append(torch.stack(mine))
    return normalised(spec, values)


DEFINITIONS: dict[str, Callable[[Any, Sequence[Sample], Sequence[Out]], Tensor]] = {
    "cross_entropy": _cross_entropy, "tangents": _tangents, "grpo": _policy, "gspo": _policy, "cispo": _policy,
    "gmpo": _policy, "sapo": _policy, "clip_cov": _policy, "kl_cov": _policy,
    "forward_kl": _divergence, "jsd": _divergence,
    "dpo": _dpo, "simpo": _simpo, "orpo": _orpo, "kto": _kto, "ranking": _ranking, "mse": _mse,
    "trust_region_mse": _trust_region_mse,
}  # fmt: skip
