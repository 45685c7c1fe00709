"""The checks behind `ostinato doctor`: each says what it found, and what to do where that is not well.

No value of the environment is shown but urls, and those without what stands before an @ in them.
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
from storage.store.objects import ObjectStore

DISTRIBUTION = "ostinato"
RACERS = 8
"""Writers that race for one key."""
SKEW_SECONDS = 60.0
"""Garbage collection and leases compare the store's clock with hours; a minute is worth a look."""
LOW_SPACE = 2 << 30
SLOW_PUT_SECONDS = 0.5
HTTP_SECONDS = 5.0

Verdict = Literal["ok", "note", "warning", "fail"]


class Check(Frozen):
    """One verdict."""

    area: str
    name: str
    verdict: Verdict
    what: str
    what_to_do: str = ""


# -- versions --------------------------------------------------------------------------------------------------


def check_versions() -> Iterator[Check]:
    """Python and every package against what this distribution asks for."""
    try:
        wanted, python = requires(DISTRIBUTION) or [], metadata(DISTRIBUTION)["Requires-Python"]
    except PackageNotFoundError:
        yield Check(
            area="versions", name=DISTRIBUTION, verdict="warning", what="is not installed, so its ranges are not known",
            what_to_do="pip install -e . in the checkout",
        )  # fmt: skip
        return
    fits = platform.python_version() in SpecifierSet(python or "")
    yield Check(
        area="versions",
        name="python",
        verdict="ok" if fits else "fail",
        what=f"{platform.python_version()} ({python})",
        what_to_do="" if fits else f"use a Python {python}",
    )
    fine: list[str] = []
    for requirement in map(Requirement, wanted):
        optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        problem = _version_problem(requirement, optional=optional)
        if problem is not None:
            yield problem
        elif (have := _installed(requirement.name)) is not None:
            fine.append(f"{requirement.name} {have}")
    yield Check(area="versions", name="packages", verdict="ok", what=", ".join(dict.fromkeys(fine)))


def _version_problem(requirement: Requirement, *, optional: bool) -> Check | None:
    have = _installed(requirement.name)
    said = {"area": "versions", "name": requirement.name, "what_to_do": f"pip install '{_plain(requirement)}'"}
    if have is None:
        return None if optional else Check(verdict="fail", what="is not installed", **said)
    if requirement.specifier.contains(have, prereleases=True):
        return None
    what = f"{have} is installed, {requirement.specifier} is asked for"
    return Check(verdict="warning" if optional else "fail", what=what, **said)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


# -- storage ---------------------------------------------------------------------------------------------------


def check_storage(store: ObjectStore) -> Iterator[Check]:
    """Whether the store does what everything rests on. Small objects are written under doctor/, and removed."""
    root = store.local_path("x")
    if root is not None and not root.parent.is_dir():
        what = f"{root.parent} is not there yet; the first run makes it"
        yield Check(area="storage", name="reachable", verdict="note", what=what)
        return
    prefix = f"doctor/{uuid4().hex}"
    try:
        yield _writable(store, prefix)
        yield _exclusive(store, f"{prefix}/race")
        yield _clock(store)
    except StorageError as error:
        yield Check(
            area="storage", name="writable", verdict="fail", what=str(error),
            what_to_do="check --storage, the permissions there and, for S3, the endpoint and the credentials of AWS_*",
        )  # fmt: skip
    finally:
        with suppress(StorageError):
            for info in store.list(f"{prefix}/"):
                store.delete(info.key)
    if root is not None:
        yield _space(root.parent)


def _writable(store: ObjectStore, prefix: str) -> Check:
    seconds = []
    for number in range(5):
        data, start = os.urandom(1024), time.perf_counter()
        store.put(f"{prefix}/{number}", data)
        seconds.append(time.perf_counter() - start)
        if store.get(f"{prefix}/{number}") != data:
            what = f"{store.url} gives back other bytes than it took"
            return Check(
                area="storage", name="writable", verdict="fail", what=what, what_to_do="do not use this store"
            )
    middle = statistics.median(seconds)
    return Check(
        area="storage",
        name="writable",
        verdict="ok" if middle < SLOW_PUT_SECONDS else "warning",
        what=f"{store.url}: a put of 1 KiB takes {middle * 1000:.1f} ms (median of {len(seconds)})",
        what_to_do="" if middle < SLOW_PUT_SECONDS else "each step writes a dozen objects: use a store nearer to here",
    )


def _exclusive(store: ObjectStore, key: str) -> Check:
    """Of several writers at once, one must win, and all must see its bytes: every commit rests on it."""
    with ThreadPoolExecutor(RACERS) as pool:
        puts = list(pool.map(lambda number: store.put_if_absent(key, f"writer {number}".encode()), range(RACERS)))
    winners, seen = sum(put.won for put in puts), {put.data for put in puts} | {store.get(key)}
    if winners == 1 and len(seen) == 1:
        what = f"of {RACERS} writers of one key at once, one won, and all saw its bytes"
        return Check(area="storage", name="put-if-absent", verdict="ok", what=what)
    return Check(
        area="storage",
        name="put-if-absent",
        verdict="fail",
        what=f"of {RACERS} writers of one key at once, {winners} won, and {len(seen)} contents were seen",
        what_to_do="do not use this store: steps could be taken twice. S3 servers must honour If-None-Match: *",
    )


