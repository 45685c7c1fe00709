"""Tests of a grader that crashes the interpreter in the run's process: the next process of the run names it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from engine.text.threads import StringThread

GRADING_PROCESS = """
import asyncio, sys
from engine.workspace import Workspace
from storage.store.artifacts import Provenance
from tasks.graders.spec import grader_spec
from tasks.plans import Grading
from tasks.sampling.grading import grade_texts

provenance = Provenance(code_version="c", config_digest="0" * 64, seed=0)
workspace = Workspace(store="memory://notes", run="noted", provenance=provenance)
grading = Grading(grader=grader_spec(sys.argv[1]))
rows = [{"thread": sys.argv[2], "text": sys.argv[3]}]
print(asyncio.run(grade_texts(rows, grading, workspace))[0].reward)
"""


def grade_in_process(cache: Path, name: str, text: str) -> subprocess.CompletedProcess[str]:
    thread = StringThread(turns=[("user", "q")]).to_json()
    return subprocess.run(
        [sys.executable, "-c", GRADING_PROCESS, f"tests.fixtures.crashing:{name}", thread, text],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_crash_in_the_run_s_process_is_said_then_and_by_the_next_process(tmp_path: Path) -> None:
    crashed = grade_in_process(tmp_path, "segfault", "crash")
    assert crashed.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in crashed.stderr and "crashing.py" in crashed.stderr and "segfault" in crashed.stderr
    resumed = grade_in_process(tmp_path, "segfault", "fine")
    assert resumed.stdout.split() == ["1.0"]
    assert "ended without a message while tests.fixtures.crashing:segfault graded" in resumed.stderr
    assert "workers: local" in resumed.stderr
    assert not list((tmp_path / "ostinato" / "grading").iterdir()), "said once, and nothing is left"


