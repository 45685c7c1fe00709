"""Tests of the end of a deployed flow run: its folder, key and attempts, and the release of its lease by another
process."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Running, Scheduled, State

from engine.specs.engine import HttpEngineSpec, LocalEngineSpec
from engine.workspace import Workspace
from flows.configs.common import FlowConfig, StorageConfig
from flows.configs.overrides import ConfigError
from flows.ops import deployment_settings, hooks, termination
from flows.ops.processes import FLOW_RUN_ENV
from flows.ops.run_names import run_key_of
from flows.ops.termination import TooManyAttempts, check_attempts
from storage.chain import leases
from storage.chain.leases import is_held
from storage.store.objects import open_store
from tests.fixtures.engines import PROVENANCE

DEPLOYED = {"ostinato_storage": "s3://bucket/data", "engine": {"url": "http://engine:8777", "token": "t" * 32}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_ENGINE_TOKEN", "")
    monkeypatch.delenv("OSTINATO_ENGINE_TOKEN")
    block = type("Block", (), {"get": lambda self: DEPLOYED["engine"]})
    monkeypatch.setattr(deployment_settings.Variable, "get", lambda name, _sync: DEPLOYED[name])
    monkeypatch.setattr(deployment_settings.Secret, "load", lambda name, _sync: block())


def test_a_deployed_config_that_names_no_place_gets_the_deployments(server: None) -> None:
    config = deployment_settings.with_deployment_settings(FlowConfig(seed=3), deployed=True)
    assert config == FlowConfig(
        seed=3, storage=StorageConfig(url="s3://bucket/data"), engine=HttpEngineSpec(url="http://engine:8777")
    )
    assert os.environ["OSTINATO_ENGINE_TOKEN"] == "t" * 32
    assert "t" * 32 not in config.model_dump_json()
    assert deployment_settings.with_deployment_settings(config, deployed=True) == config


def test_what_a_config_names_is_kept(server: None) -> None:
    named = FlowConfig(storage=StorageConfig(url="/elsewhere"), engine=LocalEngineSpec(threads=1))
    assert deployment_settings.with_deployment_settings(named, deployed=True) == named


def test_a_run_from_a_terminal_asks_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.delenv(FLOW_RUN_ENV, raising=False)
    monkeypatch.setattr(deployment_settings, "_sync", refused)
    assert deployment_settings.with_deployment_settings(FlowConfig()) == FlowConfig()
    monkeypatch.setenv(FLOW_RUN_ENV, str(uuid4()))
    with pytest.raises(AssertionError, match="asked"):
        deployment_settings.with_deployment_settings(FlowConfig())


def test_a_block_that_holds_something_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment_settings.Variable, "get", lambda name, _sync: None)
    block = type("Block", (), {"get": lambda self: "a word"})
    monkeypatch.setattr(deployment_settings.Secret, "load", lambda name, _sync: block())
    with pytest.raises(ValueError, match="ostinato deploy --engine URL"):
        deployment_settings.with_deployment_settings(FlowConfig(), deployed=True)


def a_run(**changes: Any) -> FlowRun:
    return FlowRun(id=UUID("12345678-0000-4000-8000-000000000000"), flow_id=uuid4(), **changes)


def test_a_key_stays_over_attempts() -> None:
    start = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
    deployment = UUID("abcdef01-0000-4000-8000-000000000000")
    scheduled = a_run(auto_scheduled=True, expected_start_time=start, deployment_id=deployment)
    assert run_key_of("grpo", a_run()) == "grpo-12345678"
    assert run_key_of("grpo", scheduled) == "grpo-abcdef01/20261121T030000Z"
    again = scheduled.model_copy(
        update={"id": uuid4(), "run_count": 3, "start_time": start + timedelta(hours=1), "state": Running()}
    )
    assert run_key_of("grpo", again) == run_key_of("grpo", scheduled)
    by_hand = scheduled.model_copy(update={"auto_scheduled": False})
    assert run_key_of("grpo", by_hand) == "grpo-12345678"


def test_attempts_have_a_cap_that_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(termination.MAX_ATTEMPTS_ENV, "3")
    context = type("Context", (), {"flow_run": a_run(run_count=3)})()
    monkeypatch.setattr(termination.FlowRunContext, "get", classmethod(lambda _: context))
    check_attempts("r")
    context.flow_run = a_run(run_count=4)
    with pytest.raises(TooManyAttempts, match=r"attempt 4 .* 3 are allowed.*config\.run='r'.*OSTINATO_MAX_ATTEMPTS"):
        check_attempts("r")
    monkeypatch.setenv(termination.MAX_ATTEMPTS_ENV, "many")
    with pytest.raises(ConfigError, match="'many' is not a number of attempts"):
        check_attempts("r")


class Told:
    """An engine that hears which runs were left."""

    def __init__(self) -> None:
        self.left: list[tuple[str, int]] = []

    async def release(self, run: str, *, epoch: int) -> None:
        self.left.append((run, epoch))


class Server:
    """What a hook asks of Prefect's API: one flow run, its children, and the flows that these are of."""

    def __init__(self, run: FlowRun, now: State, children: dict[str, FlowRun] | None = None) -> None:
        self.run, self.now, self.children = run, now, children or {}
        self.later: dict[UUID, State] = {}
        """The states of children that change after they were listed."""
        self.states: dict[UUID, str] = {}

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def read_flow_run(self, flow_run: UUID) -> FlowRun:
        if flow_run == self.run.id:
            return self.run.model_copy(update={"state": self.now})
        (child,) = [child for child in self.children.values() if child.id == flow_run]
        return child.model_copy(update={"state": self.later.get(flow_run, child.state)})

    async def read_flow_runs(self, *, flow_run_filter: Any, **_: Any) -> list[FlowRun]:
        assert flow_run_filter.parent_flow_run_id.any_ == [self.run.id]
        return list(self.children.values())

    async def read_flow(self, flow: UUID) -> Any:
        (name,) = [name for name, child in self.children.items() if child.flow_id == flow]
        return type("Flow", (), {"name": name})

    async def set_flow_run_state(self, flow_run: UUID, state: State, *, force: bool) -> None:
        self.states[flow_run] = state.type.value


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(Workspace, "connect", lambda self: told)
    return told


