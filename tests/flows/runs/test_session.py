"""Tests of the end of a run's session: it ends soon even when a server is away, and releases the lease where it can."""

from __future__ import annotations

import asyncio
import socket

import pytest

from engine.specs.engine import HttpEngineSpec
from engine.workspace import Workspace
from flows.runs import session
from flows.runs.session import release_run, take_lease
from storage.chain.leases import current_epoch, is_held
from tests.fixtures.engines import PROVENANCE


def workspace_at(port: int) -> Workspace:
    spec = HttpEngineSpec(url=f"http://127.0.0.1:{port}", patience_seconds=3600, timeout_seconds=3600)
    return take_lease(Workspace(store=f"memory://leave-{port}", engine=spec, run="r", provenance=PROVENANCE))


@pytest.mark.parametrize("listening", [False, True], ids=["no server", "a server that does not answer"])
async def test_an_engine_that_is_away_does_not_keep_a_worker_from_ending(
    listening: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RELEASE_TIMEOUT", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:
            server.listen()
        workspace = workspace_at(server.getsockname()[1])
        assert is_held(workspace.open_store(), "r")
        async with asyncio.timeout(60):  # an hour, by the patience of the run
            await release_run(workspace)
    assert current_epoch(workspace.open_store(), "r") == workspace.epoch == 1
    assert not is_held(workspace.open_store(), "r")
