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
    """Part of `gradients` that DeepSpeed allocates when the model is loaded, even if the policy is never trained."""
    moments: int = 0
    """Bytes of AdamW's two moments."""

    def nbytes(self, *, training: bool = True) -> int:
        """The sum: with `training`, at the peak of an update; without, for a policy that is only read."""
        if training:
            return self.weights + self.masters + self.gradients + self.moments
        return self.weights + self.masters + self.standing


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
    stage = spec.zero_stage
    # ZeRO splits the masters and the moments over the ranks, so all ranks together hold them once.
    masters = parameters * master_bytes
    moments = MOMENTS_PER_WEIGHT * masters
    all_buffers = ranks * buffers

    # Stage 0: every rank has all states.
    if stage == 0:
        device = ZeroStateBytes(
            weights=ranks * masters + all_buffers, gradients=ranks * masters, moments=ranks * moments
        )
        return PlacedStates(device, ZeroStateBytes())

    # The weights that compute. Stage 3 splits them, in the other stages every rank has all of them.
    weights = parameters * compute_bytes
    if stage != 3:
        weights *= ranks
    weights_on_host = 0
    if spec.offload_parameters != "none":
        weights_on_host = weights
    weights_on_device = weights - weights_on_host + all_buffers

    # Stage 1 holds a whole gradient on every rank until the step. In bfloat16 the micro-batches add up in a second
    # gradient, in the precision of the masters, which DeepSpeed never frees.
    in_bfloat16 = compute_bytes != master_bytes
    whole_gradients = accumulated_gradients = 0
    if stage == 1:
        if in_bfloat16:
            accumulated_gradients = ranks * masters
        whole_gradients = ranks * parameters * compute_bytes + accumulated_gradients

    if spec.offload_optimizer != "cpu":
        # Stages 2 and 3 hold only each rank's part of the gradient. In stage 3 its buffer is never freed.
        device = ZeroStateBytes(
            weights=weights_on_device,
            masters=masters,
            gradients=whole_gradients if stage == 1 else masters,
            standing={1: accumulated_gradients, 2: 0, 3: masters}[stage],
            moments=moments,
        )
        return PlacedStates(device, ZeroStateBytes(weights=weights_on_host))

    # The offloaded masters have a gradient on the host. The micro-batches add up in another gradient of the same size,
    # which is on the host too, except in stages 1 and 2 with bfloat16.
    gradients_on_host, gradients_on_device = 2 * masters, whole_gradients
    if stage != 3 and in_bfloat16:
        gradients_on_host, gradients_on_device = masters, whole_gradients + masters
    device = ZeroStateBytes(weights=weights_on_device, gradients=gradients_on_device)
    host = ZeroStateBytes(
        weights=weights_on_host,
        masters=masters,
        gradients=gradients_on_host,
        standing=2 * masters if stage == 3 else masters,
        moments=moments,
    )
    return PlacedStates(device, host)
