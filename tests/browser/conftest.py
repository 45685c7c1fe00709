"""A browser, and the processes that `ostinato up` starts. Without Chromium and the playwright package these tests are
skipped."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.specs.engine import LocalEngineSpec
from engine.workspace import Workspace
from flows.ops.services import free_port
from flows.ops.state import UpState, load_state
from storage.store.artifacts import Provenance
from tests.fixtures.runs.deployed import Deployed

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ICONS = re.compile(r"favicon\.ico|/ico/[a-z-]+\.svg")
"""Files that Prefect's page asks for and its server does not have."""


@dataclass
class Watched:
    """A page, and what went wrong on it."""

    page: Any
    errors: list[str]
    """Console errors, and answers of 400 and more."""
    elsewhere: list[str]
    """Requests that left this machine."""

    def screenshot(self, name: str) -> None:
        """Kept for the docs when OSTINATO_SCREENSHOTS names a folder."""
        folder = os.environ.get("OSTINATO_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))

    def check(self) -> None:
        """Nothing went wrong, and nothing left this machine."""
        assert self.elsewhere == []
        assert [error for error in self.errors if not ICONS.search(error)] == []


class World(Deployed):
    """What `ostinato up` keeps alive: Prefect server, worker, engine."""

    def __init__(self, folder: Path, tiny_folder: Path) -> None:
        super().__init__(folder, tiny_folder)
        self.url = f"http://127.0.0.1:{free_port()}"

    @property
    def state(self) -> UpState:
        state = load_state(self.folder / ".ostinato" / "up")
        assert state is not None
        return state

    @property
    def api_url(self) -> str:
        return f"{self.url}/api"

    @property
    def engine_log(self) -> str:
        return (self.folder / ".ostinato" / "up" / "engine.log").read_text()

    def cli(self, *words: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli.main", *words],
            cwd=self.folder,
            env=inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def register(self, model: Path) -> str:
        """Imports a model folder into the store; returns the name under which configs find it."""
        provenance = Provenance(code_version="test", config_digest="0" * 64, seed=0)
        spec = LocalEngineSpec(threads=1)
        workspace = Workspace(store=self.store.url, engine=spec, run="import", provenance=provenance)
        importing = workspace.connect().import_model(str(model), provenance=provenance)
        with ThreadPoolExecutor(1) as thread:  # a browser under way has an event loop in ours
            return thread.submit(asyncio.run, importing).result().key.split("/")[1]  # type: ignore[arg-type]

    def kill(self, service: str) -> None:
        os.kill(self.state.services[service].pid, signal.SIGKILL)

    def engine_figure(self, name: str) -> float:
        """The sum of a metric of the engine over its labels."""
        text = httpx.get(f"{self.state.engine_url}/metrics", trust_env=False, headers=self._authorized).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{name}[ {{]", line))

    @property
    def _authorized(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.state.token}"}

    def artifacts_of(self, flow_run: str) -> dict[str, dict[str, Any]]:
        """By key."""
        body = {"artifacts": {"flow_run_id": {"any_": [flow_run]}}}
        return {one["key"]: one for one in self.ask("POST", "/artifacts/filter", **body)}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("up"), tiny_folder)
    try:
        world.cli("up", "--detach", "--port", world.url.rpartition(":")[2])
        yield world
    finally:
        world.cli("down")


@pytest.fixture
def watched() -> Iterator[Watched]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        watched = Watched(page, [], [])

        def add_console_error(said: Any) -> None:
            if said.type == "error":
                watched.errors.append(f"{said.text} {said.location}")

        def add_if_elsewhere(request: Any) -> None:
            if _is_elsewhere(request.url):
                watched.elsewhere.append(request.url)

        page.on("console", add_console_error)
        page.on("pageerror", lambda error: watched.errors.append(str(error)))
        page.on("request", add_if_elsewhere)
        yield watched
        browser.close()


def _is_elsewhere(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:"))
