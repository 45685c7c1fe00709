"""Tests of graders in worker processes, on this machine and on a Ray cluster."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.cluster import connection
from engine.errors import BadSpec
from engine.protocol import SamplingParams
from engine.text.threads import StringThread
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.graders.base import BaseGrader, GraderCrashed, GraderError
from tasks.graders.running.grade_threads import grade_threads
from tasks.graders.spec import GraderSpec, Workers, build, grader_spec
from tasks.plans import EvaluationPlan, Grading, PromptShard
from tests.fixtures.ray_nodes import ray_nodes
from tests.fixtures.waiting import alive, wait_for_text, wait_until


def answered(text: str, **metadata: Any) -> StringThread:
    return StringThread(turns=[("user", "q"), ("assistant", text)], metadata=metadata)


@pytest.fixture(scope="module")
def cluster_address() -> Iterator[str]:
    with ray_nodes() as cluster:
        yield cluster.address


@pytest.fixture(params=["local", pytest.param("cluster", marks=pytest.mark.slow)])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Workers:
    if request.param == "cluster":
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("cluster_address"))
    return request.param  # type: ignore[no-any-return]


@asynccontextmanager
async def grader_in(workers: Workers, path: str, **arguments: Any) -> AsyncIterator[BaseGrader]:
    grader = build(grader_spec(path if ":" in path else f"tests.fixtures.crashing:{path}", arguments, workers=workers))
    await grader.setup()
    try:
        yield grader
    finally:
        await grader.teardown()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("segfault", r"ended by signal 11 \(SIGSEGV\) in string_at .*, called by segfault \(.*crashing.py:\d+\)"),
        pytest.param("leave", "exited with status 3", marks=pytest.mark.slow),
        pytest.param("be_killed", r"ended by signal 9 \(SIGKILL\), which the system sends", marks=pytest.mark.slow),
        pytest.param("overflow", r"ended by signal 11 \(SIGSEGV\)", marks=pytest.mark.slow),
    ],
)
async def test_a_crash_masks_its_grade_and_no_other(workers: Workers, name: str, how: str) -> None:
    async with grader_in(workers, name) as grader:
        with pytest.raises(GraderCrashed, match=f"the process of grader '{name}' on 'crash' {how}"):
            await grader.grade(answered("crash"))
        threads = [answered(text) for text in ("a", "crash", "b")]
        outcomes = await grade_threads(grader, threads, retries=1, retry_delay_seconds=0)
    assert [outcome.status for outcome in outcomes] == ["ok", "masked", "ok"]
    assert outcomes[1].reason.startswith(f"{name}: GraderCrashed: the process of grader")


async def test_a_crashed_grade_is_tried_again_in_another_process(workers: Workers, tmp_path: Path) -> None:
    async with grader_in(workers, "crash_once", folder=str(tmp_path)) as grader:
        (outcome,) = await grade_threads(grader, [answered("a")], retries=1, retry_delay_seconds=0)
    assert (tmp_path / "crashed").exists()
    assert outcome.reward == 1.0


async def test_everything_else_is_as_in_the_run_s_process(workers: Workers, capfd: pytest.CaptureFixture[str]) -> None:
    """Outcomes and logs. The worker process loads no torch, and there is nothing for it to read."""
    async with grader_in(workers, "Talkative", grader_key="t") as grader:
        texts = ["four", "decline", "bad data", "bug", "exit"]
        outcomes = await grade_threads(grader, [answered(text) for text in texts], retries=0)
        assert [(outcome.status, outcome.reward, outcome.reason) for outcome in outcomes] == [
            ("ok", 1.0, "because"),
            ("ignored", None, "no opinion"),
            ("masked", None, "t: no answer in the dataset"),
            ("masked", None, "t: GraderRaised: ValueError: a bug"),
            ("masked", None, "t: the grader raised SystemExit(1), which would end the process"),
        ]
        assert grader.get_logs()["length/mean"] == 4.0
    printed = "and one from native code" in capfd.readouterr().err
    assert printed == (workers == "local"), "on a cluster it stands in Ray's logs"


async def test_a_setup_that_fails_says_why(workers: Workers) -> None:
    with pytest.raises(GraderError, match="'u' cannot grade in worker processes: setup raised RuntimeError: no licen"):
        async with grader_in(workers, "Unready", grader_key="u"):
            pass


async def test_a_grade_that_hangs_takes_its_process_along(workers: Workers, tmp_path: Path) -> None:
    async with grader_in(workers, "hang", folder=str(tmp_path)) as grader:
        grade = asyncio.ensure_future(grader.grade(answered("hang")))
        hung = int(await asyncio.to_thread(wait_for_text, tmp_path / "pid"))
        grade.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grade
        assert not alive(hung)
        assert (await grader.grade(answered("go on"))).value == 1.0
        last = int((tmp_path / "pid").read_text())
    await asyncio.to_thread(wait_until, lambda: not alive(last))  # a process must not outlive the teardown


async def test_code_and_mathematics_are_graded_as_in_the_run_s_process(workers: Workers) -> None:
    double = [{"stdin": "2", "stdout": "4"}, {"stdin": "3", "stdout": "6"}]
    programs = ["print(2 * int(input()))", "print(4)", "print(", "import os; os._exit(0)"]
    threads = [answered(f"```python\n{program}\n```", tests=double) for program in programs]
    async with grader_in(workers, "tasks.graders.code:CodeGrader", limits={"seconds": 60}) as grader:
        outcomes = await grade_threads(grader, threads, retries=0, timeout_seconds=300)
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.5, 0.0, 0.0]
    threads = [answered(text, answer=r"\frac{1}{2}") for text in (r"$\boxed{0.5}$", r"$\boxed{2}$")]
    async with grader_in(workers, "tasks.graders.maths:MathsGrader", timeout_seconds=60) as grader:
        outcomes = await grade_threads(grader, threads, retries=0, timeout_seconds=300)
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0]


HANGING_PARENT = """
import asyncio, sys
from engine.text.threads import StringThread
from tasks.graders.spec import build, grader_spec