async def hook(monkeypatch: pytest.MonkeyPatch, name: str, server: Server) -> None:
    monkeypatch.setattr(hooks, "get_client", lambda: server)
    flow: Any = type("Flow", (), {"name": name})
    for _ in range(2):  # Prefect may run it twice
        await hooks.release_lease(flow=flow, flow_run=server.run, state=server.now)


@pytest.mark.parametrize(
    ("now", "holder", "released"),
    [
        (Crashed(), "mine", True),
        (Cancelling(), "mine", True),
        (Scheduled(), "mine", False),
        (Running(), "mine", False),
        (Crashed(), "another flow run", False),
    ],
    ids=["crashed", "cancelling", "due again", "running again", "another flow run drives it"],
)
async def test_a_hook_gives_back_only_what_the_ended_attempt_held(
    now: State, holder: str, released: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Told
) -> None:
    run = a_run(parameters={"config": {"storage": {"url": str(tmp_path)}, "model": "ignored"}})
    workspace = Workspace(store=str(tmp_path), run="grpo-12345678", provenance=PROVENANCE)
    store = workspace.open_store()
    info = {"flow_run": str(run.id) if holder == "mine" else holder}
    assert leases.acquire_lease(store, workspace.run, info) == 1
    assert leases.lease_holder(store, workspace.run, 1) == info
    await hook(monkeypatch, "grpo", Server(run, now))
    assert is_held(store, workspace.run) is not released
    assert engine.left == ([("grpo-12345678", 1)] if released else [])


async def test_an_evaluation_is_found_by_its_holder_as_its_key_is_made_of_its_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Told
) -> None:
    run, store = a_run(parameters={"config": {"storage": {"url": str(tmp_path)}}}), open_store(str(tmp_path))
    leases.acquire_lease(store, "evaluation-mine", {"flow_run": str(run.id)})
    leases.acquire_lease(store, "evaluation-theirs", {"flow_run": str(uuid4())})
    leases.acquire_lease(store, "evaluation-done", {"flow_run": str(run.id)})
    leases.release_lease(store, "evaluation-done", 1)
    await hook(monkeypatch, "evaluation", Server(run, Crashed()))
    assert [is_held(store, f"evaluation-{name}") for name in ("mine", "theirs", "done")] == [False, True, False]
    assert engine.left == [("evaluation-mine", 1)]


