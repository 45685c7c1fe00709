"""The optimizer on the ranks: AdamW on flat master weights, or Muon for the hidden matrices with AdamW for everything
else.

Muon needs whole matrices, of which each rank has pieces. The momentum is kept in pieces. In a step, each matrix is
assembled on one rank, which computes the update with torch's Muon and sends it to all, so that the definition is that
of the torch trainer (engine.backends.torch.optimizers). DeepSpeed's own Muon is another one: it clips the updates
instead of the gradient, does not scale them to AdamW's, and keeps whole momenta whose layout follows the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from engine.backends.deepspeed.rank_model import gather
from engine.backends.deepspeed.shards import ShardPiece, Shards
from engine.backends.torch.optimizers import MUON_MOMENTUM, check_kind, new_muon
from engine.backends.torch.updates import set_adamw
from engine.cluster.rank_progress import report_progress
from storage.chain.records import OptimizerKind, OptimizerSpec


class RankOptimizer(torch.optim.AdamW):
    """Steps the flat tensors of which this rank has pieces. `bind` tells it which ones, before the first step.

    The momentum of a hidden matrix is in `exp_avg`, so that both kinds of optimizer have the same state."""

    def __init__(self, groups: Sequence[dict[str, Any]], hidden: Iterable[str], device: torch.device) -> None:
        """`groups` are those of `adamw_groups`, `hidden` the names of the matrices that Muon steps. Matrices are
        assembled on `device`."""
        super().__init__(groups, fused=True)
        self.kind: OptimizerKind = "adamw"
        self.hidden, self._device = frozenset(hidden), device
        self._shards: Shards | None = None
        self._names: dict[int, list[str]] = {}
        self._pieces: dict[int, list[ShardPiece]] = {}

    def bind(self, shards: Shards, flats: Sequence[Tensor]) -> None:
        """`flats` are the tensors of `shards`, in the same order on all ranks. Every rank calls it."""
        self._shards = shards
        numbers = {id(flat): number for number, flat in enumerate(flats)}
        for piece in shards.pieces:
            self._pieces.setdefault(id(piece.flat), []).append(piece)
        # A rank may have no piece of a small matrix, and takes part in assembling it.
        on_rank = [(numbers[id(piece.flat)], piece.name) for piece in shards.pieces if piece.name in self.hidden]
        names: set[tuple[int, str]] = set()
        for of_rank in [on_rank] if shards.replicated else gather(on_rank):
            names.update(of_rank)
        for number, name in sorted(names):
            self._names.setdefault(id(flats[number]), []).append(name)

    def apply(self, spec: OptimizerSpec) -> None:
        """Applies the settings of one step. Raises BadSpec for another kind of optimizer than that of the moments."""
        self.check(spec)
        self.kind = spec.kind
        set_adamw(self.param_groups, spec)

    def check(self, spec: OptimizerSpec) -> None:
        """Raises BadSpec if the moments are those of another kind of optimizer."""
        if any(self.state.values()):
            check_kind(spec, self.kind)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch has overloads
        if self.kind == "adamw":
            return super().step(closure)
        # DeepSpeed steps a part of the tensors at once, the same on all ranks.
        for group in self.param_groups:
            for flat in group["params"]:
                self._create_moments(flat)
                self._step_hidden(flat, group)
                self._step_others(flat, group)
        return None

    def _create_moments(self, flat: Tensor) -> None:
        if not self.state[flat]:
            moments = {name: torch.zeros_like(flat, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            count = torch.zeros((), dtype=torch.float32, device=flat.device)
            self.state[flat] = {"step": count, **moments}

    def _step_hidden(self, flat: Tensor, group: Mapping[str, Any]) -> None:
        """Steps the pieces of hidden matrices."""
        assert self._shards is not None and flat.grad is not None
        pieces: dict[str, list[ShardPiece]] = {}
        # What is made orthogonal: the gradient, moved towards the momentum (Nesterov), element by element.
        for piece in self._pieces.get(id(flat), []):
            if piece.name in self.hidden:
                pieces.setdefault(piece.name, []).append(piece)
                momentum, gradient = piece.of(self.state[flat]["exp_avg"]), piece.of(flat.grad)
                momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
                gradient.lerp_(momentum, MUON_MOMENTUM)

        # The ranks compute at the same time, one matrix each. Without ZeRO, every rank has all and sends nothing.
        names = self._names.get(id(flat), [])
        alone = self._shards.replicated or dist.get_world_size() == 1
        ranks = [dist.get_rank()] if alone else list(range(dist.get_world_size()))
        for begin in range(0, len(names), len(ranks)):
            batch = list(zip(ranks, names[begin : begin + len(ranks)], strict=False))
            computed: Tensor | None = None
            for rank, name in batch:
                direction = self._shards.assemble(name, on=rank, device=self._device, of=_gradient)
                if direction is not None:
                    computed = _muon_change(direction, lr=group["lr"])
                report_progress()
            for rank, name in batch:
                change = computed
                if rank != dist.get_rank() or change is None:
                    change = torch.empty(self._shards.shapes[name], dtype=flat.dtype, device=self._device)
                if not alone:
                    dist.broadcast(change, rank)
                for piece in pieces.get(name, []):
                    of_piece = change.view(-1)[piece.start : piece.start + piece.length]
                    weight = piece.of(flat)
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(of_piece.to(weight.device))

    def _step_others(self, flat: Tensor, group: Mapping[str, Any]) -> None:
        """Steps the elements between the hidden matrices with AdamW."""
        state = self.state[flat]
        ranges: list[tuple[int, int]] = []
        end = 0
        hidden = [piece for piece in self._pieces.get(id(flat), []) if piece.name in self.hidden]
        for piece in sorted(hidden, key=lambda piece: piece.offset):
            ranges.append((end, piece.offset))
            end = piece.offset + piece.length
        ranges = [(begin, end) for begin, end in [*ranges, (end, flat.numel())] if end > begin]

        def parts(tensor: Tensor) -> list[Tensor]:
            return [tensor.detach().view(-1)[begin:end] for begin, end in ranges]

        if ranges:
            beta1, beta2 = group["betas"]
            adamw(
                parts(flat),
                parts(flat.grad),  # type: ignore[arg-type]  # every flat tensor has a gradient in a step
                parts(state["exp_avg"]),
                parts(state["exp_avg_sq"]),
                [],
                [state["step"].clone() for _ in ranges],  # each call counts one step
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        state["step"] += 1


def _gradient(flat: Tensor) -> Tensor:
    assert flat.grad is not None
    return flat.grad


def _muon_change(direction: Tensor, *, lr: float) -> Tensor:
    """What Muon adds to a matrix, without the weight decay."""
    change = nn.Parameter(torch.zeros_like(direction))
    change.grad = direction
    new_muon([change], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return change.detach()
