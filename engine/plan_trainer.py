"""What a trainer holds, by its kind: parts of a rank's device, and parts of the machine's memory per rank."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import BadSpec
from engine.plan_parts import (
    MASTER,
    activations,
    autocast_weights,
    head_activations,
    torch_states,
    zero_states,
)
from engine.plan_records import PHASES, Machine, Part, Phase, Workload
from engine.spec import LocalEngineSpec
from engine.trainer_spec import DeepSpeedSpec

MIB = 1 << 20
CPU_PROCESS = 500 * MIB
"""A process that has imported torch and transformers: measured by bench/memory_plan.py."""
GPU_CONTEXT = 700 * MIB
"""CUDA context, cuBLAS workspaces and NCCL buffers of a process on its GPU. Assumed."""
GPU_PROCESS = 3 << 30
"""Machine memory of a process that uses CUDA. Assumed."""
EVERY: tuple[Phase, ...] = PHASES
TRAINING: tuple[Phase, ...] = ("backward", "step")


@dataclass(frozen=True, slots=True)
class Group:
    """How a config trains on a machine."""

    ranks: int
    """Processes per node."""
    nodes: int
    compute: int
    """Bytes of a number in the compute dtype."""

    @property
    def world(self) -> int:
        return self.ranks * self.nodes

    @property
    def master(self) -> int:
        return max(MASTER, self.compute)


@dataclass(frozen=True, slots=True)
class Held:
    """Parts of one rank (or of one server): on its device, and in the machine's memory."""

    device: tuple[Part, ...]
    node: tuple[Part, ...]


def part(key: str, name: str, size: float, why: str, phases: tuple[Phase, ...] = EVERY) -> Part:
    """`size` bytes in each of `phases`."""
    return Part(key, name, dict.fromkeys(phases, size), why)


def trainer_parts(spec: LocalEngineSpec, work: Workload, machine: Machine, group: Group) -> Held:
    """Of one rank of the config's trainer; without ZeRO a rank holds what the torch trainer does. Raises BadSpec."""
    zero = spec.trainer if isinstance(spec.trainer, DeepSpeedSpec) else None
    if zero is not None and work.lora_rank is not None:
        raise BadSpec("trainer.kind='deepspeed' trains all weights; for a LoRA adapter, set trainer.kind='torch'")
    if zero is None or zero.zero_stage == 0:
        return _torch(spec, work, machine, group)
    return _deepspeed(spec, zero, work, machine, group)


def lowered(work: Workload) -> int:
    """Elements of a shared base that are held in the compute dtype: linear layers, and a head of its own
    (engine.backends.shared_base)."""
    shape = work.shape
    return shape.layers * shape.layer_linear + (0 if shape.tied else shape.embedding)


def _process(machine: Machine) -> Held:
    if machine.device == "cpu":
        return Held((part("runtime", "process", CPU_PROCESS, "torch and transformers, measured"),), ())
    context = part("runtime", "CUDA context, NCCL", GPU_CONTEXT, "assumed, not measured")
    return Held((context,), (part("runtime", "trainer process", GPU_PROCESS, "assumed, not measured"),))


