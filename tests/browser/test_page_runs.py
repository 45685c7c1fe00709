"""Ostinato's page in a browser: a run, the form's errors, two windows, a hostile completion, an expired session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from prefect.client.orchestration import get_client
from prefect.states import Failed, Running

from engine.text.threads import StringThread, Turn
from flows.page import runs
from flows.page.app import create_app
from flows.page.shared import PageSettings
from storage.inspect.step_samples import GradedSample
from tests.browser.conftest import Watched
from tests.fixtures.runs.toy_run import ToyRun
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.browser

REFUSED = "has changed since this page was shown"
TOKEN = "a token of sixteen letters".replace(" ", "-")
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\u202edrawkcab " + (
    "A" * (1 << 20)
)


@pytest.fixture
def serve(toy_run: ToyRun, tmp_path: Path, prefect_server: str) -> Iterator[Callable[..., str]]:
    """Serves pages over a copy of the toy run's store; returns the address of each."""
    store = toy_run.copied(tmp_path / "copy").folder
    servers: list[uvicorn.Server] = []

    def start(token: str | None = None) -> str:
        app = create_app(PageSettings(storage=str(store), server=prefect_server, token=token))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        threading.Thread(target=server.run, daemon=True).start()
        wait_until(lambda: server.started)
        servers.append(server)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.should_exit = True


WIDE = """() => [...document.querySelectorAll("main *")]
  .filter(e => e.scrollWidth > window.innerWidth && !e.closest(".scroll"))
  .map(e => e.outerHTML.slice(0, 120))"""
"""The elements that are wider than the window. Tables scroll in a box of their own."""


def test_the_page_of_a_run_at_every_width_and_by_keyboard(serve: Callable[..., str], watched: Watched) -> None:
    url, page = serve(), watched.page
    page.goto(url)
    page.get_by_role("link", name="toy", exact=True).click()
    page.get_by_text("step 4 of 4", exact=True).wait_for()
    page.locator("figure img").first.wait_for()
    assert page.locator("figure img").first.evaluate("image => image.naturalWidth") > 100
    page.get_by_text("16 of 16 samples of step 4").wait_for()
    watched.screenshot("page-run")

    # a filter, by keyboard alone
    page.get_by_label("Status").focus()
    page.get_by_label("Step", exact=True).fill("2")
    page.keyboard.press("Enter")
    page.get_by_text("samples of step 2 of 0-grpo").wait_for()
    page.get_by_text("Lineage", exact=True).click()
    page.get_by_text("toy/0-grpo/policy, steps 1 to 4").wait_for()

    # the first stop of the keyboard leads to the content, and nothing is wider than a telephone
    page.reload()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.set_viewport_size({"width": 400, "height": 800})
    for path in ("/runs", "/runs/toy", "/start", "/start?training=grpo"):
        page.goto(url + path)
        assert page.evaluate(WIDE) == [], path
    watched.screenshot("page-start-400")
    page.emulate_media(color_scheme="dark")
    page.goto(f"{url}/runs")
    watched.screenshot("page-dark")
    watched.check()


def test_errors_stand_at_their_fields_and_keep_what_was_typed(serve: Callable[..., str], watched: Watched) -> None:
    url, page = serve(), watched.page
    page.goto(f"{url}/start?training=sft")
    page.get_by_label("model.key").fill("/no/such/model")
    page.get_by_label("data.train").fill("/no/such/rows.jsonl")
    page.get_by_label("data.train").press("Enter")
    page.get_by_text("2 problems").wait_for()
    described = page.get_by_label("model.key").get_attribute("aria-describedby").split()[0]
    assert "/no/such/model" in page.locator(f'[id="{described}"]').inner_text()
    assert page.get_by_label("data.train").input_value() == "/no/such/rows.jsonl"
    watched.screenshot("page-start-errors")
    page.get_by_role("button", name="Paste YAML instead").click()
    assert "/no/such/rows.jsonl" in page.get_by_label("Config").input_value()
    page.get_by_role("button", name="Fill in fields instead").click()
    assert page.get_by_label("model.key").input_value() == "/no/such/model"
    assert [error for error in watched.errors if "422" not in error] == []


def test_two_windows_that_cancel_and_retry_at_once(serve: Callable[..., str], watched: Watched) -> None:
    url, page = serve(), watched.page
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow_from_name("grpo"), name="grpo")
        config = {"config": {"run": "two-windows"}}
        flow_run = client.create_flow_run_from_deployment(deployment, parameters=config).id
        client.set_flow_run_state(flow_run, Running(), force=True)
        other = page.context.browser.new_page()
        for action, state in (("Cancel", None), ("Retry", Failed(message="no disk"))):
            if state is not None:
                client.set_flow_run_state(flow_run, state, force=True)
            before = len(client.read_flow_run_states(flow_run))
            for window in (page, other):
                window.goto(f"{url}/runs/{flow_run}")
            # both are open before one is pressed
            page.get_by_role("button", name=action).click(no_wait_after=True)
            other.get_by_role("button", name=action).click(no_wait_after=True)
            wait_until(lambda: any(window.get_by_text(REFUSED).count() for window in (page, other)))
            page.wait_for_load_state()
            assert len(client.read_flow_run_states(flow_run)) == before + 1
    watched.screenshot("page-two-windows")


def test_a_hostile_completion_is_shown_as_text(
    serve: Callable[..., str], watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = StringThread(turns=(Turn("user", "<b>bold?</b>"),)).to_json()
    row = GradedSample(prompt="p", completion=0, status="ok", reward=1.0, reason=HOSTILE, thread=thread, text=HOSTILE)
    monkeypatch.setattr(runs, "step_samples", lambda *_: iter([row]))
    url, page = serve(), watched.page
    page.set_viewport_size({"width": 400, "height": 800})
    page.goto(f"{url}/runs/toy")
    page.get_by_text("1 of 1 samples").wait_for()
    assert page.title() == "toy · Ostinato" and page.locator("article script, article img, article b b").count() == 0
    assert page.evaluate(WIDE) == [] and page.get_by_text("<b>bold?</b>").count() == 1
    # the direction of the answer does not leave its box
    order = "element => getComputedStyle(element).unicodeBidi"
    assert page.locator("article .text").nth(1).evaluate(order) in ("isolate", "plaintext")
    watched.check()


def test_an_expired_session_asks_for_the_token_again(serve: Callable[..., str], watched: Watched) -> None:
    url, page = serve(TOKEN), watched.page
    page.goto(f"{url}/runs")
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("This is not the token of this page").wait_for()
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("link", name="toy", exact=True).click()
    page.get_by_text("16 of 16 samples").wait_for()
    # the next part that is asked for leads to the login form, and from there back
    page.context.clear_cookies()
    page.get_by_role("button", name="Filter").click()
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("16 of 16 samples").wait_for()
