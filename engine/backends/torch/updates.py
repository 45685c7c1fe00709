"""The parts of one optimizer update that all trainers share: which samples need a forward pass, the loss of a
micro-batch, its normalisation, which does not depend on the micro-batches, AdamW's parameter groups, and the metrics of
the report. The trainers differ in where gradients are stored.

Axes: N trained token · S sequence · P pair
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from engine.backends.protocol import Objective
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.packing import Packable, Packed, longest_unit, pack
from engine.errors import BadSpec, OutOfMemory, PermanentEngineError, SampleTooLong
from engine.losses.base import LossNorm, NormalisedLossSpec, PairLoss, TokenLoss
from engine.losses.inputs import LossInputs, Outputs
from engine.losses.spec import LossSpec
from engine.models.folder import CONTEXT_SOURCE
from engine.models.samples import PER_SAMPLE, PER_TOKEN, PER_TOP, FloatArray, Sample
from storage.chain.records import OptimizerSpec

Forward = Callable[[Packed], Outputs]
"""A forward pass that returns the outputs that the objective's loss reads, with gradient."""

_OLD_COLUMN = {"trainer": "old_logprobs", "sampler": "sampler_logprobs"}
"""`Objective.old_logprobs` -> column of the old logprobs. With "forward", they come from no column."""
GAP_SUM = "logprob_gap_sum"
"""Metric of updates with `old_logprobs="forward"`: the sum over the trained tokens of the forward pass of
|sampler's - trainer's logprob|, in nats. Samples without gradient have no forward pass and are not counted."""

T = TypeVar("T")

