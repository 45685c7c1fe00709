"""What a trainer holds, by its kind: parts of a rank's device, and parts of the machine's memory per rank."""

from __future__ import annotations

from dataclasses import dataclass

from engine.backends.deepspeed.memory import Held as States
from engine.backends.deepspeed.memory import held_bytes
from engine.errors import BadSpec
from engine.memory_plan.parts import MASTER, activations, autocast_weights, head_activations, torch_states
from engine.memory_plan.records import PHASES, Machine, Part, Phase, Workload
from engine.specs.engine import LocalEngineSpec
from engine.specs.trainer import DeepSpeedSpec

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
    """How a config trains."""

    ranks: int
    """Processes, over all machines."""
    compute: int
    """Bytes of a number in the compute dtype."""

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
    (engine.backends.torch.shared_base)."""
    shape = work.shape
    return shape.layers * shape.layer_linear + shape.own_head


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
        casts = 0.0 if compute == master else compute * (trained + shape.language_head - shape.own_head)
        formula = f"{master}A, A = {trained:,} parameters of the adapter"
    tokens = spec.max_tokens_per_forward
    zero = spec.trainer if isinstance(spec.trainer, DeepSpeedSpec) else None
    recompute = "none" if zero is None else zero.activation_checkpointing
    tokens = -(-tokens // (1 if zero is None else zero.sequence_parallel))
    kept, kept_away = activations(shape, tokens, compute=compute, autocast=compute < master, recompute=recompute)
    logits = head_activations(shape, tokens, compute=compute, trained=work.lora_rank is None)
    waiting = master * (shape.language_head - shape.own_head) if work.lora_rank is None else 0
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
    # the ranks of the deepspeed trainer read into their devices
    read_here = master * shape.parameters if zero is None else 0
    loading = part("loading", "loading the model", read_here, "read here, then moved", ("start",))
    inputs = part("activations", "layer inputs, offloaded", kept_away, "", ("backward",))
    return Held((*process.device, *parts), (inputs,) if machine.device == "cpu" else (*process.node, inputs, loading))


def _more_adapters(work: Workload, master: int) -> float:
    """Of an adapter run the base is the first reference."""
    assert work.lora_rank is not None
    return master * work.shape.lora(work.lora_rank) * max(0, work.frozen - 1)


def _deepspeed(
    spec: LocalEngineSpec, zero: DeepSpeedSpec, work: Workload, machine: Machine, group: Group
) -> Held:
    """Stages 1 to 3: states as engine.backends.deepspeed.memory counts them, split over the ranks."""
    shape, compute, world = work.shape, group.compute, group.ranks
    places = held_bytes(
        zero, parameters=shape.parameters, buffers=0, ranks=world, compute_bytes=compute, master_bytes=MASTER
    )
    tokens = -(-spec.max_tokens_per_forward // zero.sequence_parallel)
    kept, kept_away = activations(
        shape, tokens, compute=compute, autocast=False, recompute=zero.activation_checkpointing
    )
    step = part("step", "the step's flat gradient", MASTER * shape.parameters / world, "4P/N", ("step",))
    on_device = [
        *_states(places.device, zero, work, group),
        *_if(zero.offload_optimizer == "none", [step]),
        *_buffers(zero, work, machine, group),
        part("activations", "activations", kept, f"{tokens} tokens, {zero.activation_checkpointing}", ("backward",)),
        part("logits", "logits and their gradient", head_activations(shape, tokens, compute=compute),
             "at most 2^27 logits at once", ("backward",)),
        *_loading(zero, work, machine, group),
    ]  # fmt: skip
    # DeepSpeed lays the shards out in the machine's memory once
    shards = compute * shape.parameters / world if zero.zero_stage == 3 and zero.offload_parameters == "none" else 0.0
    away = [
        *_states(places.host, zero, work, group),
        part("activations", "layer inputs", kept_away, f"{tokens} tokens", ("backward",)),
        *_if(machine.device == "cuda", [part("loading", "loading the model", shards, f"{compute}P/N", ("start",))]),
    ]
    process = _process(machine)
    return Held((*process.device, *on_device), (*process.node, *away))


def _states(held: States, zero: DeepSpeedSpec, work: Workload, group: Group) -> list[Part]:
    """Of one rank in one kind of memory; the moments come with the first step."""
    world, what = group.ranks, f"ZeRO {zero.zero_stage} over {group.ranks} ranks"
    split = "/N" * (zero.zero_stage == 3)
    weights, masters, standing = held.weights / world, held.masters / world, held.standing / world
    optimizer: dict[Phase, float] = dict.fromkeys(EVERY, masters + held.moments / world)
    gradients: dict[Phase, float] = dict.fromkeys(EVERY, standing) | dict.fromkeys(TRAINING, held.gradients / world)
    return [
        part("weights", "weights", weights, f"{what}: {group.compute}P{split}"),
        Part("moments", "master weights, moments", optimizer | {"start": masters}, f"{what}: 12P/N, 4P/N at the start"),
        Part("gradients", "gradients", gradients, "float32: 4P/N" if zero.zero_stage >= 2 else "whole"),
        part("frozen", f"{work.frozen} frozen policies", weights * work.frozen, f"{group.compute}P{split} each"),
        part("frozen", "their masters and buffers", (masters + standing) * work.frozen, "4P/N masters each"),
    ]


def _loading(zero: DeepSpeedSpec, work: Workload, machine: Machine, group: Group) -> list[Part]:
    """On the device, beside the states: each rank reads what it keeps (engine.backends.deepspeed.meta_model)."""
    if zero.zero_stage == 3:
        size, why = group.compute * work.shape.embedding * _copies(machine, group), "the largest tensor, whole"
        return [part("loading", "loading the model", size, why, ("start",))]
    added_up = zero.zero_stage == 1 and group.compute < MASTER
    if added_up or zero.offload_optimizer == "cpu":  # there is one already
        return []
    share = MASTER * work.shape.parameters / group.ranks
    return [part("loading", "loading the model", share, "DeepSpeed's first gradient, 4P/N", ("start",))]


def _copies(machine: Machine, group: Group) -> int:
    """Of what is gathered: gloo makes one more."""
    return 2 if machine.device == "cpu" and group.ranks > 1 else 1


def _if(wanted: bool, parts: list[Part]) -> list[Part]:
    return parts if wanted else []


def _buffers(zero: DeepSpeedSpec, work: Workload, machine: Machine, group: Group) -> list[Part]:
    """A bucket of gradients and one of weights; with ZeRO 3 also what is whole for a moment: the largest module (the
    embedding or the head), a layer, and two buckets that DeepSpeed may keep (stage3_max_live_parameters)."""
    size = 2 * zero.bucket_mib * MIB
    buffers = [part("buckets", "buckets", size, f"2 * bucket_mib={zero.bucket_mib}", TRAINING)]
    if zero.zero_stage == 3:
        heads = _copies(machine, group) * work.shape.embedding
        gathered = group.compute * (work.shape.layer_linear + heads) + 2 * zero.bucket_mib * MIB
        why = "a layer, the head, two buckets"
        buffers.append(part("gathered", "gathered weights", gathered, why, ("backward",)))
    elif _copies(machine, group) > 1:
        whole = group.compute * work.shape.parameters
        buffers.append(part("gathered", "gloo's copy of the weights", whole, f"{group.compute}P", ("step",)))
    return buffers
