"""A person's word, given in the Prefect UI while the flow run is paused.

Two traps of Prefect's are stepped around. A pause that timed out on the server can only end as Failed: so the server's
limit lies beyond ours. And fields filled in beforehand lose their constraints: so what comes back is checked here.
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
"""How much longer the server keeps the pause open than we wait."""
POLL_SECONDS = 5


class ApprovalForm(RunInput):
    """What the form asks for."""

    promote: bool = Field(False, description="Make the challenger the champion. Off: hold it back.")
    your_name: str = Field("", description="Who decides. It is kept with the decision.")
    reason: str = Field("", description="Why, for whoever reads the decision later.")


class Approval(Frozen):
    """An answer that can be kept."""

    promote: bool
    your_name: str = Field(min_length=1, max_length=200, pattern=r"\S")
    reason: str = Field("", max_length=10_000)


async def request_approval(comparison: str, *, timeout_seconds: float) -> Approval | None:
    """Pauses the flow run until a person answers; None when nobody does in time. An answer without a name is asked for
    again, within the same time."""
    loop = asyncio.get_running_loop()
    deadline, problem = loop.time() + timeout_seconds, ""
    while (left := deadline - loop.time()) > 0:
        answer = await _pause(problem + comparison, left)
        if answer is None:
            return None
        try:
            return Approval.model_validate(answer.model_dump(include=set(Approval.model_fields)))
        except ValidationError as error:
            said = "; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors(include_url=False))
            problem = f"**The last answer cannot be kept ({said}). Please answer again.**\n\n"
    return None


async def _pause(description: str, seconds: float) -> ApprovalForm | None:
    form = ApprovalForm.with_initial_data(description=description)
    # a key of its own: a retry of the flow run must be able to ask again
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
        await _go_on()
        return None


async def _go_on() -> None:
    """Ends the pause ourselves."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None  # a pause is in a flow run
    async with get_client() as client:
        await client.set_flow_run_state(context.flow_run.id, Running(message="nobody answered in time"))
