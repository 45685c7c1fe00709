"""Checks of what a Hugging Face hub replies, before huggingface_hub uses it and after it stored the files.

huggingface_hub makes paths of the ETags and commits that a server names, without looking at them. Each client that it
makes in this process gets the two hooks of this module.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_cached_repo_tree, set_client_factory
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import _http, httpx

from storage.registry.hub import COMMIT, HubError, HubRepo
from storage.serialization import digest_file

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MAX_REPLY_BYTES = 64 * 2**20
"""Largest reply of the hub's API, such as a list of files. Files themselves are not limited."""
REPLY_SECONDS = 60.0
"""Longest silence of the hub in a request for which huggingface_hub sets no timeout."""
_BLOCK_BYTES = 1 << 20
_installation = threading.Lock()


def install_checks() -> None:
    """Makes every later client of huggingface_hub check its requests and replies. A second call changes nothing."""
    # set_client_factory closes the client that other threads use, so a second one must not follow the first
    with _installation:
        factory = _http._GLOBAL_CLIENT_FACTORY
        if getattr(factory, "checks_replies", False):
            return

        def checking_client() -> httpx.Client:
            client = factory()
            hooks = client.event_hooks
            client.event_hooks = {
                "request": [*hooks["request"], _check_request],
                "response": [_check_reply, *hooks["response"]],
            }
            return client

        checking_client.checks_replies = True  # type: ignore[attr-defined]
        set_client_factory(checking_client)


def repo_files(repo: HubRepo) -> list[RepoFile]:
    """The files of a commit. The list of a model that was downloaded before is in the cache."""
    try:
        files = get_cached_repo_tree(repo.repo, repo_type=repo.kind, revision=repo.revision)
        for file in files:
            _expect_digest("a blob id", _digest_of_entry(file))
    except CachedRepoTreeNotFoundError:
        entries = HfApi().list_repo_tree(repo.repo, recursive=True, repo_type=repo.kind, revision=repo.revision)
        files = [entry for entry in entries if isinstance(entry, RepoFile)]
    for file in files:
        if not isinstance(file.path, str):
            raise HubError(_untrusted("the name of a file", file.path, "text"))
    return files


def snapshot_folder(repo: HubRepo) -> Path:
    """The folder of the cache that has the files of a commit that were downloaded."""
    folder = repo_folder_name(repo_id=repo.repo, repo_type=repo.kind)
    return Path(constants.HF_HUB_CACHE, folder, "snapshots", repo.revision or "")


def check_files(repo: HubRepo, paths: Iterable[Path], files: Iterable[RepoFile]) -> None:
    """Raises HubError for one of `paths`, files of the commit in the cache, whose content is not the one of the commit.

    A file that `files` does not name is compared with the digest by which the cache names it."""
    digests = {file.path: _digest_of_entry(file) for file in files}
    folder = snapshot_folder(repo)
    for path in paths:
        # The cache files what it downloads under the commit that the reply named.
        if not path.is_relative_to(folder):
            raise HubError(
                f"the hub answered a request for {path.name} of the {repo} with a file of another commit "
                f"({path.relative_to(folder.parent).parts[0]!r}); check HF_ENDPOINT"
            )
        blob = path.resolve()
        expected = digests.get(path.relative_to(folder).as_posix(), blob.name)
        if _DIGEST.fullmatch(expected) and _file_digest(blob, expected) != expected:
            raise HubError(
                f"{path.name} of the {repo} is damaged in the cache: its digest is not the one that the hub gave; "
                f"delete {blob} and run it again"
            )


def _digest_of_entry(file: RepoFile) -> str:
    """sha256 of a large file, and the sha1 by which git names a small one."""
    return str(file.blob_id if file.lfs is None else file.lfs.sha256)


def _file_digest(path: Path, like: str) -> str:
    """The digest of a file, of the same kind as `like`: sha256, or git's sha1 of a blob."""
    if len(like) == 64:
        return digest_file(path)[0]
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _check_request(request: httpx.Request) -> None:
    """Raises HubError for a request, or a redirect, to a server that is neither the hub nor reached by https."""
    _expect_safe_address("an address", str(request.url))
    # a compressed reply can be any number of times larger than what is transferred
    request.headers["Accept-Encoding"] = "identity"
    given = {name: limit for name, limit in request.extensions.get("timeout", {}).items() if limit is not None}
    request.extensions["timeout"] = httpx.Timeout(REPLY_SECONDS).as_dict() | given
    # a redirect has the extensions of the request before it, so it cannot turn a reply of the API into a file
    request.extensions.setdefault("is_file", _is_file(request.url.path))


