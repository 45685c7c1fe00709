"""Replies of a hub that lies or is broken, for the fuzz campaign. A case is a JSON list of changes of its replies."""

from __future__ import annotations

import functools
import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import BadModelFolder
from engine.models.hub import check_hub_model, download_model
from storage.errors import StorageError
from storage.registry.hub import HubRepo, resolve_commit
from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import load_dataset
from tasks.datasets.spec import HubDataset
from tests.fixtures.servers.hub import Hub, Reply, hub_server
from tests.fuzz.inputs import Input

PROVENANCE = Provenance(code_version="fuzz", config_digest="0" * 64, seed=0)
HEADERS = ("ETag", "X-Linked-Etag", "X-Repo-Commit", "Location", "Content-Type", "X-Linked-Size", "X-Xet-Hash",
           "X-Xet-Refresh-Route", "X-Xet-Cas-Url", "X-Error-Code", "X-Error-Message", "Link", "Content-Encoding",
           "Content-Disposition", "Content-Range", "Retry-After", "RateLimit", "X-HF-Warning",
           "Set-Cookie")  # fmt: skip
TEXTS = ("", "../../../../outside", "/tmp/outside-of-fuzz", '"' + "a" * 40 + '"', '"' + "b" * 64 + '"', "a" * 40,
    "main",
         "..", ".", "a/b", "%2e%2e%2f", "\\..\\x", "W/\"x\"", "-1", "0", "99999999999999999999", "nan", "gzip", "br",
         "http://10.255.255.1/x", "http://127.0.0.1:9/", "file:///etc/passwd", "//evil", "/relative",
         "https://127.0.0.1:9/x",
         "attachment; filename=../../x", "bytes 0-1/2", "EntryNotFound", "GatedRepo", "é", "a" * 5000, "\x7f",
         '<https://x>; rel="xet-auth"', "ftp://x", "http://[::1", "http://user:pw@127.0.0.1:9/")  # fmt: skip
VALUES: tuple[Any, ...] = (None, True, -1, 0, 1.5, 1e308, 2**70, "", "x", [], {}, [[]], {"a": {}}, "\ud800", *TEXTS)
PARTS = ("/resolve/", "/api/", "/tree/", "/revision/", "config.json", "model.safetensors", "train", "paths-info", "")
STATUSES = (200, 204, 206, 301, 302, 303, 307, 308, 400, 401, 403, 404, 409, 416, 429, 500, 503)


def case(kind: str, seed: int, number: int) -> bytes:
    draw = random.Random(f"{seed}/{kind}/{number}")
    return json.dumps([_change(draw) for _ in range(draw.choice((1, 1, 1, 2, 3)))]).encode()


def _change(draw: random.Random) -> dict[str, Any]:
    """One change of the replies whose path has `part`, from the reply number `first` on."""
    change: dict[str, Any] = {"part": draw.choice(PARTS), "first": draw.choice((0, 0, 0, 1, 2))}
    action = draw.choice(("header", "header", "header", "status", "redirect", "json", "json", "json", "bytes", "size"))
    change["do"] = action
    if action == "header":
        change |= {"name": draw.choice(HEADERS), "value": draw.choice(TEXTS)}
    elif action == "status":
        change["status"] = draw.choice(STATUSES)
    elif action == "redirect":
        change |= {"status": draw.choice((301, 302, 307, 308)), "to": draw.choice(TEXTS)}
    else:
        change["draw"] = draw.randrange(2**32)
    return change


class Lies:
    """Applies the changes of a case to the replies."""

    def __init__(self, changes: list[dict[str, Any]]) -> None:
        self.changes, self.seen = changes, [0] * len(changes)

    def __call__(self, reply: Reply) -> None:
        for index, change in enumerate(self.changes):
            if change["part"] not in reply.path:
                continue
            self.seen[index] += 1
            if self.seen[index] > change["first"]:
                _apply(change, reply)
        reply.headers = {name: _header_text(value) for name, value in reply.headers.items()}


