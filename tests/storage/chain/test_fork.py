"""A fork copies records and checkpoints, so that it shares nothing that the other run may delete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from storage.chain.fork import check_fork, fork_run, read_fork
from storage.chain.records import Chain
from storage.chain.retention import Retention, prune_checkpoints
from storage.errors import ForkRefused, ObjectNotFound
from storage.inspect.audit import audit_store
from storage.store import keys
from storage.store.artifacts import find_artifact, read_manifest
from storage.store.objects import ObjectStore
from tests.fixtures.runs.interruption import Killed
from tests.fixtures.runs.toy_run import ToyRun


@pytest.fixture
def toy(toy_run: ToyRun, tmp_path: Path) -> ToyRun:
    return toy_run.copied(tmp_path / "copy")


def fork(store: ObjectStore, step: int, new: str = "new", run: str = "toy") -> Chain:
    fork_run(store, run, new, step=step, code_version="test")
    return Chain(store, new, "0-grpo", "policy")


def of_run(store: ObjectStore, run: str) -> dict[str, bytes]:
    """Returns every object of a run without the names of attempts."""
    return {info.key: store.get(info.key) for info in store.list(keys.run_prefix(run))}


def test_states_are_equal_and_names_are_the_new_run(toy: ToyRun) -> None:
    copy = fork(toy.store, 3)
    assert list(copy.steps()) == [1, 2, 3]
    for step in range(4):
        assert copy.policy(step).state == toy.chain.policy(step).state
    for mine, theirs in zip(copy.records(0, 3), toy.chain.records(0, 3), strict=True):
        assert mine.request.parent.run == "new"
        assert mine.request.reference is not None
        assert mine.request.reference.run == "new"
        assert mine.request.batch == theirs.request.batch  # the batch stays an artifact of the old run
        assert mine.weights_digest == theirs.weights_digest
    stage = json.loads(toy.store.get(keys.stage_json("new", "0-grpo")))
    assert stage["start"]["run"] == stage["reference"]["run"] == "new"


def test_what_is_not_shared_is_not_copied(toy: ToyRun) -> None:
    fork(toy.store, 3)
    assert not toy.store.exists(keys.run_json("new"))  # the first run of the fork writes it
    assert not toy.store.exists(keys.result_json("new"))
    # metrics are numbered from 0: those of the shared steps, equal to the byte
    copied = {info.key: toy.store.get(info.key) for info in toy.store.list(keys.step_metrics_prefix("new", "0-grpo"))}
    assert copied == {
        keys.step_metrics("new", "0-grpo", n): toy.store.get(keys.step_metrics("toy", "0-grpo", n)) for n in range(3)
    }


@pytest.mark.parametrize(("step", "checkpoint"), [(1, None), (2, 2), (3, 2), (4, 4)])
def test_the_nearest_checkpoint_is_a_copy_of_its_own(toy: ToyRun, step: int, checkpoint: int | None) -> None:
    copy = fork(toy.store, step)
    listed = toy.store.list(keys.checkpoints_prefix("new", "0-grpo", "policy"))
    assert [n for info in listed if (n := keys.checkpoint_step(info.key)) is not None] == [checkpoint] * (
        checkpoint is not None
    )
    if checkpoint is None:
        return
    mine = read_manifest(toy.store, keys.checkpoint("new", "0-grpo", "policy", checkpoint))
    assert mine.parents == (copy.policy(checkpoint).uri,)
    assert mine.extra["state"] == copy.policy(checkpoint).state
    before = {entry.name: (toy.folder / entry.key).read_bytes() for entry in mine.files}
    prune_checkpoints(toy.store, toy.chain.policy(4), Retention(keep_last=0))
    assert find_artifact(toy.store, keys.checkpoint("toy", "0-grpo", "policy", checkpoint)) is None
    for entry in mine.files:
        assert (toy.folder / entry.key).stat().st_nlink == 1
        assert (toy.folder / entry.key).read_bytes() == before[entry.name]


def test_the_audit_finds_nothing_in_a_fork_of_a_fork(toy: ToyRun) -> None:
    fork(toy.store, 3)
    copy = fork(toy.store, 2, new="nightly/2", run="new")
    assert copy.policy(2).state == toy.chain.policy(2).state
    assert audit_store(toy.store).problems == ()
    info = read_fork(toy.store, "nightly/2")
    assert info is not None
    assert (info.run, info.stage, info.step) == ("new", "0-grpo", 2)
    assert info.shared == (Chain(toy.store, "new", "0-grpo", "policy").policy(2),)


def test_the_marks_of_loops_are_copied_up_to_the_fork(toy: ToyRun) -> None:
    """Two loops with marks at the policies 0, 2 and 2, 4."""
    for loop, done, step in ((0, 0, 0), (0, 1, 2), (1, 0, 2), (1, 1, 4)):
        body = {"policies": {"policy": toy.chain.policy(step).model_dump()}, "cursors": [10 * step]}
        toy.store.put(keys.loop_mark("toy", loop, done), json.dumps(body).encode())

    def marks(run: str) -> dict[str, tuple[str, int, list[int]]]:
        prefix = keys.loops_prefix(run)
        bodies = {info.key.removeprefix(prefix): json.loads(toy.store.get(info.key)) for info in toy.store.list(prefix)}
        policies = {key: body["policies"]["policy"] for key, body in bodies.items()}
        return {key: (policies[key]["run"], policies[key]["step"], body["cursors"]) for key, body in bodies.items()}

    fork(toy.store, 3)
    assert marks("new") == {
        "000000/000000.json": ("new", 0, [0]), "000000/000001.json": ("new", 2, [20]),
        "000001/000000.json": ("new", 2, [20]),
    }  # fmt: skip
    fork(toy.store, 1, new="early")
    assert marks("early") == {"000000/000000.json": ("early", 0, [0])}
    fork(toy.store, 4, new="late")
    assert {key: ("toy", *rest) for key, (_, *rest) in marks("late").items()} == marks("toy")
    assert audit_store(toy.store).problems == ()


class Mortal:
    """A store whose n-th write raises Killed."""

    def __init__(self, store: ObjectStore, writes: int) -> None:
        self.left, self.store = writes, store

    def open(self) -> ObjectStore:
        backend = self.store.backend
        for name in ("put", "put_file", "put_if_absent"):
            setattr(backend, name, self._counting(getattr(backend, name)))
        return self.store

    def _counting(self, write):  # type: ignore[no-untyped-def]
        def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
            if self.left == 0:
                raise Killed
            self.left -= 1
            return write(*args, **kwargs)

        return counted


def test_a_fork_killed_at_any_write_is_finished_by_the_same_command(toy: ToyRun, tmp_path: Path) -> None:
    fork(toy.store, 3)
    whole = {key for key in of_run(toy.store, "new") if "/checkpoints/" not in key}
    kills = 0
    for writes in range(100):
        again = toy.copied(tmp_path / f"killed-{writes}")
        entries = [info.key for info in again.store.list("index/") if "/new" in info.key]
        for key in (*of_run(again.store, "new"), *entries):
            again.store.delete(key)
        try:
            fork(Mortal(again.store, writes).open(), 3)
        except Killed:
            kills += 1
        else:
            break
        is_begun = again.store.exists(keys.fork_json("new"))
        if is_begun and not again.store.exists(keys.chain_record("new", "0-grpo", "policy", 3)):
            with pytest.raises(ForkRefused, match="ostinato fork toy --step 3 --stage 0-grpo --run new"):
                check_fork(again.store, "new")
        copy = fork(again.store, 3)
        check_fork(again.store, "new")
        assert copy.head() == Chain(toy.store, "new", "0-grpo", "policy").head()
        assert {key for key in of_run(again.store, "new") if "/checkpoints/" not in key} == whole
        assert audit_store(again.store).problems == ()
    # fork.json, stage.json, three metrics, root, three records, a checkpoint of two files and its manifest; and in the
    # index: the run and the use of the old run before fork.json, the chain and the use of the base before the root
    assert kills == 1 + 1 + 3 + 1 + 3 + 3 + 2 + 2


def test_a_taken_key_is_refused(toy: ToyRun) -> None:
    fork(toy.store, 3)
    fork(toy.store, 3)  # a repetition changes nothing
    with pytest.raises(ForkRefused, match="another fork already"):
        fork(toy.store, 2)
    with pytest.raises(ForkRefused, match="into itself"):
        fork(toy.store, 2, new="toy")
    toy.store.put(keys.lease("mine", 1), b"{}")
    with pytest.raises(ForkRefused, match="'mine' exists already"):
        fork(toy.store, 2, new="mine")
    assert not toy.store.exists(keys.fork_json("mine"))


def test_the_parent_of_scheduled_runs_is_free(toy: ToyRun) -> None:
    toy.store.put(keys.lease("nightly/1", 1), b"{}")
    fork(toy.store, 2, new="nightly")  # runs/nightly/1/ is another run


@pytest.mark.parametrize(
    ("run", "step", "stage", "says"),
    [
        ("none", 1, None, "no run 'none'"),
        ("toy", 5, None, "no step 5; it has steps 1 to 4"),
        ("toy", 1, "1-sft", "no stage '1-sft'; it has 0-grpo"),
    ],
)
def test_a_place_that_is_not_there(toy: ToyRun, run: str, step: int, stage: str | None, says: str) -> None:
    with pytest.raises(ObjectNotFound, match=says):
        fork_run(toy.store, run, "new", step=step, stage=stage, code_version="test")
    assert not toy.store.exists(keys.fork_json("new"))
