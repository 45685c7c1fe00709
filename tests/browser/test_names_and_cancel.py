"""Tests of the name that a person types into the form, and of what a cancelled run says, in the browser."""

from __future__ import annotations

import re
from typing import Any

import pytest

from storage.chain.leases import is_held
from tests.browser.conftest import ROOT, Watched, World
from tests.browser.forms import field, unfold, write
from tests.fixtures.runs.deployed import wait_for

pytestmark = pytest.mark.browser

PROMPTS = str(ROOT / "examples" / "data" / "sums-train.jsonl")
"""With its folder: deployed flows work in the folder of `ostinato up`, which is an empty one here."""
TITLE = "grpo tiny on sums-train, seed 0"
RUN_SECONDS = 300.0


def open_form(world: World, watched: Watched) -> Any:
    """The form of the deployment grpo, filled in for a long run."""
    model = world.register(world.tiny)
    page = watched.page
    page.goto(f"{world.url}/deployments/deployment/{world.deployment('grpo')}")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    field(page, "Key", "Model").wait_for()
    write(page, "Key", model, "Model")
    write(page, "Path", PROMPTS, "Train")
    write(page, "Import path", "tests.fixtures.grading:even_share", "Grader")
    write(page, "Max new tokens (Optional)", "6")
    unfold(page, "Further settings", "Sampling (Optional)")
    write(page, "Min new tokens (Optional)", "6")
    write(page, "Steps", "400")
    write(page, "Samples per batch (Optional)", "32")
    return page


def submit(world: World, page: Any) -> str:
    """Submits the form. Returns the id of the new flow run."""
    before = {run["id"] for run in world.runs_of("grpo")}
    page.get_by_role("button", name="Submit").click()
    wait_for(lambda: len(world.runs_of("grpo")) > len(before))
    (created,) = {run["id"] for run in world.runs_of("grpo")} - before
    return str(created)


def cancel(page: Any) -> None:
    page.get_by_role("button", name="Cancel", exact=True).first.click()
    answer = page.get_by_role("dialog").get_by_role("button", name="Confirm", exact=True)
    answer.wait_for()
    answer.click()


def test_a_typed_name_stays_in_the_list_and_cancel_says_what_is_committed(world: World, watched: Watched) -> None:
    page = open_form(world, watched)
    write(page, "Run Name", "first try, lr 1e-5")
    run = submit(world, page)
    page.goto(f"{world.url}/runs/flow-run/{run}")
    page.get_by_text(re.compile("^step [3-9]")).first.wait_for(timeout=RUN_SECONDS * 1000)

    # cancel: the log of the page shows the sentence
    cancel(page)
    key = f"grpo-{run[:8]}"
    wait_for(lambda: world.status(run)[0] == "Cancelled" and not is_held(world.store, key), 60)
    sentence = f"cancelled; {world.steps(key)} steps are committed. Retry continues after them"
    wait_for(lambda: sentence in [line["message"] for line in world.log(run)], 60)
    page.reload()
    page.get_by_text(sentence).first.wait_for(timeout=60_000)
    watched.screenshot("cancelled")
    assert page.get_by_text(re.compile("Crash detected")).count() == 0
    lines = [line["message"] for line in world.log(run)]
    assert sentence in lines
    assert not [line for line in lines if "Crash detected" in line]

    # the list of runs has the typed name
    page.goto(f"{world.url}/runs")
    page.get_by_text("first try, lr 1e-5", exact=True).first.wait_for(timeout=60_000)
    watched.screenshot("named")
    watched.check()


def test_a_run_whose_name_was_not_typed_has_the_title_in_the_list(world: World, watched: Watched) -> None:
    page = open_form(world, watched)
    suggested = field(page, "Run Name").locator("input").input_value()
    run = submit(world, page)
    name = f"{suggested}: {TITLE}"
    wait_for(lambda: world.ask("GET", f"/flow_runs/{run}")["name"] == name, RUN_SECONDS)
    page.goto(f"{world.url}/runs")
    page.get_by_text(name, exact=True).first.wait_for(timeout=60_000)
    world.set_state(run, type="CANCELLING", name="Cancelling")
    world.until(run, "Cancelled")
    watched.check()
