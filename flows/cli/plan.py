"""`ostinato engine plan`: plans the memory of an engine's config without starting anything.

Exit status 0: it fits. 3: it does not fit, and changes that would fit are printed. 2: wrong usage.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.cluster.connection import Inventory
from engine.errors import EngineError
from engine.memory_plan.plan import plan_memory
from engine.memory_plan.records import DEVICES_GIB, GIB, PHASES, Machine, MemoryPlan, MemoryPool, Workload
from engine.memory_plan.remedies import Scenario, remedies
from engine.memory_plan.shape import PRESETS, ModelShape, preset, read_shape, stored_shape
from engine.models.folder import local_folder, registered_model
from engine.specs.adapters import LoraSpec
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec, VllmSpec
from flows.cli.backend_checks import cluster_document, describe_inventory, query_cluster, shortage
from flows.cli.lane_plan import LaneSeconds, lane_document, lane_lines, lane_table, measured_lanes
from flows.cli.output import (
    AsJson,
    add_rows,
    console,
    print_json,
    print_plain,
    report_errors,
    table,
    usage_error,
)
from flows.configs.common import GRPOAlgorithm
from flows.configs.overrides import ConfigError, load_engine
from storage.serialization import default_of
from storage.store.objects import open_store

DOES_NOT_FIT = 3
DEFAULT_CONTEXT = 4096
"""Tokens of prompt and completion together, if neither the config nor --context gives a number."""
ACCURACY = (
    "The torch trainer's tensors were planned within 2 % of those measured on a CPU (135M, 512 and 1024 tokens), whose "
    "process takes up to 17 % more (bench/README.md). GPU, vLLM and ZeRO figures are computed, not measured."
)


def plan(  # noqa: PLR0913 - the options of a command
    config: Annotated[Path, typer.Option(help="Config file of an engine or of a run.", exists=True)],
    model: Annotated[
        str, typer.Option(help=f"A Hugging Face folder, a registered key, or one of {', '.join(PRESETS)}.")
    ] = "",
    gpu: Annotated[str, typer.Option(help=f"Type of the GPU: {', '.join(DEVICES_GIB)}.")] = "",
    device_gib: Annotated[float, typer.Option(help="Memory per device in GiB, instead of --gpu.", min=0)] = 0.0,
    devices: Annotated[int, typer.Option(help="GPUs per machine.", min=1)] = 1,
    machines: Annotated[int, typer.Option(help="Machines of the Ray cluster. 0: query it.", min=0)] = 0,
    node_gib: Annotated[float, typer.Option(help="Memory of a machine in GiB. 0: not checked.", min=0)] = 0.0,
    context: Annotated[int, typer.Option(help="Tokens of prompt and completion together.", min=0)] = 0,
    lora_rank: Annotated[int, typer.Option(help="Rank of a LoRA adapter. 0: all weights.", min=0)] = 0,
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit", help="Plan a LoRA adapter whose base is held in 4 bits (QLoRA).")
    ] = False,
    scalar: Annotated[bool, typer.Option("--scalar", help="Plan a reward or value model, with a scalar head.")] = False,
    frozen: Annotated[int, typer.Option(help="Frozen policies in memory. -1: from the config.", min=-1)] = -1,
    storage: Annotated[str, typer.Option(help="Store of a registered model.")] = "",
    run: Annotated[
        str, typer.Option(help="A run on this engine: divide its GPUs by the measured seconds of its steps.")
    ] = "",
    sets: Annotated[list[str] | None, typer.Option("--set", help="Override one key: trainer.zero_stage=3.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plans the memory of each device, and proposes changes if the config does not fit."""
    with report_errors():
        # what is planned: a model, on machines
        try:
            spec, body = load_engine(config, sets or [])
            shape = find_shape(model or _model_of(body), storage or _storage_of(body))
            work = workload_of(body, spec, shape, context=context, lora_rank=lora_rank, frozen=frozen)
            if load_in_4bit:
                work = replace(work, load_in_4bit=True, lora_rank=work.lora_rank or default_of(LoraSpec, "rank"))
            if scalar:
                head = work.shape.with_scalar_head(keep_language_head=work.lora_rank is not None)
                work = replace(work, shape=head)
            cluster = None if machines else query_cluster(spec)
            machine = find_machine(spec, gpu, devices, device_gib=device_gib, node_gib=node_gib)
            machine = replace(machine, count=machines or _gpu_machines(cluster))
            scenario = Scenario(spec, work, machine)
            memory_plan = plan_memory(scenario.spec, scenario.work, scenario.machine)
            lanes = None
            if run:
                lanes = _lanes_of(run, spec, scenario.machine, storage or _storage_of(body))
        except (ConfigError, EngineError) as error:
            raise usage_error(f"{type(error).__name__}: {error}") from None

        # the result, and what would fit instead
        memory_plan = _with_shortage(memory_plan, spec, cluster)
        proposals = [] if memory_plan.fits else remedies(scenario)
        if as_json:
            divided = {"lanes": lane_document(lanes, _sampler_gpus(spec))} if lanes else {}
            print_json(as_document(memory_plan, work, proposals) | _cluster_entry(cluster) | divided)
        else:
            print_plan(memory_plan, work, proposals, _cluster_line(spec, cluster))
            if lanes:
                console().print(lane_table(lanes, _sampler_gpus(spec)))
                for line in lane_lines(run, lanes, _sampler_gpus(spec)):
                    print_plain(console(), line)
    raise typer.Exit(0 if memory_plan.fits else DOES_NOT_FIT)


