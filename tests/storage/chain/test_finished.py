"""Garbage collection deletes the checkpoints that a finished run does not need, and the run stays whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.local.verify import verify_run
from storage.chain.checkpoint_names import name_step, named_checkpoints, resolve_checkpoint_name
from storage.chain.fork import fork_run
from storage.chain.leases import acquire_lease
from storage.chain.listing import stored_checkpoint_steps
from storage.chain.records import Chain, Root
from storage.inspect.audit import audit_store
from storage.inspect.gc import GcReport, collect_garbage
from storage.store import keys
from tests.fixtures.runs.toy_run import ToyRun

REASON = "checkpoint that a finished run does not need"


@pytest.fixture
def toy(toy_run: ToyRun, tmp_path: Path) -> ToyRun:
    return toy_run.copied(tmp_path / "copy")


def set_rules(toy: ToyRun, checkpoints: dict[str, Any] | None) -> None:
    """Writes run.json as a run with these settings of its checkpoints would."""
    body = json.loads(toy.store.get(keys.run_json("toy")))
    body["other"] = {} if checkpoints is None else {"checkpoints": checkpoints}
    toy.store.put(keys.run_json("toy"), json.dumps(body).encode())


def collect(toy: ToyRun, **options: Any) -> tuple[GcReport, list[int]]:
    """The report of a collection, and the steps whose checkpoints it left."""
    return collect_garbage(toy.store, **options), stored_checkpoint_steps(toy.chain)


def test_the_last_checkpoint_is_enough(toy: ToyRun) -> None:
    set_rules(toy, {"frequency": 0.2, "keep_last": 2})
    size = sum(info.size for info in toy.store.list(f"{keys.checkpoint('toy', '0-grpo', 'policy', 2)}/"))
    would, steps = collect(toy, dry_run=True)
    assert (would.deleted[REASON].bytes, steps) == (size, [2, 4])
    did, steps = collect(toy)
    assert (did.deleted, did.names, steps) == (would.deleted, would.names, [4])
    again, steps = collect(toy)
    assert (again.total.objects, steps) == (0, [4])
    # the run can be verified, audited, and forked at the very step
    (chain,) = verify_run(toy.store, "toy").chains
    assert (chain.problems, chain.redone, chain.checkpoints) == ((), 4, 1)
    assert audit_store(toy.store).problems == ()
    fork_run(toy.store, "toy", "new", step=2, code_version="test")


@pytest.mark.parametrize("rules", [{"keep_every": 2}, {"keep_best": 2, "metric": "loss"}])
def test_what_the_config_asks_for_stays(toy: ToyRun, rules: dict[str, Any]) -> None:
    set_rules(toy, rules)
    assert collect(toy)[1] == [2, 4]


def test_an_unfinished_run_and_an_unreadable_one_lose_nothing(toy: ToyRun) -> None:
    set_rules(toy, {})
    result = toy.store.get(keys.result_json("toy"))
    toy.store.delete(keys.result_json("toy"))
    assert collect(toy)[1] == [2, 4]
    toy.store.put(keys.result_json("toy"), result)
    toy.store.put(keys.run_json("toy"), b"{")
    assert collect(toy)[1] == [2, 4]


def test_a_recipe_loses_checkpoints_of_shares_and_keeps_their_names(toy: ToyRun) -> None:
    set_rules(toy, None)
    assert collect(toy)[1] == [2, 4]
    name_step(toy.store, toy.chain.policy(2), "policy-0.5")
    assert collect(toy)[1] == [4]
    assert [named.title for named in named_checkpoints(toy.store, "toy")] == ["toy/0-grpo/policy-0.5"]
    assert resolve_checkpoint_name(toy.store, "toy/policy-0.5") == toy.chain.policy(2)
    assert audit_store(toy.store).problems == ()


def test_a_stage_in_progress_keeps_the_share_it_began_at(toy: ToyRun) -> None:
    set_rules(toy, {})
    policy = toy.chain.policy(2)
    name_step(toy.store, policy, "policy-0.5")
    Chain(toy.store, "again", "0-sft", "policy").create_root(Root(start=policy, base_digest=policy.state))
    acquire_lease(toy.store, "again", {})
    assert collect(toy)[1] == [2, 4]


@pytest.mark.parametrize("failpoint", ["retention.named", "retention.unlisted"])
def test_a_collection_that_is_killed_can_be_repeated(toy: ToyRun, failpoint: str) -> None:
    set_rules(toy, {})
    # a name that is only in the manifest of the checkpoint
    key = keys.manifest_of_files(keys.checkpoint("toy", "0-grpo", "policy", 2))
    body = json.loads(toy.store.get(key))
    body["extra"]["name"] = "policy-0.5"
    toy.store.put(key, json.dumps(body).encode())
    code = (
        "from storage.inspect.gc import collect_garbage\n"
        "from storage.store.objects import open_store\n"
        f"collect_garbage(open_store({str(toy.folder)!r}))"
    )
    environment = os.environ | {"OSTINATO_FAILPOINT": failpoint}
    killed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert audit_store(toy.store).problems == ()
    assert [named.name for named in named_checkpoints(toy.store, "toy")] == ["policy-0.5"]
    # files that the kill left without a manifest are garbage like any other
    collect(toy, now=toy.store.now() + 1e6)
    left = [info.key for info in toy.store.list(f"{keys.checkpoint('toy', '0-grpo', 'policy', 2)}/")]
    assert left == [keys.checkpoint_name(keys.checkpoint("toy", "0-grpo", "policy", 2))]
    assert [named.name for named in named_checkpoints(toy.store, "toy")] == ["policy-0.5"]
