"""Tests of the page of a running loop: it is updated in place and does not slow the loop."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import Artifact
from prefect.events import emit_event
from prefect.runtime import flow_run

from engine.specs.engine import HttpEngineSpec, LocalEngineSpec
from flows.display.live_page import MAX_STEPS, FlowRunPage, RunPage, engine_links, show_finished_run
from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.artifacts import commit_bytes
from storage.store.objects import open_store
from tasks.evaluation.validation_curve import validation_entry
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import write_metrics
from tests.fixtures.engines import PROVENANCE
from tests.fixtures.prefect import prefect_client
from tests.fixtures.runs.toy_run import ToyRun
from tests.fixtures.waiting import wait_until

POLICY = PolicyRef(run="r", stage="0-sft", model="policy", step=0, state="0" * 64)


def a_step(step: int, total: int | None = 30) -> StepMetrics:
    return StepMetrics(step=step, total_steps=total, loss=2.0, grad_norm=1.0, learning_rate=1e-5)


class Shown:
    """A page that remembers what it shows, and how often it was told."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.now: dict[str, tuple[str, Any, str]] = {}
        self.times, self.fails = 0, fails

    def show(self, kind: str, key: str, data: Any, description: str) -> None:
        self.times += 1
        if self.fails:
            raise self.fails
        self.now[key] = (kind, data, description)


def run_page(folder: Path, page: Any, *, policy: PolicyRef = POLICY, total: int | None = 30, **options: Any) -> RunPage:
    store = open_store(folder)
    return RunPage(store, policy, total_steps=total, engine=LocalEngineSpec(), page=page, **options)


def test_the_end_of_a_loop_shows_its_last_step(tmp_path: Path) -> None:
    page = Shown()
    with run_page(tmp_path, page, every_seconds=3600) as running:
        for step in range(30):
            running.add_step(a_step(step))
    kind, data, description = page.now["progress"]
    assert (kind, data, description) == ("progress", 100.0, "step 30 of 30")
    kind, _, description = page.now["training"]
    assert (kind, description) == ("markdown", "step 30 of 30")
    assert page.times <= 4  # at most a first and a last update of two artifacts, however many steps


def test_between_two_updates_there_is_time(tmp_path: Path) -> None:
    page = Shown()
    with run_page(tmp_path, page, every_seconds=3600) as running:
        running.add_step(a_step(0))
        deadline = time.monotonic() + 60
        while "training" not in page.now:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.add_step(a_step(1))
        assert page.now["training"][2].startswith("step 1 of 30")
    assert page.now["training"][2].startswith("step 2 of 30")


def test_a_page_that_fails_is_said_once_and_the_loop_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    page = Shown(fails=httpx.ConnectError("the server is away"))
    running = run_page(tmp_path, page)
    for step in range(3):
        running.add_step(a_step(step))
        running._try(running.update)
    assert page.times == 3
    assert [record.getMessage() for record in caplog.records if record.name == "flows.display.live_page"] == [
        "the page of run r is not up to date: ConnectError: the server is away"
    ]


def test_a_page_that_hangs_holds_nothing_but_its_own_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.display.live_page.FINAL_UPDATE_TIMEOUT", 0.05)
    hangs = threading.Event()

    class Hanging(Shown):
        def show(self, kind: str, key: str, data: Any, description: str) -> None:
            self.times += 1
            hangs.wait()

    page = Hanging()
    try:
        with run_page(tmp_path, page) as running:
            for step in range(1000):
                running.add_step(a_step(step, 1000))
        assert page.times <= 1
    finally:
        hangs.set()


def test_a_resumed_loop_shows_the_steps_before_it(tmp_path: Path) -> None:
    store, page = open_store(tmp_path), Shown()
    for step in range(5):
        write_metrics(store, POLICY, a_step(step).model_copy(update={"loss": 9.0}))
    with run_page(tmp_path, page, policy=POLICY.model_copy(update={"step": 5})) as running:
        running.add_step(a_step(5))
    assert "| loss | 9 | 2 | 2 | 9 |" in page.now["training"][1]


def test_an_endless_loop_has_no_progress_bar(tmp_path: Path) -> None:
    page = Shown()
    with run_page(tmp_path, page, total=None) as running:
        running.add_step(a_step(0, None))
    assert set(page.now) == {"training"}
    assert page.now["training"][2] == "step 1"


def test_other_stages_and_models_have_pages_of_their_own(tmp_path: Path) -> None:
    page = Shown()
    other = POLICY.model_copy(update={"stage": "1-grpo", "model": "Judge_2"})
    with run_page(tmp_path, page, policy=other) as running:
        running.add_step(a_step(0))
    assert set(page.now) == {"progress-judge-2-1-grpo", "training-judge-2-1-grpo"}


def test_a_long_run_keeps_a_bounded_number_of_steps(tmp_path: Path) -> None:
    running = run_page(tmp_path, Shown())
    for step in range(3 * MAX_STEPS):
        running.add_step(a_step(step, None))
    steps = [step.step for step in running._steps]
    assert len(steps) <= MAX_STEPS
    assert steps[0] == 0 and steps[-1] == 3 * MAX_STEPS - 1


