"""The checks of `ostinato doctor` for DeepSpeed, vLLM and Ray: is each installed for the interpreter that will run it,
and does the Ray cluster answer?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from engine.cluster.inventory import Inventory
from engine.specs.engine import EngineSpec, HttpEngineSpec, LocalEngineSpec
from engine.specs.sampler import VllmSpec
from engine.specs.trainer import DeepSpeedSpec
from flows.cli.checks import Check
from flows.cli.cluster import ask_cluster, describe_inventory, shortage

IMPORT_SECONDS = 60.0
HOW_TO_INSTALL = {
    "deepspeed": "DS_BUILD_OPS=0 pip install --no-build-isolation 'ostinato[deepspeed]', after torch",
    "vllm": "vLLM takes an environment of its own: make .venv-vllm/.ready, or on GPUs pip install 'ostinato[vllm]'; "
    "run the engine from it, or name its interpreter in sampler.python",
    "ray": "pip install 'ostinato[cluster]', the same version of Ray for every interpreter and on every machine",
}
WHAT_IS_INSTALLED = """
import sys
from importlib.metadata import packages_distributions, version
names = packages_distributions().get(sys.argv[1], [])
print(", ".join(f"{name} {version(name)}" for name in names))
sys.exit(not names)
"""


def check_backends(spec: EngineSpec) -> Iterator[Check]:
    """What an engine here trains and samples with. A served engine has its own doctor, on its own machine."""
    if isinstance(spec, HttpEngineSpec):
        return
    if isinstance(spec.trainer, DeepSpeedSpec):
        trainer = spec.trainer
        ranks = f"ranks={trainer.ranks}, zero_stage={trainer.zero_stage}"
        yield _installed_for(sys.executable, "deepspeed", "trainer", ranks)
    if isinstance(spec.sampler, VllmSpec):
        sampler = spec.sampler
        where = f"{sampler.replicas} replicas" if sampler.replicas else "in the engine's process"
        yield _installed_for(sampler.python or sys.executable, "vllm", "sampler", where)
    if spec.uses_ray:
        yield _check_ray(spec)
        if spec.cluster.address is not None:
            yield _check_cluster(spec)


def _check_ray(spec: LocalEngineSpec) -> Check:
    """One version of Ray for the engine and for the replicas of vLLM."""
    where = spec.cluster.address or "private, on this machine"
    engines = _installed_for(sys.executable, "ray", "ray", where)
    python = spec.sampler.python if isinstance(spec.sampler, VllmSpec) and spec.replicas else None
    if python is None or engines.verdict == "fail":
        return engines
    replicas = _installed_for(python, "ray", "ray", where)
    if replicas.verdict == "fail" or replicas.what == engines.what:
        return replicas
    what = f"{engines.what} for {sys.executable}, but {replicas.what} for sampler.python={python}"
    return Check(area="engine", name="ray", verdict="fail", what=what, what_to_do=HOW_TO_INSTALL["ray"])


def _check_cluster(spec: LocalEngineSpec) -> Check:
    answer = ask_cluster(spec)
    if not isinstance(answer, Inventory):
        to_do = "start the cluster, or mend cluster.address: docs/scaling.md"
        return Check(area="engine", name="cluster", verdict="fail", what=str(answer), what_to_do=to_do)
    short = shortage(spec, answer)
    return Check(
        area="engine",
        name="cluster",
        verdict="fail" if short else "ok",
        what="; ".join(filter(None, (short, describe_inventory(answer)))),
        what_to_do="add machines to the cluster, or ask for fewer ranks and replicas" if short else "",
    )


def _installed_for(python: str, package: str, role: str, how: str) -> Check:
    try:
        asked = subprocess.run(
            [python, "-c", WHAT_IS_INSTALLED, package],
            capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        what = f"{python} cannot be asked: {error}"
        return Check(area="engine", name=role, verdict="fail", what=what, what_to_do=HOW_TO_INSTALL[package])
    if asked.returncode:
        what = f"{package} is not installed for {python}"
        return Check(area="engine", name=role, verdict="fail", what=what, what_to_do=HOW_TO_INSTALL[package])
    return Check(area="engine", name=role, verdict="ok", what=f"{asked.stdout.strip()}; {how}")