def find_shape(source: str, storage: str) -> ModelShape:
    """Returns the shape of a preset, a folder or a registered model. Raises ConfigError, BadSpec, BadModelFolder."""
    if not source:
        raise ConfigError(f"no model was given; add --model: a Hugging Face folder, a key, or {', '.join(PRESETS)}")
    preset_shape, folder = preset(source), local_folder(source)
    if preset_shape is not None:
        return preset_shape
    if folder is not None:
        return read_shape(folder)
    if not storage:
        raise ConfigError(
            f"{source!r} is neither a folder nor one of {', '.join(PRESETS)}; for a registered model, add --storage"
        )
    store = open_store(storage)
    return stored_shape(store, registered_model(store, source))


def workload_of(
    body: Mapping[str, Any], spec: LocalEngineSpec, shape: ModelShape, *, context: int, lora_rank: int, frozen: int
) -> Workload:
    """Returns the workload of the options, else of the run's config, else of GRPO on all weights with a reference."""
    algorithm, model = body.get("algorithm") or {}, body.get("model") or {}

    # context: the option, else what the engine and the model allow
    max_context = min(shape.context, getattr(spec.sampler, "max_context", None) or shape.context)
    if context > max_context:
        raise ConfigError(
            f"--context {context} exceeds the {max_context} tokens of the model or of sampler.max_context"
        )
    if not context:
        context = min(max_context, DEFAULT_CONTEXT, spec.max_tokens_per_forward)

    # adapter: the option, else the config of the run
    adapter = model.get("adapter") if isinstance(model, dict) else None
    rank: int | None = lora_rank or None
    if rank is None and adapter is not None:
        rank = int(adapter.get("rank", default_of(LoraSpec, "rank")))

    # a KL term needs a frozen copy of the initial policy
    if frozen < 0:
        frozen = 1 if algorithm.get("kl_beta", default_of(GRPOAlgorithm, "kl_beta")) else 0
    in_4bit = bool(adapter and adapter.get("load_in_4bit"))
    frozen = min(spec.frozen_policies, frozen)

    # The sampler may still sample from the policy that is max_staleness steps older than the newest one. In flight, it
    # takes each policy as soon as it is there.
    rules = body.get("rules") or {}
    staged = 1
    if rank is None and rules.get("weight_updates", "between") == "between":
        staged = max(1, int(rules.get("max_staleness", 0)))
    return Workload(shape, context=context, lora_rank=rank, load_in_4bit=in_4bit, frozen=frozen, staged=staged)