def _torch(spec: LocalEngineSpec, work: Workload, machine: Machine, group: Group) -> Held:
    shape, compute, master = work.shape, group.compute, group.master
    if work.lora_rank is None:
        states, trained = torch_states(shape.parameters, master=master), shape.parameters
        base, casts = 0.0, autocast_weights(shape, compute, master=master)
        formula = f"{master}P: float32 masters, cast per operation" if compute < master else f"{master}P"
    else:
        trained = shape.lora(work.lora_rank)
        states = torch_states(trained, master=master)
        base = compute * lowered(work) + master * (shape.parameters - lowered(work))
        casts = 0.0 if compute == master else compute * (trained + (shape.embedding if shape.tied else 0))
        formula = f"{master}A, A = {trained:,} parameters of the adapter"
    tokens = spec.max_tokens_per_forward
    zero = spec.trainer if isinstance(spec.trainer, DeepSpeedSpec) else None
    recompute = "none" if zero is None else zero.activation_checkpointing
    tokens = -(-tokens // (1 if zero is None else zero.sequence_parallel))
    kept, kept_away = activations(shape, tokens, compute=compute, autocast=compute < master, recompute=recompute)
    logits = head_activations(shape, tokens, compute=compute, trained=work.lora_rank is None)
    waiting = master * shape.embedding if work.lora_rank is None and shape.tied else 0
    frozen = master * shape.parameters * work.frozen if work.lora_rank is None else _more_adapters(work, master)
    parts = [
        part("base", "frozen base", base, "linear layers in the compute dtype, the rest in float32"),
        part("weights", "weights", states.weights, formula),
        part("moments", "AdamW moments", states.optimizer, f"2 * {master} * {trained:,}", EVERY[1:]),
        part("gradients", "gradients", states.gradients, f"{master} * {trained:,}", TRAINING),
        part("casts", "autocast's weights", casts, "a copy of each matrix until the backward pass ends", ("backward",)),
        part("activations", "activations", kept, f"{tokens} tokens, {shape.layers} layers", ("backward",)),
        part("logits", "logits and their gradient", logits, "at most 2^27 logits at once", ("backward",)),
        part("tied", "gradient of the tied head", waiting, "waits for the embedding's", ("backward",)),
        part("frozen", f"{work.frozen} frozen policies", frozen, "reference and past policies, read only"),
    ]
    process = _process(machine)
    loading = part("loading", "loading the model", 4 * shape.parameters, "read here, then moved", ("start",))
    inputs = part("activations", "layer inputs, offloaded", kept_away, "", ("backward",))
    return Held((*process.device, *parts), (inputs,) if machine.device == "cpu" else (*process.node, inputs, loading))


def _more_adapters(work: Workload, master: int) -> float:
    """Of an adapter run the base is the first reference."""
    assert work.lora_rank is not None
    return master * work.shape.lora(work.lora_rank) * max(0, work.frozen - 1)


def _deepspeed(
    spec: LocalEngineSpec, zero: DeepSpeedSpec, work: Workload, machine: Machine, group: Group
) -> Held:
    """Stages 1 to 3 (engine.backends.deepspeed). Beyond the paper: gradients add up in float32, and every rank reads
    the whole model in float32 before it keeps its part."""
    shape, compute, stage, world = work.shape, group.compute, zero.zero_stage, group.world
    size = shape.parameters
    states = zero_states(size, stage=stage, ranks=world, weight_bytes=compute)
    tokens = -(-spec.max_tokens_per_forward // zero.sequence_parallel)
    kept, kept_away = activations(
        shape, tokens, compute=compute, autocast=False, recompute=zero.activation_checkpointing
    )
    what, split = f"ZeRO {stage} over {world} ranks", "/N" * (stage == 3)
    summed = MASTER * size / world if stage >= 2 else (MASTER + (compute if compute < MASTER else 0)) * size
    masters = MASTER * size / world * work.frozen
    weights = part("weights", "weights", states.weights, f"{what}: {compute}P{split}")
    moments = part("moments", "master weights, moments", states.optimizer, f"{what}: 12P/N")
    gradients = part("gradients", "gradients", summed, "float32: 4P/N" if stage >= 2 else "float32, whole", TRAINING)
    frozen = part("frozen", f"{work.frozen} frozen policies", states.weights * work.frozen, f"{compute}P{split} each")
    frozen_masters = part("frozen", "their master weights", masters, "4P/N each")
    step = part("step", "the step's flat gradient", MASTER * size / world, "4P/N", ("step",))
    optimizer = [moments, frozen_masters, step, *([gradients] if stage >= 2 else [])]
    on_device = [
        *_if(zero.offload_parameters == "none", [weights, frozen]),
        *_if(zero.offload_optimizer == "none", optimizer),
        *_if(stage == 1, [gradients]),
        *_buffers(zero, work, group),
        part("activations", "activations", kept, f"{tokens} tokens, {zero.activation_checkpointing}", ("backward",)),
        part("logits", "logits and their gradient", head_activations(shape, tokens, compute=compute),
             "at most 2^27 logits at once", ("backward",)),
    ]  # fmt: skip
    away = [
        *_if(zero.offload_parameters == "cpu", [weights, frozen]),
        *_if(zero.offload_optimizer == "cpu", optimizer),
        part("activations", "layer inputs", kept_away, f"{tokens} tokens", ("backward",)),
        part("loading", "loading the model", (MASTER + compute) * size, f"{MASTER}P read, {compute}P kept", ("start",)),
    ]
    process = _process(machine)
    return Held((*process.device, *on_device), (*process.node, *away))


def _if(wanted: bool, parts: list[Part]) -> list[Part]:
    return parts if wanted else []


def _buffers(zero: DeepSpeedSpec, work: Workload, group: Group) -> list[Part]:
    """A bucket of gradients and one of weights; with ZeRO 3 also what is whole for a moment: the largest module (the
    embedding or the head), a layer, and two buckets that DeepSpeed may keep (stage3_max_live_parameters)."""
    size = 2 * zero.bucket_mib * MIB
    buffers = [part("buckets", "buckets", size, f"2 * bucket_mib={zero.bucket_mib}", TRAINING)]
    if zero.zero_stage == 3:
        gathered = group.compute * (work.shape.layer_linear + work.shape.embedding) + 2 * zero.bucket_mib * MIB
        why = "a layer, the head, two buckets"
        buffers.append(part("gathered", "gathered weights", gathered, why, ("backward",)))
    return buffers
