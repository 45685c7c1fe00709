"""A Prefect server with the deployments of this project, for the slow tests of servers and workers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.ops.local_server import local_prefect_server
from tests.fixtures.runs.deployed import Site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with local_prefect_server(folder / "prefect") as server:
        site = Site(folder, tiny_folder, server.api_url)
        site.deploy()
        try:
            yield site
        finally:
            for worker in list(site.workers):
                site.end(worker, signal.SIGKILL)
