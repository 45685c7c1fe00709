"""Tests of loggers: each service receives each step once, also after an interruption. The services are stand-ins. Where
TensorBoard is installed, its event file is read back."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from storage.chain.records import PolicyRef
from storage.store import key_patterns, keys
from storage.store.artifacts import Provenance, commit_bytes
from storage.store.objects import ObjectStore, open_store
from tasks.evaluation.validation_curve import Validation, validation_entry
from tasks.loggers.base import LoggedRun, LoggerMissing, Table, figures_of
from tasks.loggers.services import SINKS, run_id
from tasks.loggers.stage_loggers import Loggers
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import write_metrics
from tests.fixtures.waiting import wait_until


def policy(step: int, stage: str = "0-sft") -> PolicyRef:
    return PolicyRef(run="r", stage=stage, model="policy", step=step, state=f"s{step}")


def metrics(step: int) -> StepMetrics:
    nan = float("nan")
    return StepMetrics(step=step, loss=1.0 / (step + 1), grad_norm=nan, learning_rate=0.1, seconds={"train": 2.0})


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "data"))


@pytest.fixture
def run(tmp_path: Path) -> LoggedRun:
    return LoggedRun(project="p", name="n", run="r", folder=str(tmp_path / "logs"), config={"seed": 1})


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


class Recorder:
    """A run of wandb's or swanlab's."""

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.lines: list[tuple[int | None, dict[str, float]]] = []
        self.finished = 0

    def init(self, **arguments: Any) -> Recorder:
        self.opened.append(arguments)
        return self

    def log(self, figures: Mapping[str, float], step: int | None = None) -> None:
        self.lines.append((step, dict(figures)))

    def finish(self) -> None:
        self.finished += 1


def record(store: ObjectStore, loggers: Loggers, step: int) -> None:
    """As a loop does: the metrics of a committed step are stored, and then logged."""
    write_metrics(store, policy(step + 1), metrics(step))
    loggers.step(metrics(step))


def test_figures_are_the_finite_ones() -> None:
    figures = figures_of(metrics(1))
    assert figures["train/loss"] == 0.5 and figures["train/learning_rate"] == 0.1 and figures["seconds/train"] == 2.0
    assert "train/grad_norm" not in figures and "train/reward_mean" not in figures and "train/step" not in figures
    assert figures_of(metrics(1).model_copy(update={"reward_mean": 0.0}))["train/reward_mean"] == 0.0
    parts = metrics(1).model_copy(update={"reward_parts": {"form": 0.25}})
    assert figures_of(parts)["reward_part/form"] == 0.25 and "reward_parts" not in metrics(1).model_dump()


def test_wandb_goes_on_with_the_run_it_knows(
    store: ObjectStore, run: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Recorder()
    fake(monkeypatch, "wandb", init=wandb.init)
    for first in (0, 2):
        loggers = Loggers(store, policy(first), ["wandb"], run)
        for step in (first, first + 1):
            record(store, loggers, step)
        loggers.close()
    assert [one["step"] for _, one in wandb.lines] == [1, 2, 3, 4]
    assert [one["train/loss"] for _, one in wandb.lines] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    first, again = wandb.opened
    assert first == again and first["id"] == run_id(run, 32) and first["resume"] == "allow"
    assert (first["project"], first["name"], first["config"]) == ("p", "n", {"seed": 1})
    assert wandb.finished == 2


def test_a_resume_logs_no_step_twice_and_none_too_few(
    store: ObjectStore, run: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the metrics of step 2 were stored and before they were logged; then the step is asked for again."""
    swanlab = Recorder()
    fake(monkeypatch, "swanlab", init=swanlab.init)
    loggers = Loggers(store, policy(0), ["swanlab"], run)
    record(store, loggers, 0)
    loggers.flush()
    write_metrics(store, policy(2), metrics(1))
    resumed = Loggers(store, policy(2), ["swanlab"], run)
    resumed.step(metrics(1))
    record(store, resumed, 2)
    resumed.close()
    assert [step for step, _ in swanlab.lines] == [1, 2, 3]
    assert len(swanlab.opened[0]["id"]) == 21


