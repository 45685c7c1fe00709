"""Bytes of a model in training, by ZeRO stage (arXiv:1910.02054, figure 1), and where they lie. No torch: the memory
plan (engine.memory_plan.trainer) and the backend both count with this."""

from __future__ import annotations

from dataclasses import dataclass

from engine.specs.trainer import DeepSpeedSpec

MOMENTS_PER_WEIGHT = 2


@dataclass(frozen=True, slots=True)
class ZeroStateBytes:
    """Of one policy, over all ranks, in one kind of memory."""

    weights: int = 0
    """That compute, and buffers."""
    masters: int = 0
    """Where they are others than `weights`."""
    gradients: int = 0
    """At their peak, in an update."""
    standing: int = 0
    """Of `gradients`, what is held from the start on, trained or not: DeepSpeed's own buffers."""
    moments: int = 0

    def nbytes(self, *, training: bool = True) -> int:
        return self.weights + self.masters + (self.gradients + self.moments if training else self.standing)


@dataclass(frozen=True, slots=True)
class PlacedStates:
    device: ZeroStateBytes
    host: ZeroStateBytes
    """What is offloaded to the machines' memory."""


def zero_state_bytes(
    spec: DeepSpeedSpec, *, parameters: int, buffers: int, ranks: int, compute_bytes: int, master_bytes: int
) -> PlacedStates:
    """`ranks` of all nodes; `compute_bytes` and `master_bytes` per number, `buffers` in bytes."""
    stage, lower, everywhere = spec.zero_stage, compute_bytes != master_bytes, ranks * buffers
    masters = parameters * master_bytes
    if stage == 0:
        whole = ranks * masters
        device = ZeroStateBytes(weights=whole + everywhere, gradients=whole, moments=MOMENTS_PER_WEIGHT * whole)
        return PlacedStates(device, ZeroStateBytes())
    away = spec.offload_optimizer == "cpu"
    computing = (1 if stage == 3 else ranks) * parameters * compute_bytes
    # stage 1: a whole gradient on every rank until the step; in bfloat16 added up beside it in the masters' precision,
    # where nothing is offloaded in a buffer that is always there
    added_up = ranks * parameters * master_bytes if stage == 1 and lower else 0
    whole = ranks * parameters * compute_bytes + added_up if stage == 1 else 0
    # offloaded, the masters have a gradient of their own, beside that in which micro-batches add up: in stages 1 and 2
    # DeepSpeed keeps that one on the device unless it has the weights' precision
    in_host = away and (stage == 3 or not lower)
    shares = 0 if in_host or (stage == 1 and not away) else masters
    on_device = ZeroStateBytes(
        weights=(computing if spec.offload_parameters == "none" else 0) + everywhere,
        masters=0 if away else masters,
        gradients=whole + shares,
        standing=0 if away else {1: added_up, 2: 0, 3: masters}[stage],
        moments=0 if away else MOMENTS_PER_WEIGHT * masters,
    )
    offloaded = ZeroStateBytes(
        weights=0 if spec.offload_parameters == "none" else computing,
        masters=masters if away else 0,
        gradients=(2 if in_host else 1) * masters if away else 0,
        standing=(2 * masters if stage == 3 else masters) if away else 0,
        moments=MOMENTS_PER_WEIGHT * masters if away else 0,
    )
    return PlacedStates(on_device, offloaded)