def _lanes_of(run: str, spec: LocalEngineSpec, machine: Machine, storage: str) -> LaneSeconds:
    """The measured seconds of a run whose trainer and samplers have GPUs of their own. Raises ConfigError."""
    if not spec.replica_gpus or not isinstance(spec.trainer, DeepSpeedSpec):
        raise ConfigError(
            "--run divides GPUs between the ranks of a DeepSpeed trainer and dedicated vLLM replicas, but the config "
            f"has trainer.kind={spec.trainer.kind!r} and {spec.replica_gpus} GPUs of dedicated replicas; leave it out"
        )
    if not storage:
        raise ConfigError(f"--run {run} was given without a store; add --storage")
    gpus = machine.devices * (machine.count or 1)
    return measured_lanes(open_store(storage), run, train_gpus=spec.ranks(gpus), sample_gpus=spec.replica_gpus)


def _sampler_gpus(spec: LocalEngineSpec) -> int:
    return spec.sampler.tensor_parallel if isinstance(spec.sampler, VllmSpec) else 1


def find_machine(spec: LocalEngineSpec, gpu: str, devices: int, *, device_gib: float, node_gib: float) -> Machine:
    """Returns a machine with the given GPUs, or this machine if the engine computes on a CPU. Raises ConfigError."""
    # refuse contradictions
    if gpu and gpu not in DEVICES_GIB:
        raise ConfigError(f"--gpu {gpu!r} is not known; give one of {', '.join(DEVICES_GIB)}, or --device-gib")
    if gpu and spec.device == "cpu":
        raise ConfigError(f"--gpu {gpu} was given, but the config says device='cpu'; leave one of them out")
    # CPU, or else the given GPUs
    if spec.device == "cpu" or (spec.device == "auto" and not gpu and not device_gib):
        return Machine.cpu(int(device_gib * GIB) or _memory_of_this_machine(), native_bfloat16=_native_bfloat16())
    if not gpu and not device_gib:
        raise ConfigError(f"the config requires a GPU; say which: --gpu {'|'.join(DEVICES_GIB)}, or --device-gib")
    return Machine.gpus(gpu or "GPU", devices, gib=device_gib or None, node_gib=node_gib or None)


def print_plan(memory_plan: MemoryPlan, work: Workload, proposals: list[str], cluster: str = "") -> None:
    """Prints what runs on each machine, a table per memory, and the conclusion."""
    to = console()
    shape = work.shape
    trained = "all weights" if work.lora_rank is None else f"LoRA rank {work.lora_rank}"
    if work.load_in_4bit:
        trained += " on a base in 4 bits"
    to.print(f"{shape.name}: {shape.parameters:,} parameters, {trained}, {work.context} tokens", markup=False)
    # what runs where
    for number, use in enumerate(memory_plan.machines, 1):
        to.print(f"machine {number}: {use.describe()}", markup=False, highlight=False)
    if cluster:
        print_plain(to, cluster)
    for pool in memory_plan.pools:
        # one table per memory, with its sum
        to.print(_pool_table(pool))
        usable = "" if pool.usable is None else f" of {pool.usable / GIB:.1f} GiB usable"
        to.print(f"needs {pool.needed / GIB:.1f} GiB{usable}\n", markup=False, highlight=False)
    for line in conclusion(memory_plan, work, proposals):
        print_plain(to, line)


