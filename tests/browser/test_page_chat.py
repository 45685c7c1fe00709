"""The chat of Ostinato's page in a browser: a blind vote that becomes training data, answers that attack the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.page.app import create_app
from flows.page.shared import PageSettings
from storage.store.objects import ObjectStore, open_store
from tasks.datasets.votes import list_votes
from tests.browser.conftest import Watched
from tests.fixtures.page import HOSTILE, publish, scripted_chat
from tests.fixtures.servers.openai_server import running_app

pytestmark = pytest.mark.browser

HUGE = HOSTILE + "A" * (1 << 20)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    store = open_store(tmp_path / "store")
    for name in ("good", "bad", "evil"):
        publish(store, tmp_path, name, "1")
    return store


@pytest.fixture
def answers() -> dict[str, str]:
    return {"good@1": "2 + 2 is four.", "bad@1": "2 + 2 is five.", "evil@1": HUGE}


@pytest.fixture
def url(store: ObjectStore, answers: dict[str, str]) -> Iterator[str]:
    with scripted_chat(answers) as engine:
        app = create_app(PageSettings(storage=store.url, server="http://127.0.0.1:1/api", engine=engine))
        with running_app(app) as page:
            yield page


def test_a_blind_vote_is_a_row_to_train_on(url: str, store: ObjectStore, watched: Watched) -> None:
    page = watched.page
    page.set_viewport_size({"width": 400, "height": 900})
    page.goto(f"{url}/chat")
    page.get_by_label("Model", exact=False).first.fill("good@1")
    page.get_by_label("Second model, to compare").fill("bad@1")
    page.get_by_label("Blind").check()
    page.get_by_role("button", name="Begin").click()
    # by keyboard: the question, and then the button
    page.get_by_label("Your message").fill("2 + 2?")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Tie").wait_for()
    left = page.locator(".card", has_text=re.compile("^Left")).inner_text()
    assert "@1" not in page.locator("#talk").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    watched.screenshot("chat-blind")
    page.get_by_role("button", name="Left is better" if "four" in left else "Right is better").click()
    page.get_by_text("Your vote is stored").wait_for()
    (vote,) = list_votes(store)
    preferred = vote.left if vote.choice == "left" else vote.right
    assert (preferred.model, vote.blind, vote.messages) == ("good@1", True, (("user", "2 + 2?"),))
    # the preferred answer goes on
    assert "four" in page.locator("#talk").inner_text() and "five" not in page.locator("#talk").inner_text()

    page.goto(f"{url}/chat")
    page.get_by_role("button", name="Train DPO on these votes").click()
    page.wait_for_url(re.compile("/start"))
    assert re.search(r"key: votes@\w+", page.get_by_label("data.train").first.input_value())
    watched.check()


def test_answers_that_attack_the_page_are_text(url: str, watched: Watched) -> None:
    page = watched.page
    page.goto(f"{url}/chat?model=evil@1")
    page.get_by_role("button", name="Begin").click()
    page.get_by_label("Your message").fill("<b>hello</b>")
    page.get_by_role("button", name="Send").click()
    answer = page.locator("#talk .card").nth(1)
    answer.wait_for(timeout=60_000)
    assert "<script>document.title='owned'</script>" in answer.inner_text()
    assert "more characters" in answer.inner_text()
    # nothing ran, nothing was drawn from it, and the long line keeps its width and direction
    assert page.title() == "Chat · Ostinato"
    assert page.locator("#talk script, #talk img, #talk b >> text=hello").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("#talk .text").nth(1).get_attribute("dir") == "auto"
    page.reload()
    assert page.title() == "Chat · Ostinato" and page.get_by_role("button", name="Send").is_enabled()
    watched.check()


def test_an_outage_is_one_sentence_and_the_question_stays(
    url: str, watched: Watched, answers: dict[str, str]
) -> None:
    page = watched.page
    page.goto(f"{url}/chat?model=good@1")
    page.get_by_role("button", name="Begin").click()
    del answers["good@1"]
    page.get_by_label("Your message").fill("Are you there?")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("the engine refused: no model 'good@1'").wait_for()
    assert page.get_by_label("Your message").input_value() == "Are you there?"
    watched.check()
