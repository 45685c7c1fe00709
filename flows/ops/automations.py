"""Automations of the Prefect server that bring runs back: who falls silent has crashed, who has crashed goes on.

Both wait for the absence of an event (Proactive). One that answers a crash at once would fire twice, since the process
that ran a flow and its worker both report the crash, and two attempts of one run would overlap. How often a run may be
brought back is counted by the flow (flows/ops/attempts.py), and by a third automation, Reactive, for processes that end
before the flow begins: their import fails, or the machine has no memory for it. All touch flow runs with the tag
`ostinato` only.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.ops.attempts import max_attempts
from flows.ops.services import HEARTBEAT_SECONDS, RETRY_DELAY_SECONDS, TAG

HEARTBEAT_TIMEOUT_SECONDS = 3 * HEARTBEAT_SECONDS
"""A busy machine may miss a heartbeat, or two."""
ANY_EVENT = "prefect.flow-run.*"
CRASHED = "prefect.flow-run.Crashed"
REPORTS = 2
"""How often one crash may be reported; to count each as a crash would end runs before the flow's own cap does."""
COUNTED_HOURS = 24
"""For how long a crash counts."""


def automations() -> list[AutomationCore]:
    """What every server of ours has."""
    return [
        AutomationCore(
            name="ostinato: silent runs have crashed",
            description=f"A flow run whose heartbeats stopped for {HEARTBEAT_TIMEOUT_SECONDS} s is marked Crashed.",
            trigger=_silence(after="prefect.flow-run.heartbeat", seconds=HEARTBEAT_TIMEOUT_SECONDS),
            actions=[
                ChangeFlowRunState(
                    state=StateType.CRASHED, name="Crashed", message=f"no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS} s"
                )
            ],
        ),
        AutomationCore(
            name="ostinato: crashed runs go on",
            description="A flow run that crashed is due again, and goes on from its last committed step.",
            trigger=_silence(after=CRASHED, seconds=RETRY_DELAY_SECONDS),
            actions=[
                ChangeFlowRunState(
                    state=StateType.SCHEDULED,
                    name="AwaitingRetry",
                    message="it crashed; it goes on from its last committed step",
                    force=True,
                )
            ],
        ),
        AutomationCore(
            name="ostinato: runs that keep crashing have failed",
            description=f"Ends a flow run whose process always ends before the flow begins: at {max_crashes()} reports "
            f"of a crash within {COUNTED_HOURS} h. Nothing starts a failed run by itself.",
            trigger=_trigger(
                expect={CRASHED},
                posture=Posture.Reactive,
                threshold=max_crashes(),
                within=timedelta(hours=COUNTED_HOURS),
            ),
            actions=[
                ChangeFlowRunState(
                    state=StateType.FAILED,
                    name="Failed",
                    message=f"its crashes were reported {max_crashes()} times within {COUNTED_HOURS} h: its process "
                    "ends before the flow begins. The worker's log says why; when the cause is gone, press Retry",
                    force=True,
                )
            ],
        ),
    ]


def max_crashes() -> int:
    """Reports of crashes that end a run. Raises ConfigError."""
    return REPORTS * max_attempts()


async def save_automations(client: PrefectClient) -> None:
    """Creates them, or makes those that are there what they are here; a person's switch (enabled) is kept."""
    for wanted in automations():
        there = await client.read_automations_by_name(wanted.name)
        if not there:
            await client.create_automation(wanted)
        elif _body(there[0]) != _body(wanted):
            await client.update_automation(there[0].id, wanted.model_copy(update={"enabled": there[0].enabled}))


def _body(automation: AutomationCore) -> dict[str, object]:
    kept = {"name", "description", "trigger", "actions"}
    return automation.model_dump(mode="json", include=kept, exclude={"trigger": {"id"}})


def _silence(*, after: str, seconds: int) -> EventTrigger:
    return _trigger(
        after={after},
        expect={ANY_EVENT},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=seconds),
    )


def _trigger(**when: Any) -> EventTrigger:
    """Of each flow run of ours by itself."""
    return EventTrigger(
        match=ResourceSpecification({"prefect.resource.id": ANY_EVENT}),
        match_related=ResourceSpecification(
            {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
        ),
        for_each={"prefect.resource.id"},
        **when,
    )
