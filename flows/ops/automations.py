"""Automations that mark a flow run as Crashed when its heartbeats stop, and reschedule crashed runs.

Both of these wait for the absence of an event (posture Proactive). An automation that reacted to the crash itself would
fire twice, because the process of the flow run and its worker both report the crash, and two attempts of one run would
overlap.

The number of attempts is limited twice: by the flow (flows/ops/termination.py), and by a third automation (posture
Reactive) for processes that end before the flow begins, for example because an import fails or memory runs out. All
three apply only to flow runs with the tag `ostinato`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.ops.services import HEARTBEAT_SECONDS, RETRY_DELAY_SECONDS, TAG
from flows.ops.termination import max_attempts

HEARTBEAT_TIMEOUT_SECONDS = 3 * HEARTBEAT_SECONDS
"""Seconds without a heartbeat after which a flow run counts as crashed. A busy machine may miss one or two."""
ANY_EVENT = "prefect.flow-run.*"
CRASHED = "prefect.flow-run.Crashed"
REPORTS_PER_CRASH = 2
"""How often one crash may be reported: by the process and by its worker."""
CRASH_WINDOW_HOURS = 24
"""Crashes within this time are counted."""


def automations() -> list[AutomationCore]:
    """Returns the automations that every Prefect server with our deployments has."""
    # the names are stored on the server, where `save_automations` finds them again
    return [
        # a flow run without heartbeats becomes Crashed
        AutomationCore(
            name="ostinato: silent runs have crashed",
            description=f"Marks a flow run as Crashed after {HEARTBEAT_TIMEOUT_SECONDS} s without a heartbeat.",
            trigger=_absence_trigger(after="prefect.flow-run.heartbeat", seconds=HEARTBEAT_TIMEOUT_SECONDS),
            actions=[
                ChangeFlowRunState(
                    state=StateType.CRASHED, name="Crashed", message=f"no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS} s"
                )
            ],
        ),
        # a crashed flow run is rescheduled, once all reports of its crash have arrived
        AutomationCore(
            name="ostinato: crashed runs go on",
            description="Reschedules a crashed flow run, which continues after its last committed step.",
            trigger=_absence_trigger(after=CRASHED, seconds=RETRY_DELAY_SECONDS),
            actions=[
                ChangeFlowRunState(
                    state=StateType.SCHEDULED,
                    name="AwaitingRetry",
                    message="the flow run crashed; it continues after its last committed step",
                    force=True,
                )
            ],
        ),
        # a flow run that crashes before its flow can count the attempts becomes Failed
        AutomationCore(
            name="ostinato: runs that keep crashing have failed",
            description=f"Marks a flow run as Failed after {max_crash_reports()} reports of a crash within "
            f"{CRASH_WINDOW_HOURS} h: its process always ends before the flow begins. Failed runs are not restarted.",
            trigger=_flow_run_trigger(
                expect={CRASHED},
                posture=Posture.Reactive,
                threshold=max_crash_reports(),
                within=timedelta(hours=CRASH_WINDOW_HOURS),
            ),
            actions=[
                ChangeFlowRunState(
                    state=StateType.FAILED,
                    name="Failed",
                    message=f"{max_crash_reports()} crashes were reported within {CRASH_WINDOW_HOURS} h: the process "
                    "ends before the flow begins. The worker's log says why; when the cause is fixed, press Retry",
                    force=True,
                )
            ],
        ),
    ]


def max_crash_reports() -> int:
    """Returns the number of crash reports after which a flow run fails. Raises ConfigError."""
    return REPORTS_PER_CRASH * max_attempts()


async def save_automations(client: PrefectClient) -> None:
    """Creates the automations on the server or updates them. Whether one is enabled in the UI is left unchanged."""
    for automation in automations():
        existing = await client.read_automations_by_name(automation.name)
        if not existing:
            await client.create_automation(automation)
        elif _body(existing[0]) != _body(automation):
            updated = automation.model_copy(update={"enabled": existing[0].enabled})
            await client.update_automation(existing[0].id, updated)


def _body(automation: AutomationCore) -> dict[str, object]:
    """The fields that we set, for a comparison with those on the server."""
    fields = {"name", "description", "trigger", "actions"}
    return automation.model_dump(mode="json", include=fields, exclude={"trigger": {"id"}})


def _absence_trigger(*, after: str, seconds: int) -> EventTrigger:
    """Fires if a flow run sends no event for `seconds` after the event `after`."""
    return _flow_run_trigger(
        after={after}, expect={ANY_EVENT}, posture=Posture.Proactive, threshold=1, within=timedelta(seconds=seconds)
    )


def _flow_run_trigger(**conditions: Any) -> EventTrigger:
    """A trigger that watches each flow run with our tag separately."""
    return EventTrigger(
        match=ResourceSpecification({"prefect.resource.id": ANY_EVENT}),
        match_related=ResourceSpecification(
            {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
        ),
        for_each={"prefect.resource.id"},
        **conditions,
    )
