"""Tests of recurring fine-tunes in the browser: a cron schedule starts runs, their pages show the decision, and a
person approves one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from storage.registry.decisions import alias_log, decisions_of
from tests.browser.conftest import Watched, World
from tests.browser.forms import field, write
from tests.fixtures.runs.deployed import recurring_config, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.slow]

EACH_MINUTE = {"cron": "* * * * *", "timezone": "UTC"}
STEPS = 12
RUN_SECONDS = 400.0
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
BAD_ENDS = ENDED[1:3]


def answers(folder: Path, character: str) -> None:
    """The training data from now on. The suite rewards characters with an odd code point."""
    rows = [{"prompt": str(digit), "completion": character * 6} for digit in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Schedule:
    """The deployment `recurring` with a schedule, and what its runs came to."""

    def __init__(self, world: World, config: dict[str, Any]) -> None:
        self.world, self.deployment = world, world.deployment("recurring")
        body = {"schedule": EACH_MINUTE, "active": True, "parameters": {"config": config}}
        response = httpx.post(f"{world.api_url}/deployments/{self.deployment}/schedules", json=[body], trust_env=False)
        self.id = response.raise_for_status().json()[0]["id"]

    def stop(self) -> None:
        """Nothing is due any more, and nothing runs."""
        self.world.ask("DELETE", f"/deployments/{self.deployment}/schedules/{self.id}")
        wait_for(lambda: all(run["state_type"] in ENDED for run in self.world.runs_of("recurring")))

    def first(self, outcome: str) -> str:
        """The flow run that came to it, once there is one."""
        matching: list[str] = []

        def look() -> bool:
            runs = self.world.runs_of("recurring")
            assert not [run for run in runs if run["state_type"] in BAD_ENDS]
            ended = [run["id"] for run in runs if run["state_name"] == "Completed"]
            matching[:] = [run for run in ended if self._said(run).startswith(f"## digits: {outcome}\n")]
            return bool(matching)

        wait_for(look, RUN_SECONDS)
        return matching[0]

    def _said(self, flow_run: str) -> str:
        return str(self.world.artifacts_of(flow_run).get("recurring", {}).get("data", ""))


@pytest.fixture
def schedule(world: World) -> Iterator[Schedule]:
    config = recurring_config(world.folder, world.tiny, steps=STEPS)
    answers(world.folder, "1")
    schedule = Schedule(world, config)
    yield schedule
    schedule.stop()


def read_decision(world: World, watched: Watched, flow_run: str, *said: str) -> None:
    """By hand: from the list of runs to the run, its artifacts, the decision."""
    page = watched.page
    page.goto(f"{world.url}/runs")
    page.locator(f'a[href*="{flow_run}"]').first.click()
    page.locator(".state-badge, .p-tag", has_text="Completed").first.wait_for()
    page.get_by_text("Artifacts", exact=True).last.click()
    page.get_by_text("recurring", exact=True).last.wait_for()
    page.goto(f"{world.url}/artifacts/artifact/{world.artifacts_of(flow_run)['recurring']['id']}")
    for text in said:
        page.get_by_text(text).first.wait_for()


def test_a_schedule_promotes_does_nothing_and_holds(world: World, watched: Watched, schedule: Schedule) -> None:
    # The first run promotes: there is no champion, and the challenger is better than the model it was trained from.
    promoted = schedule.first("promoted")
    computed = world.engine_figure("ostinato_calls_total")
    assert computed > 0
    shown = ("digits: promoted", "there is no champion yet", "compared with", "95 % interval")
    read_decision(world, watched, promoted, *shown)
    watched.screenshot("recurring-promoted")

    # Without new data the next run asks nothing of the engine.
    unchanged = schedule.first("unchanged")
    assert world.engine_figure("ostinato_calls_total") == computed
    read_decision(world, watched, unchanged, "digits: unchanged", "no new data: the champion")
    watched.screenshot("recurring-unchanged")

    # Worse data must not replace the champion.
    answers(world.folder, "2")  # an even code point
    held = schedule.first("held")
    read_decision(world, watched, held, "digits: held", "must not be worse by more than 0.05", "failed")
    watched.screenshot("recurring-held")
    assert [entry.number for entry in alias_log(world.store, "digits")] == [1]
    assert [decision.action for decision in decisions_of(world.store, "digits")] == ["promote", "hold"]

    # The page of the deployment shows the schedule.
    watched.page.goto(f"{world.url}/deployments/deployment/{schedule.deployment}")
    watched.page.get_by_text("Every minute").first.wait_for()
    watched.page.get_by_text("recurring digits").first.wait_for()
    watched.screenshot("recurring-deployment")
    runs = [run for run in world.runs_of("recurring") if run["id"] in (promoted, unchanged, held)]
    assert all(run["auto_scheduled"] for run in runs) and len(runs) == 3
    watched.check()


def test_a_person_approves_in_the_browser_and_the_promotion_follows(world: World, watched: Watched) -> None:
    config = recurring_config(world.folder, world.tiny, steps=STEPS) | {
        "model": "approved", "approval": {"required": True, "timeout_seconds": 600},
    }  # fmt: skip
    run = world.start_flow("recurring", config)
    page = watched.page
    page.goto(f"{world.url}/runs/flow-run/{run}")
    page.get_by_text("recurring approved").first.wait_for(timeout=60_000)
    page.get_by_role("button", name="Resume", exact=True).first.click(timeout=RUN_SECONDS * 1000)
    form = page.get_by_role("dialog")
    form.get_by_role("heading", name=re.compile("as the first champion")).wait_for()
    form.get_by_text("95 % interval").first.wait_for()
    assert alias_log(world.store, "approved") == []
    field(form, "Promote (Optional)").get_by_role("switch").click()
    write(form, "Your Name (Optional)", "Ada")
    write(form, "Reason (Optional)", "reads well")
    watched.screenshot("approval")
    form.get_by_role("button", name="Submit").click()
    page.locator(".state-badge, .p-tag", has_text="Completed").first.wait_for(timeout=RUN_SECONDS * 1000)
    watched.screenshot("approved")
    read_decision(world, watched, run, "approved: promoted", "reads well")
    (decision,) = decisions_of(world.store, "approved")
    assert (decision.action, decision.who) == ("promote", "Ada")
    assert [entry.version for entry in alias_log(world.store, "approved")] == [decision.version]
    watched.check()
