"""A Prefect server and a worker of one's own, without `ostinato up`: what becomes of runs whose worker or process ends.
Heartbeats and automations are the product's, so that each test takes minutes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.ops.attempts import MAX_ATTEMPTS_ENV
from flows.ops.processes import FLOW_RUN, environment_of, kill
from flows.ops.services import BATCHES, HEARTBEAT_SECONDS
from flows.server import local_prefect_server
from storage import keys
from storage.decisions import champion_of
from storage.leases import is_held
from storage.runs_index import list_runs
from tests.fixtures.deployed import Deployed, wait_for
from tests.toy import write_prompts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
ATTEMPTS = 2


class Site(Deployed):
    """A server on a port of chance, told of everything by `ostinato deploy`; workers by hand."""

    def __init__(self, folder: Path, tiny_folder: Path, api_url: str) -> None:
        super().__init__(folder, tiny_folder)
        self._api_url = api_url
        self.workers: list[subprocess.Popen[bytes]] = []
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
            "PREFECT_API_URL": api_url,
            "PREFECT_HOME": str(folder / "worker"),
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PYTHONPATH": str(ROOT),
            "NO_PROXY": "127.0.0.1",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
            MAX_ATTEMPTS_ENV: str(ATTEMPTS),
        }

    @property
    def api_url(self) -> str:
        return self._api_url

    def deploy(self) -> None:
        command = [sys.executable, "-m", "flows.cli.main", "deploy", "--storage", str(self.folder / "ostinato-data")]
        done = subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"deployed to {self.api_url}: grpo, sft, evaluation, recurring, sweep" in done.stdout

    def work(self) -> subprocess.Popen[bytes]:
        """A worker, which waits for runs."""
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "ostinato", "--type", "process"]
        with (self.folder / "worker.log").open("ab") as log:
            worker = subprocess.Popen(
                [*command, "--install-policy", "never"], env=self.environment, cwd=self.folder, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.workers.append(worker)
        return worker

    def end(self, worker: subprocess.Popen[bytes], with_signal: int = signal.SIGTERM) -> None:
        worker.send_signal(with_signal)
        worker.wait(60)
        self.workers.remove(worker)

    def kill_process_of(self, flow_run: str) -> None:
        """SIGKILL to the process that runs it."""
        found = [each for each in psutil.process_iter() if environment_of(each).get(FLOW_RUN) == flow_run]
        assert found
        kill(found)

    def states(self, flow_run: str) -> list[str]:
        return [state["name"] for state in self.ask("GET", f"/flow_run_states/?flow_run_id={flow_run}")]


def recurring_config(folder: Path, base: Path, *, steps: int) -> dict[str, Any]:
    """A champion of `digits` by supervised steps, judged on the digits as prompts."""
    rows = [{"prompt": str(digit), "completion": "2" * 6} for digit in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {
        "model": {"key": str(base)},
        "data": {"train": {"kind": "file", "path": str(folder / "rows.jsonl")}},
        "algorithm": {"samples_per_batch": 10, "steps": steps},
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
        "checkpoints": {"frequency": None, "recovery_steps": 2},
    }
    return {"model": "digits", "training": {"kind": "sft", "config": training}, "suite": suite(folder)}


def suite(folder: Path) -> dict[str, Any]:
    prompts = {"kind": "file", "path": str(write_prompts(folder / "suite.jsonl"))}
    return {
        "datasets": [{"name": "all", "source": prompts}],
        "graders": [{"name": "even", "path": "tests.grading:even_share"}],
        "sampling": {"max_new_tokens": 6, "min_new_tokens": 6, "temperature": 0.0},
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in BATCHES.items():
            patch.setenv(name, value)
        with local_prefect_server(folder / "prefect") as server:
            site = Site(folder, tiny_folder, server.api_url)
            site.deploy()
            try:
                yield site
            finally:
                for worker in list(site.workers):
                    site.end(worker, signal.SIGKILL)


@pytest.fixture
def worker(site: Site) -> Iterator[subprocess.Popen[bytes]]:
    yield site.work()
    for each in list(site.workers):
        site.end(each)


def test_a_process_that_always_ends_before_the_flow_begins_is_not_started_for_ever(
    site: Site, worker: subprocess.Popen[bytes]
) -> None:
    flow = site.ask("POST", "/flows/", name="broken")
    site.ask(
        "POST", "/deployments/", name="broken", flow_id=flow["id"], entrypoint="no_such_module.broken", pull_steps=[],
        work_pool_name="ostinato", tags=["ostinato"],
    )  # fmt: skip
    run = site.start_flow("broken", {})
    wait_for(lambda: site.status(run)[0] == "Failed", seconds=500)
    assert site.status(run)[1] == 0  # no attempt reached the flow: nothing else could have counted them
    states = site.states(run)
    assert ATTEMPTS <= states.count("Pending") <= 2 * ATTEMPTS
    assert "before the flow begins" in site.ask("GET", f"/flow_runs/{run}")["state"]["message"]


def test_a_run_whose_worker_was_ended_by_sigterm_goes_on_with_the_next_worker(
    site: Site, worker: subprocess.Popen[bytes]
) -> None:
    run = site.start("moved", steps=60)
    wait_for(lambda: site.steps("moved") >= 3)
    site.end(worker, signal.SIGTERM)
    assert not [each for each in psutil.process_iter() if environment_of(each).get(FLOW_RUN) == run]
    reached = site.steps("moved")
    assert reached < 60
    site.work()
    assert site.until(run, "Completed") == ("Completed", 2)
    print(site.states(run))
    assert site.steps("moved") == 60
    assert not is_held(site.store, "moved")


def test_a_killed_recurring_gives_its_child_run_back_and_goes_on(site: Site, worker: subprocess.Popen[bytes]) -> None:
    run = site.start_flow("recurring", recurring_config(site.folder, site.tiny, steps=60))
    wait_for(lambda: any(is_held(site.store, key) for key in list_runs(site.store, "recurring-digits/")))
    (training,) = list_runs(site.store, "recurring-digits/")
    wait_for(lambda: len(list(site.store.list(f"runs/{training}/stages/0-sft/chains/policy/0"))) >= 3)
    site.kill_process_of(run)
    children = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}}
    assert site.until(run, "Completed") == ("Completed", 2)
    print(site.states(run))
    assert site.store.exists(keys.lease_release(training, 1))  # by the hook: the process could not
    print([(each["name"], each["state_name"]) for each in site.ask("POST", "/flow_runs/filter", **children)])
    states = [each["state_name"] for each in site.ask("POST", "/flow_runs/filter", **children)]
    assert sorted(states) == ["Completed", "Completed", "Crashed"]
    assert champion_of(site.store, "digits") is not None
