"""The share of the connections' throughput that transfers of many files use, on a virtual clock.

The server is simulated: a request takes its latency, and its bytes at the rate of one connection. Reading and hashing
take no time. Sizes and rates are a thousandth of the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from storage.store.artifacts import FILES_AT_ONCE
from storage.store.backends import s3_transfer
from storage.store.backends.s3_transfer import CONNECTIONS, PART_BYTES, Transfer
from storage.store.retry import RetryPolicy

PART = PART_BYTES // 1024
FILES, PARTS = 40, 60
"""A checkpoint of 20 ranks, two files each."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not sleep: when nothing can run, its clock is set to the time of the next timer."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Body:
    """The body of a reply to `get_object`."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def __aenter__(self) -> Body:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def read(self) -> bytes:
        return self.data


class SimulatedS3:
    """Answers the requests that a Transfer makes."""

    def __init__(self, rate: float, latency: float) -> None:
        self.rate, self.latency = rate, latency
        self.open, self.most_open = 0, 0

    async def _call_s3(self, method: str, **arguments: Any) -> dict[str, Any]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        reply: dict[str, Any] = {"ContentLength": PARTS * PART, "ETag": "e", "UploadId": "u"}
        if method == "get_object":
            first, last = arguments["Range"].removeprefix("bytes=").split("-")
            reply["Body"] = Body(bytes(int(last) + 1 - int(first)))
        size = len(arguments.get("Body", b"")) + (len(reply["Body"].data) if "Body" in reply else 0)
        await asyncio.sleep(self.latency + size / self.rate)
        self.open -= 1
        return reply


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def seconds_of(
    server: SimulatedS3, transfer_file: Callable[[Transfer, int], Any], monkeypatch: pytest.MonkeyPatch
) -> float:
    """The virtual seconds in which all files are transferred, FILES_AT_ONCE at a time."""
    monkeypatch.setattr(s3_transfer, "_slots", WeakKeyDictionary())
    monkeypatch.setattr(s3_transfer.asyncio, "to_thread", inline)
    fs: Any = server
    transfer = Transfer(fs, "b", "s3://b", PART, RetryPolicy())
    waiting = iter(range(FILES))

    async def one_thread() -> None:
        for number in waiting:
            await transfer_file(transfer, number)

    async def all_files() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(one_thread() for _ in range(FILES_AT_ONCE)))
        return loop.time() - began

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(all_files())


@pytest.mark.parametrize("direction", ["upload", "download"])
@pytest.mark.parametrize(("megabytes_per_second", "latency"), [(10, 0.030), (90, 0.005)])
def test_nine_tenths_of_the_connections_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str, megabytes_per_second: float, latency: float
) -> None:
    rate = megabytes_per_second * 1e6 / 1024
    server = SimulatedS3(rate, latency)
    (tmp_path / "file").write_bytes(bytes(PARTS * PART))

    def transfer_file(transfer: Transfer, number: int) -> Any:
        if direction == "upload":
            return transfer.upload(f"key{number}", tmp_path / "file", False)
        return transfer.download(f"key{number}", tmp_path / f"back{number}")

    seconds = seconds_of(server, transfer_file, monkeypatch)
    assert FILES * PARTS * PART / (seconds * CONNECTIONS * rate) >= 0.9
    # a file whose parts wait makes at most one request beside them
    assert server.most_open <= CONNECTIONS + FILES_AT_ONCE
