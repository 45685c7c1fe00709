"""Changes of a config that make its plan fit: each is planned itself before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from engine.errors import BadSpec
from engine.memory_plan.layout import ranks_of
from engine.memory_plan.plan import plan_memory
from engine.memory_plan.records import DEVICES_GIB, GIB, Machine, Workload
from engine.specs.engine import LocalEngineSpec
from engine.specs.sampler import VllmSpec
from engine.specs.trainer import DeepSpeedSpec

MOST_TOGETHER = 3
LORA_RANK = 16


@dataclass(frozen=True, slots=True)
class Setting:
    """What is planned: a config, what it trains, and where."""

    spec: LocalEngineSpec
    work: Workload
    machine: Machine

    def fits(self) -> bool:
        return plan_memory(self.spec, self.work, self.machine).fits

    def but(self, changes: dict[str, Any]) -> Setting:
        """With keys of the config changed, validated anew; a dictionary changes the group of that name."""
        body = self.spec.model_dump()
        for key, value in changes.items():
            body[key] = body[key] | value if isinstance(value, dict) and "kind" not in value else value
        return replace(self, spec=LocalEngineSpec.model_validate(body))


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to type or to have."""

    key: str
    """Changes of one key are alternatives."""
    says: str
    apply: Callable[[Setting], Setting]


def remedies(setting: Setting, *, most: int = 4) -> list[str]:
    """The smallest sets of changes with which the plan fits, cheapest first: at most `most`, all of one size."""
    changes = list(_changes(setting))
    for size in range(1, MOST_TOGETHER + 1):
        found = [group for group in combinations(changes, size) if _fits(setting, group)]
        if found:
            return [" and ".join(change.says for change in group) for group in found[:most]]
    return []


def _fits(setting: Setting, group: tuple[Change, ...]) -> bool:
    if len({change.key for change in group}) < len(group):
        return False
    try:
        for change in group:
            setting = change.apply(setting)
        return setting.fits()
    except (BadSpec, ValidationError):  # the changes do not go together
        return False


def _config(key: str, says: str, changes: dict[str, Any]) -> Change:
    return Change(key, says, lambda setting: setting.but(changes))


def _changes(setting: Setting) -> Iterator[Change]:
    """Cheapest first: what changes neither the hardware nor what is trained comes before what does."""
    spec, work = setting.spec, setting.work
    yield from _trainer_changes(setting)
    tokens = spec.max_tokens_per_forward
    if tokens < work.context:
        yield _config("tokens", f"max_tokens_per_forward={work.context}", {"max_tokens_per_forward": work.context})
    while tokens // 2 >= work.context:
        tokens //= 2
        yield _config("tokens", f"max_tokens_per_forward={tokens}", {"max_tokens_per_forward": tokens})
    if isinstance(spec.sampler, VllmSpec):
        yield from _vllm_changes(spec.sampler)
    elif spec.max_rows > 8:
        rows = spec.max_rows // 4
        yield _config("rows", f"max_rows={rows}", {"max_rows": rows})
    if work.frozen:
        yield Change("frozen", "no reference policy (algorithm.kl_beta=0, --frozen 0)", _without_frozen)
    if work.lora_rank is None:
        alone = ' with trainer.kind="torch"' if isinstance(spec.trainer, DeepSpeedSpec) else ""
        says = f"a LoRA adapter (model.adapter={{}}, --lora-rank {LORA_RANK}){alone}"
        yield Change("lora", says, _with_adapter)
    yield from _hardware(setting)


