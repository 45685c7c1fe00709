"""Tables and Markdown on a flow run's page. They are a view: a run whose server does not answer goes on without."""

from __future__ import annotations

import logging
from typing import Any

import httpx
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

log = logging.getLogger(__name__)


async def put_markdown(key: str, markdown: str, *, description: str = "") -> None:
    """Shows Markdown on the page of the flow run; `key` is lower case with hyphens."""
    try:
        await acreate_markdown_artifact(key=key, markdown=markdown, description=description or None)
    except httpx.HTTPError as error:
        log.warning("the page %s is not in Prefect: %s", key, error)


async def put_table(key: str, rows: list[dict[str, Any]], *, description: str = "") -> None:
    """Shows a table, one dict per row, on the page of the flow run."""
    try:
        await acreate_table_artifact(key=key, table=rows, description=description or None)
    except httpx.HTTPError as error:
        log.warning("the table %s is not in Prefect: %s", key, error)
