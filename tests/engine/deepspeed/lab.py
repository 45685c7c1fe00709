"""Rank side of the tests: trainers of any stage in one group, so that its processes start once."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.backends.deepspeed.options import ZeroOptions
from engine.backends.deepspeed.ranks import RankTrainers
from engine.backends.group.progress import progress
from engine.trainer_spec import DeepSpeedSpec

TARGET = "tests.engine.deepspeed.lab:Lab"


def lab_options(dtype: str = "float32", **spec: Any) -> dict[str, Any]:
    options = ZeroOptions(trainer=DeepSpeedSpec(**spec), compute_dtype=dtype, device="cpu", threads=1)  # type: ignore[arg-type]
    return options.model_dump(mode="json")


class Lab(RankTrainers):
    """`RankTrainers` whose next load has other options, with a look inside."""

    def load_with(self, number: int, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        self._options = ZeroOptions.model_validate(options)
        return self.load(number, folder)

    def facts(self, number: int) -> list[dict[str, Any]]:
        """Of each rank: the dtypes and elements of its masters and moments, and the dtype that computes."""
        trainer = self._of(number)
        pieces = trainer.shards.pieces
        moments = [trainer.shards.moment(p, "exp_avg").dtype for p in pieces] if trainer.shards.has_moments else []
        mine = {
            "masters": {str(piece.flat.dtype) for piece in pieces},
            "elements": sum(piece.length for piece in pieces),
            "moments": {str(dtype) for dtype in moments},
            "computes": str(trainer.model.dtype),
        }
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        return found

    def runs_of_layers(self, number: int, *args: Any) -> int:
        """How often the first decoder layer ran on this rank during one update."""
        runs = 0

        def count(*_: Any) -> None:
            nonlocal runs
            runs += 1

        layer = self._of(number).module.model.layers[0].mlp
        handle = layer.register_forward_pre_hook(count)  # computing again ends as soon as it has what it needs
        try:
            self.update(number, *args)
        finally:
            handle.remove()
        return runs

    def update_small(self, number: int, room: int, failing_rank: int, *args: Any) -> Any:
        """An update during which one rank has memory for passes of `room` packed tokens only."""
        trainer = self._of(number)
        whole = trainer.gradients.logprobs

        def small(packed: Any, temperature: float) -> torch.Tensor:
            if dist.get_rank() == failing_rank and len(packed.token_ids_T) > room:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return whole(packed, temperature)

        trainer.gradients.logprobs = small
        try:
            return self.update(number, *args)
        finally:
            trainer.gradients.logprobs = whole

    def update_and_die(self, number: int, *args: Any) -> None:
        """Rank 1 dies by itself, as by `kill -9`, in the middle of an update."""
        trainer = self._of(number)
        whole = trainer.gradients.backward

        def die(loss: torch.Tensor) -> None:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            whole(loss)

        trainer.gradients.backward = die
        progress()
        self.update(number, *args)
