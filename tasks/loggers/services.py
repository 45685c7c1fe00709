"""The loggers, one class per service, and the environment variables that configure them. Each imports its package when
it is opened, and continues a run that the service already has."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Literal, NamedTuple

from tasks.loggers.base import LoggedRun, Table, imported

LoggerName = Literal["tensorboard", "wandb", "mlflow", "swanlab"]
RUN_TAG = "ostinato.run"
"""Tag of an MLflow run that holds the key of the run, by which it is found after a resume."""


def run_id(run: LoggedRun, length: int) -> str:
    """The id of the run in a service: hex digits, the same for the same run of the same project."""
    return sha256(f"{run.project}\n{run.run}".encode()).hexdigest()[:length]


class TensorBoard:
    """Writes an event file per process into folder/project/name. It does not need torch."""

    module = "tensorboard.summary.writer.event_file_writer"

    def __init__(self, run: LoggedRun) -> None:
        writer = _module(self.module, "tensorboard")
        self._event = _module("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = _module("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._writer = writer.EventFileWriter(os.path.join(run.folder, run.project, run.name))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._write(step, values)

    def show(self, table: Table) -> None:
        """Write the table as Markdown, which TensorBoard shows under "Text"."""
        tensor = _module("tensorboard.compat.proto.tensor_pb2", "tensorboard").TensorProto
        shape = _module("tensorboard.compat.proto.tensor_shape_pb2", "tensorboard").TensorShapeProto
        types = _module("tensorboard.compat.proto.types_pb2", "tensorboard")
        metadata = _module("tensorboard.compat.proto.summary_pb2", "tensorboard").SummaryMetadata
        # The text plugin expects a tensor of one string.
        text = tensor(
            dtype=types.DT_STRING, string_val=[table.markdown().encode()],
            tensor_shape=shape(dim=[shape.Dim(size=1)]),
        )  # fmt: skip
        plugin = metadata(plugin_data=metadata.PluginData(plugin_name="text"))
        self._write(table.step, [self._summary.Value(tag=table.name, tensor=text, metadata=plugin)])

    def _write(self, step: int, values: list[Any]) -> None:
        event = self._event(step=step, wall_time=time.time(), summary=self._summary(value=values))
        # Flush each event: a process that is killed loses what it has not written.
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Logs to Weights & Biases. WANDB_API_KEY and WANDB_BASE_URL in the environment set the account and the server."""

    module = "wandb"

    def __init__(self, run: LoggedRun) -> None:
        os.makedirs(run.folder, exist_ok=True)
        self._run = _module("wandb", "wandb").init(
            project=run.project, name=run.name, id=run_id(run, 32), resume="allow", dir=run.folder, config=run.config
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        # W&B's own step cannot decrease, but each stage begins again.
        self._run.log({**figures, "step": step})

    def show(self, table: Table) -> None:
        wandb_table = _module("wandb", "wandb").Table(columns=table.columns, data=table.cells)
        self._run.log({table.name: wandb_table, "step": table.step})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Logs to an MLflow run of the experiment with the project's name. MLFLOW_TRACKING_URI sets the server."""

    module = "mlflow.entities"

    def __init__(self, run: LoggedRun) -> None:
        self._entities = _module(self.module, "mlflow")
        self._client = client = _module("mlflow.tracking", "mlflow").MlflowClient()
        # MLflow chooses the ids of runs itself, so a tag tells which run is ours.
        experiment = client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(run.project)
        existing = client.search_runs([experiment_id], filter_string=f"tags.`{RUN_TAG}` = '{run.run}'", max_results=1)
        if existing:
            mlflow_run = existing[0]
        else:
            mlflow_run = client.create_run(experiment_id, run_name=run.name, tags={RUN_TAG: run.run})
        self._id = mlflow_run.info.run_id

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(name, value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def show(self, table: Table) -> None:
        """Store the table as a JSON file among the run's artifacts."""
        columns = {name: [row[name] for row in table.rows] for name in table.columns}
        self._client.log_table(self._id, columns, f"{table.name}/{table.step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanLab:
    """Logs to SwanLab. SWANLAB_API_KEY in the environment sets the account."""

    module = "swanlab"

    def __init__(self, run: LoggedRun) -> None:
        os.makedirs(run.folder, exist_ok=True)
        self._run = _module("swanlab", "swanlab").init(
            project=run.project, experiment_name=run.name, id=run_id(run, 21), resume="allow", logdir=run.folder,
            config=run.config,
        )  # fmt: skip

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def show(self, table: Table) -> None:
        self._run.log({table.name: _module("swanlab", "swanlab").Text(table.markdown())}, step=table.step)

    def close(self) -> None:
        self._run.finish()


def check_installed(name: LoggerName) -> None:
    """Raises LoggerMissing if the package of a logger is not installed."""
    _module(SINKS[name].module, name)


def _module(name: str, package: str) -> Any:
    return imported(name, logger=package, package=package)


SINKS: dict[LoggerName, type[TensorBoard | WandB | MLflow | SwanLab]] = {
    "tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "swanlab": SwanLab,
}  # fmt: skip


class Variables(NamedTuple):
    """Names of environment variables of a service. An empty value counts as not set."""

    configured: tuple[str, ...]
    """The service is configured if one of them is set."""
    project: str | None = None
    folder: str | None = None


VARIABLES: dict[LoggerName, Variables] = {
    "wandb": Variables(("WANDB_PROJECT", "WANDB_API_KEY"), "WANDB_PROJECT", "WANDB_DIR"),
    "mlflow": Variables(("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"), "MLFLOW_EXPERIMENT_NAME"),
    "tensorboard": Variables(("TENSORBOARD_LOGGING_DIR",), folder="TENSORBOARD_LOGGING_DIR"),
    "swanlab": Variables(("SWANLAB_PROJ_NAME", "SWANLAB_API_KEY"), "SWANLAB_PROJ_NAME", "SWANLAB_LOGDIR"),
}
SWITCHES = {"wandb": "WANDB_MODE", "swanlab": "SWANLAB_MODE"}
"""Variables whose value "disabled" switches a service off."""


def configured_loggers() -> tuple[LoggerName, ...]:
    """The services that the environment configures and does not switch off, in the order of VARIABLES."""
    return tuple(name for name, variables in VARIABLES.items() if _is_configured(name, variables))


def with_variables(run: LoggedRun, name: LoggerName) -> LoggedRun:
    """The run with the project and the folder that the environment sets for a service, where the run has none."""
    variables = VARIABLES[name]
    return run.model_copy(
        update={
            "project": run.project or _value(variables.project) or "ostinato",
            "folder": run.folder or _value(variables.folder) or "ostinato-logs",
        }
    )


def _is_configured(name: LoggerName, variables: Variables) -> bool:
    if _value(SWITCHES.get(name)) == "disabled":
        return False
    return any(_value(variable) for variable in variables.configured)


def _value(variable: str | None) -> str:
    return os.environ.get(variable, "") if variable else ""
