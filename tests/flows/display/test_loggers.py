"""Loggers and notifiers of recipes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.runtime import flow_run
from rich.console import Console

from flows.display.terminal import TerminalProgress
from flows.loggers import JobNotifier, StageNotifier, StdoutLogger, get_prod_logger
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
    monkeypatch.setattr("flows.loggers.log_line", said.append)
    stage = JobNotifier().stage_notifier("SFT Training")
    stage.report_progress(3, 4)
    assert stage.progress == 0.75 and said == ["SFT Training: 75 %"]
    for wrong in ((5, 4), (-1, 4), (0, 0)):
        with pytest.raises(ValueError, match="SFT Training"):
            stage.report_progress(*wrong)


class Bars:
    """A page that remembers its bars."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.shown: list[tuple[str, str, float, str]] = []
        self.fails = fails

    def show(self, kind: str, key: str, data: Any, description: str) -> None:
        if self.fails:
            raise self.fails
        self.shown.append((kind, key, data, description))


def test_a_stage_has_a_bar_that_is_changed_every_few_seconds_and_at_the_end() -> None:
    page, now = Bars(), [0.0]
    stage = StageNotifier("SFT Training", page=page, clock=lambda: now[0])
    for done in range(101):
        now[0] = 0.1 * done  # ten seconds in all
        stage.report_progress(done, 100)
        stage.settle()
    shares = [share for _, _, share, _ in page.shown]
    assert shares == [0.0, 50.0, 100.0]
    assert {(kind, key, said) for kind, key, _, said in page.shown} == {
        ("progress", "stage-sft-training", "SFT Training")
    }


def test_a_server_that_is_away_does_not_stop_a_stage(caplog: pytest.LogCaptureFixture) -> None:
    stage = StageNotifier("SFT", page=Bars(fails=httpx.ConnectError("the server is away")))
    stage.report_progress(1, 1)
    stage.settle()
    assert stage.progress == 1.0
    assert "the progress of SFT is not in Prefect: the server is away" in caplog.text


def test_in_a_flow_the_bar_is_on_its_page(prefect_server: str) -> None:
    @flow
    def mine() -> str:
        stage = JobNotifier().stage_notifier("Judging answers")
        stage.report_progress(1, 4)
        stage.report_progress(4, 4)
        stage.settle()
        return str(flow_run.id)

    run = ArtifactFilterFlowRunId(any_=[UUID(mine())])
    with get_client(sync_client=True) as client:
        (bar,) = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=run))
    assert (bar.type, bar.key, bar.data, bar.description) == (
        "progress", "stage-judging-answers", 100.0, "Judging answers",
    )  # fmt: skip


def test_the_context_says_where_a_recipe_runs(tmp_path: Path) -> None:
    ctx = RecipeContext.open("mine", store=str(tmp_path), engine=DETERMINISTIC)
    assert (ctx.world_size, ctx.job.id) == (1, "mine")
    assert ctx.client is ctx.workspace.connect()
    again = RecipeContext.open("mine", store=str(tmp_path), engine=DETERMINISTIC)
    assert again.workspace.epoch == ctx.workspace.epoch + 1
