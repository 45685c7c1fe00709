"""Tests of the browser's path through a run: the form of `grpo`, the progress of the run, and its artifacts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.browser.conftest import ROOT, Watched, World
from tests.browser.forms import choose, field, unfold, write
from tests.fixtures.runs.deployed import wait_for

pytestmark = pytest.mark.browser

RUN_SECONDS = 300.0
PROMPTS = "examples/data/sums-train.jsonl"
"""Deployed flows work in the folder of prefect.yaml."""


def fill_form(page: Any) -> None:
    write(page, "Path", PROMPTS, "Train")
    write(page, "Import path", "tests.fixtures.grading:even_share", "Grader")
    write(page, "Max new tokens (Optional)", "6")
    unfold(page, "Further settings", "Sampling (Optional)")
    write(page, "Min new tokens (Optional)", "6")
    write(page, "Steps", "20")
    write(page, "Samples per batch (Optional)", "32")
    unfold(page, "Further settings", "Optimizer (Optional)")
    choose(page, "Schedule (Optional)", "constant")


def test_a_run_of_grpo_from_the_form_to_its_curves(world: World, watched: Watched) -> None:
    model, before = world.register(world.tiny), len(world.runs_of("grpo"))
    # Open the form of the deployment grpo.
    page = watched.page
    page.goto(f"{world.url}/deployments")
    page.locator('a[href*="/deployments/deployment/"]', has_text=re.compile("^grpo$")).first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    field(page, "Key", "Model").wait_for()
    # the form opens with few fields
    assert page.locator("input:visible, textarea:visible").count() <= 15
    write(page, "Key", model, "Model")
    watched.screenshot("form")
    fill_form(page)
    # The form refuses a negative learning rate.
    write(page, "Learning rate (Optional)", "-1")
    page.get_by_role("button", name="Submit").click()
    page.get_by_text(re.compile("optimizer.lr|greater than|minimum")).first.wait_for()
    watched.screenshot("refused")
    watched.errors.clear()  # the browser counts a refusal as one
    write(page, "Learning rate (Optional)", "0.003")
    page.get_by_role("button", name="Submit").click()

    # The page of the run shows its progress.
    wait_for(lambda: len(world.runs_of("grpo")) > before)
    run = world.runs_of("grpo")[-1]["id"]
    page.goto(f"{world.url}/runs/flow-run/{run}")
    page.get_by_text("grpo tiny on sums-train, seed 0").first.wait_for(timeout=60_000)
    page.get_by_text(re.compile("^step 3/20")).first.wait_for(timeout=RUN_SECONDS * 1000)
    watched.screenshot("running")
    page.locator(".state-badge, .p-tag", has_text="Completed").first.wait_for(timeout=RUN_SECONDS * 1000)
    watched.screenshot("completed")
    page.get_by_text("Artifacts", exact=True).last.click()
    page.get_by_text("training").first.wait_for()
    watched.screenshot("artifacts")
    # Its artifacts show the curves and the samples.
    artifacts = world.artifacts_of(run)
    assert set(artifacts) == {"progress", "training", "samples", "report"}
    page.goto(f"{world.url}/artifacts/artifact/{artifacts['training']['id']}")
    picture = page.locator("img[src^='data:image/png']").first
    picture.wait_for()
    assert picture.evaluate("image => image.naturalWidth") == 1000
    assert page.get_by_text("where the time goes").first.is_visible()
    assert page.get_by_text("/metrics").first.is_visible()
    watched.screenshot("curves")
    page.goto(f"{world.url}/artifacts/artifact/{artifacts['samples']['id']}")
    page.get_by_text("completion", exact=True).first.wait_for()
    prompts = {row["prompt"] for row in json.loads(artifacts["samples"]["data"])}
    assert len(prompts) > 1 and prompts <= {json.loads(line)["prompt"] for line in (ROOT / PROMPTS).open()}
    assert all(page.get_by_text(prompt, exact=True).first.is_visible() for prompt in prompts)
    watched.screenshot("samples")
    watched.check()
