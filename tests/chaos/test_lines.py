"""Tests of single faults of a connection: requests that arrive twice, late, or from two clients."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from engine.errors import Fenced, StepConflict
from engine.http.client import EngineClient
from engine.local.engine import LocalEngine
from engine.specs.engine import HttpEngineSpec
from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from storage.chain.leases import acquire_lease
from storage.chain.records import Chain, CommitRecord
from storage.inspect.audit import audit_store
from storage.store.objects import open_store
from tests.chaos.processes import ROOT, s3_environment
from tests.chaos.proxy import Proxy, proxied
from tests.fixtures.engines import DETERMINISTIC, commit_batch, new_policy, request_after
from tests.fixtures.runs.toy_run import ToyRun
from tests.fixtures.servers.http_engine import running_server
from tests.fixtures.worklog import events

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

VERBS = {
    "import_model", "create_policy", "generate", "logprobs_of_rows", "take_gradient_step", "save_checkpoint",
    "export_model",
}  # fmt: skip
"""What a run of GRPO calls."""


@contextmanager
def served(url: str) -> Iterator[Proxy]:
    """An engine of its own over the store at `url`, behind a line."""
    with running_server(LocalEngine(url, DETERMINISTIC)) as spec, proxied("engine", port_of(spec.url)) as line:
        yield line


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def client_of(url: str, line: Proxy) -> EngineClient:
    return EngineClient(url, HttpEngineSpec(url=line.endpoint, timeout_seconds=20, patience_seconds=20))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/data"


@pytest.fixture
def lines(url: str) -> Iterator[list[Proxy]]:
    """Two engine servers over one store."""
    with ExitStack() as stack:
        yield [stack.enter_context(served(url)) for _ in range(2)]


async def test_equal_steps_at_once_through_two_servers_are_one_commit(
    url: str, lines: list[Proxy], tiny_folder: Path
) -> None:
    clients = [client_of(url, line) for line in lines * 4]
    start = await new_policy(clients[0], tiny_folder)
    request = request_after(start, commit_batch(clients[0].store, start))
    records = await asyncio.gather(*(client.take_gradient_step(request) for client in clients))
    assert len({record.policy for record in records}) == 1
    assert len({record.attempt for record in records}) == 1  # everybody was told of the one record that stands
    assert list(Chain.of(open_store(url), start).steps()) == [1]
    assert audit_store(open_store(url)).problems == ()
    await asyncio.gather(*(client.close() for client in clients))


async def test_of_different_steps_for_one_parent_one_wins_and_the_others_conflict(
    url: str, lines: list[Proxy], tiny_folder: Path
) -> None:
    clients = [client_of(url, line) for line in lines * 3]
    start = await new_policy(clients[0], tiny_folder)
    batch = commit_batch(clients[0].store, start)
    requests = [request_after(start, batch, lr=1e-3 * (number + 1)) for number in range(len(clients))]
    ends = await asyncio.gather(
        *(client.take_gradient_step(request) for client, request in zip(clients, requests, strict=True)),
        return_exceptions=True,
    )
    won = [end for end in ends if isinstance(end, CommitRecord)]
    assert len(won) == 1
    assert sum(isinstance(end, StepConflict) for end in ends) == len(clients) - 1
    record = Chain.of(open_store(url), start).record(1)
    assert record == won[0]
    # the losers' weights moved and were dropped: the engines go on from the winner's step
    after = request_after(won[0].policy, commit_batch(clients[0].store, won[0].policy))
    second = [await client.take_gradient_step(after) for client in clients[:2]]
    assert second[0] == second[1]
    await asyncio.gather(*(client.close() for client in clients))


async def test_a_zombie_that_wakes_after_its_successor_changes_nothing(
    url: str, lines: list[Proxy], tiny_folder: Path
) -> None:
    """The zombie's step is on its way when it freezes; it arrives when the successor's two steps are committed."""
    zombie, successor = client_of(url, lines[0]), client_of(url, lines[1])
    start = await new_policy(successor, tiny_folder)
    store = open_store(url)
    old = acquire_lease(store, start.run, {"who": "zombie"})
    other = request_after(start, commit_batch(store, start, shard=1), lr=0.5)
    await zombie.info()
    # Freeze the line while the step of the zombie is on it.
    lines[0].line.frozen = True
    late = asyncio.create_task(zombie.take_gradient_step(other, epoch=old))
    await asyncio.to_thread(lines[0].arrived.wait, 20)
    # The successor takes the lease and commits two steps.
    new = acquire_lease(store, start.run, {"who": "successor"})
    policy = start
    for _ in range(2):
        request = request_after(policy, commit_batch(store, policy))
        policy = (await successor.take_gradient_step(request, epoch=new)).policy
    # The late step must change no object in the store.
    before = [(info.key, info.size) for info in store.list()]
    lines[0].heal()
    with pytest.raises(Fenced):
        await late
    with pytest.raises(Fenced):  # it cannot even have what it wants by coming through the successor's engine
        await client_of(url, lines[1]).take_gradient_step(other, epoch=old)
    assert [(info.key, info.size) for info in store.list()] == before
    assert Chain.of(store, start).policy(2) == policy
    await asyncio.gather(zombie.close(), successor.close())


@pytest.mark.slow
async def test_a_run_whose_every_acknowledgement_is_lost_once_is_the_run(
    url: str, tmp_path: Path, toy_run: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_WORKLOG", str(tmp_path / "work.log"))
    with served(url) as line:
        line.line.lose_each_once = True
        await run_over_http(url, line, toy_run)
        lost = line.lost
    assert {name.rpartition("/")[2] for name in lost} >= VERBS
    assert_same_run(url, toy_run)
    # an acknowledgement that was lost was asked for again: the work was not done again
    assert [event["step"] for event in events(tmp_path / "work.log", "step")] == [1, 2, 3, 4]


@pytest.mark.slow
async def test_a_run_is_unchanged_when_s3_acknowledges_writes_at_the_second_time(
    toy_run: ToyRun, moto_endpoint: str, moto_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxied("s3", port_of(moto_endpoint)) as line:
        for name, value in s3_environment(line.endpoint).items():
            monkeypatch.setenv(name, value)
        line.line.losable = lambda request: request.first[0] in ("PUT", "POST", "DELETE")
        line.line.lose_each_once = True
        url = f"s3://{moto_bucket}/run"
        with served(url) as engine:
            await run_over_http(url, engine, toy_run)
        assert line.lost.total() > 50
        line.heal()
        assert_same_run(url, toy_run)


async def run_over_http(url: str, line: Proxy, toy_run: ToyRun) -> None:
    spec = {"kind": "http", "url": line.endpoint, "timeout_seconds": 20, "patience_seconds": 60}
    config = toy_run.config | {"storage": {"url": url}, "engine": spec}
    await grpo(GRPOConfig.model_validate(config))


def assert_same_run(url: str, toy_run: ToyRun) -> None:
    """Same states, same weights, and nothing torn."""
    mine, reference = Chain(open_store(url), "toy", "0-grpo", "policy"), toy_run.chain
    assert [mine.policy(step) for step in range(5)] == [reference.policy(step) for step in range(5)]
    digests = [[record.weights_digest for record in chain.records(after=0, until=4)] for chain in (mine, reference)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 4
    assert audit_store(open_store(url)).problems == ()


@pytest.mark.slow
def test_a_worker_without_torch_drives_a_run_over_http(
    url: str, tmp_path: Path, toy_run: ToyRun, prefect_server: str
) -> None:
    with served(url) as line:
        engine = {"kind": "http", "url": line.endpoint}
        config = toy_run.config | {"storage": {"url": url}, "engine": engine}
        config.pop("run")
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        worker = [sys.executable, str(ROOT / "tests" / "chaos" / "bare_worker.py")]
        ended = subprocess.run(
            [*worker, "run", "grpo", "--config", "config.yaml", "--run", "toy"],
            cwd=tmp_path,
            env=os.environ | {"PREFECT_API_URL": prefect_server, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "torch was imported" not in ended.stdout
    assert_same_run(url, toy_run)
