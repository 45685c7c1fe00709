"""Tests of rebases with two engines on one chain, and with a kill around the commit of a rebase."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.local.engine import LocalEngine
from engine.local.verify import verify_run
from storage.chain.rebase import Rebase, rebase_at, rebases_in_effect
from storage.chain.records import Chain
from storage.store import key_patterns
from tests.engine.local.rebase.rebasing import (
    DOUBLE,
    SINGLE,
    STEPS,
    Nudged,
    has_no_problems,
    loaded_digest,
    only_rebase,
    read,
    record_of,
    step,
)

ROOT = Path(__file__).parents[4]
CHILD = """
import asyncio, sys
from engine.local.engine import LocalEngine
from storage.chain.records import Chain
from storage.store.objects import open_store
from tests.engine.local.rebase.rebasing import DOUBLE, step
async def main():
    engine = LocalEngine(sys.argv[1], DOUBLE)
    await step(engine, Chain(engine.store, "r", "0-s", "policy").head())
    await engine.close(checkpoint=False)
asyncio.run(main())
"""


async def test_the_loser_of_a_race_takes_the_winners_weights(
    chain: Chain, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the loser's redo and its commit, the winner's rebase is committed."""
    from engine.local import rebase as module

    winner, loser, commit = Nudged(url, 1e-3), Nudged(url, 2e-3), module.commit_rebase
    raced = False

    # The winner commits its rebase just before the loser does.
    def after_the_winner(*arguments: Any) -> Rebase:
        nonlocal raced
        if not raced:
            raced = True
            winner.materialiser.for_training(chain.head())
        return commit(*arguments)

    monkeypatch.setattr(module, "commit_rebase", after_the_winner)
    record = await step(loser, chain.head())
    # The loser has taken its step from the winner's weights.
    rebase = only_rebase(chain)
    assert rebase.after.device == "nudged by 0.001"
    assert record.rebase == rebase.mark
    assert loaded_digest(winner, chain.policy(STEPS)) == rebase.weights_digest
    objects = chain.store.list("runs/r/stages/0-s/rebased/")
    artifacts = [key_patterns.artifact_of_manifest(info.key) for info in objects]
    assert [key for key in artifacts if key] == [rebase.checkpoint.key]  # the loser left nothing
    again = await step(winner, chain.head().model_copy(update={"step": STEPS, "state": chain.policy(STEPS).state}))
    assert again == record  # both engines have the committed step
    assert has_no_problems(chain.store)
    for engine in (winner, loser):
        await engine.close(checkpoint=False)


async def test_a_step_from_the_committed_weights_overtakes_a_rebase(chain: Chain, url: str) -> None:
    """An engine that still holds the committed weights takes a step. The rebase of the other engine is then void."""
    first = LocalEngine(url, SINGLE)
    first.materialiser.for_training(chain.head())
    other = LocalEngine(url, DOUBLE)
    await read(other, chain.head())
    record = await step(first, chain.head())
    assert record.rebase is None
    assert rebases_in_effect(chain) == []
    further = await step(other, record.policy)  # redone from the root, with another rebase after the step
    rebase = only_rebase(chain)
    assert (rebase.policy.step, further.rebase) == (STEPS + 1, rebase.mark)
    assert has_no_problems(chain.store)
    assert verify_run(chain.store, "r").problems == []
    for engine in (first, other):
        await engine.close(checkpoint=False)




@pytest.mark.slow
@pytest.mark.parametrize(
    "failpoint", ["checkpoint.mid_upload", "checkpoint.after_manifest", "rebase.before_commit", "rebase.after_commit"]
)
async def test_a_kill_around_the_commit(chain: Chain, url: str, failpoint: str) -> None:
    def run(name: str) -> int:
        environment = os.environ | {"OSTINATO_FAILPOINT": name, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, "-c", CHILD, url], cwd=ROOT, env=environment, timeout=120).returncode

    assert await asyncio.to_thread(run, failpoint) == -signal.SIGKILL
    committed = rebase_at(chain, STEPS)
    assert (committed is not None) is (failpoint == "rebase.after_commit")
    assert has_no_problems(chain.store)
    assert await asyncio.to_thread(run, "") == 0
    rebase = only_rebase(chain)
    assert committed in (None, rebase)
    assert record_of(chain, STEPS + 1).rebase == rebase.mark
    assert has_no_problems(chain.store)
    assert verify_run(chain.store, "r").problems == []
