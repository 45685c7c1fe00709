"""The rank side of `engine.backends.protocol.Trainer`: each rank holds its part of one policy.

Every method is called by every rank, with equal arguments apart from the rows, and either returns on all of them, or
raises the same error on all of them. Where this is impossible, because a rank fails in the middle of an exchange with
the others, its process ends and the group with it. The engine then starts the group again.

The engine's process checks the rows and plans the passes (`passes`). A rank gets only the rows of its own passes. Every
rank runs the same number of passes, with similar lengths at the same time, because in ZeRO 3 the ranks gather weights
together, layer by layer. A rank without work runs an empty pass, whose loss does not count.
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
from engine.backends.deepspeed.passes import RankPasses
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
from engine.backends.protocol import Objective
from engine.backends.torch.determinism import warn_only_restored
from engine.backends.torch.packing import Packed, pack
from engine.backends.torch.updates import (
    Accumulated,
    Totals,
    check_policy_not_nan,
    is_out_of_memory,
    micro_batch_loss,
    split_by_sequence,
)
from engine.backends.weight_files.sketches import Sketch, multiply_by_noise
from engine.cluster.rank_progress import RankFailed, is_peer_loss, report_progress
from engine.errors import OutOfMemory, PermanentEngineError
from engine.losses.inputs import Outputs
from engine.models.samples import FloatArray, Sample
from engine.protocol import TokenSequence
from storage.chain.records import OptimizerSpec

EMPTY_PASS = Sample(np.zeros(2, np.int32), np.array([False, True]))


class ZeroTrainer:
    """This rank's part of one policy."""

    def __init__(self, sharded: ShardedModel, state: files.ShardedState, options: RankOptions) -> None:
        self.sharded, self.state = sharded, state
        self.model: RankModel = sharded.model
        self.module: Any = self.model.module
        self._device, self._stage = self.model.device, options.trainer.zero_stage
        self._ranks, self._sequence = dist.get_world_size(), self.model.sequence

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
        self, passes: RankPasses[Sample], objective: Objective, optimizer: OptimizerSpec, totals: Totals
    ) -> tuple[dict[str, float], float, bool]:
        """Takes one optimizer step. Returns (sums of the loss and the metrics over all ranks, norm of the gradient,
        whether the weights moved), equal on all ranks. `totals` are those of the whole minibatch. Raises BadSpec if the
        moments are those of another kind of optimizer."""
        self.shards.check_optimizer(optimizer)
        with self.own_weights():
            sums = self._accumulate(passes, objective, totals)
        check_policy_not_nan(sums)
        return sums, *self.sharded.step(optimizer)

    def _accumulate(self, passes: RankPasses[Sample], objective: Objective, totals: Totals) -> dict[str, float]:
        """Sums the gradients over all passes; returns the sums over all ranks."""
        rank_sums = Accumulated()

        def run() -> None:
            for micro_batch in passes:
                self._pass(micro_batch, objective, totals, rank_sums)
                report_progress()

        # All ranks have the same number of passes, and end them together.
        self._together(run, exchanges_nothing=self.sharded.exchanges_nothing)
        # Add in the order of the ranks: floating-point sums depend on the order, and all ranks need the same numbers.
        sums = {"loss": 0.0}
        for sums_of_rank in gather(dict(rank_sums.sums)):
            for name, value in sums_of_rank.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def _pass(
        self, micro_batch: Sequence[Sample] | None, objective: Objective, totals: Totals, rank_sums: Accumulated
    ) -> None:
        """Forward and backward of one micro-batch, or of an empty pass."""

        def forward(packed: Packed) -> Outputs:
            return self._forward(packed, objective)

        # The other ranks gather weights now. This rank takes part with a gradient of zeros.
        if micro_batch is None:
            outputs = forward(pack([EMPTY_PASS], device=self._device))
            with warn_only_restored():
                self.sharded.backward(0.0 * outputs.any_N.sum())
            return
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
            OutOfMemory: on every rank, if some ranks ran out of memory and nothing else failed. No gradient is left.
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
        # If only memory ran out, the engine plans passes of half the tokens, for which the ranks free their memory.
        if out_of_memory is not None:
            self.sharded.drop_gradients()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            raise OutOfMemory(out_of_memory)

    # -- reading ----------------------------------------------------------------------------------------------

    def logprobs(self, passes: RankPasses[TokenSequence], temperature: float) -> list[FloatArray]:
        """Logprobs of every trained token in nats, per sequence of this rank's passes, in their order."""
        return self._read(passes, lambda packed: self.sharded.logprobs(packed, temperature))

    def entropies(self, passes: RankPasses[TokenSequence], temperature: float) -> list[FloatArray]:
        """Entropies in nats before every trained token, as `logprobs`."""

        def forward(packed: Packed) -> torch.Tensor:
            return self.sharded.evaluate(lambda model: model.logprobs_and_entropy(packed, temperature=temperature)[1])

        return self._read(passes, forward)

    def top_logprobs(self, passes: RankPasses[TokenSequence], count: int) -> list[FloatArray]:
        """As engine.backends.protocol.Trainer.top_logprobs, as `logprobs`."""
        return self._read(passes, lambda packed: self.sharded.evaluate(lambda model: model.top_logprobs(packed, count)))

    def values(self, passes: RankPasses[TokenSequence]) -> list[FloatArray]:
        """The scalar head's number before every trained token, as `logprobs`."""

        def forward(packed: Packed) -> torch.Tensor:
            return self.sharded.evaluate(lambda model: model.values(packed))

        return self._read(passes, forward)

    @torch.no_grad()
    def _read(
        self, passes: RankPasses[TokenSequence], forward: Callable[[Packed], torch.Tensor]
    ) -> list[FloatArray]:
        values: list[FloatArray] = []

        def run() -> None:
            for micro_batch in passes:
                if micro_batch is None:
                    forward(pack([EMPTY_PASS], device=self._device))
                else:
                    packed = pack(micro_batch, device=self._device)
                    values.extend(split_by_sequence(forward(packed), packed))
                report_progress()

        with self.own_weights():
            self._together(run, exchanges_nothing=self._stage != 3 and self._sequence is None)
        return values

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