def test_links_of_an_engine_server(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HttpEngineSpec(url="http://127.0.0.1:9/")
    monkeypatch.delenv(engine.token_env, raising=False)
    assert engine_links(engine) == {"metrics of the engine": "http://127.0.0.1:9/metrics"}
    assert engine_links(LocalEngineSpec()) == {}
    monkeypatch.setenv(engine.token_env, "a-token")  # a browser would get 401
    assert engine_links(engine) == {}


async def test_the_page_of_a_finished_run_has_the_report_and_all_evaluations(tmp_path: Path) -> None:
    store, page = open_store(tmp_path), Shown()
    for step in range(2):
        write_metrics(store, POLICY, a_step(step, 2))
    for step, reward in ((0, 0.1875), (2, 0.25)):
        commit_bytes(
            store, keys.evaluation("r", POLICY.stage, f"{step:06d}-digest"), b"", kind="evaluation", suffix="",
            provenance=PROVENANCE, extra=validation_entry("held-out", {"reward": reward}),
        )  # fmt: skip
    last = POLICY.model_copy(update={"step": 2})
    await show_finished_run(store, last, engine=LocalEngineSpec(), links={"report": "/r.html"}, page=page)
    assert set(page.now) == {"progress", "training"}
    assert "- report: `/r.html`" in page.now["training"][1]
    assert "| held-out: reward | 0.188 | 0.250 | 2 | +0.062 |" in page.now["training"][1]


def artifacts_of(run: str) -> dict[str, Artifact]:
    with get_client(sync_client=True) as client:
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
        artifacts = client.read_artifacts(artifact_filter=mine)
    assert len({artifact.key for artifact in artifacts}) == len(artifacts), "a version of an artifact was left behind"
    return {str(artifact.key): artifact for artifact in artifacts}


def test_thirty_updates_leave_one_version_of_each_artifact(
    tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # drawing is slow
    monkeypatch.setattr("tasks.reports.flow_run_page.curves_uri", lambda steps, heldout: f"data:,{len(steps)}")

    @flow
    def watched() -> str:
        for first in (0, 15):  # a second attempt finds what the first one made
            running = run_page(tmp_path, None)
            for step in range(first, first + 15):
                running.add_step(a_step(step))
                running.update()
        emit_event("ostinato.test.last", resource={"prefect.resource.id": f"ostinato.test.{flow_run.id}"})
        return str(flow_run.id)

    run = watched()
    artifacts = artifacts_of(run)
    assert set(artifacts) == {"progress", "training"}
    assert artifacts["progress"].data == 100.0
    assert artifacts["training"].description == "step 30 of 30"
    deadline = time.monotonic() + 60
    while not events_called(prefect_server, "ostinato.test.last"):  # events arrive in order, some time later
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert events_called(prefect_server, "prefect.artifact.created")
    assert not events_called(prefect_server, "prefect.artifact.updated")  # they would carry the pictures


def events_called(api: str, name: str) -> list[dict[str, Any]]:
    body = {"filter": {"event": {"name": [name]}}, "limit": 5}
    return prefect_client(api).post("/events/filter", json=body).json()["events"]  # type: ignore[no-any-return]


def test_an_artifact_that_a_person_deleted_is_made_again(prefect_server: str) -> None:
    @flow
    def watched() -> str:
        page = FlowRunPage(flow_run.id)
        page.show("markdown", "training", "one", "")
        with get_client(sync_client=True) as client:
            client.delete_artifact(artifacts_of(str(flow_run.id))["training"].id)
        with pytest.raises(httpx.HTTPError):
            page.show("markdown", "training", "two", "")
        page.show("markdown", "training", "three", "")
        return str(flow_run.id)

    assert artifacts_of(watched())["training"].data == "three"


def test_a_run_of_grpo_shows_itself(toy_run: ToyRun, prefect_server: str) -> None:
    runs = prefect_client(prefect_server).post("/flow_runs/filter", json={}).json()
    (run,) = [run for run in runs if (run["parameters"].get("config") or {}).get("run") == "toy"]
    assert run["name"] == "grpo tiny on prompts, seed 0"
    # Its artifacts.
    artifacts = artifacts_of(run["id"])
    assert set(artifacts) == {"progress", "training", "samples", "report"}
    assert artifacts["progress"].data == 100.0
    assert "data:image/png;base64," in str(artifacts["training"].data)
    rows = json.loads(str(artifacts["samples"].data))
    assert len(rows) == 8
    assert all(list(row)[:3] == ["grade", "prompt", "completion"] for row in rows)
    assert all(isinstance(row["grade"], float) and row["prompt"] for row in rows)
    assert artifacts["samples"].description == "Rollouts of step 4"

    # Its log has one line per step.
    def logs_of_run() -> list[dict[str, Any]]:
        query = {"logs": {"flow_run_id": {"any_": [run["id"]]}}}
        return prefect_client(prefect_server).post("/logs/filter", json=query).json()

    def lines() -> list[str]:
        return [log["message"] for log in logs_of_run() if log["name"] == "ostinato.steps"]

    # the run's process sends its log in batches; the last line is that of the report
    wait_until(lambda: f"report: {toy_run.folder / 'runs/toy/report.html'}" in lines())
    assert [line.split()[1] for line in lines() if line.startswith("step ")] == ["1/4", "2/4", "3/4", "4/4"]
    published = next(line for line in lines() if line.startswith("published toy@"))
    assert f"- published model: `{published.split()[1]}`" in str(artifacts["training"].data)
    logs = logs_of_run()
    assert not [log for log in logs if "Finished in state" in log["message"] and log["name"] == "prefect.task_runs"]
    # Its task runs are named after step and shard.
    query = {"flow_runs": {"id": {"any_": [run["id"]]}}}
    tasks = prefect_client(prefect_server).post("/task_runs/filter", json=query).json()
    names = {task["name"] for task in tasks}
    for step in range(1, 5):
        per_step = {f"rollout-{step:06d}/00", f"rollout-{step:06d}/01", f"grade-{step:06d}/00", f"grade-{step:06d}/01"}
        assert per_step | {f"batch-{step:06d}", f"step-{step:06d}"} <= names
