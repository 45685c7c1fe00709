"""Computes how many bytes a model needs in each ZeRO stage (arXiv:1910.02054, figure 1), on the devices and on the
hosts.

This module does not import torch: the memory plan (engine.memory_plan.processes) and the backend both use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.specs.engine import DeepSpeedSpec

MOMENTS_PER_WEIGHT = 2


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of one policy's states in one kind of memory, over all ranks."""

    weights: int = 0
    """Bytes of the weights that the forward pass uses, and of buffers."""
    masters: int = 0
    """Bytes of the master weights, if these are not the weights that the forward pass uses."""
    gradients: int = 0
    """Bytes of the gradients at their peak in an update."""
    gradients_at_load: int = 0
    """Part of `gradients` that DeepSpeed allocates when the model is loaded, even if the policy is never trained."""
    moments: int = 0
    """Bytes of AdamW's two moments."""

    def nbytes(self, *, training: bool = True) -> int:
        """Returns the sum: with `training`, at the peak of an update, else what a policy that is only read needs."""
        if training:
            return self.weights + self.masters + self.gradients + self.moments
        return self.weights + self.masters + self.gradients_at_load


@dataclass(frozen=True, slots=True)
class BytesByPlace:
    """Bytes of the states on the devices, and of those that are offloaded to the memory of the hosts."""

    device: StateBytes
    host: StateBytes


def adapter_spec(spec: DeepSpeedSpec) -> DeepSpeedSpec:
    """Returns how the states of an adapter are split. Stage 3 splits only the base: an adapter is small, and DeepSpeed
    keeps small weights whole on every rank, too."""
    return spec.model_copy(update={"zero_stage": min(spec.zero_stage, 2), "offload_parameters": "none"})


def adapter_bytes(spec: DeepSpeedSpec, *, parameters: int, ranks: int, master_bytes: int) -> BytesByPlace:
    """Returns the bytes of an adapter with `parameters` numbers, without its base.

    Its weights are in master precision, and whole on every rank (engine.backends.deepspeed.adapters)."""
    return state_bytes(
        adapter_spec(spec),
        parameters=parameters,
        buffer_bytes=0,
        ranks=ranks,
        compute_bytes=master_bytes,
        master_bytes=master_bytes,
    )


def state_bytes(
    spec: DeepSpeedSpec, *, parameters: int, buffer_bytes: int, ranks: int, compute_bytes: int, master_bytes: int
) -> BytesByPlace:
    """Returns the bytes of a model with `parameters` numbers and `buffer_bytes` bytes of buffers.

    `ranks` is the number of ranks on all nodes; `compute_bytes` and `master_bytes` are bytes per number."""
    stage = spec.zero_stage
    # Stages 1 to 3 split the masters and the moments over the ranks, so all ranks together hold them once.
    masters = parameters * master_bytes
    moments = MOMENTS_PER_WEIGHT * masters
    all_buffers = ranks * buffer_bytes

    # Stage 0: every rank has all states, and computes with the masters, so `compute_bytes` does not matter.
    if stage == 0:
        device = StateBytes(weights=ranks * masters + all_buffers, gradients=ranks * masters, moments=ranks * moments)
        return BytesByPlace(device, StateBytes())

    # The weights that the forward pass uses. Stage 3 splits them, in the other stages every rank has all of them.
    weights = parameters * compute_bytes
    if stage != 3:
        weights *= ranks
    weights_on_host = weights if spec.offload_parameters != "none" else 0
    weights_on_device = weights - weights_on_host + all_buffers

    # Stage 1 holds a whole gradient on every rank until the step. In bfloat16 the micro-batches add up in a second
    # gradient. It has the precision of the masters, and DeepSpeed never frees it.
    computes_in_lower_precision = compute_bytes != master_bytes
    whole_gradients = accumulation_buffer = 0
    if stage == 1:
        if computes_in_lower_precision:
            accumulation_buffer = ranks * masters
        whole_gradients = ranks * parameters * compute_bytes + accumulation_buffer

    if spec.offload_optimizer == "none":
        # Stages 2 and 3 hold only each rank's part of the gradient. In stage 3 its buffer is never freed.
        device = StateBytes(
            weights=weights_on_device,
            masters=masters,
            gradients=whole_gradients if stage == 1 else masters,
            gradients_at_load={1: accumulation_buffer, 2: 0, 3: masters}[stage],
            moments=moments,
        )
        return BytesByPlace(device, StateBytes(weights=weights_on_host))

    # The offloaded masters have a gradient on the host. The micro-batches add up in another gradient of the same size,
    # which is on the host too, except in stages 1 and 2 with bfloat16.
    gradients_on_host, gradients_on_device = 2 * masters, whole_gradients
    if stage != 3 and computes_in_lower_precision:
        gradients_on_host, gradients_on_device = masters, whole_gradients + masters
    device = StateBytes(weights=weights_on_device, gradients=gradients_on_device)
    host = StateBytes(
        weights=weights_on_host,
        masters=masters,
        gradients=gradients_on_host,
        gradients_at_load=2 * masters if stage == 3 else masters,
        moments=moments,
    )
    return BytesByPlace(device, host)
