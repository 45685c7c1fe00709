"""`ostinato engine plan`: what an engine's config takes of each memory, before anything is started.

Exit status 0: it fits. 3: it does not, and what would is said. 2: wrong usage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.cluster.inventory import Inventory
from engine.errors import EngineError
from engine.memory_plan.plan import plan_memory
from engine.memory_plan.records import DEVICES_GIB, GIB, PHASES, Machine, MemoryPlan, MemoryPool, Workload
from engine.memory_plan.remedies import Scenario, remedies
from engine.memory_plan.shape import PRESETS, ModelShape, preset, read_shape, shape_of
from engine.models.folder import local_folder, registered_model
from engine.models.size import parameter_count
from engine.specs.engine import LocalEngineSpec
from flows.cli.cluster import ask_cluster, cluster_document, describe_inventory, shortage
from flows.cli.output import AsJson, console, fill, print_json, refusals, table, usage_error
from flows.configs.engine import load_engine
from flows.configs.overrides import ConfigError
from storage.store.artifacts import read_manifest
from storage.store.objects import open_store

DOES_NOT_FIT = 3
CONTEXT = 4096
"""Tokens of prompt and completion together, unless the config or --context says otherwise."""
MEASURED = (
    "The torch trainer's tensors were planned within 2 % of those measured on a CPU (135M, 512 and 1024 tokens), whose "
    "process takes up to 17 % more (bench/README.md). GPU, vLLM and ZeRO figures are computed, not measured."
)


def plan(  # noqa: PLR0913 - the options of a command
    config: Annotated[Path, typer.Option(help="YAML, TOML or JSON: an engine's keys, or a run's.", exists=True)],
    model: Annotated[
        str, typer.Option(help=f"A Hugging Face folder, a registered key, or one of {', '.join(PRESETS)}.")
    ] = "",
    gpu: Annotated[str, typer.Option(help=f"The GPU: {', '.join(DEVICES_GIB)}.")] = "",
    device_gib: Annotated[float, typer.Option(help="Memory of a device instead, GiB.", min=0)] = 0.0,
    devices: Annotated[int, typer.Option(help="GPUs per machine.", min=1)] = 1,
    machines: Annotated[int, typer.Option(help="Machines of the Ray cluster. 0: the cluster is asked.", min=0)] = 0,
    node_gib: Annotated[float, typer.Option(help="Memory of a machine, GiB. 0: not checked.", min=0)] = 0.0,
    context: Annotated[int, typer.Option(help="Prompt and completion together, tokens.", min=0)] = 0,
    lora_rank: Annotated[int, typer.Option(help="Plan a LoRA adapter of this rank. 0: all weights.", min=0)] = 0,
    scalar: Annotated[bool, typer.Option("--scalar", help="Under a scalar head: a reward or value model.")] = False,
    frozen: Annotated[int, typer.Option(help="Frozen policies in memory. -1: what the config implies.", min=-1)] = -1,
    storage: Annotated[str, typer.Option(help="Where a registered model lies.")] = "",
    sets: Annotated[list[str] | None, typer.Option("--set", help="Override one key: trainer.zero_stage=3.")] = None,
    as_json: AsJson = False,
) -> None:
    """A memory plan per device; refuses what cannot fit, and says what would."""
    with refusals():
        try:
            spec, body = load_engine(config, sets or [])
            shape = find_shape(model or _model_of(body), storage or _storage_of(body))
            work = workload_of(body, spec, shape, context=context, lora_rank=lora_rank, frozen=frozen)
            if scalar:
                head = work.shape.with_scalar_head(beside_adapter=work.lora_rank is not None)
                work = replace(work, shape=head)
            cluster = None if machines else ask_cluster(spec)
            machine = find_machine(spec, gpu, devices, device_gib=device_gib, node_gib=node_gib)
            machine = replace(machine, count=machines or _machines_of(cluster))
            setting = Scenario(spec, work, machine)
            planned = plan_memory(setting.spec, setting.work, setting.machine)
        except (ConfigError, EngineError) as error:
            raise usage_error(f"{type(error).__name__}: {error}") from None
        planned = _with_cluster(planned, spec, cluster)
        ways = [] if planned.fits else remedies(setting)
        if as_json:
            print_json(as_document(planned, work, ways) | _cluster_of(cluster))
        else:
            show(planned, work, ways, _cluster_line(spec, cluster))
    raise typer.Exit(0 if planned.fits else DOES_NOT_FIT)


def find_shape(source: str, storage: str) -> ModelShape:
    """Of a preset, a folder, or a registered model. Raises ConfigError, BadSpec, BadModelFolder."""
    if not source:
        raise ConfigError(f"no model was given; add --model: a Hugging Face folder, a key, or {', '.join(PRESETS)}")
    published, folder = preset(source), local_folder(source)
    if published is not None:
        return published
    if folder is not None:
        return read_shape(folder)
    if not storage:
        raise ConfigError(
            f"{source!r} is no folder and none of {', '.join(PRESETS)}; for a registered model, add --storage"
        )
    store = open_store(storage)
    ref = registered_model(store, source)
    entry = next((file for file in read_manifest(store, ref.key).files if file.name == "config.json"), None)
    if entry is None:
        raise ConfigError(f"the registered model {source!r} has no config.json; import it again")
    return shape_of(json.loads(store.get(entry.key)), source, counted=parameter_count(store, ref) or None)


def workload_of(
    body: Mapping[str, Any], spec: LocalEngineSpec, shape: ModelShape, *, context: int, lora_rank: int, frozen: int
) -> Workload:
    """What the options say, else the run's config, else a GRPO run with its reference on all weights."""
    algorithm, model = body.get("algorithm") or {}, body.get("model") or {}
    longest = min(shape.context, getattr(spec.sampler, "max_context", None) or shape.context)
    adapter = model.get("adapter") if isinstance(model, dict) else None
    implied = 1 if algorithm.get("kl_beta", 0.01) else 0
    if context > longest:
        raise ConfigError(f"--context {context} exceeds the {longest} tokens of the model or of sampler.max_context")
    return Workload(
        shape,
        context=context or min(longest, CONTEXT, spec.max_tokens_per_forward),
        lora_rank=lora_rank or (None if adapter is None else int(adapter.get("rank", 16))),
        frozen=min(spec.frozen_policies, implied if frozen < 0 else frozen),
    )


