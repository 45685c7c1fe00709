"""Rank side of the tests: trainers of any stage in one group, so that its processes start once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.backends.deepspeed.options import RankOptions
from engine.backends.deepspeed.passes import RankPasses
from engine.backends.deepspeed.rank_model import gather
from engine.backends.deepspeed.ranks import RankTrainers
from engine.backends.deepspeed.shards import MOMENTS
from engine.backends.torch.attention import PackedLayout
from engine.backends.torch.packing import pack
from engine.backends.weight_files.pieces import StoredTensors
from engine.models.samples import Sample
from engine.specs.adapters import Head, LoraSpec
from engine.specs.engine import DeepSpeedSpec
from storage.chain.records import OptimizerSpec

TARGET = "tests.engine.deepspeed.lab:Lab"


def lab_options(dtype: str = "float32", **spec: Any) -> dict[str, Any]:
    options = RankOptions(trainer=DeepSpeedSpec(**spec), compute_dtype=dtype, device="cpu", threads=1)  # type: ignore[arg-type]
    return options.model_dump(mode="json")


@contextmanager
def wrong_attention() -> Iterator[None]:
    """Within this context, attention over packed rows returns a tenth of the right output."""
    right = PackedLayout.attend
    PackedLayout.attend = lambda *args: 0.1 * right(*args)  # type: ignore[method-assign]
    try:
        yield
    finally:
        PackedLayout.attend = right  # type: ignore[method-assign]


class DeadlySequence(list[Any]):
    """A list that kills its process, as by `kill -9`, when half of it has been read."""

    def __iter__(self) -> Iterator[Any]:
        yield from self[: len(self) // 2]
        os.kill(os.getpid(), signal.SIGKILL)


class Lab(RankTrainers):
    """`RankTrainers` that can load with other options, and report what a rank holds."""

    def load_with(
        self, number: int, options: Mapping[str, Any], folder: Path, head: Head = "lm", init_seed: int = 0
    ) -> dict[str, Any]:
        self._options = RankOptions.model_validate(options)
        return self.load(number, folder, head, init_seed)

    def load_adapter_with(
        self,
        number: int,
        base_number: int,
        options: Mapping[str, Any],
        folder: Path,
        spec: LoraSpec,
        init_seed: int = 0,
    ) -> dict[str, Any]:
        """Loads an adapter and its base, unless the base is there already."""
        self._options = RankOptions.model_validate(options)
        if base_number not in self._trainers:
            self.load_base(base_number, folder, "models/tiny/000001")
        return self.load_adapter(number, base_number, spec, init_seed)

    def facts(self, number: int) -> list[dict[str, Any]]:
        """For each rank: dtypes and number of elements of its masters and moments, and the compute dtype."""
        trainer = self.trainer(number)
        pieces = trainer.shards.pieces
        moments = [trainer.shards.moment(p, "exp_avg").dtype for p in pieces] if trainer.shards.has_moments else []
        mine = {
            "masters": {str(piece.flat.dtype) for piece in pieces},
            "elements": sum(piece.length for piece in pieces),
            "moments": {str(dtype) for dtype in moments},
            "computes": str(trainer.model.dtype),
        }
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        return gathered

    def held_by_adapter(self, number: int) -> list[dict[str, int]]:
        """For each rank: numbers of elements of the adapter's masters and moments, and of the base's weights and
        gradients."""
        trainer = self.trainer(number)
        shards, base = trainer.shards, trainer.base
        moments = [shards.moment(piece, name) for piece in shards.pieces for name in MOMENTS]
        mine = {
            "masters": sum(piece.length for piece in shards.pieces),
            "moments": sum(moment.numel() for moment in moments),
            "base": sum(piece.flat.numel() for piece in base.state.shards.pieces),
            "base_gradients": sum(p.grad is not None for p in base.model.module.parameters()),
        }
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        return gathered

    def load_counting(self, number: int, options: Mapping[str, Any], folder: Path) -> list[tuple[int, int]]:
        """For each rank: (number of elements that it read from files to load, largest number in one read)."""
        read: list[int] = []
        whole = StoredTensors.read_into

        def counted(tensors: StoredTensors, name: str, out: torch.Tensor, *, start: int = 0) -> None:
            read.append(out.numel())
            whole(tensors, name, out, start=start)

        StoredTensors.read_into = counted  # type: ignore[method-assign]
        try:
            self.load_with(number, options, folder)
        finally:
            StoredTensors.read_into = whole  # type: ignore[method-assign]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (sum(read), max(read)))
        return gathered

    def load_attending_wrongly(self, number: int, options: Mapping[str, Any], folder: Path) -> None:
        with wrong_attention():
            self.load_with(number, options, folder)

    def update_values(
        self, number: int, samples: Sequence[Sample], targets: Sequence[float], optimizer: OptimizerSpec
    ) -> tuple[float, float]:
        """One step on the mean square of (value - target) over trained tokens; the ranks take turns at the samples.
        (loss, norm of the gradient)."""
        gradients, rank, ranks = self.trainer(number).sharded, dist.get_rank(), dist.get_world_size()
        packed = pack(samples[rank::ranks], device=torch.device("cpu"))
        values_N = gradients.evaluate(lambda model: model.values(packed))
        targets_N = torch.tensor([t for s, t in zip(samples, targets, strict=True) for _ in range(s.trained)])
        own_N = torch.tensor([i % ranks == rank for i, s in enumerate(samples) for _ in range(s.trained)])
        loss = (values_N - targets_N[own_N]).square().sum() / len(targets_N)
        gradients.backward(loss)
        norm, moved = gradients.step(optimizer)
        assert moved
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total), norm

    def update(self, number: int, passes: RankPasses[Sample], *args: Any) -> Any:
        self._rows = []
        for micro_batch in passes:
            self._rows.append(None if micro_batch is None else [sample.completion for sample in micro_batch])
        return super().update(number, passes, *args)

    def rows_of_last_update(self, number: int) -> list[Any]:
        """[rank][pass] -> `completion` of each sample that the rank got; None for an empty pass."""
        return gather(self._rows)

    def count_layer_runs(self, number: int) -> None:
        """Counts from now on how often the first decoder layer of this trainer runs on this rank."""
        self._layer_runs = 0

        def count(*_: Any) -> None:
            self._layer_runs += 1

        layer = self.trainer(number).module.model.layers[0].mlp
        layer.register_forward_pre_hook(count)  # computing again ends as soon as it has what it needs

    def layer_runs(self, number: int) -> int:
        return self._layer_runs

    def limit_memory(self, number: int, room: int, failing_rank: int) -> None:
        """From now on one rank has memory for passes of `room` packed tokens only."""
        trainer = self.trainer(number)
        whole = trainer.sharded.logprobs

        def small(packed: Any, temperature: float) -> torch.Tensor:
            if dist.get_rank() == failing_rank and len(packed.token_ids_T) > room:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return whole(packed, temperature)

        trainer.sharded.logprobs = small

    def spoil_held(self, number: int, fault: str, other_number: int) -> None:
        """Changes the weights that this rank holds under `number`, after their digests were computed. `other_number`:
        weights of another step."""
        held = self._sender.held[number]
        tensors = [(name, part.clone()) for name, part in held.tensors]
        other = list(self._sender.held[other_number].tensors)
        first = next(index for index, (name, _) in enumerate(tensors) if name.endswith("o_proj.weight"))
        second = next(i for i, (name, _) in enumerate(tensors) if i > first and name.endswith("o_proj.weight"))
        rank = dist.get_rank()
        if fault == "off by 1e-2" and rank == 0:
            tensors[first][1][0] += 1e-2
        elif fault == "swapped":
            one, two = tensors[first], tensors[second]
            tensors[first], tensors[second] = (one[0], two[1]), (two[0], one[1])
        elif fault == "one byte" and rank == 1:
            tensors[second][1].view(torch.uint8)[-1] ^= 1
        elif fault == "a shard of another step" and rank == 1:
            tensors = other
        elif fault == "stale head":
            for index, (name, stale) in enumerate(other):
                if "embed_tokens" in name:
                    tensors[index] = (name, stale)
        elif fault == "dies" and rank == 1:
            self._sender.held[number] = replace(held, tensors=DeadlySequence(tensors))
            return
        self._sender.held[number] = replace(held, tensors=tensors)

    def die_in_backward(self, number: int) -> None:
        """From now on rank 1 dies by itself, as by `kill -9`, in the middle of an update."""
        trainer = self.trainer(number)
        whole = trainer.sharded.backward

        def die(loss: torch.Tensor) -> None:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            whole(loss)

        trainer.sharded.backward = die
