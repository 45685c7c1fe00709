"""Models that a client imports from folders on its own machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import (
    BadModelFolder,
)
from engine.http.app import create_app
from engine.http.service import ServerOptions
from engine.local.engine import LocalEngine
from storage import errors as storage_errors
from storage.errors import ObjectNotFound
from storage.store import keys
from storage.store.objects import ObjectStore
from tests.fixtures.engines import DETERMINISTIC, PROVENANCE
from tests.fixtures.servers.hub import Hub
from tests.fixtures.servers.scripted_engine import ScriptedEngine
from tests.fixtures.servers.unreliable_line import URL, UnreliableLine, client_over

pytestmark = pytest.mark.usefixtures("no_backoff")


async def test_a_folder_that_four_clients_bring_at_once_is_one_model(
    store: ObjectStore, tiny_folder: Path
) -> None:
    local = LocalEngine(store.url, DETERMINISTIC)
    line = UnreliableLine(create_app(local, store, ServerOptions()))
    clients = [client_over(line, store) for _ in range(4)]
    refs = await asyncio.gather(*(c.import_model(str(tiny_folder), provenance=PROVENANCE) for c in clients))
    assert len({ref.uri for ref in refs}) == 1
    assert list(store.list("uploads/")) == []
    await local.close()


async def test_a_folder_of_the_client_becomes_the_model_that_the_embedded_engine_makes(
    line: UnreliableLine, engine: ScriptedEngine, store: ObjectStore, tiny_folder: Path, tmp_path: Path
) -> None:
    model = await client_over(line, store).import_model(str(tiny_folder), provenance=PROVENANCE)
    elsewhere = LocalEngine(f"file://{tmp_path}/elsewhere", DETERMINISTIC)
    assert await elsewhere.import_model(str(tiny_folder), provenance=PROVENANCE) == model
    await elsewhere.close()
    assert engine.done["import_folder"] == 1
    assert await client_over(line, store).import_model(str(tiny_folder), provenance=PROVENANCE) == model
    assert engine.done["import_folder"] == 1
    assert list(store.list("uploads/")) == []
    assert (tiny_folder / "config.json").is_file()


async def test_a_model_of_the_hub_is_downloaded_by_the_client_and_uploaded_once(
    hub: Hub, line: UnreliableLine, engine: ScriptedEngine, store: ObjectStore, tiny_folder: Path, tmp_path: Path
) -> None:
    commit = hub.commit_folder("model", "ada/tiny", tiny_folder)
    model = await client_over(line, store).import_model("ada/tiny", provenance=PROVENANCE)
    elsewhere = LocalEngine(f"file://{tmp_path}/elsewhere", DETERMINISTIC)
    assert await elsewhere.import_model("ada/tiny", provenance=PROVENANCE) == model
    await elsewhere.close()
    assert list(store.list("uploads/")) == []
    # the store knows the commit: neither the hub nor the server is asked again
    hub.stop()
    line.seen.clear()
    assert await client_over(line, store).import_model(f"ada/tiny@{commit}", provenance=PROVENANCE) == model
    assert engine.done["import_folder"] == 1
    assert not line.seen


async def test_an_upload_that_another_server_imported_first_is_the_model_it_became(
    line: UnreliableLine, engine: ScriptedEngine, store: ObjectStore, tiny_folder: Path
) -> None:
    class Overtaken(ScriptedEngine):
        async def import_folder(self, folder: Any, *, provenance: Any) -> Any:
            self.theirs = await super().import_folder(folder, provenance=provenance)
            for info in list(store.list("uploads/")):
                store.delete(info.key)
            raise ObjectNotFound("the upload went away while it was read")

    overtaken = Overtaken(store)
    line.app = create_app(overtaken, store)
    assert await client_over(line, store).import_model(str(tiny_folder), provenance=PROVENANCE) == overtaken.theirs


async def test_paths_and_pickled_folders_are_refused_here(
    line: UnreliableLine, engine: ScriptedEngine, store: ObjectStore, tmp_path: Path
) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"\x80")
    client = client_over(line, store)
    for source in (str(pickled), str(tmp_path / "nowhere"), "./x", "../x"):
        with pytest.raises(BadModelFolder):
            await client.import_model(source, provenance=PROVENANCE)
    assert not line.seen
    assert not engine.begun


async def test_a_folder_beside_the_server_is_not_what_a_key_means(
    line: UnreliableLine, store: ObjectStore, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"source": tiny_folder.name, "provenance": PROVENANCE.model_dump()}
    monkeypatch.chdir(tiny_folder.parent)
    async with httpx.AsyncClient(transport=line, base_url=URL) as caller:
        answer = await caller.post("/v1/import_model", json=body)
    assert (answer.status_code, answer.json()["error"]) == (422, "BadModelFolder")


def test_an_upload_key_takes_digests_only() -> None:
    for digest in ("../x", "a" * 63, "A" * 64):
        with pytest.raises(storage_errors.InvalidKey):
            keys.upload("m", digest)
