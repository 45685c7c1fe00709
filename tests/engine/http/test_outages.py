"""Tests of the log of a server that does not answer."""

from __future__ import annotations

import httpx
import pytest

from engine.http.transport import OutageLog

URL = "http://engine:8777"
AWAY = f"the engine at {URL} does not answer; trying again for up to 300 s"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outages(clock: Clock) -> OutageLog:
    return OutageLog(URL, 300, clock=clock)


def test_an_outage_is_logged_at_its_start_and_at_its_end(
    outages: OutageLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    outages.record_answer()
    for clock.now in (10.0, 11.0, 15.0):
        outages.record_failure(httpx.ConnectError("refused"))
    clock.now = 22.4
    outages.record_answer()
    outages.record_answer()
    assert caplog.messages == [AWAY, f"the engine at {URL} answers again, after 12 s"]
    clock.now = 30.0
    outages.record_failure(httpx.ReadTimeout("slow"))
    assert caplog.messages[2:] == [AWAY]


def test_one_closed_connection_is_no_outage(
    outages: OutageLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    outages.record_failure(httpx.RemoteProtocolError("closed"))
    outages.record_answer()
    assert caplog.messages == []
    for clock.now in (50.0, 51.0):
        outages.record_failure(httpx.RemoteProtocolError("closed"))
    clock.now = 53.0
    outages.record_answer()
    assert caplog.messages == [AWAY, f"the engine at {URL} answers again, after 3 s"]
