"""What the sections of the page share: settings, store, Prefect's client, templates and the error that users see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlencode

import yaml
from fastapi import Request, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from starlette.responses import HTMLResponse

from flows.page.security import Sessions
from storage.store import keys
from storage.store.objects import ObjectStore, open_store
from tasks.evaluation.model_comparison import score_changes
from tasks.reports.html_report import text_for_page

FOLDER = Path(__file__).parent
CLIENT_SECONDS = 15.0
"""Seconds that a call of Prefect may take."""


@dataclass(frozen=True)
class PageSettings:
    """What the page shows and where it sends its calls."""

    storage: str
    """Url of the store."""
    server: str
    """Url of the Prefect API, which ends with /api."""
    engine: str = ""
    """Url of the engine server. Empty: the page has no chat, and runs start with the engine of their config."""
    engine_token: str | None = field(default=None, repr=False)
    """Bearer token of the engine."""
    engine_token_file: str = ""
    """File with the engine's token, which the pages name in place of the token. Empty: $OSTINATO_ENGINE_TOKEN."""
    token: str | None = field(default=None, repr=False)
    """Token of this page. None: only loopback names are answered, without a login."""


class PageError(Exception):
    """An error that the user can mend. Shown as an error page, or in place of the part that was asked for."""

    def __init__(self, what: str, what_to_do: str = "", status: int = 400) -> None:
        super().__init__(what)
        self.what, self.what_to_do, self.status = what, what_to_do, status


class Page:
    """What the sections share: settings, store, Prefect's client and templates."""

    def __init__(self, settings: PageSettings, sections: Mapping[str, str]) -> None:
        """`sections`: title -> path, for the navigation."""
        self.settings = settings
        self.store: ObjectStore = open_store(settings.storage)
        self.sessions = Sessions(settings.token)
        loader = FileSystemLoader(FOLDER / "templates")
        self.templates = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        # for all text of models and users
        self.templates.filters["text_for_page"] = text_for_page
        # an ISO time without its seconds
        self.templates.filters["moment"] = lambda iso: (iso or "–")[:16].replace("T", " ")
        self.templates.filters.update(score_rows=score_changes, short=keys.with_short_digest)
        self.templates.globals.update(csrf=self.sessions.csrf, sections=sections, page=self)

    @property
    def prefect_url(self) -> str:
        """Address of Prefect's UI."""
        return self.settings.server.rstrip("/").removesuffix("/api")

    @contextmanager
    def prefect(self) -> Iterator[SyncPrefectClient]:
        """Yields a client of the Prefect API. A person waits for its answer, so it asks at most twice."""
        settings = {PREFECT_API_URL: self.settings.server, PREFECT_CLIENT_MAX_RETRIES: 1}
        timeout = {"timeout": CLIENT_SECONDS}
        with temporary_settings(settings), get_client(sync_client=True, httpx_settings=timeout) as client:
            yield client

    def render(self, request: Request, template: str, *, status: int = 200, **values: object) -> HTMLResponse:
        """Renders a template of this package."""
        text = self.templates.get_template(template).render(request=request, **values)
        return HTMLResponse(text, status_code=status)

    def error(self, request: Request, status: int, what: str, what_to_do: str = "") -> Response:
        """Renders the error page, or only its text where htmx asked for a part of a page."""
        is_part = "hx-request" in request.headers
        if status == HTTPStatus.UNAUTHORIZED and not is_part:
            path = request.url.path if request.method == "GET" else "/"
            return self.render(request, "login.html", status=status, what="", next=path)
        template = "error_part.html" if is_part else "error.html"
        return self.render(request, template, status=status, what=what, what_to_do=what_to_do, code=status)


def start_link(training: str, **settings: object) -> str:
    """Address of the start form with this training and these settings, by dotted key."""
    typed = {"training": training}
    for name, value in settings.items():
        text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
        # PyYAML marks the end of a single text
        typed[name.replace("__", ".")] = text.removesuffix("...\n").strip()
    return "/start?" + urlencode(typed)
