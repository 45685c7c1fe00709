"""Loggers and notifiers of recipes."""

from __future__ import annotations

import io
import sys
from itertools import chain
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

from engine.handles import Model
from engine.text.threads import StringThread
from flows.configs.validation import LoggingConfig
from flows.display.terminal import TerminalProgress
from flows.loggers import JobNotifier, StageNotifier, StdoutLogger, get_prod_logger
from flows.recipe import RecipeContext
from flows.sft import SFT
from tasks.loggers.base import LoggerMissing
from tasks.loggers.stage_loggers import VARIABLES
from tests.fixtures.engines import DETERMINISTIC


def test_a_logger_says_the_numbers_of_a_step_in_their_order() -> None:
    out = io.StringIO()
    StdoutLogger(Console(file=out))({"reward": 0.123456, "step": 3, "note": "[x]"})
    assert out.getvalue() == "reward 0.1235  step 3  note [x]\n"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ()),
        ({"WANDB_PROJECT": ""}, ()),
        ({"WANDB_PROJECT": "p"}, ("wandb",)),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, ()),
        ({"MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"}, ("mlflow",)),
        ({"TENSORBOARD_LOGGING_DIR": "d", "WANDB_API_KEY": "k"}, ("wandb", "tensorboard")),
    ],
)
def test_the_logger_of_a_deployed_recipe_sends_to_what_is_configured(
    variables: dict[str, str], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in chain.from_iterable(service.configured for service in VARIABLES.values()):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # the packages are not needed to choose
    monkeypatch.setattr("flows.configs.validation.check_installed", lambda name: None)
    logger = get_prod_logger(ctx=None)
    assert isinstance(logger, TerminalProgress) and logger.logging.loggers == expected
    # a config sends to the same services, unless it names others or none; a terminal's logger of a recipe sends nothing
    assert LoggingConfig().trackers() == expected
    assert LoggingConfig(loggers=("swanlab",)).trackers() == ("swanlab",)
    assert LoggingConfig(loggers=()).trackers() == ()
    assert StdoutLogger().logging.trackers() == ()


def test_a_configured_service_without_its_package_is_said_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "p")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(LoggerMissing, match="pip install wandb"):
        get_prod_logger()


async def test_the_steps_of_a_training_class_reach_the_configured_service(
    prefect_server: str, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    threads = [StringThread([("user", str(digit)), ("assistant", str(digit))]) for digit in range(4)]
    for _ in range(2):  # the second time, all steps are committed
        ctx = RecipeContext.open("logged", store=str(tmp_path / "data"), engine=DETERMINISTIC)
        model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy")
        await SFT(threads, model, samples_per_batch=4, max_steps=2, logger=get_prod_logger(ctx=ctx)).run()
    files = sorted((tmp_path / "events" / "ostinato" / "logged").glob("events.*"))
    events = chain.from_iterable(loader.EventFileLoader(str(file)).Load() for file in files)
    assert [event.step for event in events for value in event.summary.value if value.tag == "train/loss"] == [1, 2]


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
