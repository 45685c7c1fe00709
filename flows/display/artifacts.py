"""Shows tables and Markdown on the page of a flow run. Errors of the server are logged, and the run continues."""

from __future__ import annotations

import logging
from typing import Any

import httpx
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

log = logging.getLogger(__name__)


async def put_markdown(key: str, markdown: str, *, description: str = "") -> None:
    """Shows Markdown on the page of the flow run. `key` has lower-case letters, digits and hyphens."""
    try:
        await acreate_markdown_artifact(key=key, markdown=markdown, description=description or None)
    except httpx.HTTPError as error:
        log.warning("the Markdown artifact %s was not created in Prefect: %s", key, error)


async def put_table(key: str, rows: list[dict[str, Any]], *, description: str = "") -> None:
    """Shows a table on the page of the flow run, with one dict per row."""
    try:
        await acreate_table_artifact(key=key, table=rows, description=description or None)
    except httpx.HTTPError as error:
        log.warning("the table artifact %s was not created in Prefect: %s", key, error)
