"""Computes the memory of one sampler, by its kind: its parts on one device, and in the machine's memory."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory_plan.formulas import MASTER_BYTES, kv_bytes_per_token, torch_sampling, vllm_work
from engine.memory_plan.records import GIB, PHASES, Machine, MemoryPart, Phase, ProcessMemory, Workload
from engine.memory_plan.trainer import GPU_CONTEXT, GPU_PROCESS, TrainingSetup, compute_dtype_elements
from engine.specs.engine import LocalEngineSpec, TorchTrainerSpec, VllmSpec

VLLM_CPU_PROCESS = int(1.4 * GIB)
"""A vLLM process on the CPU without weights and KV cache. Measured: 2.2 to 2.8 GiB resident with a cache of 1 GiB and a
model of 0.27 GB."""
VLLM_GRAPHS = 1 << 30
"""CUDA graphs of vLLM, which `gpu_share` does not include. Assumed."""


@dataclass(frozen=True, slots=True)
class SamplerMemory:
    """The memory of a sampler."""

    process: ProcessMemory
    """Parts of one copy of the sampler."""
    staged: MemoryPart | None = None
    """Weights on their way to the samplers, in the memory of the engine's machine."""
    kv_bytes: float | None = None
    """KV cache of one copy of vLLM, over all of its GPUs. None for the torch sampler, whose cache is as large as its
    batch needs."""


def torch_sampler(spec: LocalEngineSpec, work: Workload, machine: Machine, setup: TrainingSetup) -> SamplerMemory:
    """Returns the memory of the embedded sampler.

    It uses the trainer's own weights, or a copy of them where the precision or the process differs. On a CPU it packs
    the linear layers and the head, except for adapters and float64. In 2 bytes, the packed ones have a second form for
    single rows.
    """
    # The sampler needs weights in the compute dtype. It uses those of the trainer where they are such.
    shape, compute = work.shape, setup.compute_bytes
    in_other_process = not isinstance(spec.trainer, TorchTrainerSpec)
    same_weights = compute == setup.master_bytes
    packs = machine.device == "cpu" and compute <= MASTER_BYTES and work.lora_rank is None and not in_other_process
    copied: float
    if same_weights and not in_other_process:
        copied = compute * (shape.layers * shape.layer_linear + shape.language_head) if packs else 0
    elif work.lora_rank is None or in_other_process:
        copied = compute * shape.parameters
        if packs:  # a tied head is there as the embedding, too
            copied += compute * (shape.language_head - shape.own_head)
            if compute < MASTER_BYTES:
                copied += compute * (shape.layers * shape.layer_linear + shape.language_head)
    else:
        # Copy the adapter, and the part of the base that it cannot share.
        others = shape.parameters - compute_dtype_elements(work)
        copied = compute * (others + shape.lora(work.lora_rank))

    # Add the KV cache and the logits.
    cache, working = torch_sampling(
        shape, rows=spec.max_rows, context=work.context, prompt_tokens=spec.max_tokens_per_forward, compute=compute
    )
    cache_source = f"{spec.max_rows} rows of {work.context} tokens"
    parts = (
        MemoryPart.constant("sampler", "sampler's copy", copied, "weights in the compute dtype"),
        MemoryPart.constant("kv", "KV cache", cache, cache_source, ("sampling",)),
        MemoryPart.constant(
            "kv", "prefill and logits", working, "keys of the prompts, 16 bytes a logit", ("sampling",)
        ),
    )
    staged = MemoryPart.constant("staged", "weights on their way", compute * shape.parameters, "files", ("sampling",))
    return SamplerMemory(ProcessMemory(parts, ()), staged if in_other_process else None)


