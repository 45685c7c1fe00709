"""Tests, in the browser, of runs that cannot begin: bad values in the form, missing files, and a schedule whose
parameters do not fit."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from flows.ops.services import RETRY_DELAY_SECONDS
from tests.browser.conftest import Watched, World
from tests.browser.forms import field, write
from tests.fixtures.runs.deployed import wait_for

pytestmark = [pytest.mark.browser, pytest.mark.slow]

RUN_SECONDS = 120.0
"""Most of it is the start of the run's process beside other work."""


def open_form(world: World, watched: Watched) -> Any:
    page = watched.page
    page.goto(f"{world.url}/deployments")
    page.locator('a[href*="/deployments/deployment/"]', has_text=re.compile("^grpo$")).first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    field(page, "Key", "Model").wait_for()
    return page


def see_failure(world: World, watched: Watched, run: str, sentence: str) -> None:
    """The page of the run shows the sentence and no traceback."""
    page = watched.page
    page.goto(f"{world.url}/runs/flow-run/{run}")
    page.get_by_text(re.compile(re.escape(sentence))).first.wait_for(timeout=RUN_SECONDS * 1000)
    page.locator(".state-badge, .p-tag", has_text=re.compile("^Failed$")).first.wait_for(timeout=RUN_SECONDS * 1000)
    assert page.get_by_text("Traceback").count() == 0


def test_bad_values_are_said_by_the_form_or_on_the_page_of_the_run(world: World, watched: Watched) -> None:
    before = len(world.runs_of("grpo"))
    page = open_form(world, watched)
    write(page, "Key", str(world.tiny), "Model")
    write(page, "Path", "no-such-file.jsonl", "Train")
    write(page, "Import path", "rules", "Grader")
    write(page, "Steps", "2")
    write(page, "Samples per batch (Optional)", "12")
    # the form: an import path has a colon
    page.get_by_role("button", name="Submit").click()
    page.get_by_text(re.compile("does not match")).first.wait_for()
    watched.screenshot("bad-value-in-the-form")
    watched.errors.clear()  # the browser counts a refusal as one
    # the run: sizes that do not fit together
    write(page, "Import path", "tests.fixtures.grading:even_share", "Grader")
    page.get_by_role("button", name="Submit").click()
    wait_for(lambda: len(world.runs_of("grpo")) > before)
    run = world.runs_of("grpo")[-1]
    sentence = "samples_per_batch=12 splits a group; use a multiple of completions_per_sample=8"
    see_failure(world, watched, run["id"], sentence)
    watched.screenshot("bad-value-of-the-run")
    # the run: a file that is not there
    config = run["parameters"]["config"]
    config["algorithm"]["samples_per_batch"] = 16
    see_failure(world, watched, world.start_flow("grpo", config), "data.train: no file at 'no-such-file.jsonl'")
    watched.check()


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"__prefect_kind": "json"}, "the parameters of this run are none, and the flow takes config"),
        (
            {"__prefect_kind": "json", "value": '{"config": {"model": {"key": "m"}, "data": {"train": 5}}}'},
            "data.train: given 5; expected a group of keys, with kind: one of",
        ),
    ],
    ids=["no parameters", "JSON that does not fit"],
)
def test_a_schedule_that_does_not_fit_ends_once(
    world: World, watched: Watched, parameters: dict[str, Any], sentence: str
) -> None:
    run = world.start_by_schedule("grpo", parameters)
    wait_for(lambda: world.status(run)[0] in ("Failed", "Crashed"))
    see_failure(world, watched, run, sentence)
    # longer than a crashed run waits before it is started again
    time.sleep(RETRY_DELAY_SECONDS + 15)
    states = [state["name"] for state in world.ask("GET", f"/flow_run_states/?flow_run_id={run}")]
    assert states.count("Failed") == 1
    assert not {"Crashed", "AwaitingRetry"} & set(states)
    watched.check()
