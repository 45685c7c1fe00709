"""The samples of a run: filters, order, and text that a model wrote to do harm."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from engine.text.threads import StringThread, Turn
from flows.page import runs
from storage.inspect.step_samples import GradedSample
from tests.flows.page.conftest import page_client

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202egnp.exe\x1b[2J" + "A" * (1 << 20)


def sample(number: int, reward: float | None, text: str, reason: str | None = None) -> GradedSample:
    thread = StringThread(turns=(Turn("user", f"prompt {number} </textarea><b>"),)).to_json()
    status = "masked" if reward is None else "ok"
    return GradedSample(
        prompt=f"id-{number}", completion=0, status=status, reward=reward, reason=reason, thread=thread, text=text
    )


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A page whose run has five samples."""
    rows = [
        sample(0, 0.5, "middle"),
        sample(1, 0.0, "x" * 50, reason="<b>wrong</b>"),
        sample(2, 1.0, "ok"),
        sample(3, None, "", reason="the grader timed out"),
        sample(4, 0.25, HOSTILE),
    ]
    monkeypatch.setattr(runs, "newest_sampled_step", lambda *_: ("0-grpo", 7))
    monkeypatch.setattr(runs, "step_samples", lambda *_: iter(rows))
    with page_client("memory://samples") as client:
        yield client


def prompts(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"prompt id-(\d)", text)]


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("status=masked", [3]),
        ("min_reward=0.25&max_reward=0.5", [0, 4]),
        ("max_length=6", [0, 2, 3]),
        ("min_length=50&max_length=50", [1]),
        ("order=lowest+reward", [1, 4, 0, 2, 3]),
        ("order=highest+reward", [2, 0, 4, 1, 3]),
        ("order=longest", [4, 1, 0, 2, 3]),
        ("from=3", [3, 4]),
    ],
)
def test_filters_and_orders(page: TestClient, query: str, shown: list[int]) -> None:
    assert prompts(page.get(f"/run-parts/samples/toy?{query}").text) == shown


def test_a_filter_that_is_no_number_is_refused(page: TestClient) -> None:
    answer = page.get("/run-parts/samples/toy?min_reward=low")
    assert answer.status_code == 400 and "min_reward" in answer.text and "number" in answer.text


def test_what_a_model_wrote_is_text(page: TestClient) -> None:
    text = page.get("/run-parts/samples/toy").text
    for harm in ("<script>", "<img src=x", "<b>wrong", "</textarea>"):
        assert harm not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "\x1b" not in text
    # a megabyte is cut, and the direction of the text ends with its box
    assert len(text) < 20_000 and "more characters" in text
    assert re.search(r'<div class="text" dir="auto"[^>]*>&lt;script', text)


def test_samples_of_a_real_run(client: TestClient) -> None:
    text = client.get("/run-parts/samples/toy").text
    assert "16 of 16 samples of step 4 of 0-grpo, 1 to 16" in text and text.count("<article") == 16
    assert "of step 2 of 0-grpo" in client.get("/run-parts/samples/toy?step=2").text
    assert client.get("/run-parts/samples/toy?step=9").status_code == 404
