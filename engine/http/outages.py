"""Logs that an engine server stopped answering, and that it answers again: once each, however many calls wait."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import httpx

logger = logging.getLogger(__name__)

RESET_ERRORS = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
"""Errors of one connection. A single one may be an idle connection that the server has closed."""


class OutageLog:
    """The outages of one server, as its client sees them. It may be used from several threads."""

    def __init__(self, url: str, patience_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`patience_seconds`: how long a call tries again before it fails."""
        self._url, self._patience_seconds, self._clock = url, patience_seconds, clock
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._is_logged = False

    def record_failure(self, error: Exception) -> None:
        """Records a request without an answer of the engine. Logs the first one of an outage."""
        with self._lock:
            is_first = self._away_since is None
            if self._away_since is None:
                self._away_since = self._clock()
            if self._is_logged or (is_first and isinstance(error, RESET_ERRORS)):
                return
            self._is_logged = True
        logger.warning(
            "the engine at %s does not answer; trying again for up to %.0f s", self._url, self._patience_seconds
        )

    def record_answer(self) -> None:
        """Records an answer of the engine. Logs the end of an outage that was logged."""
        with self._lock:
            since, was_logged = self._away_since, self._is_logged
            self._away_since, self._is_logged = None, False
            if since is None or not was_logged:
                return
            seconds = self._clock() - since
        logger.warning("the engine at %s answers again, after %.0f s", self._url, seconds)
