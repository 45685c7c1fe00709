"""Computes the memory of one rank of a trainer and of one sampler, by its kind: its parts on the device, and in the
machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.backends.deepspeed.memory import StateBytes, adapter_bytes, state_bytes
from engine.memory_plan.records import GIB, PHASES, Machine, MemoryPart, Phase, ProcessMemory, Workload
from engine.memory_plan.shape import (
    MASTER_BYTES,
    activations,
    autocast_weights,
    head_activations,
    kv_bytes_per_token,
    torch_sampling,
    torch_states,
    vllm_work,
)
from engine.models.folder import BYTES_IN_4BIT
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec, TorchSamplerSpec, TorchTrainerSpec, VllmSpec

MIB = 1 << 20
CPU_PROCESS = 500 * MIB
"""A process that has imported torch and transformers. Measured by bench/memory_plan.py."""
GPU_CONTEXT = 700 * MIB
"""CUDA context, cuBLAS workspaces and NCCL buffers of a process, on its GPU. Assumed."""
GPU_PROCESS = 3 << 30
"""Machine memory of a process that uses CUDA. Assumed."""
TRAINING: tuple[Phase, ...] = ("backward", "step")
AFTER_FIRST_STEP: tuple[Phase, ...] = PHASES[1:]

VLLM_CPU_PROCESS = int(1.4 * GIB)
"""A vLLM process on the CPU without weights and KV cache. Measured: 2.2 to 2.8 GiB resident with a cache of 1 GiB and a
model of 0.27 GB."""
VLLM_GRAPHS = 1 << 30
"""CUDA graphs of vLLM, which `gpu_share` does not include. Assumed."""


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """The number of ranks and the precision that a config trains with."""

    ranks: int
    """Processes that train, over all machines."""
    compute_bytes: int
    """Bytes of a number in the compute dtype."""

    @property
    def master_bytes(self) -> int:
        """Bytes of a master weight."""
        return max(MASTER_BYTES, self.compute_bytes)


def trainer_memory(spec: LocalEngineSpec, work: Workload, machine: Machine, setup: TrainingSetup) -> ProcessMemory:
    """Returns the memory of one rank of the config's trainer.

    Without ZeRO, a rank of the deepspeed trainer holds what the torch trainer does.
    """
    zero = spec.trainer if isinstance(spec.trainer, DeepSpeedSpec) else None
    if zero is None:
        return _torch_memory(spec, work, machine, setup)
    if zero.zero_stage == 0:
        memory = _torch_memory(spec, work, machine, setup)
    elif work.lora_rank is not None:
        memory = _zero_adapter_memory(spec, zero, work, work.lora_rank, machine, setup)
    else:
        memory = _deepspeed_memory(spec, zero, work, machine, setup)
    return replace(memory, device=(*memory.device, *_held(spec, work, setup)))


def _held(spec: LocalEngineSpec, work: Workload, setup: TrainingSetup) -> list[MemoryPart]:
    """Returns this rank's part of the weights that the ranks send to vLLM by a broadcast."""
    vllm = spec.sampler
    if not isinstance(vllm, VllmSpec) or vllm.resolved_transport(spec.cluster) != "nccl":
        return []
    size = work.staged * setup.compute_bytes * work.shape.parameters / setup.ranks
    source = f"{setup.compute_bytes}P / {setup.ranks} ranks, {_copies(work)}, held until they are sent"
    return [MemoryPart.constant("staged", "weights on their way", size, source, _staging_phases(vllm))]


def compute_dtype_elements(work: Workload) -> int:
    """Returns the elements of a shared base that are held in the compute dtype or in 4 bits: the linear layers, and the
    head if it is not the embedding (engine.backends.torch.shared_base)."""
    shape = work.shape
    return shape.layers * shape.layer_linear + shape.own_head


