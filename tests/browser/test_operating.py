"""Tests of operating a run in the browser: it is cancelled, retried, killed and watched."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from storage.chain.leases import is_held
from storage.store import keys
from storage.store.artifacts import find_artifact
from tests.browser.conftest import Watched, World
from tests.fixtures.runs.deployed import wait_for
from tests.fixtures.toy import toy_config

pytestmark = [pytest.mark.browser, pytest.mark.slow]

FREE_SECONDS = 10.0
"""The promise: a cancelled run has left the engine by then."""
LONG_ROLLOUT = {
    "sampling": {"max_new_tokens": 600, "min_new_tokens": 600},
    "algorithm__samples_per_batch": 64,
    "algorithm__samples_per_mini_batch": 64,
    "algorithm__completions_per_sample": 8,
    "algorithm__prompts_per_shard": 8,
    "algorithm__kl_beta": 0.0,
}
"""One call of the engine, for a quarter of a minute and more."""
LONG_STEP = {"algorithm__mini_epochs_per_batch": 500}
"""One gradient step of as many updates."""
RUN_SECONDS = 600.0
RELOAD_SECONDS = 20.0
"""How often a person looks again."""


def config_of(world: World, run: str, **changes: Any) -> dict[str, Any]:
    """A run where the deployment works."""
    config = toy_config(world.folder, world.tiny, run=run, **changes)
    del config["engine"], config["storage"]
    return config


def badge(watched: Watched, state: str) -> Any:
    return watched.page.locator(".state-badge, .p-tag", has_text=re.compile(f"^{state}$")).first


def click(watched: Watched, button: str, sure: str) -> float:
    """On the run's page, and `sure` in answer to the question that follows; the time just before the latter."""
    watched.page.get_by_role("button", name=button, exact=True).first.click()
    answer = watched.page.get_by_role("dialog").get_by_role("button", name=sure, exact=True)
    answer.wait_for()
    clicked = time.monotonic()
    answer.click()
    return clicked


def is_in(world: World, run: str, verb: str) -> bool:
    """Whether the engine is at that call of the first step: once the one before it is done, no other can be."""
    if verb == "generate":
        ready = re.search(f"POST /v1/create_policy 200 .* run={run}$", world.engine_log, re.MULTILINE) is not None
    else:
        ready = find_artifact(world.store, keys.step_artifact(run, "0-grpo", 0, "batch", 0)) is not None
    return ready and world.engine_figure("ostinato_calls_waiting") >= 1


def has_more_steps(world: World, run: str, steps: int) -> bool:
    return world.steps(run) > steps


def reload_until(watched: Watched, state: str) -> None:
    """Reloads the page until it shows this state. A page that has shown Crashed does not poll the server again."""
    from playwright.sync_api import Error as NotYet  # the server is away, or the state is another

    address, deadline = watched.page.url, time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline:
        with suppress(NotYet):
            watched.page.goto(address)
        with suppress(NotYet):
            badge(watched, state).wait_for(timeout=RELOAD_SECONDS * 1000)
            return
    raise AssertionError(f"the page does not come to say {state}")


@pytest.mark.parametrize(
    ("verb", "changes"),
    [("generate", LONG_ROLLOUT), ("take_gradient_step", LONG_STEP)],
    ids=["in a rollout", "in a gradient step"],
)
def test_cancel_frees_the_engine_and_a_retry_completes(
    world: World, watched: Watched, verb: str, changes: dict[str, Any]
) -> None:
    key = f"cancelled-{verb}"
    flow_run = world.start_flow("grpo", config_of(world, key, algorithm__steps=1, **changes))
    page = watched.page
    page.goto(f"{world.url}/runs/flow-run/{flow_run}")
    page.get_by_role("button", name="Cancel", exact=True).wait_for(timeout=RUN_SECONDS * 1000)
    wait_for(lambda: is_in(world, key, verb), RUN_SECONDS)
    clicked = click(watched, "Cancel", "Confirm")
    wait_for(lambda: world.engine_figure("ostinato_calls_waiting") == 0 and not is_held(world.store, key), 60)
    free = time.monotonic() - clicked
    badge(watched, "Cancelled").wait_for(timeout=RUN_SECONDS * 1000)
    print(f"cancelled in {verb}: engine free after {free:.1f} s, Cancelled after {time.monotonic() - clicked:.1f} s")
    watched.screenshot(f"cancelled-{verb.replace('_', '-')}")
    assert free < FREE_SECONDS
    assert world.steps(key) == 0

    click(watched, "Retry", "Retry")
    badge(watched, "Completed").wait_for(timeout=RUN_SECONDS * 1000)
    assert world.steps(key) == 1
    world.cli("verify", key)
    watched.check()


def test_a_run_is_seen_to_complete_whatever_is_killed(world: World, watched: Watched) -> None:
    flow_run = world.start_flow("grpo", config_of(world, "killed", algorithm__steps=60))
    page = watched.page
    page.goto(f"{world.url}/runs/flow-run/{flow_run}")
    badge(watched, "Running").wait_for(timeout=60_000)
    before = world.state.restarts
    for victim in ("engine", "server", "worker"):
        wait_for(partial(has_more_steps, world, "killed", world.steps("killed")))
        world.kill(victim)
    reload_until(watched, "Completed")
    watched.screenshot("killed-completed")
    assert world.status(flow_run) == ("Completed", 2)  # engine and server: the flow waits; the worker: run again
    assert world.steps("killed") == 60
    world.cli("verify", "killed")
    after = {name: count - before.get(name, 0) for name, count in world.state.restarts.items()}
    assert after == {"engine": 1, "server": 1, "worker": 1}
    assert watched.elsewhere == []  # the console says that the server was away
