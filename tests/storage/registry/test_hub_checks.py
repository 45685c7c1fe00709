"""Tests of a hub that lies: ETags and commits that are paths, redirects elsewhere, files that are not those of the
commit. Nothing may be written outside the cache, and each lie is one sentence."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from huggingface_hub import hf_hub_download

from engine.models.hub import check_hub_model, download_model
from storage.registry import hub_checks
from storage.registry.hub import HubError, HubRepo, checked_hub, resolve_commit
from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from tasks.datasets.load import load_dataset
from tasks.datasets.spec import HubDataset
from tests.fixtures.servers.hub import Hub, Reply, hub_server

WEIGHTS = b"\x02\0\0\0\0\0\0\0{}" + bytes(range(256)) * 32
FILES = {"config.json": json.dumps({"model_type": "llama"}).encode(), "model.safetensors": WEIGHTS}
MODEL = HubRepo("model", "ada/tiny")
PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)
ESCAPE = "../../../../outside"
Falsify = Callable[[Reply], None]


def headers(**values: str) -> Falsify:
    """Sets headers of the replies about files."""

    def falsify(reply: Reply) -> None:
        if "/resolve/" in reply.path:
            reply.headers.update({name.replace("_", "-"): value for name, value in values.items()})

    return falsify


def body(part: str, change: Callable[[bytes], bytes]) -> Falsify:
    """Changes the bodies of the replies whose path contains `part`."""

    def falsify(reply: Reply) -> None:
        if part in reply.path and reply.method != "HEAD":
            reply.body = change(reply.body)
            reply.headers["Content-Length"] = str(len(reply.body))

    return falsify


def redirect(url: str) -> Falsify:
    def falsify(reply: Reply) -> None:
        if "/resolve/" in reply.path and reply.status == 200:
            reply.status, reply.headers["Location"] = 302, url

    return falsify


def large(digest: str | None) -> Falsify:
    """Gives the weights this digest in the commit's list of files, and a hash of the storage Xet."""

    def change(data: bytes) -> bytes:
        entries = json.loads(data)
        for entry in entries:
            if "lfs" in entry:
                entry["lfs"]["oid"] = digest
                entry["xetHash"] = "a" * 64
        return json.dumps(entries).encode()

    return body("/tree/", change)


