"""The checks of `ostinato doctor` for DeepSpeed, vLLM and Ray.

They check that each is installed for the Python interpreter that will run it, and that the Ray cluster answers.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from engine.cluster.connection import Inventory, inventory_of
from engine.errors import EngineError
from engine.specs.engine import DeepSpeedSpec, EngineSpec, HttpEngineSpec, LocalEngineSpec, VllmSpec
from flows.cli.checks import Check

IMPORT_TIMEOUT_SECONDS = 60.0
HOW_TO_INSTALL = {
    "deepspeed": "DS_BUILD_OPS=0 pip install --no-build-isolation 'ostinato[deepspeed]', after torch",
    "vllm": "vLLM needs an environment of its own: make .venv-vllm/.ready, or on GPUs pip install 'ostinato[vllm]'; "
    "run the engine in it, or set sampler.python to its interpreter",
    "ray": "pip install 'ostinato[cluster]', the same version of Ray for every interpreter and on every machine",
}
PRINT_VERSIONS = """
import sys
from importlib.metadata import packages_distributions, version
names = packages_distributions().get(sys.argv[1], [])
print(", ".join(f"{name} {version(name)}" for name in names))
sys.exit(not names)
"""
"""Program that prints the installed distributions of a package, and fails if there is none."""


def check_backends(spec: EngineSpec) -> Iterator[Check]:
    """Checks the trainer and the sampler of an embedded engine. A served engine is checked on its own machine."""
    if isinstance(spec, HttpEngineSpec):
        return
    # the torch backends are part of the installation and need no check
    if isinstance(spec.trainer, DeepSpeedSpec):
        trainer = spec.trainer
        ranks = f"ranks={trainer.ranks}, zero_stage={trainer.zero_stage}"
        yield _check_installed(sys.executable, "deepspeed", "trainer", ranks)
    if isinstance(spec.sampler, VllmSpec):
        sampler = spec.sampler
        location = f"{sampler.replicas} replicas" if sampler.replicas else "in the engine's process"
        yield _check_installed(sampler.python or sys.executable, "vllm", "sampler", location)
    if spec.uses_ray:
        yield _check_ray(spec)
        if spec.cluster.address is not None:
            yield _check_cluster(spec)


def _check_ray(spec: LocalEngineSpec) -> Check:
    """Checks that the engine and the vLLM replicas have the same version of Ray."""
    location = spec.cluster.address or "private, on this machine"
    of_engine = _check_installed(sys.executable, "ray", "ray", location)
    # replicas may run in the environment of vLLM, with another interpreter
    python = spec.sampler.python if isinstance(spec.sampler, VllmSpec) and spec.replicas else None
    if python is None or of_engine.verdict == "fail":
        return of_engine
    of_replicas = _check_installed(python, "ray", "ray", location)
    if of_replicas.verdict == "fail" or of_replicas.what == of_engine.what:
        return of_replicas
    what = f"{of_engine.what} for {sys.executable}, but {of_replicas.what} for sampler.python={python}"
    return Check(area="engine", name="ray", verdict="fail", what=what, what_to_do=HOW_TO_INSTALL["ray"])


def _check_cluster(spec: LocalEngineSpec) -> Check:
    """Checks that the Ray cluster answers and is large enough."""
    inventory = query_cluster(spec)
    if not isinstance(inventory, Inventory):
        remedy = "start the cluster, or correct cluster.address: docs/scaling.md"
        return Check(area="engine", name="cluster", verdict="fail", what=str(inventory), what_to_do=remedy)
    description = describe_inventory(inventory)
    lack = shortage(spec, inventory)
    if not lack:
        return Check(area="engine", name="cluster", verdict="ok", what=description)
    return Check(
        area="engine",
        name="cluster",
        verdict="fail",
        what=f"{lack}; {description}",
        what_to_do="add machines to the cluster, or use fewer ranks and replicas",
    )


def _check_installed(python: str, package: str, role: str, details: str) -> Check:
    """Checks that a package is installed for an interpreter. `details` are added to a good result."""
    command = [python, "-c", PRINT_VERSIONS, package]
    try:
        # in a process of its own, because the interpreter may be another one
        process = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        what = f"{python} cannot be run: {error}"
        return Check(area="engine", name=role, verdict="fail", what=what, what_to_do=HOW_TO_INSTALL[package])
    if process.returncode:
        what = f"{package} is not installed for {python}"
        return Check(area="engine", name=role, verdict="fail", what=what, what_to_do=HOW_TO_INSTALL[package])
    return Check(area="engine", name=role, verdict="ok", what=f"{process.stdout.strip()}; {details}")


def query_cluster(spec: LocalEngineSpec) -> Inventory | EngineError | None:
    """Returns the inventory of the spec's cluster, the error if it does not answer, or None without a cluster."""
    if not spec.uses_ray or spec.cluster.address is None:
        return None
    try:
        return inventory_of(spec.cluster)
    except EngineError as error:
        return error


def describe_inventory(inventory: Inventory) -> str:
    """Describes machines, GPUs and reservations in one line."""
    machines = f"{len(inventory.nodes)} machine{'s' * (len(inventory.nodes) != 1)}"
    gpus = f"{inventory.gpus:g} GPUs ({inventory.free_gpus:g} free)"
    parts = [f"{machines}, {gpus}, {inventory.free_cpus:g} free CPUs"]
    for node in inventory.nodes:
        for reservation in node.reservations:
            amount = f"{reservation.gpus:g} GPUs and {reservation.cpus:g} CPUs"
            parts.append(f"{reservation.name} holds {amount} on {node.host}")
    parts += [f"{name} waits for free resources" for name in inventory.waiting]
    return "; ".join(parts)


def shortage(spec: LocalEngineSpec, inventory: Inventory) -> str:
    """Returns why the cluster is too small for the engine. Empty if it is not, or if the engine computes on CPUs."""
    if spec.device == "cpu" or (spec.device == "auto" and not inventory.gpus):
        return ""
    needed = spec.actor_gpus(int(inventory.gpus))
    if needed <= inventory.gpus:
        return ""
    return f"ranks and replicas need {needed} GPUs, and the cluster has {inventory.gpus:g}"


def cluster_document(inventory: Inventory) -> dict[str, Any]:
    """Returns the inventory as a JSON document."""
    nodes = []
    for node in inventory.nodes:
        reservations = [
            {"name": reservation.name, "cpus": reservation.cpus, "gpus": reservation.gpus}
            for reservation in node.reservations
        ]
        nodes.append(
            {
                "host": node.host, "address": node.address, "cpus": node.cpus, "gpus": node.gpus,
                "reservations": reservations,
            }
        )  # fmt: skip
    return {"gpus": inventory.gpus, "free_gpus": inventory.free_gpus, "free_cpus": inventory.free_cpus, "nodes": nodes}
