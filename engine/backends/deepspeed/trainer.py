"""The rank side of `engine.backends.protocol.Trainer`: each rank holds its part of one policy.

Every method is called by every rank with equal arguments, and either returns on all of them, or raises the same error
on all of them. Where this is impossible, because a rank fails in the middle of an exchange with the others, its process
ends and the group with it. The engine then starts the group again.

Every rank runs the same number of passes, with similar lengths at the same time, because in ZeRO 3 the ranks gather
weights together, layer by layer. A rank without work runs an empty pass, whose loss does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engine.backends.deepspeed import OUT_OF_MEMORY_MARK, files
from engine.backends.deepspeed.meta_model import open_meta_model
from engine.backends.deepspeed.options import RankOptions
from engine.backends.deepspeed.rank_model import (
    RankModel,
    SequenceGroup,
    gather,
    names_of,
    prepare_module,
    probe_on_ranks,
)
from engine.backends.deepspeed.sending import HeldParts
from engine.backends.deepspeed.sharded_model import ShardedModel, shard_model
from engine.backends.deepspeed.shards import Shards
from engine.backends.protocol import Objective, UpdateReport
from engine.backends.torch.determinism import warn_only_restored
from engine.backends.torch.packing import Packable, Packed, micro_batches, pack
from engine.backends.torch.updates import (
    Accumulated,
    Totals,
    check_gives,
    check_loss_fits_head,
    check_policy_not_nan,
    check_sequences,
    count_totals,
    has_gradient,
    is_out_of_memory,
    micro_batch_loss,
    retry_on_out_of_memory,
    split_by_sequence,
    update_metrics,
    validate_batch,
)
from engine.backends.weight_files.sketches import Sketch, multiply_by_noise
from engine.cluster.rank_progress import RankFailed, is_peer_loss, report_progress
from engine.errors import NonFiniteGradient, PermanentEngineError
from engine.losses.inputs import Outputs
from engine.models.samples import FloatArray, Sample
from engine.protocol import TokenSequence
from storage.chain.records import OptimizerSpec

EMPTY_PASS = Sample(np.zeros(2, np.int32), np.array([False, True]))
SEARCH_STEPS = 6
"""How often the batch is split again to find an even split."""


class ZeroTrainer:
    """This rank's part of one policy."""

    def __init__(self, sharded: ShardedModel, state: files.ShardedState, options: RankOptions) -> None:
        self.sharded, self.state = sharded, state
        self.model: RankModel = sharded.model
        self.module: Any = self.model.module
        self._device, self._stage = self.model.device, options.trainer.zero_stage
        self._ranks, self._sequence = dist.get_world_size(), self.model.sequence
        sharing = 1 if self._sequence is None else self._sequence.size
        self._groups, self._group = self._ranks // sharing, dist.get_rank() // sharing
        """Number of groups of ranks that take different micro-batches, and this rank's group."""

    @classmethod
    def load(
        cls,
        folder: Path,
        options: RankOptions,
        *,
        device: torch.device,
        sequence: SequenceGroup | None = None,
        head_seed: int | None = None,
    ) -> ZeroTrainer:
        """A policy whose weights are all trained. A rank reads no more of the folder than its part. `sequence` is the
        group of ranks that share each packed row; None without sequence parallelism. For `head_seed`, see
        `open_meta_model`."""
        # Open the model without its weights.
        stage, master_dtype = options.trainer.zero_stage, options.master_dtype
        parameter_dtype = master_dtype if stage == 0 else options.dtype
        meta_model = open_meta_model(
            folder, dtype=master_dtype, parameter_dtype=parameter_dtype, device=device, head_seed=head_seed
        )
        prepare_module(meta_model, options, device, sequence)

        # Note the names of its weights before DeepSpeed changes the parameters.
        names = names_of(meta_model.model)
        sharded = shard_model(meta_model.model, options, device, sequence)
        state = files.state_of(names, sharded.shards, meta_model.model.module, device, master_dtype)

        # Read this rank's part of the weights, and check the packed forward pass with them.
        files.fill(state, meta_model.weights)
        if not meta_model.probed:
            probe_on_ranks(sharded.evaluate, folder, device)
        return cls(sharded, state, options)

    def own_weights(self) -> AbstractContextManager[object]:
        """A context within which the model computes with this trainer's weights."""
        return nullcontext()

    @property
    def shards(self) -> Shards:
        return self.sharded.shards

    # -- gradient ---------------------------------------------------------------------------------------------

    def update(
        self, samples: Sequence[Sample], objective: Objective, optimizer: OptimizerSpec, *, max_tokens: int
    ) -> UpdateReport:
        # Check everything before anything changes.
        check_loss_fits_head(objective.loss, scalar=self.model.scalar, name=type(self.module).__name__)
        self._check_sequences(samples)
        totals = count_totals(samples)
        with_gradient = [sample for sample in samples if has_gradient(sample, objective)]
        validate_batch(with_gradient, objective)

        # Sum the gradients over micro-batches.
        def accumulate(max_tokens: int) -> Accumulated:
            return self._accumulate(with_gradient, objective, totals, max_tokens)

        with self.own_weights():
            accumulated = retry_on_out_of_memory(
                accumulate,
                with_gradient,
                max_tokens,
                device=self._device,
                drop_gradients=self.sharded.drop_gradients,
                whole_groups=objective.loss.pairwise,
            )
        check_policy_not_nan(accumulated.sums)

        # Take the step. All ranks have the same norm, so all raise or none.
        norm, moved = self.sharded.step(optimizer)
        if not moved and not objective.skip_nan_gradients:
            raise NonFiniteGradient(f"the gradient norm of {len(samples)} samples is {norm}")
        return UpdateReport(
            metrics=update_metrics(accumulated.sums, forward_samples=with_gradient, totals=totals)
            | {"grad_norm": norm},
            skipped=not moved,
            micro_batches=accumulated.micro_batches,
            max_tokens=accumulated.max_tokens,
        )

    def _accumulate(
        self, samples: Sequence[Sample], objective: Objective, totals: Totals, max_tokens: int
    ) -> Accumulated:
        """Runs all passes; returns the sums over all ranks."""
        passes = distribute(samples, max_tokens=max_tokens, ranks=self._groups, whole_groups=objective.loss.pairwise)
        rank_sums = Accumulated(max_tokens)

        def run() -> None:
            for row in passes:
                self._pass(row[self._group], samples, objective, totals, rank_sums)
                report_progress()

        # All ranks have the same number of passes, and end them together.
        self._together(run, exchanges_nothing=self.sharded.exchanges_nothing)
        accumulated = Accumulated(max_tokens)
        for row in passes:
            accumulated.micro_batches += len(row) - row.count(None)
        # Add in the order of the ranks: floating-point sums depend on the order, and all ranks need the same numbers.
        accumulated.sums["loss"] = 0.0
        for sums in gather(dict(rank_sums.sums)):
            for name, value in sums.items():
                accumulated.sums[name] += value
        return accumulated

    def _pass(
        self,
        indices: list[int] | None,
        samples: Sequence[Sample],
        objective: Objective,
        totals: Totals,
        rank_sums: Accumulated,
    ) -> None:
        """Forward and backward of one micro-batch, or of an empty pass."""

        def forward(packed: Packed) -> Outputs:
            return self._forward(packed, objective)

        # The other ranks gather weights now. This rank takes part with a gradient of zeros.
        if indices is None:
            outputs = forward(pack([EMPTY_PASS], device=self._device))
            with warn_only_restored():
                self.sharded.backward(0.0 * outputs.any_N.sum())
            return
        micro_batch = [samples[index] for index in indices]
        loss, sums = micro_batch_loss(forward, micro_batch, objective, totals, device=self._device)
        with warn_only_restored():
            self.sharded.backward(loss)
        # All ranks of a sequence group have the same loss and metrics. Only the first of them counts them.
        if self._sequence is None or self._sequence.rank == 0:
            rank_sums.add(loss, sums)

    def _forward(self, packed: Packed, objective: Objective) -> Outputs:
        if objective.loss.needs_entropy:

            def logprobs_and_entropy(model: RankModel) -> torch.Tensor:
                return torch.stack(model.logprobs_and_entropy(packed, temperature=objective.temperature))

            both_2N = self.sharded.evaluate(logprobs_and_entropy)
            return Outputs(logprobs_N=both_2N[0], entropy_N=both_2N[1])
        if objective.loss.reads == "values":
            return Outputs(values_N=self.sharded.evaluate(lambda model: model.values(packed)))
        return Outputs(logprobs_N=self.sharded.logprobs(packed, objective.temperature))

    def _together(self, run: Callable[[], None], *, exchanges_nothing: bool) -> None:
        """Runs `run` on this rank. Every rank calls it at the same time.

        Args:
            exchanges_nothing: whether the ranks exchange nothing within `run`.

        Raises:
            OutOfMemoryError: on every rank, if some ranks ran out of memory and nothing else failed.
            PermanentEngineError: on every rank, if `run` failed on one of them in another way.
            RankFailed: on the rank that failed, if the ranks exchange something within `run`. The others may be waiting
                for it in the middle of `run`, so the whole group ends.
        """
        failure: Exception | None = None
        try:
            run()
        except Exception as error:  # noqa: BLE001 - the boundary between a rank and the others, which wait for it
            failure = error.with_traceback(None)  # the traceback holds the tensors of the forward pass that failed
        if failure is not None and not exchanges_nothing and self._ranks > 1:
            short_of_memory = isinstance(failure, RuntimeError) and is_out_of_memory(failure)
            reason = f"{OUT_OF_MEMORY_MARK}: {failure}" if short_of_memory else f"a pass failed: {failure!r}"
            raise RankFailed(reason, is_cause=not is_peer_loss(failure))
        # No rank waits for another one here. Each tells the others whether it failed, so that all raise the same error.
        out_of_memory: str | None = None
        for rank, description in enumerate(gather(_describe(failure))):
            if description is None:
                continue
            message, short_of_memory = description
            if not short_of_memory:
                raise PermanentEngineError(f"rank {rank}: {message}") from failure
            out_of_memory = out_of_memory or f"rank {rank}: {message}"
        # If only memory ran out, all ranks try again with half the tokens.
        if out_of_memory is not None:
            raise torch.OutOfMemoryError(out_of_memory)

    # -- reading ----------------------------------------------------------------------------------------------

    def logprobs(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[FloatArray]:
        """Logprobs of every trained token in nats, per sequence, in the order of the sequences."""
        check_gives("logprobs", scalar=self.model.scalar, name=type(self.module).__name__)
        return self._read(sequences, lambda packed: self.sharded.logprobs(packed, temperature), max_tokens)

    def entropies(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[FloatArray]:
        """Entropies in nats before every trained token, per sequence, in the order of the sequences."""
        check_gives("logprobs", scalar=self.model.scalar, name=type(self.module).__name__)

        def forward(packed: Packed) -> torch.Tensor:
            return self.sharded.evaluate(lambda model: model.logprobs_and_entropy(packed, temperature=temperature)[1])

        return self._read(sequences, forward, max_tokens)

    def values(self, sequences: Sequence[TokenSequence], *, max_tokens: int) -> list[FloatArray]:
        """The scalar head's number before every trained token, per sequence, in the order of the sequences."""
        check_gives("values", scalar=self.model.scalar, name=type(self.module).__name__)

        def forward(packed: Packed) -> torch.Tensor:
            return self.sharded.evaluate(lambda model: model.values(packed))

        return self._read(sequences, forward, max_tokens)

    @torch.no_grad()
    def _read(
        self, sequences: Sequence[TokenSequence], forward: Callable[[Packed], torch.Tensor], max_tokens: int
    ) -> list[FloatArray]:
        self._check_sequences(sequences)  # here, where all ranks raise alike, and not in the middle of a pass

        def run(max_tokens: int) -> list[FloatArray]:
            passes = distribute(sequences, max_tokens=max_tokens, ranks=self._groups)
            values: dict[int, FloatArray] = {}

            def compute() -> None:
                for row in passes:
                    indices = row[self._group]
                    if indices is None:
                        forward(pack([EMPTY_PASS], device=self._device))
                    else:
                        packed = pack([sequences[index] for index in indices], device=self._device)
                        values.update(zip(indices, split_by_sequence(forward(packed), packed), strict=True))
                    report_progress()

            self._together(compute, exchanges_nothing=self._stage != 3 and self._sequence is None)
            # The engine takes rank 0's result, which therefore needs the values that the other ranks computed.
            for rank_values in gather(dict(values)):
                values.update(rank_values)
            return [values[index] for index in range(len(sequences))]

        with self.own_weights():
            return retry_on_out_of_memory(run, sequences, max_tokens, device=self._device, drop_gradients=lambda: None)

    def _check_sequences(self, sequences: Sequence[Packable]) -> None:
        check_sequences(sequences, vocab_size=self.model.vocab_size, context_length=self.model.context_length)

    # -- state ------------------------------------------------------------------------------------------------

    def reset_optimizer(self) -> None:
        self.shards.drop_moments()

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return files.weights_digest(self.state)

    def weights_sketch(self) -> Sketch:
        return files.weights_sketch(self.state)

    def add_rounding_noise(self, relative: float, *, seed: int) -> None:
        # Ranks that have the same pieces must draw the same noise.
        seed = seed if self.shards.replicated else seed * dist.get_world_size() + dist.get_rank()
        pieces = [piece.of(piece.flat) for piece in self.shards.pieces]
        generators = {piece.device: torch.Generator(piece.device).manual_seed(seed) for piece in pieces}
        for piece in pieces:
            multiply_by_noise(piece, relative, generators[piece.device])
        self.shards.publish()

    def write_checkpoint(self, folder: Path) -> list[str]:
        names = files.write_checkpoint(self.state, folder)
        dist.barrier()
        return names

    def read_checkpoint(self, paths: Mapping[str, Path], *, optimizer: bool) -> None:
        files.read_checkpoint(self.state, paths, optimizer=optimizer)

    def write_config(self, folder: Path) -> list[str]:
        """Writes the configs on rank 0; returns the names of the new files there."""
        folder.mkdir(parents=True, exist_ok=True)
        # Only the new files are reported, whatever else the folder contains.
        before = set(folder.iterdir())
        if dist.get_rank() == 0:
            self.module.config.save_pretrained(folder)
            if getattr(self.module, "generation_config", None) is not None:
                self.module.generation_config.save_pretrained(folder)
        return sorted(path.name for path in set(folder.iterdir()) - before)

    def stage_weights(self, folder: Path, *, dtype: torch.dtype) -> list[str]:
        return files.write_folder(self.sampled_state(), folder, dtype=dtype, file_per_rank=True)

    def hold_parts(self, *, dtype: torch.dtype) -> HeldParts:
        """Copies this rank's part of the weights that a sampler needs."""
        return files.hold_parts(self.sampled_state(), dtype=dtype)

    def sampled_state(self) -> files.ShardedState:
        """The weights that a sampler needs."""
        return self.state

    def whole_state(self) -> files.ShardedState:
        """The weights of a model folder."""
        return self.state

    def export(self, folder: Path) -> list[str]:
        names = files.write_folder(self.whole_state(), folder)
        self.write_config(folder)
        dist.barrier()
        return sorted({*names, *(path.name for path in folder.glob("*config.json"))})

    def close(self) -> None:
        self.sharded.close()


def _describe(error: Exception | None) -> tuple[str, bool] | None:
    """(first line of the message, whether memory ran out); None without an error."""
    if error is None:
        return None
    return str(error).splitlines()[0], isinstance(error, RuntimeError) and is_out_of_memory(error)


def distribute(
    samples: Sequence[Packable], *, max_tokens: int, ranks: int, whole_groups: bool = False
) -> list[list[list[int] | None]]:
    """[pass][rank] -> indices of the samples, or None for an empty pass. There is at least one pass, and there are no
    more than `max_tokens` per forward pass requires.

    Micro-batches are built over the samples of all ranks, then distributed by length, so that the micro-batches of one
    pass have similar lengths.
    """
    # Micro-batches of all ranks, longest first. Equal lengths keep their order, so that every rank gets the same list.
    batches: list[list[int]] = []
    if samples:
        batches = _split_evenly(samples, max_tokens, ranks, whole_groups)
        batches.sort(key=lambda batch: -_tokens(samples, batch))

    # Each pass takes one micro-batch per rank. The last one may not have enough.
    passes: list[list[list[int] | None]] = []
    for begin in range(0, max(len(batches), 1), ranks):
        row: list[list[int] | None] = [*batches[begin : begin + ranks]]
        row += [None] * (ranks - len(row))
        # The order alternates, so that no rank always has the longest.
        if len(passes) % 2 == 1:
            row.reverse()
        passes.append(row)
    return passes


def _tokens(samples: Sequence[Packable], batch: Sequence[int]) -> int:
    """Number of tokens of the samples with these indices, each counted in full."""
    return sum(len(samples[index].token_ids) for index in batch)


def _split_evenly(samples: Sequence[Packable], max_tokens: int, ranks: int, whole_groups: bool) -> list[list[int]]:
    """Micro-batches that are as small as possible without one more pass, so that ranks that would wait take a part of
    the work instead. A binary search over the largest number of tokens."""
    best = micro_batches(samples, max_tokens=max_tokens, whole_groups=whole_groups)
    slots = -(-len(best) // ranks) * ranks
    if len(best) == slots:
        return best
    # Bounds of the search: a micro-batch must have room for the longest unit, and for an even share of the tokens.
    lengths = _unit_lengths(samples, whole_groups)
    longest, total = max(lengths), sum(lengths)
    # Invariant: `enough` tokens per micro-batch give at most `slots` micro-batches, and `too_few` give more.
    enough = min(max_tokens, total)
    too_few = min(max(longest, -(-total // slots)), enough) - 1
    for _ in range(SEARCH_STEPS):
        if enough - too_few <= 1:
            break
        middle = (too_few + enough) // 2
        batches: list[list[int]] = []
        if middle >= longest:
            batches = micro_batches(samples, max_tokens=middle, whole_groups=whole_groups)
        if batches and len(batches) <= slots:
            best, enough = batches, middle
        else:
            too_few = middle
    return best


def _unit_lengths(samples: Sequence[Packable], whole_groups: bool) -> list[int]:
    """Tokens of each unit that has to stay in one micro-batch: a sample, or with `whole_groups` a group."""
    lengths: dict[str, int] = {}
    for index, sample in enumerate(samples):
        unit = sample.group if whole_groups else f"#{index}"
        lengths[unit] = lengths.get(unit, 0) + len(sample.token_ids)
    return list(lengths.values())
