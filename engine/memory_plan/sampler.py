"""What a sampler holds, by its kind: parts of one device, and parts of the machine's memory per sampler."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory_plan.parts import kv_bytes_per_token, torch_sampling, vllm_work
from engine.memory_plan.records import GIB, PHASES, Machine, Part, Phase, Workload
from engine.memory_plan.trainer import GPU_CONTEXT, GPU_PROCESS, Group, Held, lowered, part
from engine.specs.engine import LocalEngineSpec
from engine.specs.sampler import VllmSpec
from engine.specs.trainer import TorchTrainerSpec

VLLM_CPU_PROCESS = int(1.4 * GIB)
"""A vLLM process on the CPU besides weights and KV cache: 2.2 to 2.8 GiB resident with a 1 GiB cache and a 0.27 GB
model."""
VLLM_GRAPHS = 1 << 30
"""CUDA graphs, which vLLM makes beside `gpu_share`. Assumed."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parts, and what vLLM's share of a device leaves for keys and values."""

    held: Held
    """Of one copy of the sampler."""
    staged: Part | None = None
    """Weights on their way to the samplers, in the memory of the engine's machine."""
    kv_bytes: float | None = None
    """Per copy of vLLM, over all of its GPUs; None for the torch sampler, whose cache is made to measure."""


def torch_sampler(spec: LocalEngineSpec, work: Workload, group: Group) -> Sampling:
    """The embedded one: the trainer's own weights, or a copy where precision or process differ."""
    shape, compute, away = work.shape, group.compute, not isinstance(spec.trainer, TorchTrainerSpec)
    if work.lora_rank is None or away:
        copied = 0 if compute == group.master and not away else compute * shape.parameters
    else:
        others = shape.parameters - lowered(work)
        copied = 0 if compute == group.master else compute * (others + shape.lora(work.lora_rank))
    cache, logits = torch_sampling(
        shape, rows=spec.max_rows, context=work.context, prompt_tokens=spec.max_tokens_per_forward, compute=compute
    )
    parts = (
        part("sampler", "sampler's copy", copied, "weights in the compute dtype"),
        part("kv", "KV cache", cache, f"{spec.max_rows} rows of {work.context} tokens, 1.75 times", ("sampling",)),
        part("kv", "prefill and logits", logits, "keys of the prompts, 16 bytes a logit", ("sampling",)),
    )
    staged = part("staged", "weights on their way", compute * shape.parameters, "files", ("sampling",))
    return Sampling(Held(parts, ()), staged if away else None)


def vllm_sampler(
    vllm: VllmSpec, spec: LocalEngineSpec, work: Workload, machine: Machine, group: Group, *, colocated: bool
) -> Sampling:
    """Of one copy of vLLM. Device parts are one GPU's; on the CPU, the machine's."""
    shape, compute, tp = work.shape, group.compute, vllm.tensor_parallel
    weights = compute * shape.parameters / tp
    if work.lora_rank is not None:
        weights += compute * shape.lora(vllm.max_lora_rank) / tp
    if machine.device == "cpu":
        cache = GIB * (1.0 if vllm.kv_cache_gib == "auto" else vllm.kv_cache_gib)
        parts = [
            part("runtime", "vLLM process", VLLM_CPU_PROCESS, "besides weights and KV cache"),
            part("vllm", "vLLM weights", weights, "compute dtype, prepacked"),
            part("kv", "KV cache", cache, "kv_cache_gib"),
        ]
        return Sampling(Held(tuple(parts), ()), _staging(spec, vllm, weights), cache)
    work_bytes = vllm_work(shape, rows=spec.max_rows, tensor_parallel=tp, compute=compute)
    share = vllm.gpu_share * machine.device_bytes
    # vLLM wants its context within its share; the caches get what is left of it
    left = share - weights - work_bytes - GPU_CONTEXT
    cache = max(0.0, left) if vllm.kv_cache_gib == "auto" else vllm.kv_cache_gib * GIB
    asleep = colocated and vllm.sleep is not False
    phases: tuple[Phase, ...] = ("sampling",) if asleep else PHASES
    fixed = GPU_CONTEXT + (0 if vllm.eager is True else VLLM_GRAPHS)
    device = [
        part("runtime", "vLLM context, CUDA graphs", fixed, "assumed, not measured; stays when vLLM sleeps"),
        part("vllm", "vLLM weights", weights, f"{compute}P / tensor_parallel={tp}", phases),
        part("vllm", "vLLM activations", work_bytes, f"8192 tokens, logits of {spec.max_rows} rows", phases),
        part("kv", "KV cache", cache, f"what gpu_share={vllm.gpu_share:g} leaves", phases),
    ]
    node = [part("runtime", "vLLM process", GPU_PROCESS * tp, "assumed, not measured")]
    if asleep:
        slept = part("vllm", "weights of a vLLM that sleeps", weights * tp, "kept for waking up", ("backward", "step"))
        node.append(slept)
    return Sampling(Held(tuple(device), tuple(node)), _staging(spec, vllm, weights * tp), cache * tp)


def _staging(spec: LocalEngineSpec, vllm: VllmSpec, weights: float) -> Part:
    """Files of all weights in shared memory, where they travel so: a broadcast of what other processes train too."""
    way = vllm.resolved_transport(spec.cluster)
    elsewhere = spec.trainer.kind == "deepspeed"  # its ranks write what this process hands on
    by_files = way == "shm" or (way != "checkpoint" and elsewhere)
    return part("staged", "weights on their way", weights if by_files else 0, "files in shared memory", ("sampling",))


def sequences_of(work: Workload, kv_bytes: float, compute: int) -> int:
    """Whole contexts whose keys and values fit `kv_bytes`."""
    return int(kv_bytes // (work.context * kv_bytes_per_token(work.shape, compute)))
