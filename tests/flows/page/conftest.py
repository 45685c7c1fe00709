"""A page over the store of the toy run and the Prefect server of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from flows.page.app import create_app
from flows.page.security import CSRF_HEADER
from flows.page.shared import PageSettings
from tests.fixtures.runs.toy_run import ToyRun


def page_client(storage: Path | str, server: str = "http://127.0.0.1:1/api", **settings: str) -> TestClient:
    """A client of a page that sends the form token with each request."""
    app = create_app(PageSettings(storage=str(storage), server=server, **settings))
    headers = {CSRF_HEADER: app.state.page.sessions.csrf}
    return TestClient(app, base_url="http://127.0.0.1:4202", headers=headers, follow_redirects=False)


@pytest.fixture
def client(toy_run: ToyRun, tmp_path: Path, prefect_server: str) -> Iterator[TestClient]:
    """A page over a copy of the toy run's store."""
    toy = toy_run.copied(tmp_path / "copy")
    with page_client(toy.folder, prefect_server) as client:
        yield client
