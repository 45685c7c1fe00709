"""A store that behaves like S3 on a virtual clock: real bytes in plain files; modelled latency, limits and SlowDown.

The simulation never sleeps. Each lane (a worker or a thread) has its own clock, and a request advances it by the
modelled time of the request. The limits hold for each second of virtual time. Lanes are simulated one after the other,
and a later lane sees the requests of the earlier ones in each second. So the order decides which lanes are throttled,
but not how many requests are.
"""

from __future__ import annotations

import io
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import BinaryIO, Literal, cast
from uuid import uuid4

from storage.errors import ObjectNotFound, StorageUnavailable
from storage.serialization import FileDigest, digest
from storage.store.backends.protocol import Folder, Leftover, ObjectInfo, PutResult
from storage.store.backends.s3_transfer import CONNECTIONS, PART_BYTES
from storage.store.retry import RetryPolicy

Verb = Literal["GET", "HEAD", "LIST", "PUT", "DELETE"]
READ_AHEAD_BYTES = 1 << 20  # as storage.store.backends.s3
PAGE_KEYS = 1000


@dataclass(frozen=True)
class S3Model:
    """The speed and limits of S3. The latency of a request has a lognormal distribution."""

    p50_seconds: float = 0.030
    p99_seconds: float = 0.100
    reads_per_second: int = 5500
    """Limit on GET, HEAD and LIST requests to one partition. S3 documents it for GET and HEAD."""
    writes_per_second: int = 3500
    """Limit on PUT and DELETE requests to one partition."""
    bytes_per_second: float = 90e6
    """Throughput of one connection."""

    def latency(self, random: Random) -> float:
        sigma = math.log(self.p99_seconds / self.p50_seconds) / 2.3263
        return self.p50_seconds * math.exp(sigma * random.gauss(0.0, 1.0))


