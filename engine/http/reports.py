"""The reports of the store's runs, as pages for a browser. Their addresses prove themselves:
engine/http/report_links.py."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException
from starlette.responses import HTMLResponse

from engine.http.report_links import PREFIX, is_proof
from engine.http.service import Service
from storage.errors import InvalidKey, ObjectNotFound
from storage.store import keys

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"
"""A report shows what models wrote: it is escaped, and if it were not, nothing in it would run or load."""


def report_routes(service: Service) -> APIRouter:
    """One page per run; 404 for a wrong proof as for a run without a report."""
    router = APIRouter()

    @router.get(f"{PREFIX}{{run:path}}", include_in_schema=False)
    def report(run: str, proof: str = "") -> HTMLResponse:
        if is_proof(proof, service.store_id, run):
            try:
                page = service.store.get(keys.report(run))
                return HTMLResponse(page, headers={"content-security-policy": POLICY, "referrer-policy": "no-referrer"})
            except (ObjectNotFound, InvalidKey):
                pass
        raise HTTPException(404, "there is no such report; ask for the address in the run's page")

    return router
