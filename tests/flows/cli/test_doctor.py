"""Tests of `ostinato doctor` on broken stores, versions, engines and servers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.specs.engine import ClusterSpec, DeepSpeedSpec, HttpEngineSpec, LocalEngineSpec, VllmSpec
from flows.cli import checks
from flows.cli.backend_checks import check_backends
from flows.cli.checks import Check
from flows.cli.doctor import check_up
from flows.cli.main import app
from flows.ops.processes import ProcessIdentity
from flows.ops.state import HOME, Ports, UpOptions, UpState, save_state
from storage.errors import AccessDenied
from storage.store import keys
from storage.store.backends.memory import MemoryBackend
from storage.store.backends.protocol import PutResult
from storage.store.objects import ObjectStore
from tests.fixtures.runs.toy_run import ToyRun


@pytest.fixture(autouse=True)
def no_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


@pytest.fixture
def dead_port() -> int:
    """A port without a listener."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def doctor(*words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *words])


def verdicts(found: Iterator[checks.Check] | list[checks.Check]) -> dict[str, str]:
    return {check.name: check.verdict for check in found}


def test_a_store_that_is_well(tmp_path: Path) -> None:
    result = doctor("--storage", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    checks_by_name = {(check["area"], check["name"]): check for check in json.loads(result.stdout)["checks"]}
    for name in ("writable", "put-if-absent", "clock", "space"):
        assert checks_by_name["storage", name]["verdict"] == "ok"
    assert checks_by_name["engine", "embedded"]["verdict"] == "ok"
    assert checks_by_name["prefect", "server"]["verdict"] == "ok"
    assert "starts its own" in checks_by_name["prefect", "server"]["what"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []  # the probes are gone


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    result = doctor("--storage", str(tmp_path / "none"))
    assert result.exit_code == 0
    assert "does not exist yet" in result.stdout
    assert not (tmp_path / "none").exists()


class EverybodyWins(MemoryBackend):
    """An S3 server that knows no If-None-Match."""

    def put_if_absent(self, key: str, data: bytes, attempt: str) -> PutResult:
        self.put(key, data)
        return PutResult(True, data)


class AheadOfTime(MemoryBackend):
    def now(self) -> float:
        return super().now() + 3600


class ReadOnly(MemoryBackend):
    def put(self, key: str, data: bytes) -> None:
        raise AccessDenied(f"may not write {key}")


@pytest.mark.parametrize(
    ("backend", "name", "verdict"),
    [
        (MemoryBackend, "put-if-absent", "ok"),
        (EverybodyWins, "put-if-absent", "fail"),
        (AheadOfTime, "clock", "warning"),
        (ReadOnly, "writable", "fail"),
    ],
)
def test_stores_that_are_not_well(backend: type[MemoryBackend], name: str, verdict: str) -> None:
    store = ObjectStore(backend(f"doctor-{backend.__name__}"))
    results = list(checks.check_storage(store))
    assert verdicts(results)[name] == verdict
    assert all(check.what_to_do for check in results if check.verdict in ("warning", "fail"))
    assert list(store.list()) == []


def test_versions_are_held_against_what_the_project_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = [
        "prefect>=99", "no-such-package", "pydantic>=2", "torch>=99; extra == 'torch'", "absent; extra == 'dev'",
    ]  # fmt: skip
    monkeypatch.setattr(checks, "requires", lambda name: requirements)
    results = list(checks.check_versions())
    assert verdicts(results) == {
        "python": "ok", "prefect": "fail", "no-such-package": "fail", "torch": "warning", "packages": "ok",
    }  # fmt: skip
    by_name = {check.name: check for check in results}
    assert by_name["prefect"].what_to_do == "pip install 'prefect>=99'"
    assert "pydantic" in by_name["packages"].what
    assert "absent" not in by_name["packages"].what


class Draining(BaseHTTPRequestHandler):
    """An engine that answers, and takes no calls."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def answering_port() -> Iterator[int]:
    """The port of a server that answers /health."""
    server = HTTPServer(("127.0.0.1", 0), Draining)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def up_state(engine_port: int, worker_port: int, **services: int) -> UpState:
    """The state of an 'ostinato up' whose services are processes with these pids."""
    ended = ProcessIdentity(pid=1 << 22, created=0.0)
    identities = {name: ProcessIdentity.of(pid) or ended for name, pid in services.items()}
    return UpState(
        id="doctor", options=UpOptions(storage="/data"), ports=Ports(engine=engine_port, worker=worker_port), token="t",
        supervisor=identities.pop("supervisor"), services=identities, restarts={"engine": 2}, ready=True,
    )  # fmt: skip


def test_the_services_of_up_are_named_with_their_addresses_and_health(answering_port: int, dead_port: int) -> None:
    state = up_state(answering_port, dead_port, supervisor=os.getpid(), engine=os.getpid(), worker=os.getpid())
    results = {check.name: check for check in check_up(state)}
    assert verdicts(list(results.values())) == {"supervisor": "ok", "engine": "ok", "worker": "fail"}
    assert results["engine"].what == f"http://127.0.0.1:{answering_port}, pid {os.getpid()}, restarts: 2"
    assert "work pool ostinato" in results["worker"].what and "does not answer" in results["worker"].what
    assert "worker.log" in results["worker"].what_to_do


def test_services_without_their_supervisor_are_a_problem(answering_port: int) -> None:
    state = up_state(answering_port, answering_port, supervisor=1 << 22, engine=os.getpid())
    results = {check.name: check for check in check_up(state)}
    assert verdicts(list(results.values())) == {"supervisor": "fail", "engine": "ok"}
    assert "run 'ostinato up' again" in results["supervisor"].what_to_do


def test_without_up_the_doctor_says_how_to_start_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_state(tmp_path / HOME, up_state(1, 2, supervisor=1 << 22, engine=1 << 22))  # all were killed
    result = doctor("--json")
    assert result.exit_code == 0, result.output
    check = json.loads(result.stdout)["checks"][0]
    assert (check["what"], check["what_to_do"]) == ("nothing is running in this folder", "start with 'ostinato up'")


def test_an_engine_that_takes_no_calls(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Draining)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        spec = HttpEngineSpec(url=f"http://127.0.0.1:{server.server_port}")
        results = list(checks.check_engine(spec, str(tmp_path)))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert verdicts(results) == {"health": "ok", "ready": "fail"}
    assert "answers 503" in results[1].what


def test_an_engine_that_is_away(tmp_path: Path, dead_port: int) -> None:
    result = doctor("--storage", str(tmp_path), "--engine", f"http://127.0.0.1:{dead_port}")
    assert result.exit_code == 1
    assert "does not answer" in result.stdout
    assert "ostinato engine serve" in result.stdout
    assert doctor("--engine", "not a url").exit_code == 2


def test_a_config_says_where(tmp_path: Path, dead_port: int) -> None:
    config = {
        "model": {"key": "x"}, "storage": {"url": str(tmp_path / "data")},
        "engine": {"kind": "http", "url": f"http://127.0.0.1:{dead_port}"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = doctor("--config", str(tmp_path / "config.json"), "--json")
    checks_by_name = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert str(tmp_path / "data") in checks_by_name["reachable"]["what"]
    assert checks_by_name["health"]["verdict"] == "fail"


def test_a_prefect_server_of_this_version(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    check = checks.check_prefect()
    assert check.verdict == "ok"
    assert prefect_server in check.what
    monkeypatch.setattr(checks, "_installed_version", lambda name: "1.2.3")
    assert checks.check_prefect().verdict == "warning"


def test_a_prefect_server_that_is_away_and_a_password_that_is_not_shown(
    dead_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://me:hush@127.0.0.1:{dead_port}/api")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    result = doctor("--storage", str(tmp_path))
    assert result.exit_code == 1
    assert f"http://127.0.0.1:{dead_port}/api: does not answer" in result.stdout
    assert "hush" not in result.output


def test_deep_reads_the_store_to_the_last_byte(toy_run: ToyRun, tmp_path: Path) -> None:
    fine = doctor("--storage", str(toy_run.folder), "--deep")
    assert fine.exit_code == 0, fine.output
    assert "no problem was found" in fine.stdout
    broken = toy_run.copied(tmp_path / "copy")
    (broken.folder / keys.chain_record("toy", "0-grpo", "policy", 4)).write_bytes(b"{")
    result = doctor("--storage", str(broken.folder), "--deep", "--json")
    assert result.exit_code == 1
    problems = json.loads(result.stdout)["audit"]["problems"]
    assert problems[0]["key"] == keys.chain_record("toy", "0-grpo", "policy", 4)


def bare_python(folder: Path) -> str:
    """An interpreter with nothing installed, as `python -m venv` makes it."""
    venv.create(folder, with_pip=False)
    return str(folder / "bin" / "python")


def checks_of(spec: LocalEngineSpec) -> dict[str, Check]:
    return {check.name: check for check in check_backends(spec)}


def test_backends_that_are_not_installed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = bare_python(tmp_path / "bare")
    monkeypatch.setattr("flows.cli.backend_checks.sys.executable", bare)
    checks = checks_of(LocalEngineSpec(trainer=DeepSpeedSpec(ranks=2), sampler=VllmSpec(replicas=1, python=bare)))
    verdicts = {name: check.verdict for name, check in checks.items()}
    assert verdicts == {"trainer": "fail", "sampler": "fail", "ray": "fail"}
    assert "deepspeed is not installed" in checks["trainer"].what
    assert "vllm is not installed" in checks["sampler"].what
    assert "ray is not installed" in checks["ray"].what
    assert "ostinato[cluster]" in checks["ray"].what_to_do


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    checks = checks_of(LocalEngineSpec(sampler=VllmSpec(replicas=1, python=str(tmp_path / "none"))))
    assert {name: check.verdict for name, check in checks.items()} == {"sampler": "fail", "ray": "fail"}
    assert "cannot be run" in checks["sampler"].what


def test_another_version_of_ray_for_the_replicas_is_refused(tmp_path: Path) -> None:
    python = bare_python(tmp_path / "other")
    packages = next((tmp_path / "other" / "lib").glob("python*/site-packages"))
    (packages / "ray").mkdir()
    (packages / "ray-2.9.9.dist-info").mkdir()
    (packages / "ray-2.9.9.dist-info" / "METADATA").write_text("Name: ray\nVersion: 2.9.9\n")
    (packages / "ray-2.9.9.dist-info" / "top_level.txt").write_text("ray\n")
    check = checks_of(LocalEngineSpec(sampler=VllmSpec(replicas=1, python=python)))["ray"]
    assert check.verdict == "fail"
    assert f"ray {version('ray')}" in check.what and "ray 2.9.9" in check.what


def test_deepspeed_and_ray_that_are_installed_are_told_with_their_versions() -> None:
    pytest.importorskip("deepspeed")
    checks = checks_of(LocalEngineSpec(trainer=DeepSpeedSpec(ranks=2)))
    assert {name: check.verdict for name, check in checks.items()} == {"trainer": "ok", "ray": "ok"}
    assert f"deepspeed {version('deepspeed')}" in checks["trainer"].what
    assert checks["ray"].what == f"ray {version('ray')}; private, on this machine"


CLUSTER_CHECK = """
import subprocess
import sys
from engine.specs.engine import LocalEngineSpec
from flows.cli.backend_checks import check_backends
spec = LocalEngineSpec.model_validate({"trainer": {"kind": "deepspeed"}, "cluster": {"address": sys.argv[1]}})
check = next(check for check in check_backends(spec) if check.name == "cluster")
print(check.verdict, check.what)
"""


def test_a_cluster_that_does_not_answer(dead_port: int) -> None:
    """In a process of its own: this one may be connected to the Ray of another test's ranks."""
    address = f"127.0.0.1:{dead_port}"
    told = subprocess.run([sys.executable, "-c", CLUSTER_CHECK, address], capture_output=True, text=True, check=True)
    verdict, what = told.stdout.split(" ", 1)
    assert verdict == "fail"
    assert f"no Ray cluster answers at {address}" in what


def test_an_engine_without_ranks_and_replicas_needs_no_ray(dead_port: int) -> None:
    assert checks_of(LocalEngineSpec(cluster=ClusterSpec(address=f"127.0.0.1:{dead_port}"))) == {}
