"""What the route modules of the engine server share: parameter types, documented responses, and the router of /v1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query
from fastapi.security import HTTPBearer

from engine.errors import BadSpec
from engine.http import wire
from engine.http.bodies import MAX_WAIT_SECONDS, REQUEST_HEADER, STORE_HEADER, VERSION, VERSION_HEADER, CallStatus
from engine.http.errors import STATUSES
from engine.http.service import EngineService

ARROW = {  # documentation of a body or response that is an Arrow stream
    wire.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}
}
Responses = dict[int | str, dict[str, Any]]
_WAIT = Query(ge=0, le=MAX_WAIT_SECONDS, description="Longest wait for the result in seconds; then 202.")
Wait = Annotated[float, _WAIT]
RequestId = Annotated[
    str | None,
    Header(alias=REQUEST_HEADER, pattern="^[0-9a-f]{32}$", description="Id of the call; the same on retries."),
]
CallId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


def v1_router(service: EngineService) -> APIRouter:
    """Returns a router under /v1, which checks the interface version and the store that the client names."""

    def check_headers(
        version: Annotated[str | None, Header(alias=VERSION_HEADER)] = None,
        store: Annotated[str | None, Header(alias=STORE_HEADER)] = None,
    ) -> None:
        if version is not None and version != str(VERSION):
            raise BadSpec(f"the client has version {version[:20]!r} of the interface, the server {VERSION}: upgrade")
        if store is not None and store != service.store_id:
            raise BadSpec(
                f"the client works on store {store[:40]!r}, this engine on {service.store_id} ({service.store.url}); "
                "give both the same storage url"
            )

    return APIRouter(
        prefix="/v1", tags=["engine"], dependencies=[Depends(check_headers), Depends(HTTPBearer(auto_error=False))]
    )


def error_responses(model: Any, statuses: Iterable[int]) -> Responses:
    """Returns the documentation of error responses with these statuses."""
    return {status: {"model": model, "description": STATUSES[status]} for status in statuses}


def not_finished() -> Responses:
    """Returns the documentation of the response to a call that is not finished."""
    return {202: {"model": CallStatus, "description": "The call is not finished: poll the address in Location."}}