def find_machine(
    spec: LocalEngineSpec, gpu: str, devices: int, *, device_gib: float, node_gib: float
) -> Machine:
    """GPUs as named; else this machine, as a CPU. Raises ConfigError."""
    if gpu and gpu not in DEVICES_GIB:
        raise ConfigError(f"--gpu {gpu!r} is not known; give one of {', '.join(DEVICES_GIB)}, or --device-gib")
    if gpu and spec.device == "cpu":
        raise ConfigError(f"--gpu {gpu} was given, but the config says device='cpu'; leave one of them out")
    if spec.device == "cpu" or (spec.device == "auto" and not gpu and not device_gib):
        return Machine.cpu(int(device_gib * GIB) or _this_memory(), native_bfloat16=_native_bfloat16())
    if not gpu and not device_gib:
        raise ConfigError(f"the config wants a GPU; say which: --gpu {'|'.join(DEVICES_GIB)}, or --device-gib")
    return Machine.gpus(gpu or "GPU", devices, gib=device_gib or None, node_gib=node_gib or None)


def show(planned: MemoryPlan, work: Workload, ways: list[str], cluster: str = "") -> None:
    """Who runs where, tables per memory, then the verdict."""
    out = console()
    shape = work.shape
    trained = "all weights" if work.lora_rank is None else f"LoRA rank {work.lora_rank}"
    out.print(f"{shape.name}: {shape.parameters:,} parameters, {trained}, {work.context} tokens", markup=False)
    for number, use in enumerate(planned.machines, 1):
        out.print(f"machine {number}: {use.describe()}", markup=False, highlight=False)
    if cluster:
        out.print(cluster, markup=False, highlight=False, soft_wrap=True)
    for load in planned.pools:
        out.print(_table(load))
        free = "" if load.usable is None else f" of {load.usable / GIB:.1f} GiB usable"
        out.print(f"needs {load.needed / GIB:.1f} GiB{free}\n", markup=False, highlight=False)
    for line in verdict(planned, work, ways):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def verdict(planned: MemoryPlan, work: Workload, ways: list[str]) -> list[str]:
    lines = []
    if planned.sequences is not None:
        lines.append(f"KV caches hold {planned.sequences} sequences of {work.context} tokens")
    if planned.fits:
        return [*lines, f"fits. {MEASURED}"]
    lines += [f"does not fit: {reason}" for reason in planned.reasons()]
    lines += [f"would fit: {way}" for way in ways]
    if not ways:
        lines.append("nothing that was tried fits; take a smaller model, or more and larger devices")
    return [*lines, MEASURED]


