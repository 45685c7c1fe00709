"""Tests of a Prefect server and a worker without `ostinato up`: runs whose worker or process ends. Heartbeats and
automations have the intervals of the product, so each test takes minutes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from flows.ops.processes import FLOW_RUN_ENV, process_environment
from flows.ops.services import RETRY_DELAY_SECONDS
from storage.chain.leases import is_held
from storage.chain.listing import list_runs
from storage.registry.decisions import champion_of
from storage.store import keys
from tests.fixtures.runs.deployed import ATTEMPTS, Site, recurring_config, wait_for
from tests.fixtures.toy import toy_config

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


def test_json_input_of_a_schedule_is_read_and_one_without_parameters_fails_once(
    site: Site, worker: subprocess.Popen[bytes]
) -> None:
    config = toy_config(site.folder, site.tiny, algorithm__steps=1, run="scheduled")
    del config["engine"], config["storage"]
    as_json = {"__prefect_kind": "json", "value": json.dumps({"config": config})}
    good, bad = site.start_by_schedule("grpo", as_json), site.start_by_schedule("grpo", {"__prefect_kind": "json"})
    assert site.until(good, "Completed") == ("Completed", 1)
    assert site.steps("scheduled") == 1
    wait_for(lambda: site.status(bad)[0] == "Failed")
    time.sleep(RETRY_DELAY_SECONDS + 15)  # a crash would be started again
    assert site.status(bad) == ("Failed", 0)
    assert not {"Crashed", "AwaitingRetry"} & set(site.states(bad))
    message = site.ask("GET", f"/flow_runs/{bad}")["state"]["message"]
    assert message.startswith("the parameters of this run are none, and the flow takes config; correct the parameters")


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


def test_a_cancelled_run_says_what_is_committed_and_how_it_goes_on(site: Site, worker: subprocess.Popen[bytes]) -> None:
    run = site.start("cancelled", steps=60)
    wait_for(lambda: site.steps("cancelled") >= 3)
    site.set_state(run, type="CANCELLING", name="Cancelling")
    assert site.until(run, "Cancelled") == ("Cancelled", 1)
    expected = f"cancelled; {site.steps('cancelled')} steps are committed. Retry continues after them"
    assert not is_held(site.store, "cancelled")
    wait_for(lambda: expected in [line["message"] for line in site.log(run)], seconds=30)
    lines = [line["message"] for line in site.log(run)]
    assert not [line for line in lines if "Crash detected" in line or "state Running" in line]

    # it is not revived, and Retry continues it
    time.sleep(RETRY_DELAY_SECONDS + 10)
    assert site.status(run) == ("Cancelled", 1)
    site.set_state(run, type="SCHEDULED", name="AwaitingRetry")
    assert site.until(run, "Completed") == ("Completed", 2)
    assert site.steps("cancelled") == 60


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
