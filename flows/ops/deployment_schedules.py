"""Keeps what people changed in the Prefect UI when deployments are updated: switches, schedules and their parameters.

prefect.yaml only says how a schedule begins. `prefect deploy` alone would reset every switch, and delete the schedules
that a person added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse


async def read_deployments(client: PrefectClient, names: Sequence[str]) -> list[DeploymentResponse]:
    """Returns the deployments with these names as they are on the server."""
    return await client.read_deployments(
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=list(names)))
    )


async def restore_choices(client: PrefectClient, before: Iterable[DeploymentResponse]) -> None:
    """Restores people's choices in deployments that were updated: paused or not, the state and parameters of the
    schedules, and the schedules that a person added. Those have no slug."""
    for old in before:
        new = await client.read_deployment(old.id)
        # the switch of the deployment
        if new.paused != old.paused:
            await (client.pause_deployment(new.id) if old.paused else client.resume_deployment(new.id))

        # schedules of prefect.yaml are recognised by their slug
        new_schedules = {schedule.slug: schedule for schedule in new.schedules if schedule.slug}
        for schedule in old.schedules:
            if schedule.slug in new_schedules:
                await _restore_schedule(client, new, new_schedules[schedule.slug], schedule)

        # schedules without a slug were added by a person, and deleted by the update
        present = [schedule.schedule for schedule in new.schedules]
        added = [schedule for schedule in old.schedules if not schedule.slug]
        deleted = [schedule for schedule in added if schedule.schedule not in present]
        if deleted:
            fields = {"schedule", "active", "parameters", "max_scheduled_runs"}
            body = [schedule.model_dump(mode="json", include=fields) for schedule in deleted]
            await client.request("POST", "/deployments/{id}/schedules", path_params={"id": new.id}, json=body)


async def _restore_schedule(
    client: PrefectClient, deployment: DeploymentResponse, new: DeploymentSchedule, old: DeploymentSchedule
) -> None:
    changes: dict[str, Any] = {}
    if new.active != old.active:
        changes["active"] = old.active
    # a schedule without parameters of its own keeps those of prefect.yaml
    if old.parameters and new.parameters != old.parameters:
        changes["parameters"] = old.parameters
    if changes:
        path = {"id": deployment.id, "schedule_id": new.id}
        await client.request("PATCH", "/deployments/{id}/schedules/{schedule_id}", path_params=path, json=changes)
