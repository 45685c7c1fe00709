"""Routes that show the HTML reports of runs in a browser. The address proves that the reader may see the report
(engine.http.report_links)."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException
from starlette.responses import HTMLResponse

from engine.http.report_links import PREFIX, is_proof
from engine.http.service import EngineService
from storage.errors import InvalidKey, ObjectNotFound
from storage.store import keys

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"
"""Content security policy of a report. A report shows text of models, which is escaped; the policy also forbids that
anything in it runs or loads."""


def report_routes(service: EngineService) -> APIRouter:
    """Returns the route with one page per run. A wrong proof gives 404, as a run without a report does."""
    router = APIRouter()

    @router.get(f"{PREFIX}{{run:path}}", include_in_schema=False)
    def report(run: str, proof: str = "") -> HTMLResponse:
        # A wrong proof and a missing report give the same response, so that no one can find out which runs exist.
        if is_proof(proof, service.store_id, run):
            try:
                page = service.store.get(keys.report(run))
                return HTMLResponse(page, headers={"content-security-policy": POLICY, "referrer-policy": "no-referrer"})
            except (ObjectNotFound, InvalidKey):
                pass
        raise HTTPException(404, "there is no such report; ask for the address in the run's page")

    return router
