"""Tests of the names of flow runs."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
from prefect import flow, get_client
from prefect.flow_engine import run_flow
from prefect.states import AwaitingRetry
from prefect.utilities.names import generate_slug
from pydantic import BaseModel

from flows.ops.run_names import flow_run_title, title_unless_named


class Titled(BaseModel):
    title: str


@flow(flow_run_name=flow_run_title)
async def child(config: Titled) -> None: ...


@flow(flow_run_name=flow_run_title)
async def parent(config: Titled) -> UUID:
    state = await child(Titled(title="child's title"), return_state=True)
    assert state.state_details.flow_run_id is not None
    return state.state_details.flow_run_id


@pytest.mark.parametrize("name", ["first try", "lr-high", "seed-3", "kl", "beta 0.1", "betatest-a", "calm-otter-2"])
def test_a_typed_name_is_kept(name: str) -> None:
    assert title_unless_named(name, "grpo m on d, seed 0") == name


def test_a_name_that_the_server_made_up_is_replaced_by_the_title() -> None:
    assert {title_unless_named(generate_slug(2), "title") for _ in range(2000)} == {"title"}
    assert title_unless_named("", "title") == "title"
    assert title_unless_named("phi-mini", "phi-mini") == "phi-mini"  # a title that looks like a name of the form


@pytest.mark.parametrize("name", ["beta4-vega-reach", "omega-ursae-majoris", "alpha731-barad-dur-x", "beta-low"])
def test_a_name_that_the_form_may_have_made_up_is_kept_before_the_title(name: str) -> None:
    named = title_unless_named(name, "title")
    assert named == f"{name}: title"
    assert title_unless_named(named, "title") == named  # a retry


async def names(created_as: str | None) -> list[str]:
    """The names of a flow run that was created with this name, after its first and second attempt, and of its child."""
    config = {"config": {"title": "parent's title"}}
    after = []
    async with get_client() as client:
        flow_run = await client.create_flow_run(parent, name=created_as, parameters=config)
        child_run = await run_flow(parent, flow_run=flow_run, parameters=config)  # type: ignore[misc]
        after.append((await client.read_flow_run(flow_run.id)).name)
        await client.set_flow_run_state(flow_run.id, AwaitingRetry(), force=True)
        again = await client.read_flow_run(flow_run.id)
        await run_flow(parent, flow_run=again, parameters=config)  # type: ignore[misc]
        twice = await client.read_flow_run(flow_run.id)
        assert twice.run_count == 2
        after.append(twice.name)
        return [*after, (await client.read_flow_run(child_run)).name]


def test_prefect_keeps_the_typed_name_over_attempts(prefect_server: str) -> None:
    assert asyncio.run(names("my first run")) == ["my first run", "my first run", "child's title"]
    assert asyncio.run(names(None)) == ["parent's title", "parent's title", "child's title"]
