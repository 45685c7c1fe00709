"""The outages of an engine server: when one began, and a line in the log at its begin and its end, however many calls
wait."""

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
        self._last_failure = 0.0
        self._is_logged = False

    def since(self) -> float | None:
        """When the present outage began, by the clock; None without one.

        A failure that is older than the patience says nothing about now.
        """
        with self._lock:
            is_recent = self._clock() - self._last_failure <= self._patience_seconds
            return self._away_since if is_recent else None

    def record_failure(self, error: Exception, *, since: float | None = None) -> None:
        """Records a request without an answer of the engine. Logs the first one of an outage.

        `since`: when the caller last had an answer, or began to wait for one. None: now.
        """
        with self._lock:
            is_first = self._away_since is None
            self._last_failure = self._clock()
            if self._away_since is None:
                self._away_since = self._last_failure if since is None else since
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
