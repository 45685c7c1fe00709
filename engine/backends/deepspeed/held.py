"""Bytes that a trained model takes on the devices of all ranks, by ZeRO stage (arXiv:1910.02054, figure 1)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.trainer_spec import DeepSpeedSpec

MOMENTS_PER_WEIGHT = 2


@dataclass(frozen=True, slots=True)
class Held:
    """Of one policy, added up over all devices; what is offloaded to the machines' memory is in `host`."""

    weights: int
    """That compute, and their masters."""
    gradients: int
    """At their peak, in an update."""
    moments: int
    host: int

    def device_bytes(self, *, training: bool) -> int:
        return self.weights + (self.gradients + self.moments if training else 0)


def held_bytes(
    spec: DeepSpeedSpec, *, parameters: int, buffers: int, ranks: int, compute_bytes: int, master_bytes: int
) -> Held:
    """`ranks` of all nodes; `compute_bytes` and `master_bytes` per number, `buffers` in bytes."""
    stage, lower = spec.zero_stage, compute_bytes != master_bytes
    if stage == 0:
        whole = ranks * parameters * master_bytes
        return Held(whole + ranks * buffers, whole, MOMENTS_PER_WEIGHT * whole, 0)
    replicas = 1 if stage == 3 else ranks
    computing, masters = replicas * parameters * compute_bytes, parameters * master_bytes
    moments = MOMENTS_PER_WEIGHT * masters
    if stage == 1:
        # a whole gradient on every rank until the step; in bfloat16 it is added up beside it in the masters' precision
        gradients = ranks * parameters * (compute_bytes + (master_bytes if lower else 0))
    else:
        gradients = masters
    host = 0
    if spec.offload_optimizer == "cpu":
        host, masters, moments = host + masters + moments + parameters * master_bytes, 0, 0
    if spec.offload_parameters == "cpu":
        host, computing = host + computing, 0
    return Held(computing + masters + ranks * buffers, gradients, moments, host)
