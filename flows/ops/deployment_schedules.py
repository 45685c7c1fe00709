"""What people switched in the UI outlives a deployment: prefect.yaml says how a schedule begins, people how it goes on.

`prefect deploy` would put every switch back, and drop the schedules that a person added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse


async def remember(client: PrefectClient, names: Sequence[str]) -> list[DeploymentResponse]:
    """The deployments of these names, as they are."""
    return await client.read_deployments(
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=list(names)))
    )


async def restore(client: PrefectClient, before: Iterable[DeploymentResponse]) -> None:
    """Puts back what people chose: whether a deployment is paused, whether its schedules run and with which parameters,
    and the schedules that they added, which have no slug."""
    for old in before:
        new = await client.read_deployment(old.id)
        if new.paused != old.paused:
            await (client.pause_deployment(new.id) if old.paused else client.resume_deployment(new.id))
        slugs = {schedule.slug: schedule for schedule in new.schedules if schedule.slug}
        for schedule in old.schedules:
            if schedule.slug in slugs:
                await _put_back(client, new, slugs[schedule.slug], schedule)
        added = [schedule for schedule in old.schedules if not schedule.slug]
        lost = [one for one in added if one.schedule not in [other.schedule for other in new.schedules]]
        if lost:
            keep = {"schedule", "active", "parameters", "max_scheduled_runs"}
            body = [one.model_dump(mode="json", include=keep) for one in lost]
            await client.request("POST", "/deployments/{id}/schedules", path_params={"id": new.id}, json=body)


async def _put_back(
    client: PrefectClient, deployment: DeploymentResponse, now: DeploymentSchedule, old: DeploymentSchedule
) -> None:
    body: dict[str, Any] = {} if now.active == old.active else {"active": old.active}
    if old.parameters and now.parameters != old.parameters:
        body["parameters"] = old.parameters
    if body:
        where = {"id": deployment.id, "schedule_id": now.id}
        await client.request("PATCH", "/deployments/{id}/schedules/{schedule_id}", path_params=where, json=body)