def conclusion(memory_plan: MemoryPlan, work: Workload, proposals: list[str]) -> list[str]:
    """Returns the lines below the tables: whether it fits, why not, what would fit, and how accurate this is."""
    lines = []
    if memory_plan.sequences is not None:
        lines.append(f"KV caches hold {memory_plan.sequences} sequences of {work.context} tokens")
    if memory_plan.fits:
        return [*lines, f"fits. {ACCURACY}"]
    # the reasons, and the changes that were tried
    lines += [f"does not fit: {reason}" for reason in memory_plan.reasons()]
    lines += [f"would fit: {proposal}" for proposal in proposals]
    if not proposals:
        lines.append("no change that was tried fits; use a smaller model, or more or larger devices")
    return [*lines, ACCURACY]


def as_document(memory_plan: MemoryPlan, work: Workload, proposals: list[str]) -> dict[str, Any]:
    """Returns the plan as a JSON document, with sizes in bytes."""
    # the processes of each machine
    machines = []
    for use in memory_plan.machines:
        machines.append(
            {
                "ranks": use.ranks, "samplers": use.samplers,
                "trains": sorted(use.training_gpus), "samples": sorted(use.sampling_gpus),
            }
        )  # fmt: skip
    # the parts of each memory
    memories = []
    for pool in memory_plan.pools:
        parts = [{"name": part.name, "bytes": part.bytes, "why": part.source} for part in pool.parts]
        memories.append(
            {
                "name": pool.name, "capacity": pool.capacity, "usable": pool.usable, "needed": pool.needed,
                "fits": pool.fits, "parts": parts,
            }
        )  # fmt: skip
    return {
        "model": work.shape.name, "parameters": work.shape.parameters, "context": work.context,
        "fits": memory_plan.fits, "reasons": memory_plan.reasons(), "would_fit": proposals,
        "sequences": memory_plan.sequences, "machines": machines, "memories": memories,
    }  # fmt: skip


def _gpu_machines(cluster: Inventory | EngineError | None) -> int | None:
    """The number of machines with GPUs in a cluster. None without a cluster that answers."""
    if not isinstance(cluster, Inventory):
        return None
    return sum(node.gpus > 0 for node in cluster.nodes) or None


def _with_shortage(
    memory_plan: MemoryPlan, spec: LocalEngineSpec, cluster: Inventory | EngineError | None
) -> MemoryPlan:
    """Adds a problem to the plan if the cluster is too small."""
    lack = shortage(spec, cluster) if isinstance(cluster, Inventory) else ""
    if not lack:
        return memory_plan
    return replace(memory_plan, problems=(*memory_plan.problems, lack))


def _cluster_line(spec: LocalEngineSpec, cluster: Inventory | EngineError | None) -> str:
    if cluster is None:
        return ""
    if isinstance(cluster, EngineError):
        return f"the cluster does not answer, so its free resources are unknown: {cluster}"
    return f"cluster at {spec.cluster.address}: {describe_inventory(cluster)}"


def _cluster_entry(cluster: Inventory | EngineError | None) -> dict[str, Any]:
    """The cluster's part of the JSON document."""
    if cluster is None:
        return {}
    if isinstance(cluster, EngineError):
        return {"cluster": {"error": str(cluster)}}
    return {"cluster": cluster_document(cluster)}


def _pool_table(pool: MemoryPool) -> Any:
    pool_table = table(pool.name, "part", *(f"{phase}>" for phase in PHASES), "GiB of what")
    for part in pool.parts:
        sizes = [_gib(part.bytes.get(phase, 0.0)) for phase in PHASES]
        add_rows(pool_table, [[part.name, *sizes, part.source]])
    sums = [_gib(pool.bytes_in(phase)) for phase in PHASES]
    return add_rows(pool_table, [["sum", *sums, ""]])


def _gib(size: float) -> str | None:
    if not size:
        return None
    return f"{size / GIB:.2f}"


def _model_of(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, dict):
        return ""
    return str(model.get("key", ""))


def _storage_of(body: Mapping[str, Any]) -> str:
    storage = body.get("storage")
    if not isinstance(storage, dict):
        return ""
    return str(storage.get("url", ""))


def _memory_of_this_machine() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _native_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16: the same test as in engine.backends.torch.backend, which needs torch."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
