"""Finds changes of a config, or of the hardware, with which a memory plan fits. Each is planned before it is
proposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from engine.errors import BadSpec
from engine.memory_plan.plan import count_ranks, plan_memory
from engine.memory_plan.records import DEVICES_GIB, GIB, Machine, Workload
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec, VllmSpec

MAX_COMBINED = 3
"""Largest number of changes that are tried together."""
LORA_RANK = 16
"""Rank of the adapter that is proposed."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The input of a plan: an engine's config, what it trains, and the machine."""

    spec: LocalEngineSpec
    work: Workload
    machine: Machine

    def fits(self) -> bool:
        return plan_memory(self.spec, self.work, self.machine).fits

    def with_changes(self, changes: dict[str, Any]) -> Scenario:
        """Returns a scenario with other values of some config keys. A dictionary changes keys of the group of that
        name, or replaces the group if it has a `kind`. Raises ValidationError, BadSpec."""
        body = self.spec.model_dump()
        for key, value in changes.items():
            changes_group = isinstance(value, dict) and "kind" not in value
            body[key] = body[key] | value if changes_group else value
        return replace(self, spec=LocalEngineSpec.model_validate(body))


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change of the config or of the hardware."""

    key: str
    """Remedies with the same key are alternatives, and are not combined."""
    description: str
    """The change as a person makes it, such as a config key and its value."""
    apply: Callable[[Scenario], Scenario]


def remedies(scenario: Scenario, *, most: int = 4) -> list[str]:
    """Returns the smallest sets of changes with which the plan fits: at most `most`, cheapest first, all of one
    size."""
    candidates = list(_candidates(scenario))
    for size in range(1, MAX_COMBINED + 1):
        # One change that fits is better than two, so larger sets are tried only if no smaller one fits.
        fitting = [combined for combined in combinations(candidates, size) if _fits(scenario, combined)]
        if fitting:
            return [_describe(combined) for combined in fitting[:most]]
    return []


def _describe(combined: tuple[Remedy, ...]) -> str:
    return " and ".join(remedy.description for remedy in combined)


def _fits(scenario: Scenario, combined: tuple[Remedy, ...]) -> bool:
    if len({remedy.key for remedy in combined}) < len(combined):
        return False
    try:
        for remedy in combined:
            scenario = remedy.apply(scenario)
        return scenario.fits()
    except (BadSpec, ValidationError):  # the changes contradict each other
        return False


# -- changes of the config -------------------------------------------------------------------------------------


def _config_change(key: str, description: str, changes: dict[str, Any]) -> Remedy:
    return Remedy(key, description, lambda scenario: scenario.with_changes(changes))


def _candidates(scenario: Scenario) -> Iterator[Remedy]:
    """Yields remedies, cheapest first: those that keep both the hardware and what is trained come before the others."""
    spec, work = scenario.spec, scenario.work
    # the trainer
    yield from _trainer_changes(scenario)
    yield from _token_changes(spec.max_tokens_per_forward, work.context)

    # the sampler
    if isinstance(spec.sampler, VllmSpec):
        yield from _vllm_changes(spec.sampler)
    elif spec.max_rows > 8:
        rows = spec.max_rows // 4
        yield _config_change("rows", f"max_rows={rows}", {"max_rows": rows})

    # what is trained
    if work.frozen:
        yield Remedy("frozen", "no reference policy (algorithm.kl_beta=0, --frozen 0)", _without_frozen)
    if work.lora_rank is None:
        description = f"a LoRA adapter (model.adapter={{}}, --lora-rank {LORA_RANK})"
        yield Remedy("lora", description, _with_adapter)
    if not work.load_in_4bit:
        description = "an adapter on a base in 4 bits (model.adapter.load_in_4bit=true, --load-in-4bit)"
        yield Remedy("lora", description, _with_base_in_4bit)

    # the hardware
    yield from _larger_devices(scenario.machine)
    yield from _more_gpus(scenario)


def _token_changes(tokens: int, context: int) -> Iterator[Remedy]:
    if tokens < context:
        yield _config_change("tokens", f"max_tokens_per_forward={context}", {"max_tokens_per_forward": context})
    while tokens // 2 >= context:
        tokens //= 2
        yield _config_change("tokens", f"max_tokens_per_forward={tokens}", {"max_tokens_per_forward": tokens})


def _trainer_changes(scenario: Scenario) -> Iterator[Remedy]:
    trainer = scenario.spec.trainer
    if not isinstance(trainer, DeepSpeedSpec):
        if scenario.machine.devices > 1:
            deepspeed = {"trainer": {"kind": "deepspeed", "zero_stage": 3}}
            yield _config_change("stage", 'trainer.kind="deepspeed" with trainer.zero_stage=3', deepspeed)
        return
    if trainer.activation_checkpointing == "none":
        description = 'trainer.activation_checkpointing="recompute"'
        yield _config_change("recompute", description, {"trainer": {"activation_checkpointing": "recompute"}})
    for stage in range(trainer.zero_stage + 1, 4):
        yield _config_change("stage", f"trainer.zero_stage={stage}", {"trainer": {"zero_stage": stage}})
    if trainer.offload_optimizer == "none":
        changes = {"trainer": {"offload_optimizer": "cpu"}}
        yield _config_change("optimizer", 'trainer.offload_optimizer="cpu"', changes)
    if trainer.offload_parameters == "none":
        changes = {"trainer": {"offload_parameters": "cpu"}}
        yield _config_change("parameters", 'trainer.offload_parameters="cpu"', changes)


def _vllm_changes(vllm: VllmSpec) -> Iterator[Remedy]:
    if vllm.sleep is False:
        yield _config_change("sleep", "sampler.sleep=true", {"sampler": {"sleep": True}})
    for share in (0.8, 0.6, 0.4, 0.3):
        if share < vllm.gpu_share:
            yield _config_change("share", f"sampler.gpu_share={share}", {"sampler": {"gpu_share": share}})
    for tp in (2, 4, 8):
        if tp > vllm.tensor_parallel:
            yield _config_change("tp", f"sampler.tensor_parallel={tp}", {"sampler": {"tensor_parallel": tp}})


# -- changes of what is trained --------------------------------------------------------------------------------


def _with_adapter(scenario: Scenario) -> Scenario:
    return replace(scenario, work=replace(scenario.work, lora_rank=LORA_RANK))


def _with_base_in_4bit(scenario: Scenario) -> Scenario:
    rank = scenario.work.lora_rank or LORA_RANK
    return replace(scenario, work=replace(scenario.work, lora_rank=rank, load_in_4bit=True))


def _without_frozen(scenario: Scenario) -> Scenario:
    return replace(scenario, work=replace(scenario.work, frozen=0))


# -- changes of the hardware -----------------------------------------------------------------------------------


def _larger_devices(machine: Machine) -> Iterator[Remedy]:
    if machine.device == "cpu":
        for gib in (32, 64, 128, 256, 512, 1024):
            if gib * GIB > machine.device_bytes:
                yield Remedy("larger", f"a machine with {gib} GiB", _with_machine(Machine.cpu(gib * GIB)))
        return
    for name, size in sorted(DEVICES_GIB.items(), key=lambda item: item[1]):
        if size * GIB > machine.device_bytes:
            larger = replace(machine, name=name, device_bytes=int(size * GIB))
            yield Remedy("larger", f"{name} GPUs", _with_machine(larger))


def _more_gpus(scenario: Scenario) -> Iterator[Remedy]:
    """Yields more GPUs and more machines, for a trainer that can use them."""
    machine, trainer = scenario.machine, scenario.spec.trainer
    if not isinstance(trainer, DeepSpeedSpec) or machine.device != "cuda":
        return
    if trainer.ranks == "auto":
        for count in (2, 4, 8):
            if count > machine.devices:
                yield Remedy("gpus", f"{count} GPUs per machine", _with_devices(count))
    present_ranks = count_ranks(scenario.spec, machine)
    for machines in (2, 4, 8):
        ranks = machines * machine.devices
        if ranks > present_ranks:
            description = f"trainer.ranks={ranks} on a Ray cluster (cluster.address) of {machines} machines or more"
            address = scenario.spec.cluster.address or "auto"
            changes = {"trainer": {"ranks": ranks}, "cluster": {"address": address}}
            yield Remedy("machines", description, _with_cluster(changes))


def _with_machine(machine: Machine) -> Callable[[Scenario], Scenario]:
    return lambda scenario: replace(scenario, machine=machine)


def _with_devices(count: int) -> Callable[[Scenario], Scenario]:
    return lambda scenario: replace(scenario, machine=replace(scenario.machine, devices=count))


def _with_cluster(changes: dict[str, Any]) -> Callable[[Scenario], Scenario]:
    """Applies config changes on a cluster with as many machines as they need."""
    return lambda scenario: replace(scenario.with_changes(changes), machine=replace(scenario.machine, count=None))
