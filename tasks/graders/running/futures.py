"""A callback for asyncio futures whose failure nothing waits for."""

from __future__ import annotations

import asyncio
from typing import Any


def retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Read the exception of a finished future, so that asyncio does not print that it was never retrieved."""
    if not future.cancelled():
        future.exception()