def test_what_was_measured_on_held_out_rows(
    store: ObjectStore, run: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    swanlab = Recorder()
    fake(monkeypatch, "swanlab", init=swanlab.init)
    key = keys.evaluation("r", "0-sft", "000000-abc")
    provenance = Provenance(code_version="t", config_digest="d", seed=0)
    commit_bytes(
        store, key, b"x", kind="validation", suffix=".bin", provenance=provenance,
        extra=validation_entry("held-out", {"reward": 0.25, "none": None, "nan": float("nan")}),
    )  # fmt: skip
    for _ in range(2):  # and again after a restart
        loggers = Loggers(store, policy(0), ["swanlab"], run)
        loggers.validation(Validation(name="held-out", step=2, measures={"reward": 0.5}))
        loggers.validation(Validation(name="empty", step=2))
        loggers.close()
    assert swanlab.lines == [(0, {"held-out/reward": 0.25}), (2, {"held-out/reward": 0.5})]


def test_a_further_stage_has_figures_of_its_own(
    store: ObjectStore, run: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    swanlab = Recorder()
    fake(monkeypatch, "swanlab", init=swanlab.init)
    first = Loggers(store, policy(0), ["swanlab"], run)
    record(store, first, 0)
    first.close()
    later = Loggers(store, policy(0, "1-gspo"), ["swanlab"], run)
    later.step(metrics(0))
    later.close()
    assert "train/loss" in swanlab.lines[0][1] and "1-gspo/train/loss" in swanlab.lines[1][1]


def test_mlflow_finds_its_run_again(store: ObjectStore, run: LoggedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    logged: list[tuple[str, str, float, int]] = []
    ended: list[str] = []

    # A client that has an experiment and a run once one was created.
    class Client:
        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id="7") if made else None

        def create_experiment(self, name: str) -> str:
            return "7"

        def search_runs(self, places: list[str], filter_string: str, max_results: int) -> list[Any]:
            assert places == ["7"] and filter_string == "tags.`ostinato.run` = 'r'"
            return [SimpleNamespace(info=SimpleNamespace(run_id="m1"))] if made else []

        def create_run(self, place: str, run_name: str, tags: dict[str, str]) -> Any:
            made.append({"name": run_name, "tags": tags})
            return SimpleNamespace(info=SimpleNamespace(run_id="m1"))

        def log_batch(self, run_id: str, metrics: list[Any]) -> None:
            logged.extend((run_id, one.key, one.value, one.step) for one in metrics)

        def set_terminated(self, run_id: str) -> None:
            ended.append(run_id)

    def metric(key: str, value: float, timestamp: int, step: int) -> Any:
        return SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)

    fake(monkeypatch, "mlflow.entities", Metric=metric)
    fake(monkeypatch, "mlflow.tracking", MlflowClient=Client)
    # Each step opens the loggers again, as a resumed run does.
    for step in range(2):
        loggers = Loggers(store, policy(step), ["mlflow"], run)
        record(store, loggers, step)
        loggers.close()
    assert made == [{"name": "n", "tags": {"ostinato.run": "r"}}]
    assert [line for line in logged if line[1] == "train/loss"] == [
        ("m1", "train/loss", 1.0, 1), ("m1", "train/loss", 0.5, 2)
    ]  # fmt: skip
    assert ended == ["m1", "m1"]


@pytest.mark.parametrize("name", SINKS)
def test_a_missing_package_is_named(
    name: Any, store: ObjectStore, run: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tensorboard.summary.writer.event_file_writer", "wandb", "mlflow.entities", "swanlab"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(LoggerMissing, match=rf"needs the package '{name}'.*pip install {name}"):
        Loggers(store, policy(0), [name], run)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message.partition("; the run goes on")[0] for one in caplog.records if "logger" in one.message]


def test_a_service_that_fails_is_said_once_and_gets_the_rest_when_the_run_is_resumed(
    store: ObjectStore, run: LoggedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    swanlab = Recorder()
    good_log = swanlab.log

    def log_two_steps(figures: Mapping[str, float], step: int | None = None) -> None:
        if step == 3:
            raise ConnectionError("no route to https://ada:hunter2@host")
        good_log(figures, step)

    fake(monkeypatch, "swanlab", init=swanlab.init)
    monkeypatch.setattr(swanlab, "log", log_two_steps)
    loggers = Loggers(store, policy(0), ["swanlab"], run)
    for step in range(5):
        record(store, loggers, step)
    loggers.close()
    [warning] = warnings_of(caplog)
    assert warning == "the logger swanlab does not have all metrics: ConnectionError: no route to https://…@host"
    assert [step for step, _ in swanlab.lines] == [1, 2]

    monkeypatch.setattr(swanlab, "log", good_log)
    Loggers(store, policy(5), ["swanlab"], run).close()
    assert [step for step, _ in swanlab.lines] == [1, 2, 3, 4, 5]
    assert [line["train/loss"] for _, line in swanlab.lines] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])


