"""Tests of a Prefect server and a worker without `ostinato up`: runs whose worker or process ends. Heartbeats and
automations have the intervals of the product, so each test takes minutes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from flows.ops.processes import FLOW_RUN_ENV, process_environment
from storage.chain.leases import is_held
from storage.chain.listing import list_runs
from storage.registry.decisions import champion_of
from storage.store import keys
from tests.fixtures.runs.deployed import ATTEMPTS, Site, recurring_config, wait_for

pytestmark = pytest.mark.slow


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
    assert not [each for each in psutil.process_iter() if process_environment(each).get(FLOW_RUN_ENV) == run]
    reached = site.steps("moved")
    assert reached < 60
    site.work()
    assert site.until(run, "Completed") == ("Completed", 2)
    assert site.states(run)[3:6] == ["Running", "Crashed", "AwaitingRetry"]
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
    assert site.store.exists(keys.lease_release(training, 1))  # by the hook: the process could not
    states = [each["state_name"] for each in site.ask("POST", "/flow_runs/filter", **children)]
    assert sorted(states) == ["Completed", "Completed", "Crashed"]
    assert champion_of(site.store, "digits") is not None