def _process(machine: Machine) -> ProcessMemory:
    """Returns what a process takes before it holds a model."""
    if machine.device == "cpu":
        process = MemoryPart.constant("runtime", "process", CPU_PROCESS, "torch and transformers, measured")
        return ProcessMemory((process,), ())
    context = MemoryPart.constant("runtime", "CUDA context, NCCL", GPU_CONTEXT, "assumed, not measured")
    process = MemoryPart.constant("runtime", "trainer process", GPU_PROCESS, "assumed, not measured")
    return ProcessMemory((context,), (process,))


def _tokens_per_rank(spec: LocalEngineSpec) -> int:
    """Returns the packed tokens of one forward on one rank, rounded up."""
    ways = spec.trainer.sequence_parallel if isinstance(spec.trainer, DeepSpeedSpec) else 1
    return -(-spec.max_tokens_per_forward // ways)


# -- the torch trainer -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TorchStates:
    """Sizes of what the torch trainer holds for a model, in bytes."""

    trained: int
    """Number of trained parameters, in elements."""
    weights_source: str
    base: float
    """The frozen base under an adapter."""
    dequantised: float
    """The largest weight of the base that is held in 4 bits, in the compute dtype."""
    casts: float
    """Autocast's copies of weights in the compute dtype."""
    tied_gradient: float
    """The gradient of a tied head, which is held until that of the embedding is there."""
    frozen: float
    """Frozen policies."""


def _torch_memory(spec: LocalEngineSpec, work: Workload, machine: Machine, setup: TrainingSetup) -> ProcessMemory:
    shape, compute, master = work.shape, setup.compute_bytes, setup.master_bytes
    zero = spec.trainer if isinstance(spec.trainer, DeepSpeedSpec) else None

    # Compute the sizes of states, activations and logits.
    if work.lora_rank is None:
        sizes = _full_states(work, setup)
    else:
        sizes = _adapter_states(work, work.lora_rank, setup)
    states = torch_states(sizes.trained, master=master)
    tokens = _tokens_per_rank(spec)
    recompute = "none" if zero is None else zero.activation_checkpointing
    saved, offloaded = activations(shape, tokens, compute=compute, autocast=compute < master, recompute=recompute)
    logits = head_activations(shape, tokens, compute=compute, trained=work.lora_rank is None)

    # The parts on the device. Those with a phase are held only then.
    base_source = "linear layers in the compute dtype, the rest in float32"
    if work.load_in_4bit:
        base_source = "linear layers in 4 bits, the rest in float32"
    moments_source = f"2 * {master} * {sizes.trained:,}"
    casts_source = "a copy of each matrix until the backward pass ends"
    logits_source = "logits of at most 512 MiB at once"
    frozen_source = "reference and past policies, read only"
    constant = MemoryPart.constant
    device = [
        constant("base", "frozen base", sizes.base, base_source),
        constant("weights", "weights", states.weights, sizes.weights_source),
        constant("moments", "AdamW moments", states.optimizer, moments_source, AFTER_FIRST_STEP),
        constant("gradients", "gradients", states.gradients, f"{master} * {sizes.trained:,}", TRAINING),
        constant("casts", "autocast's weights", sizes.casts, casts_source, ("backward",)),
        constant("casts", "dequantised weight", sizes.dequantised, "one layer at a time", ("backward", "sampling")),
        constant("activations", "activations", saved, f"{tokens} tokens, {shape.layers} layers", ("backward",)),
        constant("logits", "logits and their gradient", logits, logits_source, ("backward",)),
        constant("tied", "gradient of the tied head", sizes.tied_gradient, "waits for the embedding's", ("backward",)),
        constant("frozen", f"{work.frozen} frozen policies", sizes.frozen, frozen_source),
    ]

    # The torch trainer reads the model in the machine's memory; ranks of the deepspeed trainer read into their devices.
    process = _process(machine)
    read_bytes = master * shape.parameters if zero is None else 0
    loading = constant("loading", "loading the model", read_bytes, "read here, then moved", ("start",))
    inputs = constant("activations", "layer inputs, offloaded", offloaded, "", ("backward",))
    host: tuple[MemoryPart, ...] = (inputs,)
    if machine.device != "cpu":
        host = (*process.host, inputs, loading)
    elif work.lora_rank is not None:
        # On the CPU, the base is read in master precision before its linear layers take less.
        in_addition = max(0.0, read_bytes - sizes.base)
        device.append(constant("loading", "loading the model", in_addition, "read in float32", ("start",)))
    return ProcessMemory((*process.device, *device), host)


def _full_states(work: Workload, setup: TrainingSetup) -> _TorchStates:
    """Returns the sizes of a run that trains all weights."""
    shape, compute, master = work.shape, setup.compute_bytes, setup.master_bytes
    weights_source = f"{master}P"
    if compute < master:
        weights_source += ": float32 masters, cast per operation"
    return _TorchStates(
        trained=shape.parameters,
        weights_source=weights_source,
        base=0.0,
        dequantised=0.0,
        casts=autocast_weights(shape, compute, master=master),
        tied_gradient=master * (shape.language_head - shape.own_head),
        frozen=master * shape.parameters * work.frozen,
    )


def _adapter_states(work: Workload, lora_rank: int, setup: TrainingSetup) -> _TorchStates:
    """Returns the sizes of a run that trains a LoRA adapter. Its base is also the first frozen policy."""
    shape, compute, master = work.shape, setup.compute_bytes, setup.master_bytes
    trained = shape.lora(lora_rank)
    lowered = compute_dtype_elements(work)
    # Autocast copies only what is in the master precision: the adapter, and a head that is the embedding.
    casts = 0.0
    if compute != master:
        casts = compute * (trained + shape.language_head - shape.own_head)
    base, dequantised = float(compute * lowered + master * (shape.parameters - lowered)), 0.0
    if work.load_in_4bit:
        base -= (compute - BYTES_IN_4BIT) * shape.layers * shape.layer_linear
        dequantised = compute * max(inputs * outputs for inputs, outputs in shape.linears)
    return _TorchStates(
        trained=trained,
        weights_source=f"{master}A, A = {trained:,} parameters of the adapter",
        base=base,
        dequantised=dequantised,
        casts=casts,
        tied_gradient=0,
        frozen=master * trained * max(0, work.frozen - 1),
    )


# -- DeepSpeed with ZeRO ---------------------------------------------------------------------------------------


def _deepspeed_memory(
    spec: LocalEngineSpec, zero: DeepSpeedSpec, work: Workload, machine: Machine, setup: TrainingSetup
) -> ProcessMemory:
    """Stages 1 to 3. engine.backends.deepspeed.memory counts the states, which are split over the ranks."""
    shape, compute, ranks = work.shape, setup.compute_bytes, setup.ranks
    places = state_bytes(
        zero, parameters=shape.parameters, buffer_bytes=0, ranks=ranks, compute_bytes=compute, master_bytes=MASTER_BYTES
    )
    tokens, checkpointing = _tokens_per_rank(spec), zero.activation_checkpointing
    saved, offloaded = activations(shape, tokens, compute=compute, autocast=False, recompute=checkpointing)
    logits = head_activations(shape, tokens, compute=compute)
    constant = MemoryPart.constant

    # The parts on the device: states, buffers, activations, and what loading takes in addition.
    device = _zero_states(places.device, zero, work, setup)
    if zero.offload_optimizer == "none":
        flat_gradient = MASTER_BYTES * shape.parameters / ranks
        device.append(constant("step", "the step's flat gradient", flat_gradient, "4P/N", ("step",)))
    device += _buffers(zero, work, machine, setup)
    device.append(constant("activations", "activations", saved, f"{tokens} tokens, {checkpointing}", ("backward",)))
    device.append(
        constant("logits", "logits and their gradient", logits, "logits of at most 512 MiB at once", ("backward",))
    )
    device += _loading(zero, work, machine, setup)

    # The parts in the machine's memory: what is offloaded.
    host = _zero_states(places.host, zero, work, setup)
    host.append(constant("activations", "layer inputs", offloaded, f"{tokens} tokens", ("backward",)))
    if machine.device == "cuda":
        # DeepSpeed lays the shards of stage 3 out in the machine's memory once, before it moves them.
        in_machine = zero.zero_stage == 3 and zero.offload_parameters == "none"
        shards = compute * shape.parameters / ranks if in_machine else 0.0
        host.append(constant("loading", "loading the model", shards, f"{compute}P/N", ("start",)))

    process = _process(machine)
    return ProcessMemory((*process.device, *device), (*process.host, *host))


def _zero_adapter_memory(
    spec: LocalEngineSpec, zero: DeepSpeedSpec, work: Workload, lora_rank: int, machine: Machine, setup: TrainingSetup
) -> ProcessMemory:
    """Stages 1 to 3 with a LoRA adapter: the frozen base, which stage 3 splits, and the states of the adapter."""
    shape, compute, ranks = work.shape, setup.compute_bytes, setup.ranks
    sizes = _adapter_states(work, lora_rank, setup)
    states = adapter_bytes(zero, parameters=sizes.trained, ranks=ranks, master_bytes=MASTER_BYTES)
    base, base_source = sizes.base, "whole on every rank: linear layers in the compute dtype, the rest in float32"
    if zero.zero_stage == 3:
        base, base_source = compute * shape.parameters / ranks, f"ZeRO 3 over {ranks} ranks: {compute}P/N"
    tokens, checkpointing = _tokens_per_rank(spec), zero.activation_checkpointing
    saved, offloaded = activations(shape, tokens, compute=compute, autocast=compute < MASTER_BYTES,
                                   recompute=checkpointing)  # fmt: skip
    logits = head_activations(shape, tokens, compute=compute, trained=False)
    constant = MemoryPart.constant

    # The parts on the device and those that are offloaded. The adapter is whole on every rank, its states are split.
    base_part = constant("base", "frozen base", base, base_source)
    device = [] if zero.offload_parameters == "cpu" else [base_part]
    device += _adapter_parts(states.device, sizes, ranks)
    if zero.zero_stage == 3:
        device.append(_gathered(zero, work, machine, setup))
    device.append(constant("activations", "activations", saved, f"{tokens} tokens, {checkpointing}", ("backward",)))
    device.append(
        constant("logits", "logits and their gradient", logits, "logits of at most 512 MiB at once", ("backward",))
    )
    host = [base_part] if zero.offload_parameters == "cpu" else []
    host += _adapter_parts(states.host, sizes, ranks)
    host.append(constant("activations", "layer inputs", offloaded, f"{tokens} tokens", ("backward",)))
    process = _process(machine)
    return ProcessMemory((*process.device, *device), (*process.host, *host))


def _adapter_parts(held: StateBytes, sizes: _TorchStates, ranks: int) -> list[MemoryPart]:
    """Returns the states of an adapter of one rank in one kind of memory, without its base."""
    optimizer: dict[Phase, float] = dict.fromkeys(PHASES, (held.masters + held.moments) / ranks)
    on_device = 1 if held.weights else 0
    constant = MemoryPart.constant
    return [
        constant("weights", "weights", held.weights / ranks, sizes.weights_source),
        MemoryPart("moments", "master weights, moments", optimizer | {"start": held.masters / ranks}, "12A/N"),
        constant("gradients", "gradients", held.gradients / ranks, "of the adapter only", TRAINING),
        constant("casts", "autocast's weights", on_device * sizes.casts, "of the adapter", ("backward",)),
        constant("frozen", "frozen policies", on_device * sizes.frozen, "reference and past policies, read only"),
    ]


def _zero_states(held: StateBytes, zero: DeepSpeedSpec, work: Workload, setup: TrainingSetup) -> list[MemoryPart]:
    """Returns the state of one rank in one kind of memory. The moments are made in the first step."""
    ranks = setup.ranks
    split = "/N" if zero.zero_stage == 3 else ""
    weights, masters, gradients_at_load = held.weights / ranks, held.masters / ranks, held.gradients_at_load / ranks
    optimizer: dict[Phase, float] = dict.fromkeys(PHASES, masters + held.moments / ranks)
    gradients: dict[Phase, float] = dict.fromkeys(PHASES, gradients_at_load)
    gradients |= dict.fromkeys(TRAINING, held.gradients / ranks)

    stage = f"ZeRO {zero.zero_stage} over {ranks} ranks"
    optimizer_source = f"{stage}: 12P/N, 4P/N at the start"
    gradients_source = "float32: 4P/N" if zero.zero_stage >= 2 else "whole"
    constant, frozen = MemoryPart.constant, work.frozen
    return [
        constant("weights", "weights", weights, f"{stage}: {setup.compute_bytes}P{split}"),
        MemoryPart("moments", "master weights, moments", optimizer | {"start": masters}, optimizer_source),
        MemoryPart("gradients", "gradients", gradients, gradients_source),
        constant("frozen", f"{frozen} frozen policies", weights * frozen, f"{setup.compute_bytes}P{split} each"),
        constant("frozen", "their masters and buffers", (masters + gradients_at_load) * frozen, "4P/N masters each"),
    ]


def _buffers(zero: DeepSpeedSpec, work: Workload, machine: Machine, setup: TrainingSetup) -> list[MemoryPart]:
    """Returns a bucket of gradients and a bucket of weights, and what is gathered.

    ZeRO 3 gathers whole modules for a moment: the largest one (the embedding or the head) and a layer. DeepSpeed may
    also keep two buckets of them (stage3_max_live_parameters).
    """
    compute = setup.compute_bytes
    bucket_bytes = 2 * zero.bucket_mib * MIB
    buffers = [MemoryPart.constant("buckets", "buckets", bucket_bytes, f"2 * bucket_mib={zero.bucket_mib}", TRAINING)]
    if zero.zero_stage == 3:
        buffers.append(_gathered(zero, work, machine, setup))
    elif _copies_of_gathered(machine, setup) > 1:
        whole = compute * work.shape.parameters
        buffers.append(MemoryPart.constant("gathered", "gloo's copy of the weights", whole, f"{compute}P", ("step",)))
    return buffers


def _gathered(zero: DeepSpeedSpec, work: Workload, machine: Machine, setup: TrainingSetup) -> MemoryPart:
    """Returns the weights that ZeRO 3 gathers for a moment."""
    modules = work.shape.layer_linear + _copies_of_gathered(machine, setup) * work.shape.embedding
    gathered = setup.compute_bytes * modules + 2 * zero.bucket_mib * MIB
    source = "a layer, the head, two buckets"
    return MemoryPart.constant("gathered", "gathered weights", gathered, source, ("backward",))


def _loading(zero: DeepSpeedSpec, work: Workload, machine: Machine, setup: TrainingSetup) -> list[MemoryPart]:
    """Returns what loading takes on the device in addition to the states. Each rank reads only what it keeps
    (engine.backends.deepspeed.meta_model)."""
    if zero.zero_stage == 3:
        size = setup.compute_bytes * work.shape.embedding * _copies_of_gathered(machine, setup)
        return [MemoryPart.constant("loading", "loading the model", size, "the largest tensor, whole", ("start",))]
    # The gradient buffer of these settings is already counted in the states.
    accumulates_in_master_dtype = zero.zero_stage == 1 and setup.compute_bytes < MASTER_BYTES
    if accumulates_in_master_dtype or zero.offload_optimizer == "cpu":
        return []
    share = MASTER_BYTES * work.shape.parameters / setup.ranks
    return [MemoryPart.constant("loading", "loading the model", share, "DeepSpeed's first gradient, 4P/N", ("start",))]


def _copies_of_gathered(machine: Machine, setup: TrainingSetup) -> int:
    """Returns how many copies of a gathered tensor there are. gloo, which the CPU uses, makes a second one."""
    return 2 if machine.device == "cpu" and setup.ranks > 1 else 1


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

    It uses the trainer's own weights, or a copy of them where the precision, the process or the lane differs. On a CPU
    it packs the linear layers and the head, except for adapters and float64. In 2 bytes, the packed ones have a second
    form for single rows.
    """
    # The sampler needs weights in the compute dtype. It uses those of the trainer where they are such.
    shape, compute = work.shape, setup.compute_bytes
    in_other_process = not isinstance(spec.trainer, TorchTrainerSpec)
    own_lane = isinstance(spec.sampler, TorchSamplerSpec) and spec.sampler.own_lane
    has_lane = in_other_process or (own_lane and work.lora_rank is None)
    same_weights = compute == setup.master_bytes
    packs = machine.device == "cpu" and compute <= MASTER_BYTES and work.lora_rank is None and not in_other_process
    copied: float
    if same_weights and not has_lane:
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
    # With a lane of its own it samples, and gets its next weights, at any time.
    phases: tuple[Phase, ...] = PHASES if has_lane else ("sampling",)
    cache_source = f"{spec.max_rows} rows of {work.context} tokens"
    parts = (
        MemoryPart.constant("sampler", "sampler's copy", copied, "weights in the compute dtype"),
        MemoryPart.constant("kv", "KV cache", cache, cache_source, phases),
        MemoryPart.constant("kv", "prefill and logits", working, "keys of the prompts, 16 bytes a logit", phases),
    )
    size = work.staged * compute * shape.parameters
    staged = MemoryPart.constant("staged", "weights on their way", size, _copies(work), phases)
    return SamplerMemory(ProcessMemory(parts, ()), staged if has_lane else None)


def vllm_sampler(
    vllm: VllmSpec, spec: LocalEngineSpec, work: Workload, machine: Machine, setup: TrainingSetup, *, colocated: bool
) -> SamplerMemory:
    """Returns the memory of one copy of vLLM. Its device parts are those of one GPU, or of the machine on the CPU."""
    shape, compute, tp = work.shape, setup.compute_bytes, vllm.tensor_parallel
    weights = compute * shape.parameters / tp
    if work.lora_rank is not None:
        weights += compute * vllm.max_loras * shape.lora(vllm.max_lora_rank) / tp
    if machine.device == "cpu":
        return _vllm_on_cpu(vllm, spec, weights, work)

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
    return SamplerMemory(ProcessMemory(tuple(device), tuple(host)), _staged(spec, vllm, weights * tp, work), cache * tp)


def _vllm_on_cpu(vllm: VllmSpec, spec: LocalEngineSpec, weights: float, work: Workload) -> SamplerMemory:
    cache = GIB * (1.0 if vllm.kv_cache_gib == "auto" else vllm.kv_cache_gib)
    parts = (
        MemoryPart.constant("runtime", "vLLM process", VLLM_CPU_PROCESS, "besides weights and KV cache"),
        MemoryPart.constant("vllm", "vLLM weights", weights, "compute dtype, prepacked"),
        MemoryPart.constant("kv", "KV cache", cache, "kv_cache_gib"),
    )
    return SamplerMemory(ProcessMemory(parts, ()), _staged(spec, vllm, weights, work), cache)


def _copies(work: Workload) -> str:
    return "a copy" if work.staged == 1 else f"{work.staged} copies (rules.max_staleness)"


def _staged(spec: LocalEngineSpec, vllm: VllmSpec, weights: float, work: Workload) -> MemoryPart:
    """Returns the files of all weights in shared memory; 0 bytes where weights do not travel by such files.

    vLLM in this process needs them, too, if other processes train.
    """
    transport = vllm.resolved_transport(spec.cluster)
    trains_elsewhere = spec.trainer.kind == "deepspeed"
    by_files = transport == "shm" or (transport in ("memory", "ipc") and trains_elsewhere)
    size = work.staged * weights if by_files else 0
    source = f"files in shared memory, {_copies(work)}"
    return MemoryPart.constant("staged", "weights on their way", size, source, _staging_phases(vllm))


def _staging_phases(vllm: VllmSpec) -> tuple[Phase, ...]:
    # Replicas that sample all the time get their next weights at any time.
    return PHASES if vllm.replicas and vllm.placement == "dedicated" else ("sampling",)


def count_sequences(work: Workload, kv_bytes: float, compute: int) -> int:
    """Returns how many whole contexts have keys and values that fit into `kv_bytes`."""
    return int(kv_bytes // (work.context * kv_bytes_per_token(work.shape, compute)))