_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",  # of an allocation that torch's allocator did not make
)


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole minibatch, including samples without gradient."""

    tokens: int
    """Trained tokens."""
    sequences: int
    groups: int


@dataclass(slots=True)
class Accumulated:
    """Sums of loss and metrics over the micro-batches of one update, and the token limit they were made with."""

    max_tokens: int = 0
    """0 on a rank: the engine's process alone knows the limit."""
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    micro_batches: int = 0

    def add(self, loss: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Adds the loss and the metrics of one micro-batch."""
        self.sums["loss"] += loss.item()
        for name, value in sums.items():
            self.sums[name] += float(value)


def count_totals(samples: Sequence[Sample]) -> Totals:
    """The totals of a minibatch. Raises BadSpec if no token is trained."""
    tokens = _trained_tokens(samples)
    if tokens == 0:
        raise BadSpec("no token of the minibatch is trained (every weight is 0); leave such samples out")
    return Totals(tokens, len(samples), _group_count(samples))


def _trained_tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.trained for sample in samples)


def _group_count(samples: Sequence[Sample]) -> int:
    return len({sample.group for sample in samples})


def has_gradient(sample: Sample, objective: Objective) -> bool:
    """False for a sample whose loss is exactly 0 for all weights, so that it needs no forward pass. A sample of a pair
    always has a gradient."""
    loss = objective.loss
    if loss.pairwise:
        return True
    if sample.trained == 0:
        return False
    if not loss.zero_without_advantage or sample.advantages is None:
        return True
    return bool(sample.advantages.any())


# -- the loss of a micro-batch ---------------------------------------------------------------------------------


def make_forward(model: CausalLM, objective: Objective) -> Forward:
    """The forward pass of `model` for the objective's loss."""
    loss, temperature = objective.loss, objective.temperature

    def forward(packed: Packed) -> Outputs:
        if loss.reads == "values":
            return Outputs(values_N=model.values(packed))
        if loss.needs_teacher_top:
            return Outputs.of_choices(model.choice_logprobs(packed, temperature=temperature))
        if loss.needs_entropy:
            logprobs_N, entropy_N = model.logprobs_and_entropy(packed, temperature=temperature)
            return Outputs(logprobs_N=logprobs_N, entropy_N=entropy_N)
        return Outputs(logprobs_N=model.logprobs(packed, temperature=temperature))

    return forward


def micro_batch_loss(
    forward: Forward, samples: Sequence[Sample], objective: Objective, totals: Totals, *, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """(the part of the whole minibatch's loss that comes from these samples, with gradient; metrics as sums)."""
    loss, inputs = loss_of_outputs(forward(pack(samples, device=device)), samples, objective)
    return normalised_loss(loss, inputs, objective.loss, totals), loss.sums


def loss_of_outputs(
    outputs: Outputs, samples: Sequence[Sample], objective: Objective
) -> tuple[TokenLoss | PairLoss, LossInputs]:
    """The loss of each token or pair, and what it was computed from."""
    inputs = _loss_inputs(outputs, samples, objective)
    loss = objective.loss.compute(inputs)
    if objective.old_logprobs == "forward" and inputs.old_N is not None and inputs.sampler_N is not None:
        loss.sums[GAP_SUM] = (inputs.sampler_N - inputs.old_N).abs().sum()
    return loss, inputs


def normalised_loss(loss: TokenLoss | PairLoss, inputs: LossInputs, spec: LossSpec, totals: Totals) -> Tensor:
    """The part of the whole minibatch's loss that comes from these tokens or pairs."""
    if isinstance(loss, PairLoss):
        return loss.values_P.sum() / totals.groups

    # The weights are those of the whole minibatch, so that the losses of its micro-batches add up.
    def normalised(values_N: Tensor, norm: LossNorm, constant: float | None) -> Tensor:
        weights_N = token_weights(
            inputs.lengths_S, norm=norm, total_tokens=totals.tokens, total_sequences=totals.sequences, constant=constant
        )
        return (values_N * weights_N.to(inputs.outputs.any_N)).sum()

    total = normalised(loss.values_N, *_normalisation_of(spec))
    if loss.terms is not None:
        total = total + normalised(*loss.terms, None)
    return total


def check_policy_not_nan(sums: Mapping[str, float]) -> None:
    """Raises PermanentEngineError if a logprob of the update's own forward pass is NaN, also where updates without a
    finite gradient are skipped: skipping does not repair weights that give NaN already."""
    if isnan(sums.get(GAP_SUM, 0.0)):
        raise PermanentEngineError(
            "the policy before the step gives NaN for the logprobs of its own completions: an earlier update made its "
            "weights overflow. Lower optimizer.lr, and fork the run from a step before that"
        )


def _normalisation_of(loss: LossSpec) -> tuple[LossNorm, float | None]:
    """(norm, its constant). A loss without normalisation is a plain sum over tokens."""
    if isinstance(loss, NormalisedLossSpec):
        return loss.norm, loss.norm_constant
    return "token_sum", None


def _loss_inputs(outputs: Outputs, samples: Sequence[Sample], objective: Objective) -> LossInputs:
    """The outputs and the columns of a micro-batch, as the loss reads them."""

    def column(name: str) -> Tensor | None:
        return _column(samples, name, outputs.any_N)

    def column_S(name: str, dtype: torch.dtype) -> Tensor | None:
        values = [getattr(sample, name) for sample in samples]
        return None if None in values else torch.tensor(values, dtype=dtype, device=outputs.any_N.device)

    # The weights do not change within an update. If the step has one update, these are the logprobs of the policy
    # before the step.
    if objective.old_logprobs == "forward":
        old_N = None if outputs.logprobs_N is None else outputs.logprobs_N.detach()
    else:
        old_N = column(_OLD_COLUMN[objective.old_logprobs])
    # Only a loss on pairs needs to know which samples form a pair.
    preferred_P, dispreferred_P = None, None
    if objective.loss.pairwise:
        preferred_P, dispreferred_P = _pair_indices(samples, outputs.any_N.device)
    return LossInputs(
        outputs=outputs,
        lengths_S=tuple(sample.trained for sample in samples),
        old_N=old_N,
        old_is_sampler=objective.old_logprobs == "sampler",
        reference_N=column("reference_logprobs"),
        sampler_N=column("sampler_logprobs"),
        advantages_N=column("advantages"),
        returns_N=column("returns"),
        old_values_N=column("old_values"),
        selected_N=column("selected"),
        tangents_N=column("tangents"),
        teacher_top_NK=column("teacher_top_logprobs"),
        preferred_S=column_S("preferred", torch.bool),
        baseline_S=column_S("kl_baseline", outputs.any_N.dtype),
        preferred_P=preferred_P,
        dispreferred_P=dispreferred_P,
    )


def _pair_indices(samples: Sequence[Sample], device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of the preferred and of the other sample of each pair, (P,) each."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        members[sample.group].append(index)
    # Sort each pair so that its preferred sample comes first.
    for pair in members.values():
        pair.sort(key=lambda index: not samples[index].preferred)
    indices_P2 = torch.tensor(list(members.values()), dtype=torch.long, device=device)
    return indices_P2[:, 0], indices_P2[:, 1]


def _column(samples: Sequence[Sample], name: str, like: Tensor) -> Tensor | None:
    """One optional per-token column of all samples, flat (N,); None when no sample has it."""
    # `validate_batch` has checked that all samples have the column or none has it.
    if getattr(samples[0], name) is None:
        return None
    values_N = np.concatenate([getattr(sample, name) for sample in samples])
    return torch.from_numpy(values_N).to(like)


def split_by_sequence(values_N: Tensor, packed: Packed) -> list[FloatArray]:
    """The values of each sequence's trained tokens, in float64."""
    values = values_N.detach().cpu().double().numpy()
    return np.split(values, np.cumsum(packed.trained_S)[:-1])


# -- the report, and the optimizer -----------------------------------------------------------------------------


def update_metrics(sums: Mapping[str, float], *, forward_samples: Sequence[Sample], totals: Totals) -> dict[str, float]:
    """The metrics of an update, or of a measurement. `forward_samples` are the samples that had a forward pass.

    TokenLoss explains the names in `sums`."""
    # The ending of a sum's name says what it is a sum over, and thus which count makes it a mean.
    counts = {"_sum": _trained_tokens(forward_samples), "_per_pair": _group_count(forward_samples)}
    for ending, preferred in (("_per_preferred", True), ("_per_other", False)):
        counts[ending] = sum(sample.preferred is preferred for sample in forward_samples)
    means: dict[str, float] = {}
    for name, value in sums.items():
        for ending, count in counts.items():
            if name.endswith(ending) and count:
                means[name.removesuffix(ending) + "_mean"] = value / count
    return {**means, "loss": sums["loss"], "tokens": float(totals.tokens)}


def adamw_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, object]]:
    """Two parameter groups: matrices, which decay, and norm weights and biases, which do not, as usual."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in parameters:
        if parameter.ndim >= 2:
            matrices.append(parameter)
        else:
            others.append(parameter)
    return [{"params": matrices}, {"params": others}]


def set_adamw(groups: Iterable[dict[str, object]], spec: OptimizerSpec) -> None:
    """Applies the settings of one step to the groups of `adamw_groups`."""
    for index, group in enumerate(groups):
        group.update(
            lr=spec.lr,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            weight_decay=spec.weight_decay if index == 0 else 0.0,
        )


def token_weights(
    lengths_S: Sequence[int], *, norm: LossNorm, total_tokens: int, total_sequences: int, constant: float | None = None
) -> Tensor:
    """Weight of each trained token (N,), in float64, with which the loss is Σ value·weight over *all* micro-batches.

    token_mean: 1 / total_tokens. sequence_mean: 1 / (total_sequences · length of the token's sequence). token_sum: 1.
    constant: 1 / (total_sequences · constant), as Dr. GRPO (arXiv:2503.20783) divides. The totals are those of the
    whole minibatch.

    Raises ValueError when the totals are smaller than those of this micro-batch alone, or the constant is missing.
    """
    if total_tokens < max(1, sum(lengths_S)) or total_sequences < max(1, len(lengths_S)):
        raise ValueError(
            f"totals of {total_tokens} tokens and {total_sequences} sequences, but this micro-batch has "
            f"{sum(lengths_S)} and {len(lengths_S)}; give the totals of the whole minibatch"
        )
    # float64, since the inverse of a large total loses digits in float32. Each token has the weight of its sequence.
    lengths = torch.tensor(list(lengths_S), dtype=torch.long)
    if norm == "token_mean":
        weights_S = torch.full((len(lengths),), 1 / total_tokens, dtype=torch.float64)
    elif norm == "sequence_mean":
        # A sequence without trained tokens has no weights, so its length of 0 must not divide.
        weights_S = 1 / (total_sequences * lengths.clamp(min=1).double())
    elif norm == "token_sum":
        weights_S = torch.ones(len(lengths), dtype=torch.float64)
    else:
        if constant is None:
            raise ValueError("norm='constant' needs the constant it divides by")
        weights_S = torch.full((len(lengths),), 1 / (total_sequences * constant), dtype=torch.float64)
    return weights_S.repeat_interleave(lengths)


def is_out_of_memory(error: RuntimeError | OutOfMemory) -> bool:
    """Whether the device or the CPU is out of memory. The CPU's allocator and CUDA's libraries raise plain
    RuntimeErrors, and ranks raise OutOfMemory."""
    message = str(error)
    return isinstance(error, torch.OutOfMemoryError | OutOfMemory) or any(part in message for part in _MESSAGES)


def retry_on_out_of_memory(
    run: Callable[[int], T],
    sequences: Sequence[Packable],
    max_tokens: int,
    *,
    device: torch.device,
    drop_gradients: Callable[[], None],
    whole_groups: bool = False,
) -> T:
    """Returns `run(max_tokens)`. If it runs out of memory, it is run once more from the start, with half the tokens.

    `drop_gradients` drops those of the failed try. With `whole_groups`, no group is split over micro-batches. Raises
    OutOfMemory when half of the tokens do not fit either.
    """
    tokens = max_tokens
    for _ in range(2):
        try:
            return run(tokens)
        except (RuntimeError, OutOfMemory) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        # Free memory after the `except` block: the traceback there holds the tensors of the failed forward pass.
        drop_gradients()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        failed, longest = tokens, longest_unit(sequences, whole_groups=whole_groups)
        tokens = max(max_tokens // 2, longest)
        if tokens >= failed:
            break
    raise OutOfMemory(
        f"a pass of at most {failed} packed tokens (longest {'pair' if whole_groups else 'sequence'} {longest}) does "
        f"not fit {device} memory: {reason}. Lower max_tokens_per_forward (max_batch_size, now "
        f"{max_tokens}) or the longest sequence, or free memory held by other processes"
    )


def check_sequences(sequences: Sequence[Packable], *, vocab_size: int, context_length: int) -> None:
    """Checks lengths and token ids. Positions beyond the context were never trained, and rotary embeddings extrapolate
    to them without an error. Ids beyond the vocabulary have no row in the embedding.

    Raises:
        SampleTooLong: a sequence is longer than the context.
        BadSpec: a token id that the model does not have, also among those of a teacher.
    """
    for index, sequence in enumerate(sequences):
        token_ids = sequence.token_ids
        if len(token_ids) > context_length:
            raise SampleTooLong(
                f"a sequence of {len(token_ids)} tokens (group {sequence.group!r}) passes the model's context "
                f"of {context_length}{CONTEXT_SOURCE}; shorten it or leave it out"
            )
        is_unknown = (token_ids < 0) | (token_ids >= vocab_size)
        if is_unknown.any():
            position = int(is_unknown.argmax())
            raise BadSpec(
                f"sample {index} (group {sequence.group!r}) has the token id {token_ids[position]} at position "
                f"{position}; the model's are 0..{vocab_size - 1}. Was it rendered with another model's tokenizer?"
            )
        # A teacher with the same tokenizer may have a wider head, whose last ids are no tokens.
        choices = sequence.teacher_top_ids
        if choices is not None and choices.size and not 0 <= choices.min() <= choices.max() < vocab_size:
            wrong = choices[(choices < 0) | (choices >= vocab_size)][0]
            raise BadSpec(
                f"sample {index} (group {sequence.group!r}) has {wrong} among its teacher_top_ids; the model's tokens "
                f"are 0..{vocab_size - 1}. Give fewer tokens of the teacher (teacher_top_k), or a teacher whose "
                "config.json has no larger vocab_size"
            )


def check_loss_fits_head(loss: LossSpec, *, scalar: bool, name: str) -> None:
    """Raises BadSpec if the model `name` does not give what the loss reads. `scalar`: it has a scalar head."""
    if (loss.reads == "values") == scalar:
        return
    if scalar:
        output, needed, fix = "one number per token", "logprobs", "a causal language model"
    else:
        output, needed, fix = "logprobs", "one number per token", "a scalar head: builder.into_scoring_model()"
    raise BadSpec(f"{name} gives {output}, and the loss {loss.kind!r} reads {needed}; train {fix}")


def check_gives(output: Literal["logprobs", "values"], *, scalar: bool, name: str) -> None:
    """Raises BadSpec if the model `name` does not give this output. `scalar`: it has a scalar head."""
    if (output == "values") == scalar:
        return
    if scalar:
        head, available, fix = "a scalar head", "values or scores", "a causal language model"
    else:
        head, available, fix = "a language head", "logprobs", "one of builder.into_scoring_model()"
    raise BadSpec(f"{name} has {head}, and no {output}; ask it for {available}, or use {fix}")


def check_top(top: int, vocab_size: int) -> None:
    """Raises BadSpec if the model has fewer tokens than are asked for at each position."""
    if top > vocab_size:
        raise BadSpec(
            f"the {top} most probable tokens were asked for, and the model has {vocab_size}; ask for at most as many"
        )


def check_pairs(samples: Sequence[Sample]) -> None:
    """Raises BadSpec, which names the pair, unless every group is a pair: two samples with trained tokens, of which one
    is preferred."""
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
    """Raises the error that the loss would raise for a column that the samples lack. Every rank raises the same, before
    any of them starts a pass."""
    if not samples:
        return
    for name in (*PER_TOKEN, *PER_TOP) if objective.loss.pairwise else (*PER_TOKEN, *PER_TOP, *PER_SAMPLE):
        _check_column(samples, name)
    # Compute the loss of the shortest unit, with zeros instead of the outputs of a forward pass.
    unit = [min(samples, key=lambda sample: sample.trained)]
    if objective.loss.pairwise:
        check_pairs(samples)
        unit = [sample for sample in samples if sample.group == unit[0].group]

    def zeros(packed: Packed) -> Outputs:
        zeros_N = torch.zeros(len(packed.target_N))
        return Outputs(zeros_N, zeros_N, zeros_N, torch.zeros_like(packed.candidates_NC[:, 1:], dtype=zeros_N.dtype))

    micro_batch_loss(zeros, unit, objective, count_totals(unit), device=torch.device("cpu"))


def _check_column(samples: Sequence[Sample], name: str) -> None:
    columns = [getattr(sample, name) for sample in samples]
    if len({column is None for column in columns}) > 1:
        raise BadSpec(f"some samples of the batch have {name} and some have none; give it for all or for none")
    # Samples that teachers of different vocabularies scored could have different widths.
    if name in PER_TOP and columns[0] is not None:
        widths = sorted({column.shape[1] for column in columns if len(column)})
        if len(widths) > 1:
            raise BadSpec(f"{name} has {widths} numbers per trained token; give equally many in all samples")
