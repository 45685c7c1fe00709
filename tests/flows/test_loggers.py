"""Loggers and notifiers of recipes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from flows.loggers import JobNotifier, StdoutLogger, get_prod_logger
from flows.progress import TerminalProgress
from flows.recipe import RecipeContext
from tests.fixtures.engines import DETERMINISTIC


def test_a_logger_says_the_numbers_of_a_step_in_their_order() -> None:
    out = io.StringIO()
    StdoutLogger(Console(file=out))({"reward": 0.123456, "step": 3, "note": "[x]"})
    assert out.getvalue() == "reward 0.1235  step 3  note [x]\n"


def test_the_logger_of_a_deployed_recipe_is_one_that_training_classes_take() -> None:
    assert isinstance(get_prod_logger(ctx=None), TerminalProgress)


def test_a_stage_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("flows.loggers.say", said.append)
    stage = JobNotifier().stage_notifier("SFT Training")
    stage.report_progress(3, 4)
    assert stage.progress == 0.75 and said == ["SFT Training: 75 %"]
    for wrong in ((5, 4), (-1, 4), (0, 0)):
        with pytest.raises(ValueError, match="SFT Training"):
            stage.report_progress(*wrong)


def test_the_context_says_where_a_recipe_runs(tmp_path: Path) -> None:
    ctx = RecipeContext.open("mine", store=str(tmp_path), engine=DETERMINISTIC)
    assert (ctx.world_size, ctx.job.id) == (1, "mine")
    assert ctx.client is ctx.workspace.connect()
    again = RecipeContext.open("mine", store=str(tmp_path), engine=DETERMINISTIC)
    assert again.workspace.epoch == ctx.workspace.epoch + 1