def as_document(planned: MemoryPlan, work: Workload, ways: list[str]) -> dict[str, Any]:
    """The same for machines; sizes in bytes."""
    loads = [
        {
            "name": load.name, "capacity": load.capacity, "usable": load.usable, "needed": load.needed,
            "fits": load.fits,
            "parts": [{"name": p.name, "bytes": p.bytes, "why": p.source} for p in load.parts],
        }
        for load in planned.pools
    ]  # fmt: skip
    return {
        "model": work.shape.name, "parameters": work.shape.parameters, "context": work.context,
        "fits": planned.fits, "reasons": planned.reasons(), "would_fit": ways, "sequences": planned.sequences,
        "machines": [
            {
                "ranks": use.ranks, "samplers": use.samplers,
                "trains": sorted(use.training_gpus), "samples": sorted(use.sampling_gpus),
            }
            for use in planned.machines
        ],
        "memories": loads,
    }  # fmt: skip


def _machines_of(cluster: Inventory | EngineError | None) -> int | None:
    """Machines with GPUs, of a cluster that answered."""
    if not isinstance(cluster, Inventory):
        return None
    return sum(node.gpus > 0 for node in cluster.nodes) or None


def _with_cluster(planned: MemoryPlan, spec: LocalEngineSpec, cluster: Inventory | EngineError | None) -> MemoryPlan:
    """The plan, with what the cluster lacks as a problem."""
    short = shortage(spec, cluster) if isinstance(cluster, Inventory) else ""
    return replace(planned, problems=(*planned.problems, short)) if short else planned


def _cluster_line(spec: LocalEngineSpec, cluster: Inventory | EngineError | None) -> str:
    if cluster is None:
        return ""
    if isinstance(cluster, EngineError):
        return f"whether the cluster has room is not known: {cluster}"
    return f"cluster at {spec.cluster.address}: {describe_inventory(cluster)}"


def _cluster_of(cluster: Inventory | EngineError | None) -> dict[str, Any]:
    if cluster is None:
        return {}
    return {"cluster": cluster_document(cluster) if isinstance(cluster, Inventory) else {"error": str(cluster)}}


def _table(load: MemoryPool) -> Any:
    made = table(load.name, "part", *(f"{phase}>" for phase in PHASES), "GiB of what")
    rows = [[p.name, *(_gib(p.bytes.get(phase, 0.0)) for phase in PHASES), p.source] for p in load.parts]
    return fill(made, [*rows, ["sum", *(_gib(load.bytes_in(phase)) for phase in PHASES), ""]])


def _gib(size: float) -> str | None:
    return f"{size / GIB:.2f}" if size else None


def _model_of(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    return str(model.get("key", "")) if isinstance(model, dict) else ""


def _storage_of(body: Mapping[str, Any]) -> str:
    storage = body.get("storage")
    return str(storage.get("url", "")) if isinstance(storage, dict) else ""


def _this_memory() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _native_bfloat16() -> bool:
    """As engine.backends.torch.backend decides, which imports torch."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
