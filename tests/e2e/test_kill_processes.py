"""`kill -9` of the processes that an engine starts for itself: the run goes on with no hand on it, its chain stands.

The command is not restarted: one command runs from the beginning to the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from storage.chain.records import Chain
from storage.store.objects import open_store
from tests.fixtures.toy import toy_config

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
RANKS = "ray::Rank"
REPLICAS = "ray::ReplicaActor"
PLAIN = {"deterministic": False, "compute_dtype": "float32", "threads": 1, "device": "cpu"}
DEEPSPEED = {**PLAIN, "trainer": {"kind": "deepspeed", "ranks": 2, "zero_stage": 2}}
VLLM = {**PLAIN, "sampler": {"kind": "vllm", "replicas": 2, "kv_cache_gib": 0.25}}


class Command:
    """One `ostinato run grpo` of the toy task in a folder of its own."""

    def __init__(self, folder: Path, tiny_folder: Path, server: str, engine: dict[str, Any]) -> None:
        self.folder = folder
        config = toy_config(
            folder,
            tiny_folder,
            grader__path="tests.fixtures.grading:even_share",
            engine=engine,
            algorithm__steps=STEPS,
            checkpoints__recovery_steps=2,
        )
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        self.environment = os.environ | {"PREFECT_API_URL": server, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "flows.cli.main", *words]

    @contextmanager
    def running(self) -> Iterator[psutil.Process]:
        """The run, which ends by itself with 0, or it is a failure."""
        log = self.folder / "run.log"
        with log.open("w") as output:
            started = subprocess.Popen(
                self.argv("run", "grpo", "--config", "config.yaml", "--run", "kill"),
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield psutil.Process(started.pid)
            assert started.wait(timeout=400) == 0, log.read_text()[-8000:]
        finally:
            started.kill()
            started.wait()

    def wait_for(self, step: int, process: psutil.Process) -> None:
        chain = Chain(open_store(str(self.folder / "data")), "kill", "0-grpo", "policy")
        while step not in list(chain.steps()):
            alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            assert alive, (self.folder / "run.log").read_text()[-8000:]
            time.sleep(0.05)

    def verified(self) -> str:
        """What `ostinato verify` says of the run, which it accepts."""
        words = ("verify", "kill", "--storage", str(self.folder / "data"))
        done = subprocess.run(
            self.argv(*words), cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def actors(process: psutil.Process, title: str) -> list[psutil.Process]:
    """The Ray actors below it of a class, by the title of their processes, the first started first."""
    children = [child for child in process.children(recursive=True) if child.name().startswith(title)]
    return sorted(children, key=lambda child: child.create_time())


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_the_run_ends(
    tmp_path: Path, tiny_folder: Path, prefect_server: str
) -> None:
    """Kills the first rank after step 1, and the second rank after step 3."""
    command = Command(tmp_path, tiny_folder, prefect_server, DEEPSPEED)
    with command.running() as process:
        for step, rank in ((1, 0), (3, 1)):
            command.wait_for(step, process)
            actors(process, RANKS)[rank].send_signal(signal.SIGKILL)
    chain = Chain(open_store(str(tmp_path / "data")), "kill", "0-grpo", "policy")
    assert list(chain.steps()) == list(range(1, STEPS + 1))
    assert {record.numerics.backend for record in chain.records(after=0, until=STEPS)} == {"deepspeed"}
    command.verified()


@pytest.mark.vllm
def test_a_killed_vllm_replica_is_started_again_and_the_run_ends(
    tmp_path: Path, tiny_folder: Path, prefect_server: str
) -> None:
    command = Command(tmp_path, tiny_folder, prefect_server, VLLM)
    with command.running() as process:
        for step in (1, 3):
            command.wait_for(step, process)
            actors(process, REPLICAS)[0].send_signal(signal.SIGKILL)
    chain = Chain(open_store(str(tmp_path / "data")), "kill", "0-grpo", "policy")
    assert list(chain.steps()) == list(range(1, STEPS + 1))
    command.verified()
