"""One policy on all ranks, as each rank holds its part of it: the rank side of `engine.backends.protocol.Trainer`.

Every method is called by every rank with equal arguments, and either returns or raises the same on all of them. Where
that cannot be, because a rank fails in the middle of an exchange with the others, its process ends and the group with
it: the engine starts the group again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.backends.deepspeed import OUT_OF_MEMORY_MARK, files
from engine.backends.deepspeed.gradients import Gradients, make_gradients
from engine.backends.deepspeed.meta_model import open_meta_model, probe
from engine.backends.deepspeed.model import RankModel, fuse_kernels
from engine.backends.deepspeed.options import ZeroOptions
from engine.backends.deepspeed.passes import EMPTY_PASS, deal
from engine.backends.deepspeed.ulysses import SequenceGroup
from engine.backends.protocol import Objective, UpdateReport
from engine.backends.torch.packing import Packable, Packed, pack
from engine.backends.torch.updates import (
    Accumulated,
    Totals,
    check_gives,
    check_reads,
    check_sequences,
    is_out_of_memory,
    metrics_of,
    micro_batch_loss,
    per_sequence,
    split_once,
    totals_of,
    validate_batch,
    without_gradient,
)
from engine.cluster.rank_progress import RankFailed, is_peer_loss, report_progress
from engine.errors import BadModelFolder, NonFiniteGradient, PermanentEngineError
from engine.losses.inputs import Outputs
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from storage.chain.records import OptimizerSpec


class ZeroTrainer:
    """Keeps this rank's part of the model of `folder`, and reads no more of it."""

    def __init__(
        self,
        folder: Path,
        options: ZeroOptions,
        *,
        device: torch.device,
        sequence: SequenceGroup | None = None,
        head_seed: int | None = None,
    ) -> None:
        """`sequence`: the ranks that share each packed row; None when none do. `head_seed`: see `open_meta_model`."""
        self._device, self._stage = device, options.trainer.zero_stage
        self._ranks, self._sequence = dist.get_world_size(), sequence
        shared = 1 if sequence is None else sequence.size
        self._readers, self._reader = self._ranks // shared, dist.get_rank() // shared
        """How many groups of ranks take micro-batches of their own, and which this one's is."""
        master = options.master_dtype
        held = master if self._stage == 0 else options.dtype
        meta_model = open_meta_model(folder, dtype=master, parameter_dtype=held, device=device, head_seed=head_seed)
        loaded = meta_model.model
        self.module: Any = loaded.module
        fuse_kernels(self.module, options.trainer.liger, device)
        if sequence is not None:
            sequence.check(self.module.config)
        buffers = {name: b for name, b in loaded.named_weights() if not isinstance(b, torch.nn.Parameter)}
        own = {id(tensor): name for name, tensor in loaded.named_weights()}
        trained = {own[id(parameter)]: name for name, parameter in loaded.module.named_parameters()}
        exported = {name: own[id(tensor)] for name, tensor in loaded.exported_weights()}
        self.gradients: Gradients = make_gradients(loaded, options, device, sequence)
        self.model = self.gradients.model
        self.state = files.State(
            shards=self.gradients.shards,
            buffers={name: self.module.get_buffer(name) for name in buffers},
            exported=exported,
            trained=trained,
            device=device,
            master_dtype=master,
        )
        files.fill(self.state, meta_model.weights)
        if not meta_model.probed:
            self._probe(folder)

    @torch.no_grad()
    def _probe(self, folder: Path) -> None:
        """Raises BadModelFolder on all ranks alike for an architecture that packs wrongly."""
        mine: list[str] = []

        def compare(model: RankModel) -> torch.Tensor:
            try:
                probe(model, folder)
            except BadModelFolder as error:  # once the ranks have exchanged what they had to
                mine.append(str(error))
            return torch.zeros((), device=self._device)

        self.gradients.ask(compare)
        for said in _gather(mine):
            if said:
                raise BadModelFolder(said[0])

    @property
    def shards(self) -> Any:
        return self.gradients.shards

    # -- gradient ---------------------------------------------------------------------------------------------

    def update(
        self, samples: Sequence[Sample], objective: Objective, optimizer: OptimizerSpec, *, max_tokens: int
    ) -> UpdateReport:
        check_reads(objective.loss, scalar=self.model.scalar, name=type(self.module).__name__)
        self._check_sequences(samples)
        totals = totals_of(samples)
        taught = [sample for sample in samples if not without_gradient(sample, objective)]
        validate_batch(taught, objective)

        def accumulate(max_tokens: int) -> Accumulated:
            return self._accumulate(taught, objective, totals, max_tokens)

        found = split_once(
            accumulate,
            taught,
            max_tokens,
            device=self._device,
            forget=self.gradients.forget,
            whole_groups=objective.loss.pairwise,
        )
        norm, moved = self.gradients.step(optimizer)
        report = UpdateReport(
            metrics=metrics_of(found.sums, passed=taught, totals=totals, grad_norm=norm),
            skipped=not moved,
            micro_batches=found.micro_batches,
            max_tokens=found.max_tokens,
        )
        if not moved and not objective.skip_non_finite:
            raise NonFiniteGradient(f"the gradient norm of {len(samples)} samples is {norm}")
        return report

    def _accumulate(
        self, taught: Sequence[Sample], objective: Objective, totals: Totals, max_tokens: int
    ) -> Accumulated:
        passes = deal(
            taught, max_tokens=max_tokens, ranks=self._readers, whole_groups=objective.loss.pairwise
        )
        mine = Accumulated(max_tokens)

        def run() -> None:
            for row in passes:
                self._pass(row[self._reader], taught, objective, totals, mine)
                report_progress()

        self._together(run, recovers=self.gradients.recovers)
        whole = Accumulated(max_tokens, micro_batches=sum(batch is not None for row in passes for batch in row))
        whole.sums["loss"] = 0.0
        for sums in _gather(dict(mine.sums)):
            for name, value in sums.items():
                whole.sums[name] += value
        return whole

    def _pass(
        self,
        indices: list[int] | None,
        taught: Sequence[Sample],
        objective: Objective,
        totals: Totals,
        mine: Accumulated,
    ) -> None:
        def forward(packed: Packed) -> Outputs:
            if objective.loss.needs_entropy:
                both = self.gradients.ask(
                    lambda model: torch.stack(
                        model.logprobs_and_entropy(packed, temperature=objective.temperature)
                    )
                )
                return Outputs(logprobs_N=both[0], entropy_N=both[1])
            if objective.loss.reads == "values":
                return Outputs(values_N=self.gradients.ask(lambda model: model.values(packed)))
            return Outputs(logprobs_N=self.gradients.logprobs(packed, objective.temperature))

        if indices is None:  # the others gather weights now: a gradient of zeros takes part
            self.gradients.backward(0.0 * forward(pack([EMPTY_PASS], device=self._device)).any_N.sum())
            return
        samples = [taught[i] for i in indices]
        loss, sums = micro_batch_loss(forward, samples, objective, totals, device=self._device)
        self.gradients.backward(loss)
        if self._sequence is not None and self._sequence.rank > 0:
            return  # the same numbers, which the first of them counts
        mine.sums["loss"] += loss.item()
        for name, value in sums.items():
            mine.sums[name] += float(value)

    def _together(self, run: Callable[[], None], *, recovers: bool) -> None:
        """Runs it; a rank that fails makes all of them raise, or ends the group where the others may be waiting for it
        in the middle of `run`. Out of memory is out of memory on all of them."""
        mine: Exception | None = None
        try:
            run()
        except Exception as error:  # noqa: BLE001 - the boundary between a rank and the others, who wait for it
            mine = error.with_traceback(None)  # which holds the tensors of the forward that failed
        if mine is not None and not recovers and self._ranks > 1:
            short_of_memory = isinstance(mine, RuntimeError) and is_out_of_memory(mine)
            reason = f"{OUT_OF_MEMORY_MARK}: {mine}" if short_of_memory else f"a pass failed: {mine!r}"
            raise RankFailed(reason, is_cause=not is_peer_loss(mine))
        failures = [(rank, error) for rank, error in enumerate(_gather(_described(mine))) if error is not None]
        if failures and all(short_of_memory for _, (_, short_of_memory) in failures):
            raise torch.OutOfMemoryError(f"rank {failures[0][0]}: {failures[0][1][0]}")
        for rank, (said, short_of_memory) in failures:
            if not short_of_memory:
                raise PermanentEngineError(f"rank {rank}: {said}") from mine

    # -- reading ----------------------------------------------------------------------------------------------

    def logprobs(
        self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int
    ) -> list[list[float]]:
        """Nats of every trained token, per sequence, in the order given."""
        check_gives("logprobs", scalar=self.model.scalar, name=type(self.module).__name__)
        return self._read(sequences, lambda packed: self.gradients.logprobs(packed, temperature), max_tokens)

    def values(self, sequences: Sequence[TokenSequence], *, max_tokens: int) -> list[list[float]]:
        """The scalar head's number before every trained token, per sequence, in the order given."""
        check_gives("values", scalar=self.model.scalar, name=type(self.module).__name__)

        def forward(packed: Packed) -> torch.Tensor:
            return self.gradients.ask(lambda model: model.values(packed))

        return self._read(sequences, forward, max_tokens)

    @torch.no_grad()
    def _read(
        self, sequences: Sequence[TokenSequence], forward: Callable[[Packed], torch.Tensor], max_tokens: int
    ) -> list[list[float]]:
        self._check_sequences(sequences)  # here, on all ranks alike, not in the middle of a pass

        def run(max_tokens: int) -> list[list[float]]:
            passes = deal(sequences, max_tokens=max_tokens, ranks=self._readers)
            mine: dict[int, list[float]] = {}

            def compute() -> None:
                for row in passes:
                    indices = row[self._reader]
                    chosen: list[Packable] = [EMPTY_PASS] if indices is None else [sequences[i] for i in indices]
                    packed = pack(chosen, device=self._device)
                    mine.update(zip(indices or [], per_sequence(forward(packed), packed), strict=False))
                    report_progress()

            self._together(compute, recovers=self._stage != 3 and self._sequence is None)
            found = {index: values for part in _gather(mine) for index, values in part.items()}
            return [found[index] for index in range(len(sequences))]

        return split_once(run, sequences, max_tokens, device=self._device, forget=lambda: None)

    def _check_sequences(self, sequences: Sequence[Packable]) -> None:
        check_sequences(sequences, vocab_size=self.model.vocab_size, context_length=self.model.context_length)

    # -- state ------------------------------------------------------------------------------------------------

    def reset_optimizer(self) -> None:
        self.shards.forget_moments()

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return files.weights_digest(self.state)

    def write_checkpoint(self, folder: Path) -> list[str]:
        names = files.write_checkpoint(self.state, folder)
        dist.barrier()
        return names

    def read_checkpoint(self, given: Mapping[str, Path], *, optimizer: bool) -> None:
        files.read_checkpoint(self.state, given, optimizer=optimizer)

    def write_config(self, folder: Path) -> list[str]:
        """On rank 0; the names of its files."""
        folder.mkdir(parents=True, exist_ok=True)
        before = set(folder.iterdir())
        if dist.get_rank() == 0:
            self.module.config.save_pretrained(folder)
            if getattr(self.module, "generation_config", None) is not None:
                self.module.generation_config.save_pretrained(folder)
        return sorted(path.name for path in set(folder.iterdir()) - before)

    def stage_weights(self, folder: Path, *, dtype: torch.dtype) -> list[str]:
        return files.write_folder(self.state, folder, dtype=dtype, spread=True)

    def export(self, folder: Path) -> list[str]:
        names = files.write_folder(self.state, folder)
        self.write_config(folder)
        dist.barrier()
        return sorted({*names, *(path.name for path in folder.glob("*config.json"))})

    def holds(self) -> dict[str, int]:
        """Bytes of master weights and of moments that this rank holds now."""
        return {"masters": self.shards.nbytes(), "moments": self.shards.moments_nbytes()}

    def close(self) -> None:
        """Drops everything, DeepSpeed's hooks and buffers included."""
        engine = getattr(self.gradients, "_engine", None)
        if engine is not None:
            engine.destroy()


def _described(error: Exception | None) -> tuple[str, bool] | None:
    """(what it says, whether memory ran out)."""
    if error is None:
        return None
    return str(error).splitlines()[0], isinstance(error, RuntimeError) and is_out_of_memory(error)


def _gather(value: Any) -> list[Any]:
    """Everyone's `value`, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
