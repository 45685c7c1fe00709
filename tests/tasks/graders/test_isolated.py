"""Graders that crash the interpreter: isolated ones fail their grade, others leave word of what ended the run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import SamplingParams
from engine.text.threads import StringThread
from storage.artifacts import ArtifactRef
from storage.chain import PolicyRef
from tasks.evaluations import EvaluationPlan
from tasks.graders.base import BaseGrader, GraderCrashed, GraderError
from tasks.graders.run import grade_threads
from tasks.graders.spec import GraderSpec, build, grader_spec
from tasks.gradings import Grading
from tasks.rollouts import PromptShard


def answered(text: str) -> StringThread:
    return StringThread(turns=[("user", "q"), ("assistant", text)])


@asynccontextmanager
async def isolated(name: str, **arguments: Any) -> AsyncIterator[BaseGrader]:
    grader = build(grader_spec(f"tests.crashing:{name}", arguments, isolated=True))
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
async def test_a_crash_masks_its_grade_and_no_other(name: str, how: str) -> None:
    async with isolated(name) as grader:
        with pytest.raises(GraderCrashed, match=f"the process of grader '{name}' on 'crash' {how}"):
            await grader.grade(answered("crash"))
        threads = [answered(text) for text in ("a", "crash", "b")]
        outcomes = await grade_threads(grader, threads, retries=1, retry_delay_seconds=0)
    assert [outcome.status for outcome in outcomes] == ["ok", "masked", "ok"]
    assert outcomes[1].reason.startswith(f"{name}: GraderCrashed: the process of grader")


async def test_a_crashed_grade_is_tried_again_in_another_process(tmp_path: Path) -> None:
    async with isolated("crash_once", folder=str(tmp_path)) as grader:
        (outcome,) = await grade_threads(grader, [answered("a")], retries=1, retry_delay_seconds=0)
    assert (tmp_path / "crashed").exists()
    assert outcome.reward == 1.0


async def test_everything_else_is_as_in_the_run_s_process(capfd: pytest.CaptureFixture[str]) -> None:
    """Outcomes, logs and what the grader prints. Its process loads no torch, and there is nothing for it to read."""
    async with isolated("Talkative", grader_key="t") as grader:
        told = ["four", "decline", "bad data", "bug", "exit"]
        outcomes = await grade_threads(grader, [answered(text) for text in told], retries=0)
        assert [(outcome.status, outcome.reward, outcome.reason) for outcome in outcomes] == [
            ("ok", 1.0, "because"),
            ("ignored", None, "no opinion"),
            ("masked", None, "t: no answer in the dataset"),
            ("masked", None, "t: GraderRaised: ValueError: a bug"),
            ("masked", None, "t: the grader raised SystemExit(1), which would end the process"),
        ]
        assert grader.get_logs()["length/mean"] == 4.0
    assert "and one from native code" in capfd.readouterr().err


async def test_a_setup_that_fails_says_why() -> None:
    with pytest.raises(GraderError, match="'u' cannot be isolated: setup raised RuntimeError: no license"):
        async with isolated("Unready", grader_key="u"):
            pass


async def test_a_grade_that_hangs_takes_its_process_along(tmp_path: Path) -> None:
    async with isolated("hang", folder=str(tmp_path)) as grader:
        grade = asyncio.ensure_future(grader.grade(answered("hang")))
        hung = int(await asyncio.to_thread(wait_for_text, tmp_path / "pid"))
        grade.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grade
        assert not alive(hung)
        assert (await grader.grade(answered("go on"))).value == 1.0
        last = int((tmp_path / "pid").read_text())
    assert not alive(last), "the process outlived the teardown"


HANGING_PARENT = """
import asyncio, sys
from engine.text.threads import StringThread
from tasks.graders.spec import build, grader_spec

async def main(folder):
    grader = build(grader_spec("tests.crashing:hang", {"folder": folder}, isolated=True))
    await grader.grade(StringThread(turns=[("user", "q"), ("assistant", "hang")]))

asyncio.run(main(sys.argv[1]))
"""


def test_a_killed_run_leaves_no_process_of_a_grader(tmp_path: Path) -> None:
    """Its grader hangs, and so does not read that its input has ended."""
    parent = subprocess.Popen([sys.executable, "-c", HANGING_PARENT, str(tmp_path)])
    try:
        worker = int(wait_for_text(tmp_path / "pid"))
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not alive(worker))


GRADING_PROCESS = """
import asyncio, sys
from engine.workspace import Workspace
from storage.artifacts import Provenance
from tasks.graders.spec import grader_spec
from tasks.gradings import Grading, grade_texts

provenance = Provenance(code_version="c", config_digest="0" * 64, seed=0)
workspace = Workspace(store="memory://notes", run="noted", provenance=provenance)
grading = Grading(grader=grader_spec(sys.argv[1]))
rows = [{"thread": sys.argv[2], "text": sys.argv[3]}]
print(asyncio.run(grade_texts(rows, grading, workspace))[0].reward)
"""


def grade_in_process(cache: Path, name: str, text: str) -> subprocess.CompletedProcess[str]:
    thread = StringThread(turns=[("user", "q")]).to_json()
    return subprocess.run(
        [sys.executable, "-c", GRADING_PROCESS, f"tests.crashing:{name}", thread, text],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_crash_in_the_run_s_process_is_said_then_and_by_the_next_process(tmp_path: Path) -> None:
    crashed = grade_in_process(tmp_path, "segfault", "crash")
    assert crashed.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in crashed.stderr and "crashing.py" in crashed.stderr and "segfault" in crashed.stderr
    resumed = grade_in_process(tmp_path, "segfault", "fine")
    assert resumed.stdout.split() == ["1.0"]
    assert "ended without a word while tests.crashing:segfault graded" in resumed.stderr
    assert "isolated: true" in resumed.stderr
    assert not list((tmp_path / "ostinato" / "grading").iterdir()), "said once, and nothing is left"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # dead, and not yet reaped


def wait_for_text(path: Path) -> str:
    wait_until(lambda: path.exists() and path.read_text() != "")
    return path.read_text()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_where_a_grader_runs_does_not_rename_an_evaluation() -> None:
    """The name is the one that evaluations had before graders could be isolated."""
    rows = ArtifactRef(kind="threads", key="datasets/a/b", sha256="0" * 64, bytes=1, rows=2, parents=())
    policy = PolicyRef(run="r", stage="0-grpo", model="policy", step=3, state="1" * 64)
    shard = PromptShard(index=0, dataset=rows, rows=(0, 1), base=rows, completions=1)
    for isolated in (False, True):
        grading = Grading(grader=GraderSpec(path="a.b:c", isolated=isolated))
        plan = EvaluationPlan(prompts=shard, sampling=SamplingParams(), grading=grading)
        assert plan.name(policy) == "000003-79fc96b7d3ff"
