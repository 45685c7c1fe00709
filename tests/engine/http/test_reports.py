"""Tests of the pages of reports: a signed address needs no token, and any other address is refused."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from engine.http.app import create_app
from engine.http.report_links import report_url
from engine.http.service import ServerOptions
from engine.specs.engine import HttpEngineSpec, LocalEngineSpec
from storage.store import keys
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.servers.scripted_engine import ScriptedEngine

ENGINE = HttpEngineSpec(url="http://engine:8777/")


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    store = open_store(f"file://{tmp_path}/store")
    for run in ("grpo-1", "nightly/20261121T030000Z"):
        store.put(keys.report(run), f"<h1>{run}</h1>".encode())
    return store


@pytest.fixture
def browser(store: ObjectStore) -> httpx.AsyncClient:
    """Of another machine, and without a token."""
    app = create_app(ScriptedEngine(store), store, ServerOptions(token="a-token-that-is-hard-to-guess"))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://engine:8777")


@pytest.mark.parametrize("run", ["grpo-1", "nightly/20261121T030000Z"])
async def test_a_report_is_shown_by_its_address_and_nothing_in_it_can_run(
    run: str, browser: httpx.AsyncClient, store: ObjectStore
) -> None:
    url = report_url(ENGINE, store, run)
    assert url is not None and url.startswith(f"http://engine:8777/reports/{run}?proof=")
    answer = await browser.get(url)
    assert (answer.status_code, answer.text) == (200, f"<h1>{run}</h1>")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "sandbox" in policy and "script" not in policy


async def test_another_address_shows_nothing(browser: httpx.AsyncClient, store: ObjectStore) -> None:
    good = report_url(ENGINE, store, "grpo-1")
    proof = urlsplit(good or "").query
    wrong = [
        "/reports/grpo-1", "/reports/grpo-1?proof=", f"/reports/grpo-1?proof={'0' * 32}", f"/reports/other?{proof}",
        f"/reports/nightly/20261121T030000Z?{proof}", f"/reports/../runs/grpo-1/report.html?{proof}", "/reports/",
    ]  # fmt: skip
    answers = [await browser.get(path) for path in wrong]
    assert {answer.status_code for answer in answers} <= {401, 404}
    assert not any("<h1>" in answer.text for answer in answers)
    assert (await browser.post(f"/reports/grpo-1?{proof}")).status_code == 401
    elsewhere = open_store("memory://reports-elsewhere")  # another store makes another proof
    assert report_url(ENGINE, elsewhere, "grpo-1") != good


async def test_a_run_without_a_report_is_not_found(browser: httpx.AsyncClient, store: ObjectStore) -> None:
    assert (await browser.get(report_url(ENGINE, store, "unfinished") or "")).status_code == 404
    assert (await browser.get(report_url(ENGINE, store, "a b") or "")).status_code == 404


def test_an_embedded_engine_shows_no_report(store: ObjectStore) -> None:
    assert report_url(LocalEngineSpec(), store, "grpo-1") is None