async def main(folder, workers):
    grader = build(grader_spec("tests.fixtures.crashing:hang", {"folder": folder}, workers=workers))
    await grader.grade(StringThread(turns=[("user", "q"), ("assistant", "hang")]))

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_killed_run_leaves_no_process_of_a_grader(workers: Workers, tmp_path: Path) -> None:
    """Its grader hangs, and so does not read that its input has ended."""
    parent = subprocess.Popen([sys.executable, "-c", HANGING_PARENT, str(tmp_path), workers])
    try:
        worker = int(wait_for_text(tmp_path / "pid"))
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not alive(worker))


def test_where_a_grader_runs_does_not_rename_an_evaluation() -> None:
    """The name is the one that evaluations had before graders could run in worker processes."""
    rows = ArtifactRef(kind="threads", key="datasets/a/b", sha256="0" * 64, bytes=1, rows=2, parents=())
    policy = PolicyRef(run="r", stage="0-grpo", model="policy", step=3, state="1" * 64)
    shard = PromptShard(index=0, dataset=rows, rows=(0, 1), base=rows, completions=1)
    places: tuple[Workers, ...] = ("none", "local", "cluster")
    for place in places:
        grading = Grading(grader=GraderSpec(path="a.b:c", workers=place))
        plan = EvaluationPlan(prompts=shard, sampling=SamplingParams(), source=grading)
        assert plan.name(policy) == "000003-79fc96b7d3ff"
        assert grading.grader.digest() == GraderSpec(path="a.b:c").digest()


def test_a_grader_on_a_cluster_is_refused_where_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "find_spec", lambda name: None)
    with pytest.raises(BadSpec, match=r"Ray is not installed.*pip install 'ostinato\[cluster\]'"):
        grader_spec("tests.fixtures.grading:even_share", workers="cluster")
