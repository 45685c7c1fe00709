"""The optimizer of the torch trainer: AdamW, Muon for the hidden matrices with AdamW for everything else, or AdamW with
moments of 8 bits.

A matrix is hidden if it is neither an embedding nor an output head. AdamW and Muon are torch's. The update of Muon
(kellerjordan.github.io/posts/muon) is the momentum with all singular values near 1. It is scaled to the size of AdamW's
updates, 0.2·sqrt(max(rows, columns)) (arXiv:2502.16982), so that both take the same learning rate and weight decay.

In 8 bits (bitsandbytes, arXiv:2110.02861), a moment is cut into blocks of 256 numbers. Each number is the index of an
entry in a fixed table, times the largest number of its block. The moments of small tensors stay in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from engine.backends.torch.scalar_lm import HEAD_NAME
from engine.backends.torch.updates import adamw_groups, set_adamw
from engine.backends.weight_files.pieces import moment_shapes
from engine.errors import BadSpec
from storage.chain.records import OptimizerKind, OptimizerSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
"""The only state of Muon."""
MUON_MOMENTUM = 0.95
HEADS = ("lm_head", "embed_out", HEAD_NAME)
"""Names of the output heads in models of transformers."""


STATES = ("state1", "state2")
"""bitsandbytes' names of the moments."""
SCALES = ("absmax1", "absmax2")
"""The largest number of each block of the moments of 8 bits, `state1` and `state2`."""
BLOCK = 256
"""Numbers of a moment of 8 bits that share a scale: bitsandbytes' own."""
SMALLEST_8BIT = 4096
"""Number of elements from which the moments of a tensor have 8 bits: bitsandbytes' default."""


class TrainerOptimizer:
    """One or two optimizers, which step together."""

    def __init__(self, kind: OptimizerKind, trained: Sequence[tuple[str, nn.Parameter]], module: nn.Module) -> None:
        self.kind = kind
        hidden = hidden_matrices(trained, module) if kind == "muon" else set()
        matrices = [parameter for name, parameter in trained if name in hidden]
        others = [parameter for name, parameter in trained if name not in hidden]
        self._adamw: torch.optim.Optimizer | None = None
        if others and kind == "adamw_8bit":
            self._adamw = _new_adamw_8bit(others)
        elif others:
            self._adamw = torch.optim.AdamW(adamw_groups(others), fused=True)
        self._muon = new_muon(matrices) if matrices else None
        self._parts: list[torch.optim.Optimizer] = [part for part in (self._adamw, self._muon) if part is not None]

    def apply(self, spec: OptimizerSpec) -> None:
        """Applies the settings of one step. Raises BadSpec for another kind of optimizer, whose moments these are not.
        """
        check_kind(spec, self.kind)
        if self._adamw is not None:
            set_adamw(self._adamw.param_groups, spec)
        if self._muon is not None:
            for group in self._muon.param_groups:
                group.update(lr=spec.lr, weight_decay=spec.weight_decay)

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def tensors(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The moments and the count of steps of a parameter, by name. Empty before the first step."""
        for part in self._parts:
            state: dict[str, Any] = part.state.get(parameter, {})
            if state and self.kind == "adamw_8bit":
                # the table is the same for all tensors, and bitsandbytes counts without a tensor
                names = [name for name in (*STATES, *SCALES) if name in state]
                return {"step": torch.tensor(float(state["step"]))} | {name: state[name] for name in names}
            if state:
                return dict(state)
        return {}

    def read_tensor(self, parameter: nn.Parameter, moment: str, read: Callable[[Tensor], None]) -> None:
        """Has `read` fill a moment or the count of steps of a parameter, which is created if there is none."""
        part: Any = self._muon if moment == MOMENTUM else self._adamw
        state, weight = part.state[parameter], parameter.detach()
        if self.kind == "adamw_8bit":
            if not state:
                part.init_state(part.param_groups[0], parameter, 0, 0)
            tensor = torch.empty(()) if moment == "step" else state[moment]
            read(tensor)
            if moment == "step":
                state["step"] = int(tensor)
            return
        is_moment = moment in (*MOMENTS, MOMENTUM)
        state[moment] = torch.empty_like(weight) if is_moment else torch.empty((), device=weight.device)
        read(state[moment])


def new_muon(
    matrices: list[nn.Parameter],
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    momentum: float = MUON_MOMENTUM,
    nesterov: bool = True,
) -> torch.optim.Muon:
    """torch's Muon, whose updates have the size of AdamW's."""
    return torch.optim.Muon(
        matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )


def _new_adamw_8bit(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW. Raises BadSpec if it is not installed."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise BadSpec(
            "optimizer.kind='adamw_8bit' needs the package bitsandbytes: pip install 'ostinato[qlora]' on the machine "
            f"of the engine, or set optimizer.kind='adamw' ({error})"
        ) from None
    groups = [group for group in adamw_groups(parameters) if group["params"]]
    return AdamW8bit(groups, min_8bit_size=SMALLEST_8BIT)  # type: ignore[no-any-return]


def check_kind(spec: OptimizerSpec, kind: OptimizerKind) -> None:
    """Raises BadSpec for a step of another kind of optimizer than that of the moments."""
    if spec.kind != kind:
        raise BadSpec(
            f"the step is one of {spec.kind}, and the moments of its policy are those of {kind}; set "
            f"optimizer.kind={kind!r}, or begin a new stage or run from the policy's weights"
        )


def hidden_matrices(trained: Iterable[tuple[str, nn.Parameter]], module: nn.Module) -> set[str]:
    """The names of the trained matrices that Muon steps. Adapters' matrices are hidden ones. Parameters of three axes,
    such as the experts of some mixtures, are none."""
    excluded = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    # an output head may be nested, such as language_model.lm_head
    heads = [layer for name, layer in module.named_modules() if name.rpartition(".")[2] in HEADS]
    excluded |= {id(layer.weight) for layer in heads if hasattr(layer, "weight")}
    hidden = set()
    for name, parameter in trained:
        # the head of a scalar adapter is not in the module
        in_head = id(parameter) in excluded or name.startswith(f"{HEAD_NAME}.")
        if parameter.ndim == 2 and not in_head:
            hidden.add(name)
    return hidden


def kind_of_moments(names: Iterable[str]) -> OptimizerKind:
    """The kind of optimizer that a checkpoint with tensors of these names has the moments of."""
    moments = {name.partition(".")[0] for name in names}
    if MOMENTUM in moments:
        return "muon"
    return "adamw_8bit" if STATES[0] in moments else "adamw"


def expected_moments(
    kind: OptimizerKind, trained: Sequence[tuple[str, nn.Parameter]], module: nn.Module
) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a checkpoint of such an optimizer."""
    hidden = hidden_matrices(trained, module) if kind == "muon" else set()
    shapes = {name: tuple(parameter.shape) for name, parameter in trained}
    if kind == "adamw_8bit":
        large = {name: shape for name, shape in shapes.items() if prod(shape) >= SMALLEST_8BIT}
        blocks = {name: (-(-prod(shape) // BLOCK),) for name, shape in large.items()}
        return moment_shapes(shapes, STATES) | moment_shapes(blocks, SCALES)
    others = {name: shape for name, shape in shapes.items() if name not in hidden}
    return moment_shapes(others, MOMENTS) | {f"{MOMENTUM}.{name}": shapes[name] for name in sorted(hidden)}
