"""Asks a person for approval in the Prefect UI, while the flow run is paused.

Works around two limits of Prefect. A pause that times out on the server always ends as Failed, so the server's timeout
is later than ours. Prefilled form fields lose their constraints, so the answer is validated here.
"""

from __future__ import annotations

import asyncio
import math
from uuid import uuid4

from prefect import get_client
from prefect.context import FlowRunContext
from prefect.flow_runs import apause_flow_run
from prefect.input import RunInput
from prefect.states import Running
from pydantic import Field, ValidationError

from storage.serialization import Frozen

GRACE_SECONDS = 3600
"""How much longer than our timeout the server keeps the pause open."""
POLL_SECONDS = 5


class ApprovalForm(RunInput):
    """The fields of the form in the Prefect UI."""

    promote: bool = Field(False, description="Make the challenger the champion. Off: keep the present champion.")
    your_name: str = Field("", description="Your name. It is stored with the decision.")
    reason: str = Field("", description="The reason for the decision. It is stored with the decision.")


class Approval(Frozen):
    """A valid answer to the form."""

    promote: bool
    your_name: str = Field(min_length=1, max_length=200, pattern=r"\S")
    reason: str = Field("", max_length=10_000)


async def request_approval(comparison: str, *, timeout_seconds: float) -> Approval | None:
    """Pauses the flow run until a person answers. Returns None after the timeout.

    An invalid answer, such as one without a name, is requested again within the same timeout.
    """
    # invalid answers do not extend the deadline
    loop = asyncio.get_running_loop()
    deadline, complaint = loop.time() + timeout_seconds, ""
    while (remaining := deadline - loop.time()) > 0:
        form = await _pause(complaint + comparison, remaining)
        if form is None:
            return None
        try:
            return Approval.model_validate(form.model_dump(include=set(Approval.model_fields)))
        except ValidationError as error:
            problems = "; ".join(f"{each['loc'][0]}: {each['msg']}" for each in error.errors(include_url=False))
            complaint = f"**The last answer is not valid ({problems}). Please answer again.**\n\n"
    return None


async def _pause(description: str, seconds: float) -> ApprovalForm | None:
    """Shows the form and waits for an answer, or None after `seconds`."""
    form = ApprovalForm.with_initial_data(description=description)
    # a new key for each pause, so that a retry of the flow run can ask again
    pause = apause_flow_run(
        wait_for_input=form,
        timeout=math.ceil(seconds) + GRACE_SECONDS,
        poll_interval=POLL_SECONDS,
        key=f"approval-{uuid4().hex}",
    )
    try:
        async with asyncio.timeout(seconds):
            return await pause
    except TimeoutError:
        await _end_pause()
        return None


async def _end_pause() -> None:
    """Sets the paused flow run to Running again."""
    context = FlowRunContext.get()
    # only a flow run can be paused
    assert context is not None and context.flow_run is not None
    async with get_client() as client:
        await client.set_flow_run_state(context.flow_run.id, Running(message="there was no answer in time"))
