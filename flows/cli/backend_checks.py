"""The checks of `ostinato doctor` for DeepSpeed and vLLM: is each installed for the interpreter that will run it?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from engine.sampler_spec import VllmSpec
from engine.spec import EngineSpec, HttpEngineSpec
from engine.trainer_spec import DeepSpeedSpec
from flows.cli.checks import Check, http_status, shown_url

IMPORT_SECONDS = 60.0
HOW_TO_INSTALL = {
    "deepspeed": "DS_BUILD_OPS=0 pip install --no-build-isolation 'ostinato[deepspeed]', after torch",
    "vllm": "vLLM takes an environment of its own: make .venv-vllm/.ready, or on GPUs pip install 'ostinato[vllm]'; "
    "run the engine from it, or name its interpreter in sampler.python",
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
        ranks = f"ranks={trainer.ranks}, nodes={trainer.nodes}, zero_stage={trainer.zero_stage}"
        yield _installed_for(sys.executable, "deepspeed", "trainer", ranks)
    if isinstance(spec.sampler, VllmSpec):
        sampler = spec.sampler
        if sampler.urls:
            yield from map(_answers, sampler.urls)
        else:
            where = f"{sampler.servers} servers" if sampler.servers else "in the engine's process"
            yield _installed_for(sampler.python or sys.executable, "vllm", "sampler", where)


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


def _answers(url: str) -> Check:
    status = http_status(f"{url}/health")
    if status == 200:
        return Check(area="engine", name="sampler", verdict="ok", what=f"{shown_url(url)} answers")
    said = status if isinstance(status, str) else f"answers {status}"
    return Check(
        area="engine", name="sampler", verdict="fail", what=f"{shown_url(url)}: {said}",
        what_to_do="start it there: ostinato engine sampler --model FOLDER --config FILE",
    )  # fmt: skip
