"""What a person does: opens the page, fills the form of `grpo`, and watches the run to its end."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser.conftest import Watched
from tests.toy import write_prompts

pytestmark = pytest.mark.browser

RUN_SECONDS = 300.0


def field(page: Any, title: str, within: str = "") -> Any:
    """The innermost box of the form with this label; `within`: the label of a box around it."""
    box = '//label[normalize-space()="{}"]/ancestor::*[contains(concat(" ", @class, " "), " p-label ")][1]'
    inner = box.format(title)
    return page.locator(f"xpath={box.format(within)}{inner}" if within else f"xpath={inner}").first


def write(page: Any, title: str, value: str, within: str = "", *, kind: str = "") -> None:
    """Types a value; `kind`: the tab to choose first where there are several."""
    box = field(page, title, within)
    if kind:
        box.get_by_text(kind, exact=True).first.click()
    box.locator("input, textarea").first.fill(value)


def choose(page: Any, title: str, value: str, within: str = "") -> None:
    """Chooses from a menu."""
    menu = field(page, title, within).locator(".p-select-button__control")
    menu.focus()
    menu.press("ArrowDown")  # a synthetic click opens the menu and closes it again
    page.get_by_role("option", name=value, exact=True).click()


def fill_form(page: Any, model: Path, prompts: Path) -> None:
    write(page, "Key", str(model), "Model")
    write(page, "Path", str(prompts), "Train")
    write(page, "Import path", "tests.toy:digit_share", "Grader")
    write(page, "Max new tokens (Optional)", "6")
    write(page, "Min new tokens (Optional)", "6")
    write(page, "Steps (Optional)", "20", kind="int")
    write(page, "Samples per batch (Optional)", "32")
    write(page, "Samples per mini batch (Optional)", "32")
    choose(page, "Schedule (Optional)", "constant")


def test_a_run_of_grpo_from_the_form_to_its_curves(
    up: str, watched: Watched, tiny_folder: Path, tmp_path: Path
) -> None:
    page = watched.page
    page.goto(f"{up}/deployments")
    page.locator('a[href*="/deployments/deployment/"]', has_text=re.compile("^grpo$")).first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    field(page, "Key", "Model").wait_for()
    watched.screenshot("form")
    fill_form(page, tiny_folder, write_prompts(tmp_path / "prompts.jsonl", repeats=4))
    write(page, "Learning rate (Optional)", "-1")
    page.get_by_role("button", name="Submit").click()
    page.get_by_text(re.compile("optimizer.lr|greater than|minimum")).first.wait_for()
    watched.screenshot("refused")
    watched.errors.clear()  # the browser counts a refusal as one
    write(page, "Learning rate (Optional)", "0.001")
    page.get_by_role("button", name="Submit").click()

    run = started(up)
    page.goto(f"{up}/runs/flow-run/{run['id']}")
    page.get_by_text("grpo tiny on prompts, seed 0").first.wait_for(timeout=60_000)
    page.get_by_text(re.compile("^step 3/20")).first.wait_for(timeout=RUN_SECONDS * 1000)
    watched.screenshot("running")
    page.locator(".state-badge, .p-tag", has_text="Completed").first.wait_for(timeout=RUN_SECONDS * 1000)
    watched.screenshot("completed")
    page.get_by_text("Artifacts", exact=True).last.click()
    page.get_by_text("training").first.wait_for()
    watched.screenshot("artifacts")
    artifacts = {one["key"]: one for one in artifacts_of(up, run["id"])}
    assert set(artifacts) == {"progress", "training", "samples", "report"}
    page.goto(f"{up}/artifacts/artifact/{artifacts['training']['id']}")
    picture = page.locator("img[src^='data:image/png']").first
    picture.wait_for()
    assert picture.evaluate("image => image.naturalWidth") == 1000
    assert page.get_by_text("where the time goes").first.is_visible()
    assert page.get_by_text("/metrics").first.is_visible()
    watched.screenshot("curves")
    page.goto(f"{up}/artifacts/artifact/{artifacts['samples']['id']}")
    page.get_by_text("completion", exact=True).first.wait_for()
    watched.screenshot("samples")
    assert watched.elsewhere == []
    assert [error for error in watched.errors if not re.search(r"favicon\.ico|/ico/undefined\.svg", error)] == []


def started(up: str) -> dict[str, Any]:
    """The one flow run, once it was created."""
    deadline = time.monotonic() + 60
    while True:
        runs = httpx.post(f"{up}/api/flow_runs/filter", json={}, trust_env=False).json()
        if runs:
            return runs[0]  # type: ignore[no-any-return]
        assert time.monotonic() < deadline, "the form was submitted, and no run was created"
        time.sleep(0.2)


def artifacts_of(up: str, run: str) -> list[dict[str, Any]]:
    body = {"artifacts": {"flow_run_id": {"any_": [run]}}}
    return httpx.post(f"{up}/api/artifacts/filter", json=body, trust_env=False).json()  # type: ignore[no-any-return]