def _check_reply(reply: httpx.Response) -> None:
    """Raises HubError for a reply whose commits, digests or addresses are malformed."""
    headers = reply.headers
    commit = headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT)
    if commit is not None:
        _expect_commit(commit)
    if storage_server := headers.get(constants.HUGGINGFACE_HEADER_X_XET_ENDPOINT):
        _expect_safe_address("a storage server", storage_server)
    if reply.request.method == "HEAD" and reply.status_code < 400:
        _check_etag(reply)
    is_file = reply.request.extensions["is_file"]
    if is_file and (reply.status_code < 300 or reply.request.method == "HEAD"):
        return

    # Replies of the API, redirects and error pages are read into memory.
    encoding = headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise HubError(f"{constants.ENDPOINT} gave a reply in the encoding {encoding[:20]!r}, which was not asked for")
    reply.stream = _LimitedStream(reply.stream)
    if reply.status_code < 300:
        reply.read()
        _check_body(reply)


def _is_file(path: str) -> bool:
    """Whether a path of the hub is that of a file, whose content goes to the disk, and not one of the API."""
    path = path.removeprefix(urlsplit(constants.ENDPOINT).path.rstrip("/"))
    return not path.startswith("/api/") or path.startswith("/api/resolve-cache/")


def _check_etag(reply: httpx.Response) -> None:
    """Checks the ETag, which names the file in the cache. Removes that of a redirect's own text."""
    linked = reply.headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_ETAG)
    etag = linked or reply.headers.get("ETag")
    if etag is None or _DIGEST.fullmatch(etag.removeprefix("W/").strip('"')):
        return
    if linked is None and reply.has_redirect_location:
        # web frameworks give the short text of a redirect an ETag of their own, which means nothing
        del reply.headers["ETag"]
        return
    _expect_digest("an ETag", etag)


def _check_body(reply: httpx.Response) -> None:
    """Checks the commit of a repository, and the digests of its files, in a reply of the API."""
    try:
        body = reply.json()
    except (ValueError, RecursionError):
        return  # huggingface_hub says what it expected
    if isinstance(body, Mapping):
        if body.get("sha") is not None:
            _expect_commit(body["sha"])
        if storage_server := body.get("casUrl"):
            _expect_safe_address("a storage server", storage_server)
        entries = body.get("siblings")
    else:
        entries = body
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, Mapping):
            continue
        large = entry.get("lfs")
        large = large if isinstance(large, Mapping) else {}
        for part, name in ((entry, "oid"), (entry, "blobId"), (large, "oid"), (large, "sha256")):
            if name in part:
                _expect_digest("a blob id", part[name])


def _expect_commit(commit: Any) -> None:
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise HubError(_untrusted("a commit", commit, "40 hexadecimal digits"))


def _expect_digest(what: str, digest: Any) -> None:
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise HubError(_untrusted(what, digest, "40 or 64 hexadecimal digits"))


def _expect_safe_address(what: str, url: Any) -> None:
    try:
        is_safe = urlsplit(url).scheme == "https" or _origin(url) == _origin(constants.ENDPOINT)
        shown = "{}://{}:{}".format(*_origin(url))
    except (ValueError, TypeError, AttributeError):
        is_safe, shown = False, type(url).__name__
    if not is_safe:
        # paths and parameters of an address may be secrets
        raise HubError(_untrusted(what, shown, f"https, or {constants.ENDPOINT} itself"))


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _untrusted(what: str, given: Any, expected: str) -> str:
    return (
        f"{constants.ENDPOINT} gave {what} {str(given)[:80]!r}; expected {expected}. Nothing of this reply is used; "
        "check HF_ENDPOINT, or give a local folder"
    )


class _LimitedStream(httpx.SyncByteStream):
    """The body of a reply, which ends in HubError after MAX_REPLY_BYTES."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[bytes]:
        total = 0
        for block in self.stream:
            total += len(block)
            if total > MAX_REPLY_BYTES:
                raise HubError(
                    f"{constants.ENDPOINT} gave a reply of more than {MAX_REPLY_BYTES >> 20} MiB, which is no list of "
                    "files; check HF_ENDPOINT, or give a local folder"
                )
            yield block

    def close(self) -> None:
        self.stream.close()
