"""Tests of a recipe that is run as a program: its Prefect server ends with it, and its errors are one line."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.configs.overrides import ConfigError
from flows.parameters import Dataset, dataset_kinds
from flows.recipe import InputConfig, RecipeContext, recipe_main
from flows.runs import checked_flow
from tasks.datasets.errors import DatasetNotFound
from tests.fixtures.engines import DETERMINISTIC
from tests.flows.ops.test_local_server import gone

ROOT = Path(__file__).parents[3]
PROGRAM = """
import asyncio, sys, time
from flows.configs.overrides import ConfigError
from flows.recipe import InputConfig, recipe_main

@recipe_main
async def mine(config: InputConfig) -> str:
    if sys.argv[1] == "wait":
        print("running", flush=True)
        time.sleep(600)
    raise FileNotFoundError("a defect") if sys.argv[1] == "defect" else ConfigError("no such file; give another")

asyncio.run(mine(InputConfig(run="one", storage="data")))
"""


class Config(InputConfig):
    train: Dataset[dataset_kinds.Completion] = Dataset[dataset_kinds.Completion]("{}")


@recipe_main
async def counts(config: InputConfig, ctx: RecipeContext) -> int:
    calls.append(ctx.workspace.run)
    return len(calls)


calls: list[str] = []


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"engine": {"kind": "local", "trainer": {"kind": "deepspeed", "rank": 2}}},
            "engine.trainer.rank: unknown key; did you mean 'ranks'?",
        ),
        (
            {"train": {"kind": "mixture", "parts": [{"dataset": {"kind": "file", "path": "a"}, "wieght": 3}]}},
            "train: parts.0.wieght: unknown key; did you mean 'weight'?",
        ),
    ],
)
def test_a_wrong_config_of_a_recipe_is_named_as_it_was_written(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config(**values)
    assert str(refused.value) == f"1 problem in the Config config:\n  {line}"


def test_a_finished_recipe_says_that_it_does_not_run(
    tmp_path: Path, prefect_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = InputConfig(run="counts", engine=DETERMINISTIC, storage=str(tmp_path))
    assert [asyncio.run(counts(config)), asyncio.run(counts(config))] == [1, 1]
    assert capsys.readouterr().out.count("run counts is finished already; its recorded result is returned") == 1


@pytest.mark.parametrize(("error", "is_expected"), [(DatasetNotFound("row 1 is bad"), True), (ValueError("no"), False)])
def test_an_error_that_explains_itself_has_no_traceback(
    error: Exception, is_expected: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    error.add_note("the traceback is in a file")
    try:
        raise error
    except (DatasetNotFound, ValueError):
        checked_flow._print_error(type(error), error, error.__traceback__)
    text = capsys.readouterr().err
    assert ("Traceback" not in text) == is_expected
    assert f"{type(error).__name__}: {error}\nthe traceback is in a file\n" in text


def start(tmp_path: Path, what: str, server: str = "") -> subprocess.Popen[str]:
    (tmp_path / "mine.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PREFECT_API_URL": server}
    if not server:
        del environment["PREFECT_API_URL"]
    command = [sys.executable, "mine.py", what]
    return subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", ["refuse", "defect"])
def test_a_program_ends_with_one_line_or_the_traceback_of_a_defect(
    what: str, tmp_path: Path, prefect_server: str
) -> None:
    text = start(tmp_path, what, prefect_server).communicate(timeout=120)[1]
    if what == "refuse":
        assert text.endswith(
            "ConfigError: no such file; give another\nthe traceback is in .ostinato/logs/mine.log\n"
        ), text
        assert "Traceback" not in text
        assert "Traceback" in (tmp_path / ".ostinato/logs/mine.log").read_text()
    else:
        assert 'mine.py", line' in text and text.endswith("FileNotFoundError: a defect\n")


@pytest.mark.slow
def test_the_server_of_a_program_dies_with_it(tmp_path: Path) -> None:
    process = start(tmp_path, "wait")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "running\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    servers = [int(child) for child in children if "prefect" in Path(f"/proc/{child}/cmdline").read_text()]
    assert len(servers) == 1
    process.send_signal(signal.SIGKILL)
    assert "telemetry" not in process.communicate(timeout=60)[1]
    assert gone(servers[0])
    # its history stays in the folder
    assert list((tmp_path / ".ostinato/prefect").glob("prefect-*.db"))
