"""`kill -9` at every failpoint, and at random moments: the same command again ends with the same bytes (G2).

The work log proves that it is resumption and not a lucky restart: at most one shard is sampled again per kill, at most
a checkpoint interval of steps is redone, and the loop goes on from a step after 0.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from storage.chain.leases import is_held
from storage.chain.records import Chain
from storage.failpoints import FAILPOINTS
from storage.store.objects import open_store
from tests.fixtures.commands import Command
from tests.fixtures.toy import toy_config

ROOT = Path(__file__).resolve().parents[2]
STEPS, SHARDS_PER_STEP, CHECKPOINT_EVERY = 4, 2, 2

HITS = {
    "artifact": 14,  # one dataset, then five artifacts a step: in step 2
    "rollout": 5,  # two shards a step: the first of step 2
    "grade": 5,
    "batch": 3,
    "step": 3,
    "checkpoint": 1,  # after step 2
    "model": 2,  # the first is the import of the base model, the second the publication
    "index": 3,  # the import of the base model, the root of the chain, the publication
}
"""Which hit of a failpoint kills: late enough that steps are committed before it."""

ELSEWHERE = ("rebase.", "trajectory.", "retention.", "deletion.", "publish.", "segment.")
REACHED = sorted(name for name in FAILPOINTS if not name.startswith(ELSEWHERE))
"""The failpoints that every run of one engine without episodes reaches. tests/engine/local/rebase/test_rebase_races.py,
test_kill_lanes.py, test_kill_in_flight.py and test_kill_episodes.py in tests/e2e, test_finished.py and
test_deletion.py in tests/storage/chain kill at the others."""

QUICK = ("step.before_commit",)


@dataclass
class Folder:
    """A folder in which one run is driven by the command line."""

    path: Path
    server: str

    @property
    def worklog(self) -> Path:
        return self.path / "work.log"

    def words(self) -> list[str]:
        return ["run", "grpo", "--config", "config.yaml", "--run", "kill"]

    def environment(self, failpoint: str = "") -> dict[str, str]:
        return os.environ | {
            # at a loopback address, a run waits two seconds at its end, until its server may be stopped
            "PREFECT_API_URL": self.server.replace("127.0.0.1", "localhost"),
            "NO_PROXY": "localhost,127.0.0.1",
            "PYTHONPATH": str(ROOT),
            "OSTINATO_WORKLOG": str(self.worklog),
            "OSTINATO_FAILPOINT": failpoint,
            "OMP_NUM_THREADS": "1",
        }

    def start(self, failpoint: str = "") -> Command:
        return Command(self.words(), folder=self.path, environment=self.environment(failpoint))

    def run(self, failpoint: str = "") -> tuple[int, str]:
        return self.start(failpoint).wait(timeout=180)

    def events(self, name: str) -> list[dict]:
        lines = self.worklog.read_text().splitlines() if self.worklog.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def weights(self) -> bytes:
        """The published weights."""
        (file,) = (self.path / "data" / "models" / "toy").glob("*/model.safetensors")
        return file.read_bytes()

    def chain(self) -> Chain:
        return Chain(open_store(str(self.path / "data")), "kill", "0-grpo", "policy")

    def states(self) -> list[str]:
        return [self.chain().policy(step).state for step in range(STEPS + 1)]

    def digests(self) -> list[str | None]:
        return [record.weights_digest for record in self.chain().records(after=0, until=STEPS)]


def make_folder(path: Path, tiny_folder: Path, server: str, **changes: Any) -> Folder:
    path.mkdir(parents=True, exist_ok=True)
    config = toy_config(
        path,
        tiny_folder,
        # a reward that an untrained model varies in: every step moves the weights
        grader__path="tests.fixtures.grading:even_share",
        **{"algorithm__steps": STEPS, "checkpoints__recovery_steps": CHECKPOINT_EVERY, **changes},
    )
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return Folder(path, server)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, prefect_server: str) -> Folder:
    folder = make_folder(tmp_path_factory.mktemp("uninterrupted"), tiny_folder, prefect_server)
    status, output = folder.run()
    assert status == 0, output
    assert len(folder.events("shard")) == STEPS * SHARDS_PER_STEP
    assert not folder.events("redo")
    assert len(set(folder.digests())) == STEPS  # every step moved the weights: equal bytes mean something
    return folder


def assert_resumed(folder: Folder, uninterrupted: Folder, *, kills: int) -> None:
    """Same bytes, same history, and no more work than a resumption needs."""
    assert folder.weights() == uninterrupted.weights()
    assert folder.states() == uninterrupted.states()
    assert folder.digests() == uninterrupted.digests()
    # one engine samples one shard at a time, so a kill can lose one that was sampled and not committed
    assert len(folder.events("shard")) <= STEPS * SHARDS_PER_STEP + kills
    # an interval, and at most one more while the checkpoint that ends it is on its way
    assert len(folder.events("redo")) <= kills * 2 * CHECKPOINT_EVERY
    assert len(folder.events("step")) <= STEPS + kills


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in REACHED])
def test_a_kill_at_every_failpoint_changes_nothing(
    name: str, tmp_path: Path, tiny_folder: Path, prefect_server: str, uninterrupted: Folder
) -> None:
    folder = make_folder(tmp_path, tiny_folder, prefect_server)
    status, output = folder.run(f"{name}:{HITS[name.partition('.')[0]]}")
    assert status == -signal.SIGKILL, f"{name} was not hit:\n{output}"
    status, output = folder.run()
    assert status == 0, output
    assert_resumed(folder, uninterrupted, kills=1)
    assert [event["resumed_from"] > 0 for event in folder.events("start")] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_leaves_a_checkpoint_a_cancelled_flow_run_and_no_lease(
    number: int, expected: int, tmp_path: Path, tiny_folder: Path, prefect_server: str
) -> None:
    changes = {"algorithm__steps": 12, "checkpoints__recovery_steps": None}
    folder = make_folder(tmp_path, tiny_folder, prefect_server, **changes)
    process = folder.start()
    while process.poll() is None and len(folder.events("step")) < 3:
        time.sleep(0.01)
    process.send(number)  # SIGTERM: a spot instance is taken back; SIGINT: Ctrl-C
    status, output = process.wait(timeout=60)
    assert status == expected, output
    assert "the same command resumes" in output
    assert "asyncio" not in output and "exception" not in output
    assert not is_held(open_store(str(folder.path / "data")), "kill")
    state = last_state(prefect_server, folder)
    assert state["name"] == "Cancelled"
    count = folder.chain().head().step
    assert state["message"] == f"cancelled; {count} steps are committed. The same command continues after them"
    status, output = folder.run()
    assert status == 0, output
    assert not folder.events("redo")
    assert len(folder.events("step")) == 12
    assert folder.chain().head().step == 12


def last_state(server: str, folder: Folder) -> dict[str, Any]:
    """The state of the last flow run in a folder, as the Prefect server has it."""
    with httpx.Client(base_url=server, trust_env=False) as client:
        runs = client.post("/flow_runs/filter", json={"sort": "START_TIME_DESC", "limit": 20}).json()
    stores = {run["id"]: run["parameters"].get("config", {}).get("storage", {}).get("url") for run in runs}
    (state,) = [run["state"] for run in runs if stores[run["id"]] == str(folder.path / "data")]
    return dict(state)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_random_kills_change_nothing(
    seed: int, tmp_path: Path, tiny_folder: Path, prefect_server: str, uninterrupted: Folder
) -> None:
    folder = make_folder(tmp_path, tiny_folder, prefect_server)
    moments = random.Random(seed)
    kills = 0
    while kills < 4:
        # the first kill waits for a commit, the others for a sign of life; then any moment is as good as another
        sign = "step" if kills == 0 else "start"
        known, process = len(folder.events(sign)), folder.start()
        while process.poll() is None and len(folder.events(sign)) <= known:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.4))
        if process.poll() is not None:
            break
        process.kill()
        kills += 1
    status, output = folder.run()
    assert status == 0, output
    assert kills > 0
    assert_resumed(folder, uninterrupted, kills=kills)
