"""One optimizer update, as every trainer makes it: which samples get a pass, the loss of a micro-batch, AdamW's groups,
what memory that does not do means, and the numbers of the report. The trainers differ in where the gradient is kept.

Axes: N trained token
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from engine.backends.protocol import Objective
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.packing import Packable, Packed, longest_unit, pack
from engine.errors import BadSpec, OutOfMemory, SampleTooLong
from engine.losses.base import PairLoss
from engine.losses.inputs import LossInputs, Outputs
from engine.losses.normalisation import token_weights
from engine.losses.spec import LossSpec
from engine.models.samples import PER_TOKEN, Sample
from storage.chain.records import OptimizerSpec

T = TypeVar("T")
Forward = Callable[[Packed], Outputs]
"""What the objective's loss reads of the model for the trained tokens, with gradient."""

_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",  # of an allocation that does not go by torch's allocator
)
_OLD = {"trainer": "old_logprobs", "sampler": "sampler_logprobs"}


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the whole minibatch, samples without gradient included."""

    tokens: int
    sequences: int
    groups: int


@dataclass(slots=True)
class Accumulated:
    """What the micro-batches of one update added up to, besides the gradient."""

    max_tokens: int
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    micro_batches: int = 0


def totals_of(samples: Sequence[Sample]) -> Totals:
    """Raises BadSpec when nothing is trained."""
    tokens = sum(sample.trained for sample in samples)
    if tokens == 0:
        raise BadSpec("no token of the minibatch is trained (every weight is 0); leave such samples out")
    return Totals(tokens, len(samples), len({sample.group for sample in samples}))


def without_gradient(sample: Sample, objective: Objective) -> bool:
    """True for a policy-gradient sample whose loss is exactly 0 whatever the weights: no pass is spent on it. A sample
    of a pair always has its part."""
    loss = objective.loss
    if loss.pairwise:
        return False
    if sample.trained == 0:
        return True
    if not loss.zero_without_advantage:
        return False
    return sample.advantages is not None and not any(sample.advantages)


def check_sequences(sequences: Sequence[Packable], *, vocab_size: int, context_length: int) -> None:
    """Positions beyond the context were never trained: rotary ones extrapolate without a word. Ids beyond the
    vocabulary have no row in the embedding.

    Raises:
        SampleTooLong: a sequence passes the context.
        BadSpec: a token id that the model does not have.
    """
    for index, sequence in enumerate(sequences):
        ids = sequence.token_ids
        if len(ids) > context_length:
            raise SampleTooLong(
                f"a sequence of {len(ids)} tokens (group {sequence.group!r}) passes the model's context "
                f"of {context_length}; shorten it or leave it out"
            )
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise BadSpec(
                f"sample {index} (group {sequence.group!r}) has the token id {wrong} at position "
                f"{ids.index(wrong)}; the model's are 0..{vocab_size - 1}. Was it rendered with another model's "
                "tokenizer?"
            )


def check_reads(loss: LossSpec, *, scalar: bool, name: str) -> None:
    """Raises BadSpec when the model `name` does not give what the loss reads."""
    if (loss.reads == "values") != scalar:
        gives, wanted = ("one number per token", "logprobs") if scalar else ("logprobs", "one number per token")
        other = "a causal language model" if scalar else "a scalar head: builder.into_scoring_model()"
        raise BadSpec(f"{name} gives {gives}, and the loss {loss.kind!r} reads {wanted}; train {other}")


def check_gives(wanted: Literal["logprobs", "values"], *, scalar: bool, name: str) -> None:
    """Raises BadSpec when the model `name` has the other head."""
    if (wanted == "values") != scalar:
        has, other = ("a scalar head", "values or scores") if scalar else ("a language head", "logprobs")
        do = "a causal language model" if scalar else "one of builder.into_scoring_model()"
        raise BadSpec(f"{name} has {has}, and no {wanted}; ask it for {other}, or use {do}")


def forward_of(model: CausalLM, objective: Objective) -> Forward:
    """The model's forward for the objective's loss."""
    loss, temperature = objective.loss, objective.temperature

    def forward(packed: Packed) -> Outputs:
        if loss.reads == "values":
            return Outputs(values_N=model.values(packed))
        if loss.needs_entropy:
            logprobs_N, entropy_N = model.logprobs_and_entropy(packed, temperature=temperature)
            return Outputs(logprobs_N=logprobs_N, entropy_N=entropy_N)
        return Outputs(logprobs_N=model.logprobs(packed, temperature=temperature))

    return forward


def micro_batch_loss(
    forward: Forward, samples: Sequence[Sample], objective: Objective, totals: Totals, *, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """What these samples add to the loss of the whole minibatch, with its gradient; and metrics as sums over tokens."""
    outputs = forward(pack(samples, device=device))
    inputs = _inputs(outputs, samples, objective)
    found = objective.loss.compute(inputs)
    if isinstance(found, PairLoss):
        return found.values_P.sum() / totals.groups, found.sums
    weights_N = token_weights(
        inputs.lengths_S,
        norm=getattr(objective.loss, "norm", "token_sum"),
        total_tokens=totals.tokens,
        total_sequences=totals.sequences,
        constant=getattr(objective.loss, "norm_constant", None),
    ).to(outputs.any_N)
    return (found.values_N * weights_N).sum(), found.sums


def _inputs(outputs: Outputs, samples: Sequence[Sample], objective: Objective) -> LossInputs:
    def column(name: str) -> Tensor | None:
        return _column(samples, name, outputs.any_N)

    preferred_P, dispreferred_P = _pairs(samples, outputs.any_N.device) if objective.loss.pairwise else (None, None)
    return LossInputs(
        outputs=outputs,
        lengths_S=tuple(sample.trained for sample in samples),
        old_N=column(_OLD[objective.old_logprobs]),
        reference_N=column("reference_logprobs"),
        sampler_N=column("sampler_logprobs"),
        advantages_N=column("advantages"),
        returns_N=column("returns"),
        old_values_N=column("old_values"),
        tangents_N=column("tangents"),
        preferred_P=preferred_P,
        dispreferred_P=dispreferred_P,
    )


def _pairs(samples: Sequence[Sample], device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of the preferred and of the other sample of each pair."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        members[sample.group].append(index)
    ordered = [sorted(pair, key=lambda index: not samples[index].preferred) for pair in members.values()]
    indices = torch.tensor(ordered, dtype=torch.long, device=device)
    return indices[:, 0], indices[:, 1]


def check_pairs(samples: Sequence[Sample]) -> None:
    """Raises BadSpec, which names the pair, unless every group is one: two samples with trained tokens, one of them
    preferred."""
    members: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        members[sample.group].append(sample)
    for group, pair in members.items():
        if not group:
            raise BadSpec(f"{len(pair)} samples belong to no group, and the loss is one of pairs; give each its pair")
        marks = [sample.preferred for sample in pair]
        if len(pair) != 2 or marks.count(True) != 1 or marks.count(False) != 1:
            raise BadSpec(
                f"the group {group!r} has {len(pair)} samples, preferred: {marks}; a pair has two, one of each"
            )
        for sample in pair:
            if sample.trained == 0:
                which = "preferred" if sample.preferred else "other"
                raise BadSpec(f"the {which} sample of the pair {group!r} has no trained token; leave the pair out")


def validate_batch(samples: Sequence[Sample], objective: Objective) -> None:
    """Raises what the loss would raise over the samples' columns: for all micro-batches, and on every rank the same,
    before any of them starts."""
    if not samples:
        return
    for name in PER_TOKEN:
        _check_column(samples, name)
    tried = [min(samples, key=lambda sample: sample.trained)]
    if objective.loss.pairwise:
        check_pairs(samples)
        tried = [sample for sample in samples if sample.group == tried[0].group]

    def nothing(packed: Packed) -> Outputs:
        zeros_N = torch.zeros(len(packed.target_N))
        return Outputs(zeros_N, zeros_N, zeros_N)

    micro_batch_loss(nothing, tried, objective, totals_of(tried), device=torch.device("cpu"))


def _column(samples: Sequence[Sample], name: str, like: Tensor) -> Tensor | None:
    """One optional per-token column of all samples, flat; None when no sample has it."""
    columns = [getattr(sample, name) for sample in samples]
    if columns[0] is None:
        return None
    return torch.tensor([v for column in columns for v in column], dtype=like.dtype, device=like.device)


def _check_column(samples: Sequence[Sample], name: str) -> None:
    if len({getattr(sample, name) is None for sample in samples}) > 1:
        raise BadSpec(f"some samples of the batch have {name} and some have none; give it for all or for none")


def metrics_of(
    sums: Mapping[str, float], *, passed: Sequence[Sample], totals: Totals, grad_norm: float
) -> dict[str, float]:
    """`passed`: the samples that a pass was spent on. See TokenLoss for what the names mean."""
    counts = {
        "_sum": sum(sample.trained for sample in passed),
        "_per_pair": len({sample.group for sample in passed}),
    }
    means = {
        name.removesuffix(ending) + "_mean": value / counts[ending]
        for name, value in sums.items()
        for ending in counts
        if name.endswith(ending)
    }
    return {**means, "loss": sums["loss"], "grad_norm": grad_norm, "tokens": float(totals.tokens)}


def adamw_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, object]]:
    """Matrices, which decay, then the rest: decay pulls norms and biases towards zero that should stay near one."""
    return [
        {"params": [p for p in parameters if p.ndim >= 2]},
        {"params": [p for p in parameters if p.ndim < 2]},
    ]


def set_adamw(groups: Iterable[dict[str, object]], spec: OptimizerSpec, *, decayed: Callable[[int], bool]) -> None:
    """`decayed`: whether the group of this index holds matrices."""
    for index, group in enumerate(groups):
        group.update(
            lr=spec.lr,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            weight_decay=spec.weight_decay if decayed(index) else 0.0,
        )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of the device, or of the CPU, whose allocator raises a plain RuntimeError, as CUDA's libraries do."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(words in said for words in _NO_MEMORY)


def split_once(
    run: Callable[[int], T],
    sequences: Sequence[Packable],
    max_tokens: int,
    *,
    device: torch.device,
    forget: Callable[[], None],
    whole_groups: bool = False,
) -> T:
    """`run(max_tokens)`; where memory does not do, once more from the start, with half of it. `forget` drops the
    gradients of the try that failed. `whole_groups`: none is split. Raises OutOfMemory when half does not do
    either."""
    tried = max_tokens
    for _ in range(2):
        try:
            return run(tried)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        forget()  # here, not above: the error's traceback holds the tensors of the forward that failed
        if device.type == "cuda":
            torch.cuda.empty_cache()
        failed, longest = tried, longest_unit(sequences, whole_groups=whole_groups)
        tried = max(max_tokens // 2, longest)
        if tried >= failed:
            break
    raise OutOfMemory(
        f"a pass of at most {failed} packed tokens (longest {'pair' if whole_groups else 'sequence'} {longest}) does "
        f"not fit {device} memory: {reason}. Lower max_tokens_per_forward (max_batch_size, now "
        f"{max_tokens}) or the longest sequence, or free memory held by other processes"
    )


def per_sequence(numbers_N: Tensor, packed: Packed) -> list[list[float]]:
    """Numbers of the trained tokens of the packed row, by sequence."""
    return [part.tolist() for part in numbers_N.split(list(packed.trained_S))]