def test_a_service_that_does_not_answer_holds_neither_the_steps_nor_the_end(
    store: ObjectStore, run: LoggedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """W&B and MLflow try for minutes to connect."""
    answers = threading.Event()
    swanlab = Recorder()

    def init(**arguments: Any) -> Recorder:
        answers.wait(60)
        return swanlab.init(**arguments)

    fake(monkeypatch, "swanlab", init=init)
    monkeypatch.setattr("tasks.loggers.stage_loggers.CONNECT_SECONDS", 0.5)
    began = time.monotonic()
    loggers = Loggers(store, policy(0), ["swanlab"], run)
    for step in range(3):
        record(store, loggers, step)
    assert time.monotonic() - began < 0.5
    loggers.close()
    assert 0.5 <= time.monotonic() - began < 5
    assert warnings_of(caplog) == ["the logger swanlab does not have all metrics: it has not connected within 0.5 s"]
    assert swanlab.lines == []

    # it connects after all, and is sent everything
    answers.set()
    wait_until(lambda: swanlab.finished, seconds=10)
    assert [step for step, _ in swanlab.lines] == [1, 2, 3]
    assert len(warnings_of(caplog)) == 1


TABLE = Table(name="samples", step=2, rows=({"prompt": "a|b", "grade": 0.5}, {"prompt": "c\nd", "grade": None}))


def test_a_table_of_markdown_keeps_its_cells() -> None:
    assert TABLE.markdown() == "| prompt | grade |\n| --- | --- |\n| a\\|b | 0.5 |\n| c<br>d |  |"
    assert TABLE.text() == "samples after 2 steps\n  prompt 'a|b'  grade 0.5\n  prompt 'c\\nd'  grade None"


def test_a_table_is_given_to_each_service_once(
    store: ObjectStore, run: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, swanlab = Recorder(), Recorder()
    files: list[tuple[str, dict[str, list[Any]], str]] = []
    fake(monkeypatch, "wandb", init=wandb.init, Table=lambda columns, data: (columns, data))
    fake(monkeypatch, "swanlab", init=swanlab.init, Text=lambda text: text)
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: SimpleNamespace(experiment_id="7"),
        search_runs=lambda *_, **__: [SimpleNamespace(info=SimpleNamespace(run_id="m1"))],
        log_table=lambda run_id, data, file: files.append((run_id, data, file)),
    )
    fake(monkeypatch, "mlflow.entities")
    fake(monkeypatch, "mlflow.tracking", MlflowClient=lambda: client)
    for _ in range(2):  # and again after a restart
        loggers = Loggers(store, policy(2), ["wandb", "swanlab", "mlflow"], run)
        loggers.table(TABLE)
        loggers.table(TABLE.model_copy(update={"rows": (), "step": 3}))
        loggers.flush()
    columns, cells = ["prompt", "grade"], [["a|b", 0.5], ["c\nd", None]]
    assert wandb.lines == [(None, {"samples": (columns, cells), "step": 2})]
    assert swanlab.lines == [(2, {"samples": TABLE.markdown()})]
    assert files == [("m1", {"prompt": ["a|b", "c\nd"], "grade": [0.5, None]}, "samples/000002.json")]
    later = Loggers(store, policy(0, "1-gspo"), ["swanlab"], run)
    later.table(TABLE)
    later.close()
    assert list(swanlab.lines[-1][1]) == ["1-gspo/samples"]


def test_tensorboard_has_tables_as_text(store: ObjectStore, run: LoggedRun) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    loggers = Loggers(store, policy(2), ["tensorboard"], run)
    loggers.table(TABLE)
    loggers.close()
    (file,) = (Path(run.folder) / "p" / "n").glob("events.*")
    (value,) = chain.from_iterable(event.summary.value for event in loader.EventFileLoader(str(file)).Load())
    assert (value.tag, value.metadata.plugin_data.plugin_name) == ("samples", "text")
    assert value.tensor.string_val == [TABLE.markdown().encode()]


def test_nothing_is_kept_without_loggers(store: ObjectStore, run: LoggedRun) -> None:
    loggers = Loggers(store, policy(0), [], run)
    record(store, loggers, 0)
    loggers.close()
    assert not [info.key for info in store.list(keys.stage_prefix("r", "0-sft")) if "logged" in info.key]
    assert key_patterns.is_standalone(keys.logger_progress("r", "0-sft", "wandb"))


def test_tensorboard_reads_back_what_was_logged(store: ObjectStore, run: LoggedRun) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    for first in (0, 1):
        loggers = Loggers(store, policy(first), ["tensorboard"], run)
        record(store, loggers, first)
        loggers.close()
    figures = {}
    for file in sorted((Path(run.folder) / "p" / "n").glob("events.*")):
        for event in loader.EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                assert (event.step, value.tag) not in figures, "logged twice"
                figures[event.step, value.tag] = value.tensor.float_val[0]
    assert {place: figure for place, figure in figures.items() if place[1] == "train/loss"} == {
        (1, "train/loss"): 1.0, (2, "train/loss"): 0.5
    }  # fmt: skip


def table_after(step: int) -> Table:
    return TABLE.model_copy(update={"step": step})


def test_a_service_that_failed_late_names_both_reasons_and_gets_no_more_tables(
    store: ObjectStore, run: LoggedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    def init(**arguments: Any) -> Recorder:
        answers.wait(60)
        raise ConnectionError("no route")

    fake(monkeypatch, "swanlab", init=init)
    monkeypatch.setattr("tasks.loggers.stage_loggers.CONNECT_SECONDS", 0.1)
    loggers = Loggers(store, policy(0), ["swanlab"], run)
    wait_until(lambda: warnings_of(caplog), seconds=10)
    loggers.table(table_after(1))  # this one waits for the service
    answers.set()
    wait_until(lambda: len(warnings_of(caplog)) == 2, seconds=10)
    (sender,) = loggers._senders
    wait_until(sender._ended.is_set, seconds=10)
    waiting = sender._items.qsize()
    for step in (2, 3):  # after the end, none waits
        loggers.table(table_after(step))
    assert sender._items.qsize() == waiting
    loggers.close()
    assert warnings_of(caplog) == [
        "the logger swanlab does not have all metrics: it has not connected within 0.1 s",
        "the logger swanlab does not have all metrics: ConnectionError: no route",
        "the logger swanlab misses 3 tables, which are not sent later",
    ]


def test_a_slow_service_gets_what_did_not_fit_at_the_next_start(
    store: ObjectStore, run: LoggedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    swanlab = Recorder()

    def init(**arguments: Any) -> Recorder:
        answers.wait(60)
        return swanlab.init(**arguments)

    fake(monkeypatch, "swanlab", init=init, Text=lambda text: text)
    monkeypatch.setattr("tasks.loggers.stage_loggers.MAX_WAITING", 3)
    loggers = Loggers(store, policy(0), ["swanlab"], run)
    for step in range(4):  # what is stored waits, and then two steps
        record(store, loggers, step)
    loggers.table(TABLE)
    answers.set()
    loggers.close()
    assert [step for step, _ in swanlab.lines] == [1, 2]
    assert warnings_of(caplog) == [
        "the logger swanlab does not have all metrics: it is too slow: 3 items wait for it",
        "the logger swanlab misses 1 tables, which are not sent later",
    ]
    Loggers(store, policy(4), ["swanlab"], run).close()
    assert [step for step, _ in swanlab.lines] == [1, 2, 3, 4]
