"""Bytes of a model in training, by ZeRO stage (arXiv:1910.02054, figure 1), and the memory that holds them.

This module does not import torch: the memory plan (engine.memory_plan.trainer) and the backend both use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.specs.trainer import DeepSpeedSpec

MOMENTS_PER_WEIGHT = 2


@dataclass(frozen=True, slots=True)
class ZeroStateBytes:
    """Bytes of one policy's states in one kind of memory, over all ranks."""

    weights: int = 0
    """Bytes of the weights that compute, and of buffers."""
    masters: int = 0
    """Bytes of the master weights, where these are not the weights that compute."""
    gradients: int = 0
    """Bytes of the gradients at their peak in an update."""
    standing: int = 0
    """Part of `gradients` that is allocated from the start on, whether the policy is trained or not: DeepSpeed's
    buffers."""
    moments: int = 0
    """Bytes of AdamW's two moments."""

    def nbytes(self, *, training: bool = True) -> int:
        """The sum: with `training`, at the peak of an update; without, for a policy that is only read."""
        variable = self.gradients + self.moments if training else self.standing
        return self.weights + self.masters + variable


@dataclass(frozen=True, slots=True)
class PlacedStates:
    """The states in the memory of the devices, and those that are offloaded to the machines' memory."""

    device: ZeroStateBytes
    host: ZeroStateBytes


def zero_state_bytes(
    spec: DeepSpeedSpec, *, parameters: int, buffers: int, ranks: int, compute_bytes: int, master_bytes: int
) -> PlacedStates:
    """The states of a model with this many parameters. `ranks` are those of all nodes; `compute_bytes` and
    `master_bytes` are bytes per number, `buffers` is in bytes."""
    stage, lower = spec.zero_stage, compute_bytes != master_bytes
    masters, all_buffers = parameters * master_bytes, ranks * buffers
    if stage == 0:
        replicas = ranks * masters
        moments = MOMENTS_PER_WEIGHT * replicas
        device = ZeroStateBytes(weights=replicas + all_buffers, gradients=replicas, moments=moments)
        return PlacedStates(device, ZeroStateBytes())

    # weights that compute
    computing = (1 if stage == 3 else ranks) * parameters * compute_bytes
    weights_on_host = 0 if spec.offload_parameters == "none" else computing
    weights_on_device = computing - weights_on_host + all_buffers

    # stage 1 holds a whole gradient on every rank until the step; in bfloat16, micro-batches add up in a second one, in
    # the masters' precision
    added_up = ranks * masters if stage == 1 and lower else 0
    whole_gradients = ranks * parameters * compute_bytes + added_up if stage == 1 else 0

    if spec.offload_optimizer != "cpu":
        device = ZeroStateBytes(
            weights=weights_on_device,
            masters=masters,
            gradients=whole_gradients + (0 if stage == 1 else masters),
            standing={1: added_up, 2: 0, 3: masters}[stage],
            moments=MOMENTS_PER_WEIGHT * masters,
        )
        return PlacedStates(device, ZeroStateBytes(weights=weights_on_host))

    # the offloaded masters have a gradient of their own; the gradient in which micro-batches add up is another one, and
    # in stages 1 and 2 DeepSpeed keeps it on the device unless it has the weights' precision
    sums_on_host = stage == 3 or not lower
    device = ZeroStateBytes(weights=weights_on_device, gradients=whole_gradients + (0 if sums_on_host else masters))
    host = ZeroStateBytes(
        weights=weights_on_host,
        masters=masters,
        gradients=(2 if sums_on_host else 1) * masters,
        standing=(2 if stage == 3 else 1) * masters,
        moments=MOMENTS_PER_WEIGHT * masters,
    )
    return PlacedStates(device, host)
