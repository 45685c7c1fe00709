"""`create_app`: the FastAPI app of the page, with its sections, its login and its error page.

To add a section: write `flows/page/NAME.py` with `router(page: Page) -> APIRouter`, templates that extend base.html,
and a line in SECTIONS. Routes are plain functions, which FastAPI runs in threads, so that calls of the store and of
Prefect do not block the others; a route that streams is `async` and uses `asyncio.to_thread`. GET changes nothing. A
POST finds its form in `request.state.form`; the guard has checked its token, which the macro `form` adds. An error that
the user can mend is a PageError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import httpx
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prefect.exceptions import ObjectNotFound as NoSuchFlowRun
from prefect.exceptions import PrefectException
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse
from starlette.staticfiles import StaticFiles

from engine.errors import EngineError
from flows.configs.overrides import ConfigError
from flows.page import chat, datasets, models, runs, start
from flows.page.security import Guard
from flows.page.shared import FOLDER, Page, PageError, PageSettings
from storage.errors import InvalidKey, ObjectNotFound, StorageError

logger = logging.getLogger("ostinato.page")

SECTIONS: dict[str, tuple[str, Callable[[Page], APIRouter]]] = {
    "Runs": ("/runs", runs.router),
    "Start": ("/start", start.router),
    "Models": ("/models", models.router),
    "Datasets": ("/datasets", datasets.router),
    "Chat": ("/chat", chat.router),
}
"""Title -> (path, router) of each section, in the order of the navigation."""


def create_app(settings: PageSettings) -> FastAPI:
    """Returns the app of the page. Contacts neither the store nor Prefect."""
    page = Page(settings, {title: path for title, (path, _) in SECTIONS.items()})
    app = FastAPI(title="Ostinato", openapi_url=None)
    app.state.page = page
    app.mount("/static", StaticFiles(directory=FOLDER / "static"), name="static")
    app.include_router(_base_routes(page))
    for _, router in SECTIONS.values():
        app.include_router(router(page))
    app.add_middleware(Guard, sessions=page.sessions, refuse=page.error)
    _add_error_handlers(app, page)
    return app


def _base_routes(page: Page) -> APIRouter:
    router = APIRouter()

    @router.get("/")
    def root() -> Response:
        return RedirectResponse("/runs")

    @router.get("/health")
    def health() -> dict[str, str]:
        """Answers as long as the process runs."""
        return {"status": "ok"}

    @router.post("/login")
    def login(request: Request) -> Response:
        """Begins a session if the token is right."""
        form = request.state.form
        path = form.get("next", "/")
        if not page.sessions.is_token(form.get("token")):
            return page.render(request, "login.html", status=401, what="This is not the token of this page.", next=path)
        # a path of this page only, so that a link cannot lead elsewhere after the login
        is_local = path.startswith("/") and not path.startswith(("//", "/\\"))
        response = RedirectResponse(path if is_local else "/", status_code=303)
        page.sessions.set_cookie(request, response.headers)
        return response

    return router


def _add_error_handlers(app: FastAPI, page: Page) -> None:
    """Errors become one page in plain words. Their texts say what was given and what to do."""

    def on_page_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, PageError)
        return page.error(request, error.status, error.what, error.what_to_do)

    def on_expected(request: Request, error: Exception) -> Response:
        is_missing = isinstance(error, ObjectNotFound | InvalidKey)
        return page.error(request, 404 if is_missing else 409, str(error))

    def on_prefect(request: Request, error: Exception) -> Response:
        if isinstance(error, NoSuchFlowRun):
            return page.error(request, 404, "Prefect has no such flow run: it was deleted.", "Choose one under Runs.")
        what = f"The Prefect server at {page.settings.server} did not answer as expected: {error}"
        return page.error(request, 502, what, "Look whether it runs ('ostinato up --status'), and reload the page.")

    def on_http(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return page.error(request, 422, "A value in the address is not valid.", "Use the links at the top.")
        what = "There is no such page." if error.status_code == 404 else f"The request was refused: {error.detail}."
        return page.error(request, error.status_code, what, "Use the links at the top.")

    def on_other(request: Request, error: Exception) -> Response:
        logger.exception("%s %s failed", request.method, request.url.path, exc_info=error)
        what = f"The page failed with {type(error).__name__}. This is a defect of Ostinato."
        return page.error(request, 500, what, "The log of the page's process has the details.")

    app.add_exception_handler(PageError, on_page_error)
    for expected in (StorageError, EngineError, ConfigError):
        app.add_exception_handler(expected, on_expected)
    for prefect_error in (PrefectException, httpx.HTTPError):
        app.add_exception_handler(prefect_error, on_prefect)
    for of_address in (HTTPException, RequestValidationError):
        app.add_exception_handler(of_address, on_http)
    app.add_exception_handler(Exception, on_other)