def _clock(store: ObjectStore) -> Check:
    skew = store.now() - time.time()
    fine = abs(skew) < SKEW_SECONDS
    return Check(
        area="storage",
        name="clock",
        verdict="ok" if fine else "warning",
        what=f"the store's clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's",
        what_to_do="" if fine else "set both by NTP: times in records, and ages of garbage, are told by them",
    )


def _space(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    fine = free >= LOW_SPACE
    return Check(
        area="storage",
        name="space",
        verdict="ok" if fine else "warning",
        what=f"{free / (1 << 30):.1f} GiB are free",
        what_to_do="" if fine else "make room, or lower checkpoints.keep_last; a full disk stops every run",
    )


# -- engine ----------------------------------------------------------------------------------------------------


def check_engine(spec: EngineSpec, storage_url: str) -> Iterator[Check]:
    """The engine of that spec, over that store."""
    if isinstance(spec, HttpEngineSpec):
        yield from _served(spec, storage_url)
    else:
        yield _embedded(spec)


def _embedded(spec: LocalEngineSpec) -> Check:
    try:
        backend = import_module("engine.backends.torch.backend").TorchBackend(spec)
    except ImportError as error:
        return Check(
            area="engine", name="embedded", verdict="note",
            what=f"this machine can drive runs, and not compute: {error}",
            what_to_do="pip install 'ostinato[torch]', or name a served engine: --engine URL",
        )  # fmt: skip
    numerics, memory = backend.numerics(), backend.memory_bytes()
    what = (
        f"torch {numerics.versions.get('torch')} on {numerics.device}, {numerics.compute_dtype}, {numerics.threads} "
        f"threads, {memory / (1 << 30):.1f} GiB for models"
    )
    return Check(area="engine", name="embedded", verdict="ok", what=what)


def _served(spec: HttpEngineSpec, storage_url: str) -> Iterator[Check]:
    url = shown_url(spec.url)
    remedy = f"start it: ostinato engine serve --storage {storage_url}; or check the address, and what is between"
    for path, needed in (("health", "the process answers"), ("ready", "it takes calls")):
        status = http_status(f"{spec.url}/{path}")
        if status != 200:
            said = status if isinstance(status, str) else f"answers {status}"
            yield Check(area="engine", name=path, verdict="fail", what=f"{url}: {said}", what_to_do=remedy)
            return
        yield Check(area="engine", name=path, verdict="ok", what=f"{url}: {needed}")
    try:
        info = asyncio.run(_info(spec, storage_url))
    except (EngineError, StorageError) as error:
        yield Check(
            area="engine", name="calls", verdict="fail", what=str(error),
            what_to_do=f"give both the same store, and the token in ${spec.token_env}",
        )  # fmt: skip
        return
    numerics = info.numerics
    what = f"the same store; {numerics.backend} on {numerics.device}, {numerics.compute_dtype}"
    what += f", {info.memory_used_bytes / (1 << 30):.1f} of {info.memory_bytes / (1 << 30):.1f} GiB used"
    yield Check(area="engine", name="calls", verdict="ok", what=what)


async def _info(spec: HttpEngineSpec, storage_url: str) -> Any:
    impatient = spec.model_copy(update={"patience_seconds": HTTP_SECONDS, "timeout_seconds": HTTP_SECONDS})
    client = import_module("engine.http.client").EngineClient(storage_url, impatient)
    try:
        return await client.info()
    finally:
        await client.close()


# -- Prefect ---------------------------------------------------------------------------------------------------


def check_prefect() -> Check:
    """The Prefect server that flows report to."""
    api = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    if not api:
        what = "none configured (PREFECT_API_URL): ostinato run starts its own"
        return Check(area="prefect", name="server", verdict="ok", what=what)
    url = shown_url(api)
    status = http_status(f"{api}/health")
    if status in (401, 403):
        what = f"{url} wants a key"
        return Check(area="prefect", name="server", verdict="warning", what=what, what_to_do="check PREFECT_API_KEY")
    if status != 200:
        said = status if isinstance(status, str) else f"answers {status}"
        return Check(
            area="prefect", name="server", verdict="fail", what=f"{url}: {said}",
            what_to_do="start it (prefect server start), or unset PREFECT_API_URL: ostinato run starts its own",
        )  # fmt: skip
    mine, theirs = _installed("prefect") or "none", _server_version(api)
    if theirs is None or theirs == mine:
        return Check(area="prefect", name="server", verdict="ok", what=f"{url} answers; version {theirs or 'not told'}")
    return Check(
        area="prefect", name="server", verdict="warning", what=f"{url} is version {theirs}, here is {mine}",
        what_to_do="use one version: a server must be at least as new as its clients",
    )  # fmt: skip


def _server_version(api: str) -> str | None:
    try:
        with _http(api) as client:
            answer = client.get(f"{api}/admin/version")
            return str(answer.json()) if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


# -- HTTP ------------------------------------------------------------------------------------------------------


def http_status(url: str) -> int | str:
    """The status of a GET, or why there was none."""
    try:
        with _http(url) as client:
            return client.get(url).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"does not answer ({type(error).__name__})"


def _http(url: str) -> httpx.Client:
    """A proxy of the environment does not find what is on this machine."""
    here = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    return httpx.Client(timeout=HTTP_SECONDS, trust_env=not here)


def shown_url(url: str) -> str:
    """The url without user and password."""
    return re.sub(r"//[^/@]*@", "//", url)
