"""What people and full disks do to a run in progress: its deletion, its cancellation during a checkpoint, a full
/dev/shm."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.local.saving import Saver
from flows.cli.main import app
from flows.ops.termination import FlowRunCancelled
from flows.sft import sft
from storage.chain.records import Chain, PolicyRef
from storage.inspect.audit import audit_store
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.runs.sft_runs import sft_config, write_chats

STEPS = 4
SECONDS = 120.0


class HeldUpload:
    """Holds the upload of each checkpoint until `release`."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def release(self) -> None:
        self.released.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUpload]:
    held, commit = HeldUpload(), Saver._commit

    def commit_later(saver: Saver, *arguments: Any) -> Any:
        held.begun.set()
        assert held.released.wait(SECONDS)
        return commit(saver, *arguments)

    monkeypatch.setattr(Saver, "_commit", commit_later)
    yield held
    held.release()


def config_of(folder: Path, tiny_folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    train = {"kind": "file", "path": str(write_chats(folder / "rows.jsonl", 8))}
    algorithm, checkpoints = {"samples_per_batch": 4, "steps": STEPS}, {"frequency": None, "recovery_steps": 2}
    return sft_config(folder, str(tiny_folder), train, algorithm=algorithm, checkpoints=checkpoints)


def states(store: ObjectStore) -> list[str]:
    """The states of the run's committed policies."""
    chain = Chain.of(store, PolicyRef(run="tuned", stage="0-sft", model="policy", step=0, state=""))
    return [chain.committed_record(step).policy.state for step in chain.steps()]


async def wait_for(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, SECONDS)


def delete(folder: Path) -> Any:
    words = ["runs", "delete", "tuned", "--yes", "--force", "--storage", str(folder / "data")]
    return CliRunner().invoke(app, words)


async def test_a_live_run_is_not_deleted_and_goes_on(
    prefect_server: str, tmp_path: Path, tiny_folder: Path, held: HeldUpload
) -> None:
    store = open_store(str(tmp_path / "data"))
    running = asyncio.create_task(sft(config_of(tmp_path, tiny_folder)))
    await wait_for(held.begun)
    before = {info.key for info in store.list()}
    refused = await asyncio.to_thread(delete, tmp_path)
    assert refused.exit_code == 1
    assert "run 'tuned' may be in progress, its lease 1 is held" in " ".join(refused.output.split())
    assert before <= {info.key for info in store.list()}
    held.release()
    await running
    assert len(states(store)) == STEPS
    assert not audit_store(store).problems
    assert (await asyncio.to_thread(delete, tmp_path)).exit_code == 0
    assert "tuned" not in " ".join(info.key for info in store.list("runs/"))


async def test_a_cancel_during_a_checkpoint_ends_at_once_and_the_same_run_goes_on(
    prefect_server: str, tmp_path: Path, tiny_folder: Path, held: HeldUpload
) -> None:
    running = asyncio.create_task(sft(config_of(tmp_path / "cancelled", tiny_folder)))
    await wait_for(held.begun)
    running.cancel()
    threading.Timer(3.0, held.release).start()  # the end of the run waits for the engine, which saves what it can
    with pytest.raises((asyncio.CancelledError, FlowRunCancelled)):
        async with asyncio.timeout(60):
            await running
    store = open_store(str(tmp_path / "cancelled" / "data"))
    assert not audit_store(store).problems
    await sft(config_of(tmp_path / "cancelled", tiny_folder))
    await sft(config_of(tmp_path / "whole", tiny_folder))
    assert states(store) == states(open_store(str(tmp_path / "whole" / "data")))
    assert len(states(store)) == STEPS
    assert not audit_store(store).problems


RANKS_WITHOUT_SHARED_MEMORY = """
import shutil
from pathlib import Path
from engine.backends.weight_files.tensor_files import staging_folder
from engine.cluster.rank_group import RankGroup
from storage.errors import StorageFull
Path("/dev/shm/full").write_bytes(bytes(shutil.disk_usage("/dev/shm").free))
assert shutil.disk_usage("/dev/shm").free == 0
target = "tests.engine.cluster.targets:CountingTarget"
group = RankGroup(target, {}, ranks=2, start_seconds=120, hang_seconds=60)
value = [0.5] * 1_000_000
assert group.call("echo", value) == value
assert group.call("count", "a") == ("a", 2)
group.close()
with staging_folder(1_000_000) as folder:
    assert not folder.is_relative_to("/dev/shm")
    (folder / "weights").write_bytes(bytes(1_000_000))
# there is room when the folder is made, and other processes take it before the weights are written
Path("/dev/shm/full").unlink()
try:
    with staging_folder(1_000_000) as folder:
        assert folder.is_relative_to("/dev/shm")
        (folder / "weights").write_bytes(bytes(100_000_000))
except StorageFull as error:
    assert "no space for 1000000 bytes of weights in /dev/shm" in str(error)
    print("done")
"""


@pytest.mark.slow
def test_ranks_and_weights_work_with_a_full_shared_memory() -> None:
    mounted = "mount -t tmpfs -o size=4m tmpfs /dev/shm"
    if os.geteuid() or subprocess.run(["unshare", "-m", "sh", "-c", mounted], check=False).returncode:
        pytest.skip("this test mounts a /dev/shm of its own, which needs root")
    command = f'{mounted} && exec {sys.executable} -c "$0"'
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, RANKS_WITHOUT_SHARED_MEMORY],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr[-3000:]
