"""Tests of the lease of a recipe: it is released at the end of a flow, and of a script that opened its run itself. And
of the name of its flow run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.runtime import flow_run

from flows.configs.common import StorageConfig
from flows.recipe import InputConfig, RecipeContext, recipe_main
from flows.runs.recipe_context import _release_at_exit
from storage.inspect.run_details import summarize_run
from storage.store.objects import open_store
from tests.fixtures.engines import DETERMINISTIC

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
from flows.recipe import RecipeContext
ctx = RecipeContext.open("mine", store=sys.argv[1])
print(ctx.workspace.epoch)
if len(sys.argv) > 2:
    raise ValueError(sys.argv[2])
"""


@recipe_main
async def works(config: InputConfig, ctx: RecipeContext) -> int:
    assert summarize_run(ctx.workspace.open_store(), config.run).state == "running?"
    return 1


@recipe_main
async def fails(config: InputConfig, ctx: RecipeContext) -> int:
    raise KeyError("no")


def test_a_recipe_releases_its_lease_whether_it_ends_or_fails(tmp_path: Path, prefect_server: str) -> None:
    store = open_store(tmp_path)

    def config(run: str) -> InputConfig:
        return InputConfig(run=run, engine=DETERMINISTIC, storage=StorageConfig(url=str(tmp_path)))

    assert asyncio.run(works(config("works"))) == 1
    assert summarize_run(store, "works").state == "finished"
    with pytest.raises(KeyError):
        asyncio.run(fails(config("fails")))
    assert summarize_run(store, "fails").state == "stopped"


@recipe_main
async def named(config: InputConfig, ctx: RecipeContext) -> list[str]:
    return [str(flow_run.name), ctx.workspace.run]


def test_the_flow_run_of_a_recipe_is_named_after_its_run(tmp_path: Path, prefect_server: str) -> None:
    config = InputConfig(engine=DETERMINISTIC, storage=StorageConfig(url=str(tmp_path)))
    assert asyncio.run(named(config.model_copy(update={"run": "mine/1"}))) == ["mine/1", "mine/1"]
    name, run = asyncio.run(named(config))
    assert name == run and name.startswith("named-")
    # a name that a person gave is kept
    by_hand = named.with_options(flow_run_name="by hand")
    assert asyncio.run(by_hand(config))[0] == "by hand"


@pytest.mark.parametrize("error", [[], ["no"]])
def test_a_script_releases_its_lease_when_its_process_ends(tmp_path: Path, error: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), *error]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == len(error), done.stderr
    assert done.stdout == "1\n"
    assert summarize_run(open_store(tmp_path), "mine").state == "stopped"


def test_the_end_of_a_process_leaves_another_holders_lease_alone(tmp_path: Path) -> None:
    first = RecipeContext.open("mine", store=str(tmp_path)).workspace
    second = RecipeContext.open("mine", store=str(tmp_path)).workspace
    _release_at_exit(second, os.getpid() + 1)  # in a forked process
    _release_at_exit(first, os.getpid())
    assert summarize_run(open_store(tmp_path), "mine").state == "running?"
    _release_at_exit(second, os.getpid())
    assert summarize_run(open_store(tmp_path), "mine").state == "stopped"
