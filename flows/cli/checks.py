"""The checks of `ostinato doctor` for versions, storage, engine and Prefect. Each reports what to do about a problem.

Of the environment's values only urls are shown, without user and password.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from engine.errors import EngineError
from engine.specs.engine import EngineSpec, HttpEngineSpec, LocalEngineSpec
from storage.errors import StorageError
from storage.serialization import Frozen
from storage.store.backends.protocol import PutResult
from storage.store.objects import ObjectStore

DISTRIBUTION = "ostinato"
CONCURRENT_WRITERS = 8
"""Writers that write one key at the same time."""
MAX_SKEW_SECONDS = 60.0
"""Largest clock difference without a warning. Garbage collection and leases use limits of hours."""
MIN_FREE_BYTES = 2 << 30
SLOW_PUT_SECONDS = 0.5
HTTP_TIMEOUT_SECONDS = 5.0


class Check(Frozen):
    """The result of one check."""

    area: str
    name: str
    verdict: Literal["ok", "note", "warning", "fail"]
    what: str
    """What was observed."""
    what_to_do: str = ""
    """What to do about a problem. Empty if there is none."""


# -- versions --------------------------------------------------------------------------------------------------


def check_versions() -> Iterator[Check]:
    """Checks the versions of Python and of every package against the requirements of this distribution."""
    try:
        requirements, python = requires(DISTRIBUTION) or [], metadata(DISTRIBUTION)["Requires-Python"]
    except PackageNotFoundError:
        yield Check(
            area="versions", name=DISTRIBUTION, verdict="warning",
            what="is not installed, so its requirements are not known",
            what_to_do="pip install -e . in the checkout",
        )  # fmt: skip
        return
    fits = platform.python_version() in SpecifierSet(python or "")
    if fits:
        yield Check(area="versions", name="python", verdict="ok", what=f"{platform.python_version()} ({python})")
    else:
        yield Check(
            area="versions", name="python", verdict="fail", what=f"{platform.python_version()} ({python})",
            what_to_do=f"use a Python {python}",
        )  # fmt: skip
    # a line per package with a problem, and one for all others
    good: list[str] = []
    for requirement in map(Requirement, requirements):
        optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        problem = _version_problem(requirement, optional=optional)
        if problem is not None:
            yield problem
        elif (installed := _installed_version(requirement.name)) is not None:
            good.append(f"{requirement.name} {installed}")
    yield Check(area="versions", name="packages", verdict="ok", what=", ".join(dict.fromkeys(good)))


def _version_problem(requirement: Requirement, *, optional: bool) -> Check | None:
    """The problem with an installed version, or None. An optional package may be missing."""
    installed = _installed_version(requirement.name)
    remedy = f"pip install '{requirement.name}{requirement.specifier}'"
    if installed is None and optional:
        return None
    if installed is not None and requirement.specifier.contains(installed, prereleases=True):
        return None
    what = "is not installed"
    if installed is not None:
        what = f"{installed} is installed, {requirement.specifier} is required"
    return Check(
        area="versions", name=requirement.name, verdict="warning" if optional else "fail", what=what, what_to_do=remedy
    )


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# -- storage ---------------------------------------------------------------------------------------------------


def _storage_check(name: str, what: str, *, good: bool, what_to_do: str) -> Check:
    """A good result, or a warning with what to do."""
    if good:
        return Check(area="storage", name=name, verdict="ok", what=what)
    return Check(area="storage", name=name, verdict="warning", what=what, what_to_do=what_to_do)


def check_storage(store: ObjectStore) -> Iterator[Check]:
    """Checks writes, exclusive writes, the clock and free space. The test objects under doctor/ are removed."""
    root = store.local_path("x")
    if root is not None and not root.parent.is_dir():
        what = f"{root.parent} does not exist yet; the first run creates it"
        yield Check(area="storage", name="reachable", verdict="note", what=what)
        return
    # each check writes under a prefix of its own, which is removed at the end
    prefix = f"doctor/{uuid4().hex}"
    try:
        yield _check_writable(store, prefix)
        yield _check_put_if_absent(store, f"{prefix}/race")
        yield _check_clock(store)
    except StorageError as error:
        yield Check(
            area="storage", name="writable", verdict="fail", what=str(error),
            what_to_do="check --storage, its permissions and, for S3, the endpoint and credentials in AWS_*",
        )  # fmt: skip
    finally:
        with suppress(StorageError):
            for info in store.list(f"{prefix}/"):
                store.delete(info.key)
    if root is not None:
        yield _check_free_space(root.parent)


def _check_writable(store: ObjectStore, prefix: str) -> Check:
    seconds = []
    for number in range(5):
        data, start = os.urandom(1024), time.perf_counter()
        store.put(f"{prefix}/{number}", data)
        seconds.append(time.perf_counter() - start)
        if store.get(f"{prefix}/{number}") != data:
            what = f"{store.url} returns other bytes than were written"
            return Check(area="storage", name="writable", verdict="fail", what=what, what_to_do="do not use this store")
    median = statistics.median(seconds)
    return _storage_check(
        "writable",
        f"{store.url}: a put of 1 KiB takes {median * 1000:.1f} ms (median of {len(seconds)})",
        good=median < SLOW_PUT_SECONDS,
        what_to_do="each step writes a dozen objects: use a store that is closer to this machine",
    )


def _check_put_if_absent(store: ObjectStore, key: str) -> Check:
    """If several writers write one key at once, exactly one must win, and all must read its bytes."""

    def write(number: int) -> PutResult:
        return store.put_if_absent(key, f"writer {number}".encode())

    with ThreadPoolExecutor(CONCURRENT_WRITERS) as pool:
        puts = list(pool.map(write, range(CONCURRENT_WRITERS)))
    winners = sum(put.won for put in puts)
    contents = {put.data for put in puts} | {store.get(key)}
    if winners == 1 and len(contents) == 1:
        what = f"of {CONCURRENT_WRITERS} concurrent writers of one key, one won, and all read its bytes"
        return Check(area="storage", name="put-if-absent", verdict="ok", what=what)
    return Check(
        area="storage",
        name="put-if-absent",
        verdict="fail",
        what=f"of {CONCURRENT_WRITERS} concurrent writers of one key, {winners} won, and {len(contents)} contents were "
        "read",
        what_to_do="do not use this store: a step could be taken twice. An S3 server must support If-None-Match: *",
    )


def _check_clock(store: ObjectStore) -> Check:
    skew = store.now() - time.time()
    direction = "ahead of" if skew > 0 else "behind"
    return _storage_check(
        "clock",
        f"the store's clock is {abs(skew):.1f} s {direction} this machine's",
        good=abs(skew) < MAX_SKEW_SECONDS,
        what_to_do="synchronise both by NTP: records and garbage collection use these clocks",
    )


def _check_free_space(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    return _storage_check(
        "space",
        f"{free / (1 << 30):.1f} GiB are free",
        good=free >= MIN_FREE_BYTES,
        what_to_do="free some space, or lower checkpoints.keep_last; a full disk stops every run",
    )


# -- engine ----------------------------------------------------------------------------------------------------


def check_engine(spec: EngineSpec, storage_url: str) -> Iterator[Check]:
    """Checks the embedded or served engine of a spec, with a store."""
    if isinstance(spec, HttpEngineSpec):
        yield from _check_served(spec, storage_url)
    else:
        yield _check_embedded(spec)


def _check_embedded(spec: LocalEngineSpec) -> Check:
    try:
        backend = import_module("engine.backends.torch.backend").TorchBackend(spec)
    except ImportError as error:
        return Check(
            area="engine", name="embedded", verdict="note",
            what=f"this machine can start runs, but has no engine: {error}",
            what_to_do="pip install 'ostinato[torch]', or use a served engine: --engine URL",
        )  # fmt: skip
    numerics, memory = backend.numerics(), backend.memory_bytes()
    what = (
        f"torch {numerics.versions.get('torch')} on {numerics.device}, {numerics.compute_dtype}, threads: "
        f"{numerics.threads}, {memory / (1 << 30):.1f} GiB for models"
    )
    return Check(area="engine", name="embedded", verdict="ok", what=what)


def _check_served(spec: HttpEngineSpec, storage_url: str) -> Iterator[Check]:
    # does the process answer, and does it accept calls?
    url = url_without_credentials(spec.url)
    remedy = f"start it: ostinato engine serve --storage {storage_url}; or check the address and the network"
    for path, meaning in (("health", "the process answers"), ("ready", "it accepts calls")):
        status = http_status(f"{spec.url}/{path}")
        if status != 200:
            yield Check(area="engine", name=path, verdict="fail", what=f"{url}: {_status(status)}", what_to_do=remedy)
            return
        yield Check(area="engine", name=path, verdict="ok", what=f"{url}: {meaning}")

    # do the token and the store agree?
    try:
        info = asyncio.run(_engine_info(spec, storage_url))
    except (EngineError, StorageError) as error:
        yield Check(
            area="engine", name="calls", verdict="fail", what=str(error),
            what_to_do=f"use the same store for both, and put the engine's token into ${spec.token_env}",
        )  # fmt: skip
        return
    numerics = info.numerics
    what = f"the same store; {numerics.backend} on {numerics.device}, {numerics.compute_dtype}"
    what += f", {info.memory_used_bytes / (1 << 30):.1f} of {info.memory_bytes / (1 << 30):.1f} GiB used"
    yield Check(area="engine", name="calls", verdict="ok", what=what)


async def _engine_info(spec: HttpEngineSpec, storage_url: str) -> Any:
    timeouts = {"patience_seconds": HTTP_TIMEOUT_SECONDS, "timeout_seconds": HTTP_TIMEOUT_SECONDS}
    client_spec = spec.model_copy(update=timeouts)
    client = import_module("engine.http.client").EngineClient(storage_url, client_spec)
    try:
        return await client.info()
    finally:
        await client.close()


# -- Prefect ---------------------------------------------------------------------------------------------------


def check_prefect() -> Check:
    """Checks the Prefect server that flows report to."""
    api = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    if not api:
        return _prefect_check("ok", "none configured (PREFECT_API_URL): ostinato run starts its own")
    url = url_without_credentials(api)
    status = http_status(f"{api}/health")
    if status in (401, 403):
        return _prefect_check("warning", f"{url} requires a key", "check PREFECT_API_KEY")
    if status != 200:
        remedy = "start it (prefect server start), or unset PREFECT_API_URL: ostinato run starts its own"
        return _prefect_check("fail", f"{url}: {_status(status)}", remedy)
    client_version, server_version = _installed_version("prefect") or "none", _server_version(api)
    if server_version is None or server_version == client_version:
        return _prefect_check("ok", f"{url} answers; version {server_version or 'unknown'}")
    what = f"{url} is version {server_version}, this machine has {client_version}"
    return _prefect_check("warning", what, "use one version: a server must be at least as new as its clients")


def _prefect_check(verdict: Literal["ok", "warning", "fail"], what: str, what_to_do: str = "") -> Check:
    return Check(area="prefect", name="server", verdict=verdict, what=what, what_to_do=what_to_do)


def _server_version(api: str) -> str | None:
    try:
        with _http_client(api) as client:
            response = client.get(f"{api}/admin/version")
            if response.status_code != 200:
                return None
            return str(response.json())
    except (httpx.HTTPError, ValueError):
        return None


# -- HTTP ------------------------------------------------------------------------------------------------------


def http_status(url: str) -> int | str:
    """Returns the status of a GET, or the reason why there is none."""
    try:
        with _http_client(url) as client:
            return client.get(url).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"does not answer ({type(error).__name__})"


def _status(status: int | str) -> str:
    if isinstance(status, str):
        return status
    return f"answers {status}"


def _http_client(url: str) -> httpx.Client:
    """A client that does not use the environment's proxies for this machine, which they cannot reach."""
    is_local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    return httpx.Client(timeout=HTTP_TIMEOUT_SECONDS, trust_env=not is_local)


def url_without_credentials(url: str) -> str:
    """Returns the url without user and password."""
    return re.sub(r"//[^/@]*@", "//", url)