@pytest.mark.parametrize(
    ("now", "left", "ended"),
    [
        (Crashed(), ["search/a", "evaluation-b"], "CRASHED"),
        (Cancelling(), ["search/a", "evaluation-b"], "CANCELLED"),
        (Running(), [], None),
    ],
    ids=["crashed", "cancelled", "running again"],
)
@pytest.mark.parametrize("parent", ["recurring", "sweep"])
async def test_a_flow_of_child_runs_gives_back_what_they_hold(
    parent: str, now: State, left: list[str], ended: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    engine: Told,
) -> None:  # fmt: skip
    place, store = {"storage": {"url": str(tmp_path)}}, open_store(str(tmp_path))
    run = a_run(parameters={"config": {"training": {"kind": "sft", "config": place}, "suite": "ignored"}})
    children = {
        "grpo": FlowRun(flow_id=uuid4(), parameters={"config": place | {"run": "search/a"}}, state=Running()),
        "evaluation": FlowRun(flow_id=uuid4(), parameters={"config": place}, state=Crashed()),
    }
    leases.acquire_lease(store, "search/a", {"flow_run": str(children["grpo"].id)})
    leases.acquire_lease(store, "evaluation-b", {"flow_run": str(children["evaluation"].id)})
    server = Server(run, now, children)
    await hook(monkeypatch, parent, server)
    assert [name for name, _ in engine.left] == left
    assert [is_held(store, name) for name in ("search/a", "evaluation-b")] == [not left] * 2
    assert server.states == ({children["grpo"].id: ended} if ended else {})  # the other one has ended already


@pytest.mark.parametrize("retry_is_first", [True, False])
async def test_a_hook_never_overwrites_a_newer_state_of_a_child(
    retry_is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Told
) -> None:
    place = {"storage": {"url": str(tmp_path)}}
    run = a_run(parameters={"config": {"training": {"kind": "sft", "config": place}}})
    child = FlowRun(flow_id=uuid4(), parameters={"config": place | {"run": "search/a"}}, state=Running())
    server = Server(run, Crashed(), {"grpo": child})
    if retry_is_first:
        server.later[child.id] = Scheduled()
    await hook(monkeypatch, "sweep", server)
    assert server.states == ({} if retry_is_first else {child.id: "CRASHED"})


CHANGES: list[tuple[list[State], bool]] = [
    ([Cancelling(), Cancelled()], True),
    ([Cancelled(), Scheduled()], True),
    ([Cancelling(), Scheduled()], True),
    ([Scheduled(), Running()], False),
    ([Running(), Completed()], False),
]
"""The states that Prefect has while the hooks of a cancelled flow run work, and whether they release its lease."""


@pytest.mark.parametrize(("states", "released"), CHANGES)
async def test_no_hook_sets_the_state_of_its_own_run(
    states: list[State], released: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Told
) -> None:
    """A person may press Retry before, between or after the steps of the hooks: what is pressed is kept."""

    class ChangingServer(Server):
        async def read_flow_run(self, flow_run: UUID) -> FlowRun:
            self.now = states[min(self.reads, len(states) - 1)]
            self.reads += 1
            return await super().read_flow_run(flow_run)

        reads = 0

    started, start = [], subprocess.Popen.__init__

    def record(process: Any, *arguments: Any, **options: Any) -> None:
        started.append(options.get("start_new_session", False))
        start(process, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", record)
    run = a_run(parameters={"config": {"storage": {"url": str(tmp_path)}}})
    workspace = Workspace(store=str(tmp_path), run="grpo-12345678", provenance=PROVENANCE)
    leases.acquire_lease(workspace.open_store(), workspace.run, {"flow_run": str(run.id)})
    server = ChangingServer(run, states[0])
    monkeypatch.setattr(hooks, "get_client", lambda: server)
    flow: Any = type("Flow", (), {"name": "grpo"})
    for each in hooks.ON_END["on_cancellation"]:
        await each(flow=flow, flow_run=run, state=Cancelling())
    assert server.states == {}
    assert not any(started)  # a process that outlives the hooks could act after a Retry
    assert is_held(workspace.open_store(), workspace.run) is not released


@pytest.mark.parametrize("config", [{"run": "a" * 300}, {"storage": {"url": "s3://KEY:SECRET@bucket"}}, {"seed": "x"}])
@pytest.mark.parametrize("name", ["sft", "sweep"])
async def test_a_config_that_the_flow_refused_held_nothing(
    name: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, engine: Told
) -> None:
    parameters = {"config": {"training": {"config": config}} if name == "sweep" else config}
    await hook(monkeypatch, name, Server(a_run(parameters=parameters), Crashed()))
    assert engine.left == [] and "lease" not in caplog.text


async def test_a_hook_of_a_run_that_never_began_does_nothing(tmp_path: Path) -> None:
    run = a_run(parameters={"config": {"storage": {"url": str(tmp_path)}}})
    await hooks.release_lease(flow=type("Flow", (), {"name": "grpo"}), flow_run=run, state=Crashed())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
