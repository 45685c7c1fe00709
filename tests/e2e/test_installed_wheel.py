"""The wheel, installed without a checkout: the demo, the services and a run of a deployment in an empty folder.

The environment has the packages of the one that runs the tests, but neither its `ostinato` nor its path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flows.ops.services import free_port
from flows.ops.state import load_state
from tests.fixtures.runs.deployed import Deployed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SHORT = {"steps": 1, "samples_per_batch": 8, "samples_per_mini_batch": 8}


class Installed(Deployed):
    """An empty folder, and a Python environment with the wheel."""

    def __init__(self, folder: Path, environment: Path) -> None:
        super().__init__(folder, folder)
        self.program = str(environment / "bin" / "ostinato")
        hidden = ("PREFECT_", "PYTHONPATH", "OSTINATO_")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}

    @property
    def api_url(self) -> str:
        state = load_state(self.folder / ".ostinato" / "up")
        assert state is not None
        return state.api_url

    def cli(self, *words: str) -> str:
        command = [self.program, *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Installed]:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")

    # a plain path in a .pth file: the editable installation behind it is not followed
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    install = ["--python", str(tmp_path / "venv" / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, capture_output=True)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))

    (tmp_path / "empty").mkdir()
    place = Installed(tmp_path / "empty", tmp_path / "venv")
    yield place
    place.cli("down")


def test_the_wheel_runs_the_demo_and_a_deployment_in_an_empty_folder(installed: Installed) -> None:
    # the rewards of one small step may be equal, so that it teaches nothing
    sets = [f"algorithm.{name}={value}" for name, value in SHORT.items()]
    sets += ["data.heldout=null", "model.publish_unchanged=true"]
    output = installed.cli("demo", *(word for item in sets for word in ("--set", item)))
    assert "model: smollm2-sums@000001" in output

    installed.cli("up", "--detach", "--port", str(free_port()))
    config = yaml.safe_load((installed.folder / "examples" / "demo.yaml").read_text())
    config["algorithm"] |= SHORT
    del config["data"]["heldout"]
    run = installed.start_flow("grpo", config | {"run": "deployed"})
    assert installed.until(run, "Completed") == ("Completed", 1)
    assert installed.steps("deployed") == 1

    checks = json.loads(installed.cli("doctor", "--json"))["checks"]
    assert [check for check in checks if check["verdict"] == "fail"] == []
    services = {"supervisor", "server", "engine", "worker", "page"}
    assert {check["name"] for check in checks if check["area"] == "up"} == services
