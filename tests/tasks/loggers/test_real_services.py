"""Tests of the loggers with the real packages, in their offline modes: what each stored is read back."""

from __future__ import annotations

import json
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.chain.records import PolicyRef
from storage.store.objects import open_store
from tasks.loggers.base import LoggedRun, Table
from tasks.loggers.services import LoggerName, configured_loggers, run_id
from tasks.loggers.stage_loggers import Loggers
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import write_metrics

RUN = LoggedRun(name="n", run="r", config={"seed": 1})
LOSSES = {1: 1.0, 2: 0.5, 3: 0.25}
"""Step, counted from 1 -> loss. All are powers of two, which every service stores exactly."""
Figures = list[tuple[int, str, float]]
"""Step, name and value of each number that a service has."""


def policy(step: int) -> PolicyRef:
    return PolicyRef(run="r", stage="0-sft", model="policy", step=step, state=f"s{step}")


def metrics(step: int) -> StepMetrics:
    return StepMetrics(step=step - 1, loss=LOSSES[step], grad_norm=1.0, learning_rate=0.5, seconds={"train": 2.0})


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: a log in LevelDB's format after a header of seven bytes. A record is stored in
    fragments, none of which crosses a border between blocks of 32 KiB."""
    data, offset, record = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # the end of a block has no place for a fragment's header
            offset += 32768 - offset % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        if offset + 7 + length > len(data):  # not all of it is written yet
            return
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or its last fragment
            yield record
            record = b""


def complete_records(path: Path) -> list[Any]:
    """W&B's own process writes the file, and may end after `finish` returned. Its last record is the exit status."""
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + 60.0
    while True:
        records = [Record.FromString(data) for data in wandb_records(path)]
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < deadline, f"{path} has no exit record"
        time.sleep(0.1)


def wandb_figures(folder: Path) -> Figures:
    """The numbers in W&B's files, one file per process. All of them have the same run id."""
    figures: Figures = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        assert path.stem == f"run-{run_id(LoggedRun(project='of-tests', name='n', run='r'), 32)}"
        for record in complete_records(path):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            figures += [(items["step"], name, value) for name, value in items.items() if name[0] != "_"]
    return [figure for figure in figures if figure[1] != "step"]


def mlflow_figures(folder: Path) -> Figures:
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("of-tests").experiment_id])
    assert (run.info.run_name, run.info.status) == ("n", "FINISHED")
    figures: Figures = [
        (metric.step, name, metric.value)
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    ]
    (table,) = client.list_artifacts(run.info.run_id, "samples")
    return [*figures, (int(Path(table.path).stem), "samples", 0.0)]


def tensorboard_figures(folder: Path) -> Figures:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    figures: Figures = []
    for path in sorted((folder / "ostinato" / "n").glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                figures.append((event.step, value.tag, (*value.tensor.float_val, 0.0)[0]))
    return figures


READERS: dict[LoggerName, tuple[str, Callable[[Path], Figures]]] = {
    "wandb": ("wandb", wandb_figures),
    "mlflow": ("mlflow.tracking", mlflow_figures),
    "tensorboard": ("tensorboard.summary.writer.event_file_writer", tensorboard_figures),
}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[LoggerName], None]]:
    """Configures one service by its environment variables, without a network."""
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    # a loaded machine may need longer to start a service
    monkeypatch.setattr("tasks.loggers.stage_loggers.CONNECT_SECONDS", 600.0)
    monkeypatch.setattr("tasks.loggers.stage_loggers.FLUSH_SECONDS", 600.0)
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    variables = {
        "wandb": {"WANDB_PROJECT": "of-tests", "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "1"},
        "mlflow": {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/ml.db", "MLFLOW_EXPERIMENT_NAME": "of-tests"},
        "tensorboard": {"TENSORBOARD_LOGGING_DIR": str(folder)},
    }

    def configure(name: LoggerName) -> None:
        for variable, value in variables[name].items():
            monkeypatch.setenv(variable, value)

    yield configure


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("wandb", "mlflow")]


@pytest.mark.parametrize("name", ["tensorboard", *SLOW])
def test_a_resumed_run_has_each_number_once(
    name: LoggerName, offline: Callable[[LoggerName], None], tmp_path: Path
) -> None:
    module, figures_of_service = READERS[name]
    pytest.importorskip(module, reason=f"needs the package {name}, which the extra 'loggers' has")
    offline(name)
    assert configured_loggers() == (name,)
    store = open_store(str(tmp_path / "data"))
    table = Table(name="samples", step=2, rows=({"prompt": "a", "grade": 0.5},))

    # Killed after the metrics of step 2 were stored, before they were sent.
    loggers = Loggers(store, policy(0), [name], RUN)
    write_metrics(store, policy(1), metrics(1))
    loggers.step(metrics(1))
    write_metrics(store, policy(2), metrics(2))
    loggers.close()
    # The next process sends step 2 once, although its loop shows it again, and goes on.
    resumed = Loggers(store, policy(2), [name], RUN)
    for _ in range(2):
        resumed.step(metrics(2))
        resumed.table(table)
    write_metrics(store, policy(3), metrics(3))
    resumed.step(metrics(3))
    resumed.close()

    stored: Any = figures_of_service(tmp_path / "logs")
    assert {step: value for step, tag, value in stored if tag == "train/loss"} == LOSSES
    times = Counter((step, tag) for step, tag, _ in stored)
    assert set(times.values()) == {1}, "a number was sent twice"
    assert {step for step, tag in times if tag == "samples"} == {2}