LIES: dict[str, tuple[Falsify, str]] = {
    "etag": (headers(ETag=f'"{ESCAPE}"'), r"an ETag '\"../../../../outside\"'; expected 40 or 64 hexadecimal digits"),
    "linked-etag": (headers(X_Linked_Etag=ESCAPE), "an ETag '../../../../outside'; expected 40 or 64"),
    "absolute-etag": (headers(ETag='"/tmp/outside"'), "an ETag"),
    "short-etag": (headers(ETag='"' + "a" * 39 + '"'), "an ETag"),
    "commit": (headers(X_Repo_Commit=ESCAPE), "a commit '../../../../outside'; expected 40 hexadecimal digits"),
    "other-commit": (headers(X_Repo_Commit="a" * 40), "a file of another commit .'a{40}'."),
    "listed-digest": (large(ESCAPE), "a blob id '../../../../outside'; expected 40 or 64"),
    "null-digest": (large(None), "a blob id 'None'; expected 40 or 64"),
    "plain-redirect": (redirect("http://127.0.0.1:9/x?secret=1"), "an address 'http://127.0.0.1:9'; expected https"),
    "file-redirect": (redirect("file:///etc/passwd"), "expected https"),
    "storage": (headers(X_Xet_Cas_Url="http://10.0.0.1/"), "a storage server 'http://10.0.0.1:80'; expected https"),
    "small-file": (body("config.json", lambda data: data.replace(b"a", b"b")), "config.json of the .* is damaged"),
    "list-of-files": (body("/tree/", lambda data: b'[{"type": "file"}]'), "a reply about the .* cannot be used"),
    "encoding": (lambda reply: reply.headers.update({"Content-Encoding": "gzip"}), "in the encoding 'gzip'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_hub_is_refused_and_writes_nothing_outside_the_cache(hub: Hub, tmp_path: Path, lie: str) -> None:
    hub.commit("model", "ada/tiny", FILES)
    falsify, message = LIES[lie]
    repo = resolve_commit(MODEL)
    hub.falsify = falsify
    with pytest.raises(HubError, match=message) as refusal:
        check_hub_model(open_store(tmp_path / "store"), repo)
        download_model(repo)
    assert "\n" not in str(refusal.value) and "secret" not in str(refusal.value)
    outside = {path.name for path in tmp_path.iterdir()} - {"hub-cache", "datasets-cache", "store"}
    assert not outside and not Path("/tmp/outside").exists()


@pytest.mark.parametrize("sha", [ESCAPE, "main", "a" * 41, 5])
def test_the_commit_of_a_branch_is_40_digits(hub: Hub, sha: str) -> None:
    hub.commit("model", "ada/tiny", FILES)
    hub.falsify = body("/api/", lambda data: json.dumps(json.loads(data) | {"sha": sha}).encode())
    with pytest.raises(HubError, match="gave a commit .*; expected 40 hexadecimal digits"):
        resolve_commit(MODEL)


def test_a_list_of_files_that_is_asked_for_again_is_checked_again(hub: Hub) -> None:
    hub.commit("model", "ada/tiny", FILES)
    repo = resolve_commit(MODEL)
    lists: list[str] = []

    def lie_the_second_time(reply: Reply) -> None:
        if "/tree/" in reply.path:
            lists.append(reply.path)
            if len(lists) > 1:
                large(ESCAPE)(reply)

    hub.falsify = lie_the_second_time
    with pytest.raises(HubError, match="a blob id"):
        download_model(repo)
    assert len(lists) == 2


@pytest.mark.parametrize("lie", ["etag", "commit", "plain-redirect", "small-file"])
def test_datasets_have_the_same_checks(hub: Hub, tmp_path: Path, lie: str) -> None:
    pytest.importorskip("datasets")
    rows = b"".join(b'{"prompt": "a%d"}\n' % number for number in range(3))
    repo = HubRepo("dataset", "ada/sums", hub.commit("dataset", "ada/sums", {"train.jsonl": rows}))
    hub.falsify, message = LIES[lie]
    if lie == "small-file":
        hub.falsify = body("train.jsonl", lambda data: data.replace(b"a", b"b"))
        message = "train.jsonl of the .* is damaged"
    with pytest.raises(HubError, match=message):
        load_dataset(
            open_store(tmp_path / "store"), HubDataset(path=repo.repo, revision=repo.revision), provenance=PROVENANCE
        )
    assert {path.name for path in tmp_path.iterdir()} <= {"hub-cache", "datasets-cache", "store"}


def test_a_redirect_within_the_hub_is_followed(hub: Hub) -> None:
    hub.commit("model", "ada/tiny", FILES)
    hub.commit("model", "ada/renamed", FILES)

    def rename(reply: Reply) -> None:
        if reply.path.startswith("/ada/tiny/resolve/"):
            # the ETag of a redirect's own text means nothing
            location = reply.path.replace("/ada/tiny/", "/ada/renamed/")
            reply.status, reply.headers["Location"], reply.headers["ETag"] = 307, location, 'W/"36-abc"'

    hub.falsify = rename
    assert download_model(resolve_commit(MODEL)).files["model.safetensors"].read_bytes() == WEIGHTS


def test_another_server_without_https_is_not_asked(hub: Hub) -> None:
    hub.commit("model", "ada/tiny", FILES)
    with hub_server() as other:
        other.commit("model", "ada/tiny", FILES)
        hub.falsify = redirect(f"{other.url}/ada/tiny/resolve/main/config.json")
        with pytest.raises(HubError, match="expected https, or http://127.0.0.1"):
            download_model(resolve_commit(MODEL))
        assert other.requests == []


def test_a_reply_of_any_size_is_not_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_checks, "MAX_REPLY_BYTES", 1 << 20)
    hub.commit("model", "ada/tiny", FILES)
    hub.falsify = body("/api/", lambda data: b" " * (2 << 20))
    with pytest.raises(HubError, match="a reply of more than 1 MiB, which is no list of files"):
        resolve_commit(MODEL)


def test_a_file_below_api_is_a_file(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be large, and it may have any content."""
    monkeypatch.setattr(hub_checks, "MAX_REPLY_BYTES", 1 << 10)
    data = b'{"sha": "x"}' + b" " * (1 << 11)
    repo = HubRepo("model", "ada/tiny", hub.commit("model", "ada/tiny", {"api/big.json": data}))
    with checked_hub(repo):
        path = hf_hub_download(repo.repo, "api/big.json", revision=repo.revision)
    assert Path(path).read_bytes() == data


@pytest.mark.parametrize(
    ("path", "is_file"),
    [
        ("/artifactory/api/huggingfaceml/repo/ada/tiny/resolve/main/model.safetensors", True),
        ("/artifactory/api/huggingfaceml/repo/api/models/ada/tiny", False),
        ("/artifactory/api/huggingfaceml/repo/api/resolve-cache/models/ada/tiny/0/config.json", True),
        ("/api/models/ada/tiny", False),
    ],
)
def test_the_path_of_the_endpoint_is_no_part_of_the_api(
    path: str, is_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = "https://host/artifactory/api/huggingfaceml/repo"
    monkeypatch.setattr(hub_checks.constants, "ENDPOINT", endpoint)
    request = httpx.Request("GET", f"https://host{path}")
    hub_checks._check_request(request)
    assert request.extensions["is_file"] is is_file


def test_the_body_of_a_redirect_is_limited(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("model", "ada/tiny", FILES)
    repo = resolve_commit(MODEL)
    monkeypatch.setattr(hub_checks, "MAX_REPLY_BYTES", 1 << 20)

    def redirect_with_text(reply: Reply) -> None:
        if "/resolve/" in reply.path and reply.method == "GET":
            reply.status, reply.headers["Location"], reply.body = 302, "/elsewhere", b" " * (2 << 20)
            reply.headers["Content-Length"] = str(len(reply.body))

    hub.falsify = redirect_with_text
    with pytest.raises(HubError, match="a reply of more than 1 MiB"):
        download_model(repo)


def test_a_list_of_files_that_is_redirected_to_a_file_is_checked(hub: Hub) -> None:
    entries = [{"type": "file", "path": "config.json", "size": 2, "oid": ESCAPE}]
    hub.commit("model", "ada/tiny", FILES | {"list.json": json.dumps(entries).encode()})
    repo = resolve_commit(MODEL)

    def to_the_file(reply: Reply) -> None:
        if "/tree/" in reply.path:
            reply.status, reply.headers["Location"] = 307, f"/ada/tiny/resolve/{repo.revision}/list.json"

    hub.falsify = to_the_file
    with pytest.raises(HubError, match="a blob id '../../../../outside'"), checked_hub(repo):
        hub_checks.repo_files(repo)


def test_first_calls_in_parallel_wrap_the_clients_once(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[object] = []

    def install(factory: object) -> None:
        time.sleep(0.1)
        installed.append(factory)
        monkeypatch.setattr(hub_checks._http, "_GLOBAL_CLIENT_FACTORY", factory)

    monkeypatch.setattr(hub_checks._http, "_GLOBAL_CLIENT_FACTORY", httpx.Client)
    monkeypatch.setattr(hub_checks, "set_client_factory", install)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: hub_checks.install_checks(), range(2)))
    assert len(installed) == 1


def test_each_missing_limit_of_a_request_is_set() -> None:
    given = {"connect": 5.0, "read": None, "write": None, "pool": None}
    request = httpx.Request("GET", "https://host/", extensions={"timeout": given})
    hub_checks._check_request(request)
    assert request.extensions["timeout"] == {"connect": 5.0, "read": 60.0, "write": 60.0, "pool": 60.0}
