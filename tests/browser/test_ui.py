"""Tests of the browser's path through a run: the form of `grpo`, and the progress, artifacts, log and report of the
run."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tasks.reports.table_cells import table_cells
from tests.browser.conftest import ROOT, Watched, World
from tests.browser.forms import choose, field, unfold, write
from tests.fixtures.runs.deployed import wait_for

pytestmark = pytest.mark.browser

RUN_SECONDS = 300.0
PROMPTS, HELDOUT = ROOT / "examples/data/sums-train.jsonl", ROOT / "examples/data/sums-heldout.jsonl"
"""Absolute, because deployed flows work in the folder in which `up` was started."""


def fill_form(page: Any) -> None:
    write(page, "Path", str(PROMPTS), "Train")
    field(page, "Heldout (Optional)", "Data").get_by_text("File dataset", exact=True).first.click()
    write(page, "Path", str(HELDOUT), "Heldout (Optional)")
    # greedy answers of the tiny model hardly change
    unfold(page, "Evaluation")
    write(page, "Temperature (Optional)", "1", "Evaluation (Optional)")
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
    page.get_by_text(re.compile("config.optimizer.lr")).first.wait_for()
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
    # the engine of `up` wants a token, so its metrics are not linked
    assert page.get_by_text("/metrics").count() == 0
    watched.screenshot("curves")
    check_samples(world, watched, artifacts["samples"])
    evaluation = check_report(world, watched, artifacts["training"])
    check_log(world, watched, run, *evaluation)
    watched.check()


def check_samples(world: World, watched: Watched, artifact: dict[str, Any]) -> None:
    """The table shows the grade, the prompt and the completion of each sample, in a narrow window too."""
    page = watched.page
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{world.url}/artifacts/artifact/{artifact['id']}")
    page.get_by_text("completion", exact=True).first.wait_for()
    prompts = {row["prompt"].replace("\n", " ") for row in json.loads(artifact["data"])}
    assert len(prompts) > 1 and prompts <= {json.loads(line)["prompt"] for line in PROMPTS.open()}
    assert_columns_fit(page)
    watched.screenshot("samples")


def assert_columns_fit(page: Any) -> None:
    """The first three columns are a sample and its grade, and can be seen without scrolling."""
    table = page.locator("table").first
    assert table.locator("th").all_inner_texts()[:3] == ["grade", "prompt", "completion"]
    frame = page.locator(".p-table").first.bounding_box()
    for cell in (table.locator("th").nth(2), table.locator("td").nth(2)):
        box = cell.bounding_box()
        assert box["x"] + box["width"] <= frame["x"] + frame["width"] <= 1280


def check_report(world: World, watched: Watched, artifact: dict[str, Any]) -> tuple[float, float, float]:
    """The run's page leads to the report and shows its evaluation: before training, after it, and the change."""
    page = watched.page
    page.goto(f"{world.url}/artifacts/artifact/{artifact['id']}")
    row = page.locator("tr", has_text="held-out: reward").first
    row.wait_for()
    shown = row.locator("td").all_inner_texts()
    address = page.locator("li", has_text="report:").locator("a").get_attribute("href")
    page.goto(address)
    cells = page.locator("tr", has_text="held-out reward").first.locator("td").all_inner_texts()
    before, after, change = cells[1], cells[2], cells[3].split(" ")[0]
    assert before != after
    assert shown[1:] == [before, after, "20", change]
    assert page.get_by_text(f"{before} → {after}").first.is_visible()
    return float(before), float(after), float(change)


def check_log(world: World, watched: Watched, run: str, before: float, after: float, change: float) -> None:
    """The log on the run's page has a line before and after each evaluation and the publishing of the model."""
    page = watched.page
    page.goto(f"{world.url}/runs/flow-run/{run}")
    page.get_by_text(re.compile("^report: http://127.0.0.1:")).first.wait_for()
    text = page.locator("body").inner_text()
    assert "`" not in text
    size = len(HELDOUT.read_text().splitlines())
    lines = [
        f"evaluating {size} held-out prompts before training …",
        rf"held-out before training, {size} prompts: reward (\S+)",
        f"evaluating {size} held-out prompts after training …",
        rf"held-out after training, {size} prompts: reward (\S+) \((\S+) since before training\)",
        r"publishing the model as \S+ …",
        r"published \S+@\S+",
        "report: http://127.0.0.1:",
    ]
    logged = re.search("(?s)" + ".*".join(lines), text)
    assert logged
    assert [float(figure) for figure in logged.groups()] == pytest.approx([before, after, change], abs=0.0011)


def test_samples_are_shown_literally(world: World, watched: Watched) -> None:
    """Prefect reads table cells as Markdown, and does not break their lines."""
    texts = [
        "<think>a * b * c</think> <answer>42</answer>", "#### 42", "**bold** _a_ `b` ~~c~~ [d](e)", "- a\n- b\n1. c",
        "https://example.com and www.example.com", "a | b & c &amp; \\ d", "$x$ > y == z", "    return x",
    ]  # fmt: skip
    rows = [{"grade": 0.5, "prompt": text, "completion": text, "stopped by": "stop"} for text in texts]
    rows.append({"grade": f"failed: {texts[0]}", "prompt": "word " * 500, "completion": "x" * 2000})
    data = json.dumps([table_cells(row) for row in rows])
    artifact = world.ask("POST", "/artifacts/", key="literal-samples", type="table", data=data, description="")
    watched.page.set_viewport_size({"width": 1280, "height": 900})
    watched.page.goto(f"{world.url}/artifacts/artifact/{artifact['id']}")
    watched.page.get_by_text("completion", exact=True).first.wait_for()
    assert_columns_fit(watched.page)
    cells = watched.page.locator("table").first.locator("td")
    for number, text in enumerate(texts):
        prompt, completion = (cells.nth(4 * number + column).inner_text() for column in (1, 2))
        assert prompt.split() == completion.split() == text.split()
    assert not cells.locator("a").count()
    watched.check()