def _apply(change: dict[str, Any], reply: Reply) -> None:
    action = change["do"]
    if action == "header":
        reply.headers[change["name"]] = change["value"]
    elif action == "status":
        reply.status = change["status"]
    elif action == "redirect":
        reply.status, reply.headers["Location"] = change["status"], change["to"]
    else:
        draw = random.Random(change["draw"])
        if action == "json":
            reply.body = _changed_json(reply.body, draw)
        elif action == "bytes":
            reply.body = _changed_bytes(reply.body, draw)
        elif reply.method != "HEAD":
            reply.body = (
                reply.body * draw.choice((2, 1000)) if draw.random() < 0.5 else b"[" * draw.choice((10**5, 10**7))
            )
            reply.body = reply.body[: 80 << 20]
        reply.headers["Content-Length"] = str(len(reply.body))


def _header_text(value: str) -> str:
    return value.encode("latin-1", "replace").decode("latin-1").replace("\n", " ").replace("\r", " ")


def _changed_json(body: bytes, draw: random.Random) -> bytes:
    try:
        value = json.loads(body)
    except ValueError:
        return body
    for _ in range(draw.choice((1, 1, 2))):
        value = _changed_value(value, draw)
    return json.dumps(value).encode()


def _changed_value(value: Any, draw: random.Random) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: _changed_value(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        index = draw.randrange(len(value))
        return [*value[:index], _changed_value(value[index], draw), *value[index + 1 :]]
    return draw.choice(VALUES)


def _changed_bytes(body: bytes, draw: random.Random) -> bytes:
    data = bytearray(body)
    for _ in range(draw.randint(1, 6)):
        if data:
            data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data[: draw.choice((len(data), len(data), len(data) // 2, 0))])


@functools.cache
def _hub() -> Hub:
    """The server of this process, with a model and a dataset. It ends with the process."""
    server = hub_server()
    hub = server.__enter__()
    _hub.keep = server  # type: ignore[attr-defined]
    weights = b"\x02\0\0\0\0\0\0\0{}" + bytes(range(256)) * 32
    config = json.dumps({"model_type": "llama", "num_hidden_layers": 0}).encode()
    hub.commit("model", "ada/tiny", {"config.json": config, "model.safetensors": weights, "tokenizer.json": b"{}"})
    rows = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"prompt": f"{number}+1"} for number in range(5)]), rows)
    lines = b"".join(b'{"prompt": "a%d"}\n' % number for number in range(5))
    hub.commit("dataset", "ada/sums", {"data/train-00000-of-00001.parquet": rows.getvalue()})
    hub.commit("dataset", "ada/lines", {"train.jsonl": lines, "README.md": b"# lines\n"})
    return hub


def _start(data: bytes, folder: Path) -> Hub:
    """The hub with the lies of a case, and the libraries with empty caches in `folder`."""
    import datasets
    import huggingface_hub
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    hub = _hub()
    constants.ENDPOINT = datasets.config.HF_ENDPOINT = hub.url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_CACHE = str(folder / "hub")
    constants.HF_TOKEN_PATH = str(folder / "no-token")
    constants.HF_XET_CACHE = str(folder / "xet")
    datasets.config.HF_DATASETS_CACHE = folder / "datasets"
    for module in (file_download, _http):
        module.time = type("NoWait", (), {"sleep": staticmethod(lambda seconds: None)})  # type: ignore[attr-defined]
    huggingface_hub.utils.disable_progress_bars()
    datasets.disable_progress_bars()
    hub.requests.clear()
    hub.falsify = Lies(json.loads(data))
    return hub


def use_model(data: bytes, folder: Path) -> None:
    _start(data, folder)
    repo = resolve_commit(HubRepo("model", "ada/tiny"))
    check_hub_model(open_store(folder / "store"), repo)
    download_model(repo)


def use_dataset(data: bytes, folder: Path) -> None:
    _start(data, folder)
    path = "ada/sums" if len(data) % 2 else "ada/lines"
    load_dataset(open_store(folder / "store"), HubDataset(path=path), provenance=PROVENANCE)


INPUTS = {
    "hub model": Input(
        functools.partial(case, "hub model"), use_model, (StorageError, BadModelFolder), cases_per_child=400
    ),
    "hub dataset": Input(
        functools.partial(case, "hub dataset"), use_dataset, (StorageError, DatasetError), cases_per_child=100
    ),
}
