"""A browser, and everything that `ostinato up` starts. Needs Chromium and the playwright package; else these tests are
skipped."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


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


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The one URL to open."""
    folder = tmp_path_factory.mktemp("up")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "flows.cli.main"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    try:
        subprocess.run([*command, "up", "--detach", "--port", str(port)], cwd=folder, env=environment, check=True)
        yield f"http://127.0.0.1:{port}"
    finally:
        subprocess.run([*command, "down"], cwd=folder, env=environment, check=True)


@pytest.fixture
def watched() -> Iterator[Watched]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        found = Watched(page, [], [])
        page.on("console", lambda said: said.type == "error" and found.errors.append(f"{said.text} {said.location}"))
        page.on("pageerror", lambda error: found.errors.append(str(error)))
        page.on("request", lambda request: _is_elsewhere(request.url) and found.elsewhere.append(request.url))
        yield found
        browser.close()


def _is_elsewhere(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:"))