def _trainer_changes(setting: Setting) -> Iterator[Change]:
    trainer, several = setting.spec.trainer, setting.machine.devices > 1
    if not isinstance(trainer, DeepSpeedSpec):
        if several:
            whole = {"trainer": {"kind": "deepspeed", "zero_stage": 3}}
            yield _config("stage", 'trainer.kind="deepspeed" with trainer.zero_stage=3', whole)
        return
    if trainer.activation_checkpointing == "none":
        says = 'trainer.activation_checkpointing="recompute"'
        yield _config("recompute", says, {"trainer": {"activation_checkpointing": "recompute"}})
    for stage in range(trainer.zero_stage + 1, 4):
        yield _config("stage", f"trainer.zero_stage={stage}", {"trainer": {"zero_stage": stage}})
    if trainer.offload_optimizer == "none":
        yield _config("optimizer", 'trainer.offload_optimizer="cpu"', {"trainer": {"offload_optimizer": "cpu"}})
    if trainer.offload_parameters == "none":
        yield _config("parameters", 'trainer.offload_parameters="cpu"', {"trainer": {"offload_parameters": "cpu"}})


def _vllm_changes(vllm: VllmSpec) -> Iterator[Change]:
    if vllm.sleep is False:
        yield _config("sleep", "sampler.sleep=true", {"sampler": {"sleep": True}})
    for share in (0.8, 0.6, 0.4, 0.3):
        if share < vllm.gpu_share:
            yield _config("share", f"sampler.gpu_share={share}", {"sampler": {"gpu_share": share}})
    for tp in (2, 4, 8):
        if tp > vllm.tensor_parallel:
            yield _config("tp", f"sampler.tensor_parallel={tp}", {"sampler": {"tensor_parallel": tp}})


def _with_adapter(setting: Setting) -> Setting:
    """DeepSpeed trains all weights."""
    adapted = replace(setting, work=replace(setting.work, lora_rank=LORA_RANK))
    return adapted.but({"trainer": {"kind": "torch"}}) if isinstance(setting.spec.trainer, DeepSpeedSpec) else adapted


def _without_frozen(setting: Setting) -> Setting:
    return replace(setting, work=replace(setting.work, frozen=0))


def _hardware(setting: Setting) -> Iterator[Change]:
    """Larger devices, and more GPUs for a trainer that can use them."""
    yield from _larger(setting.machine)
    machine, trainer = setting.machine, setting.spec.trainer
    if not isinstance(trainer, DeepSpeedSpec) or machine.device != "cuda":
        return
    if trainer.ranks == "auto":
        for count in (2, 4, 8):
            if count > machine.devices:
                yield Change("gpus", f"{count} GPUs per machine", _with_devices(count))
    now = ranks_of(setting.spec, machine)
    for machines in (2, 4, 8):
        ranks = machines * machine.devices
        if ranks > now:
            says = f"trainer.ranks={ranks} on a Ray cluster (cluster.address) of {machines} machines or more"
            address = setting.spec.cluster.address or "auto"
            more = {"trainer": {"ranks": ranks}, "cluster": {"address": address}}
            yield Change("machines", says, _with_machines(more))


def _larger(machine: Machine) -> Iterator[Change]:
    if machine.device == "cpu":
        for gib in (32, 64, 128, 256, 512, 1024):
            if gib * GIB > machine.device_bytes:
                yield Change("larger", f"a machine with {gib} GiB", _with_machine(Machine.cpu(gib * GIB)))
        return
    for name, size in sorted(DEVICES_GIB.items(), key=lambda item: item[1]):
        if size * GIB > machine.device_bytes:
            there = replace(machine, name=name, device_bytes=int(size * GIB))
            yield Change("larger", f"{name} GPUs", _with_machine(there))


def _with_machine(machine: Machine) -> Callable[[Setting], Setting]:
    return lambda setting: replace(setting, machine=machine)


def _with_devices(count: int) -> Callable[[Setting], Setting]:
    return lambda setting: replace(setting, machine=replace(setting.machine, devices=count))


def _with_machines(changes: dict[str, Any]) -> Callable[[Setting], Setting]:
    """On a cluster of as many machines as it takes."""
    return lambda setting: replace(setting.but(changes), machine=replace(setting.machine, count=None))