@dataclass
class Meter:
    """The number and cost of the requests to the store."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Successful requests by (area, verb)."""
    bytes_read: int = 0
    bytes_written: int = 0
    throttled: int = 0
    """Number of replies 503 SlowDown."""
    backoff_seconds: float = 0.0
    """Seconds of backoff over all lanes."""
    wait_seconds: float = 0.0
    """Seconds of requests and backoff over all lanes."""

    def add(self, other: Meter) -> None:
        self.requests.update(other.requests)
        for name in ("bytes_read", "bytes_written", "throttled", "backoff_seconds", "wait_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Clock:
    """Virtual seconds, with one lane per thread. `settle` joins the lanes at the time of the slowest one."""

    def __init__(self) -> None:
        self.now = 0.0
        """Time of the main lane: the thread that made the clock, which drives the simulation."""
        self._main = threading.get_ident()
        self._lanes: dict[int, float] = {}
        self._lock = threading.Lock()

    def read(self) -> float:
        thread = threading.get_ident()
        return self.now if thread == self._main else self._lanes.get(thread, self.now)

    def advance(self, seconds: float) -> None:
        thread = threading.get_ident()
        with self._lock:
            if thread == self._main:
                self.now += seconds
            else:
                self._lanes[thread] = self._lanes.get(thread, self.now) + seconds

    def settle(self) -> float:
        with self._lock:
            self.now = max([self.now, *self._lanes.values()])
            self._lanes.clear()
        return self.now


class VirtualRetry(RetryPolicy):
    """The retry policy of the store, with delays on the virtual clock."""

    def __init__(self, clock: Clock, meter: Meter) -> None:
        super().__init__()
        object.__setattr__(self, "_clock", clock)
        object.__setattr__(self, "_meter", meter)

    def delay(self, attempt: int) -> float:
        seconds = super().delay(attempt)
        self._clock.advance(seconds)  # type: ignore[attr-defined]
        self._meter.backoff_seconds += seconds  # type: ignore[attr-defined]
        self._meter.wait_seconds += seconds  # type: ignore[attr-defined]
        return 0.0


class SimulatedS3:
    """Implements storage.store.backends.protocol.Backend. Keys of one area (their first segment) share a partition: S3
    splits partitions by load, and the keys of a step are new when it begins."""

    def __init__(
        self, folder: Path, model: S3Model, *, clock: Clock, meter: Meter, seed: int, bytes_scale: Mapping[str, float]
    ) -> None:
        self.url = f"sim://{folder.name}"
        self.folder, self.model, self.clock, self.meter = folder, model, clock, meter
        self._random = Random(seed)
        self._bytes_scale = bytes_scale
        """Modelled bytes per real byte, by the kind of a step's table. The completions of the simulation are short."""
        self._windows: Counter[tuple[str, bool, int]] = Counter()
        """Requests by (area, whether they write, virtual second)."""
        self.trace: list[tuple[Verb, str, int]] | None = None
        """If not None, the successful requests are appended: (verb, key, bytes)."""
        self.quiet = False
        """Whether requests cost nothing, because the simulation itself reads."""
        self._lock = threading.Lock()

    # -- the model -----------------------------------------------------------------------------------------------

    def charge(self, verb: Verb, key: str, size: int = 0) -> None:
        """Charges one request. Raises StorageUnavailable if its partition is above the limit in this second."""
        if self.quiet:
            return
        # the partition and its limit
        area = key.partition("/")[0] or "(all)"
        writes = verb in ("PUT", "DELETE")
        limit = self.model.writes_per_second if writes else self.model.reads_per_second
        # latency, the limit, and the bytes of a request that is not refused
        with self._lock:
            seconds = self.model.latency(self._random)
            window = (area, writes, int(self.clock.read() + seconds))
            self._windows[window] += 1
            refused = self._windows[window] > limit
            if refused:
                self.meter.throttled += 1
            else:
                self.meter.requests[area, verb] += 1
                modelled = int(size * self._scale(key))
                seconds += modelled / self.model.bytes_per_second
                if writes:
                    self.meter.bytes_written += modelled
                else:
                    self.meter.bytes_read += modelled
                if self.trace is not None:
                    self.trace.append((verb, key, size))
            self.meter.wait_seconds += seconds
        self.clock.advance(seconds)
        if refused:
            raise StorageUnavailable(f"503 SlowDown: {verb} {key}")

    def _scale(self, key: str) -> float:
        table = "/steps/" in key and key.endswith(".parquet")
        return self._bytes_scale.get(key.split("/")[-2], 1.0) if table else 1.0

    def busiest(self) -> dict[str, int]:
        """Returns the largest number of requests in one second, by 'area reads' and 'area writes'."""
        most: Counter[str] = Counter()
        for (area, writes, _), count in self._windows.items():
            name = f"{area} {'writes' if writes else 'reads'}"
            most[name] = max(most[name], count)
        return dict(most)

    def forget_windows(self) -> None:
        self._windows.clear()

    # -- Backend -------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        return self.folder / key

    def _read(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError as error:
            self.charge("GET", key)
            raise ObjectNotFound(f"no object {key!r} in {self.url}") from error

    def get(self, key: str) -> bytes:
        data = self._read(key)
        self.charge("GET", key, len(data))
        return data

    def open(self, key: str) -> BinaryIO:
        path = self._path(key)
        self.charge("HEAD", key)
        if not path.is_file():
            raise ObjectNotFound(f"no object {key!r} in {self.url}")
        return cast(BinaryIO, io.BufferedReader(_Ranges(self, key, path), READ_AHEAD_BYTES))

    def exists(self, key: str) -> bool:
        self.charge("HEAD", key)
        return self._path(key).is_file()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        top = self.folder / prefix.rpartition("/")[0]
        listed = []
        for folder, _, names in os.walk(top):
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self.folder).as_posix()
                if key.startswith(prefix):
                    status = path.stat()
                    listed.append(ObjectInfo(key, status.st_size, status.st_mtime))
        # one request for each page of keys
        for _ in range(max(1, -(-len(listed) // PAGE_KEYS))):
            self.charge("LIST", prefix)
        return iter(listed)

    def folder(self, prefix: str) -> Folder:
        below = [path for path in (self.folder / prefix).glob("*")]
        objects = []
        for path in below:
            if path.is_file():
                status = path.stat()
                objects.append(ObjectInfo(f"{prefix}{path.name}", status.st_size, status.st_mtime))
        for _ in range(max(1, -(-len(below) // PAGE_KEYS))):
            self.charge("LIST", prefix)
        return Folder(sorted(path.name for path in below if path.is_dir()), sorted(objects))

    def put(self, key: str, data: bytes) -> None:
        self.charge("PUT", key, len(data))
        self._write(key, data, replace=True)

    def put_file(self, key: str, path: Path, *, move: bool, resume: bool) -> FileDigest:
        # one request for each part; parts are uploaded concurrently
        size = path.stat().st_size
        parts = -(-size // PART_BYTES) if size > PART_BYTES else 1
        began = self.clock.read()
        for _ in range(parts):
            self.charge("PUT", key, size // parts)
        if parts > 1:
            self.clock.advance((began - self.clock.read()) * (1 - 1 / min(parts, CONNECTIONS)))
        # a multipart upload has two more requests, which begin and complete it
        for _ in range(2 if parts > 1 else 0):
            self.charge("PUT", key)
        target = self._path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes()
        target.write_bytes(data)
        if move:
            path.unlink(missing_ok=True)
        return FileDigest(digest(data), len(data))

    def put_if_absent(self, key: str, data: bytes, attempt: str) -> PutResult:
        self.charge("PUT", key, len(data))
        if self._write(key, data, replace=False):
            return PutResult(True, data)
        return PutResult(False, self.get(key))

    def delete(self, key: str) -> None:
        self.charge("DELETE", key)
        self._path(key).unlink(missing_ok=True)

    def download(self, key: str, to: Path) -> FileDigest:
        self.charge("HEAD", key)
        data = self._read(key)
        for start in range(0, max(1, len(data)), PART_BYTES):
            self.charge("GET", key, min(PART_BYTES, len(data) - start))
        to.write_bytes(data)
        return FileDigest(digest(data), len(data))

    def local_path(self, key: str) -> Path | None:
        return None

    def now(self) -> float:
        return time.time()

    def leftovers(self, prefix: str) -> Iterator[Leftover]:
        return iter(())

    def remove_leftover(self, name: str) -> None:
        """Does nothing: there are no leftovers."""

    def _write(self, key: str, data: bytes, *, replace: bool) -> bool:
        """Writes an object atomically. It needs no fsync, because the files do not outlive the simulation."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.folder.with_name(f"{self.folder.name}.tmp") / uuid4().hex
        temporary.parent.mkdir(exist_ok=True)
        temporary.write_bytes(data)
        if replace:
            os.replace(temporary, path)
            return True
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        return True


class _Ranges(io.RawIOBase):
    """A reader that is charged one GET request per range, like that of storage.store.backends.s3."""

    def __init__(self, store: SimulatedS3, key: str, path: Path) -> None:
        self._store, self._key, self._file = store, key, path.open("rb")
        self._size = path.stat().st_size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        self._file.seek(self._position)
        data = self._file.read(len(view))
        if data:
            self._charged(len(data))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def readall(self) -> bytes:
        self._file.seek(self._position)
        data = self._file.read()
        if data:
            self._charged(len(data))
        self._position += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()

    def _charged(self, size: int) -> None:
        policy = VirtualRetry(self._store.clock, self._store.meter)
        for attempt in range(policy.attempts):
            try:
                return self._store.charge("GET", self._key, size)
            except StorageUnavailable:
                if attempt + 1 == policy.attempts:
                    raise
                policy.delay(attempt)
        return None