def vllm_sampler(
    vllm: VllmSpec, spec: LocalEngineSpec, work: Workload, machine: Machine, setup: TrainingSetup, *, colocated: bool
) -> SamplerMemory:
    """Returns the memory of one copy of vLLM. Its device parts are those of one GPU, or of the machine on the CPU."""
    shape, compute, tp = work.shape, setup.compute_bytes, vllm.tensor_parallel
    weights = compute * shape.parameters / tp
    if work.lora_rank is not None:
        weights += compute * shape.lora(vllm.max_lora_rank) / tp
    if machine.device == "cpu":
        return _vllm_on_cpu(vllm, spec, weights)

    # vLLM counts its CUDA context within its share of the GPU, and gives what is left of the share to the KV cache.
    working = vllm_work(shape, rows=spec.max_rows, tensor_parallel=tp, compute=compute)
    if vllm.kv_cache_gib == "auto":
        cache = max(0.0, vllm.gpu_share * machine.device_bytes - weights - working - GPU_CONTEXT)
    else:
        cache = vllm.kv_cache_gib * GIB

    # On a GPU that also trains, it frees its memory for every gradient step, if it may sleep.
    sleeps = colocated and vllm.sleep is not False
    phases: tuple[Phase, ...] = ("sampling",) if sleeps else PHASES
    fixed = GPU_CONTEXT
    if vllm.eager is not True:
        fixed += VLLM_GRAPHS
    device = [
        MemoryPart.constant(
            "runtime", "vLLM context, CUDA graphs", fixed, "assumed, not measured; stays when vLLM sleeps"
        ),
        MemoryPart.constant("vllm", "vLLM weights", weights, f"{compute}P / tensor_parallel={tp}", phases),
        MemoryPart.constant(
            "vllm", "vLLM activations", working, f"8192 tokens, logits of {spec.max_rows} rows", phases
        ),
        MemoryPart.constant("kv", "KV cache", cache, f"what gpu_share={vllm.gpu_share:g} leaves", phases),
    ]
    host = [MemoryPart.constant("runtime", "vLLM process", GPU_PROCESS * tp, "assumed, not measured")]
    if sleeps:
        # While it sleeps, its weights are in the machine's memory.
        name = "weights of a vLLM that sleeps"
        host.append(MemoryPart.constant("vllm", name, weights * tp, "kept for waking up", ("backward", "step")))
    return SamplerMemory(ProcessMemory(tuple(device), tuple(host)), _staged(spec, vllm, weights * tp), cache * tp)


def _vllm_on_cpu(vllm: VllmSpec, spec: LocalEngineSpec, weights: float) -> SamplerMemory:
    cache = GIB * (1.0 if vllm.kv_cache_gib == "auto" else vllm.kv_cache_gib)
    parts = (
        MemoryPart.constant("runtime", "vLLM process", VLLM_CPU_PROCESS, "besides weights and KV cache"),
        MemoryPart.constant("vllm", "vLLM weights", weights, "compute dtype, prepacked"),
        MemoryPart.constant("kv", "KV cache", cache, "kv_cache_gib"),
    )
    return SamplerMemory(ProcessMemory(parts, ()), _staged(spec, vllm, weights), cache)


def _staged(spec: LocalEngineSpec, vllm: VllmSpec, weights: float) -> MemoryPart:
    """Returns the files of all weights in shared memory; 0 bytes where weights do not travel by such files.

    A broadcast needs them, too, if other processes train: their ranks write the weights that this process hands on.
    """
    transport = vllm.resolved_transport(spec.cluster)
    trains_elsewhere = spec.trainer.kind == "deepspeed"
    by_files = transport == "shm" or (transport != "checkpoint" and trains_elsewhere)
    size = weights if by_files else 0
    return MemoryPart.constant("staged", "weights on their way", size, "files in shared memory", ("sampling",))


def count_sequences(work: Workload, kv_bytes: float, compute: int) -> int:
    """Returns how many whole contexts have keys and values that fit into `kv_bytes`."""
    return int(kv_bytes // (work.context * kv_bytes_per_token(work.shape, compute)))
