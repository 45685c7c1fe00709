"""`ostinato data add FILE` commits a dataset version to the store, and announces a new version as an event.
`ostinato data grade-difficulty` adds the pass rates of its prompts. `ostinato data votes` commits the votes of the
chat. `ostinato data ls` lists the datasets of the store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flows.cli.output import (
    DEFAULT_STORAGE,
    AsJson,
    ConfigFile,
    Storage,
    add_rows,
    console,
    format_size,
    messages,
    print_json,
    print_plain,
    report_errors,
    table,
    usage_error,
)
from flows.cli.runner import run_with_server
from flows.configs.common import GRPOConfig
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.overrides import ConfigError, load_config, parse_config
from flows.display.load_progress import LoadBar, LoadLines
from flows.runs.code_version import code_version
from storage.errors import StorageError
from storage.registry.datasets import DatasetVersion, list_datasets
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore, open_store
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import LoadedDataset, LoadProgress, OnProgress, load_dataset
from tasks.datasets.read import RowsDataset
from tasks.datasets.registered import select_version
from tasks.datasets.spec import DatasetUse, FileDataset, MixtureDataset, OrderedDataset, RegisteredDataset
from tasks.datasets.votes import register_votes

data_app = typer.Typer(help="Datasets in the store.", no_args_is_help=True)

Server = Annotated[str, typer.Option("--server", help="Prefect API url that gets the event; else $PREFECT_API_URL.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="A key of the file dataset: columns.prompt=question.")]
LENGTH = ["algorithm.steps=1"]
"""A length for the config of a training that is not run."""
SHOWN_VERSION = 12
"""Characters of a version in the table. A config accepts them in place of the whole version."""


@data_app.command("add")
def add(
    path: Annotated[str, typer.Argument(metavar="FILE", help="JSON lines, JSON, CSV, Parquet; a pattern: data/*.csv.")],
    use: Annotated[
        Literal["prompt", "completion", "preference", "rating"],
        typer.Option(
            help="prompt: prompts to complete (grpo). completion: answers to learn (sft). preference: chosen and "
            "rejected answers (dpo). rating: answers with a number (reward_model) or a label (kto)."
        ),
    ] = "prompt",
    storage: Storage = DEFAULT_STORAGE,
    sets: Sets = None,
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Checks every row and commits the dataset, which a config can then name (kind: registered). A new version sends
    the event ostinato.dataset.registered; the same rows are the same version. A file that was loaded before and has not
    changed is not read again."""
    # load and commit
    try:
        spec = parse_config(FileDataset, None, [f"path={path}", *(sets or [])])
        with report_errors():
            store = open_store(storage)
            with _progress(path) as on_progress:
                data = add_dataset(store, spec, use, on_progress)
    except (ConfigError, DatasetError) as error:
        raise usage_error(str(error)) from error

    # announce and report
    _announce(data, spec, use, server or os.environ.get("PREFECT_API_URL", ""))
    name, version = keys.dataset_of(data.ref.key)
    if as_json:
        print_json({"dataset": f"{name}@{version}"} | data.model_dump(mode="json"))
        return
    skipped = f", {data.skipped} skipped" if data.skipped else ""
    print(f"{name}@{version}: {data.rows} rows{skipped}, {'new' if data.new else 'there already'}")
    _print_hints(store, data, spec, use)


def add_dataset(
    store: ObjectStore, spec: RowsDataset, use: DatasetUse, on_progress: OnProgress = lambda progress: None
) -> LoadedDataset:
    """Commits the rows as a dataset version. Raises DatasetError, HubError and errors of storage."""
    # a dataset does not depend on a seed
    provenance = Provenance(
        code_version=code_version(), config_digest=digest(canonical_json(spec.model_dump(mode="json"))), seed=0
    )
    return load_dataset(store, spec, use=use, provenance=provenance, on_progress=on_progress)


@data_app.command("grade-difficulty")
def grade_difficulty(
    config: ConfigFile,
    samples: Annotated[int, typer.Option("--samples", help="Completions per prompt.", min=1)] = 8,
    model: Annotated[str, typer.Option("--model", help="Model that answers. Default: the model.key of the file.")] = "",
    column: Annotated[str, typer.Option("--column", help="Name of the new column.")] = "pass_rate",
    correct_from: Annotated[
        float, typer.Option("--correct-from", help="A completion passes if its reward is at least this.")
    ] = 1.0,
    sets: Sets = None,
    server: Server = "",
) -> None:
    """Measures how often a model solves each prompt of a grpo config (its data.train, grader and sampling). Commits the
    prompts with their pass rates, as a new version of the dataset that a config can filter: keep: {column: pass_rate}.
    The same command again continues an interrupted measurement."""
    try:
        training = _prompts_and_grader(config, sets or [])
        evaluation = _difficulty_evaluation(training, model or training.model.key, samples, correct_from)
    except (ConfigError, ValueError) as error:
        raise usage_error(f"{config} is not a usable config of prompts and a grader: {error}") from error

    async def call() -> dict[str, Any]:
        from flows.evaluation import grade_difficulty as measure

        return await measure(evaluation, column)

    status, result = run_with_server(call, console(), what="the measurement", log_name=config.stem, server=server)
    if status == 0:
        print_plain(console(), f"{result['dataset']}: {result['rows']} rows, {result['ungraded']} without a grade")
        print_plain(console(), f"pass rates: {result['solved']} of 1, {result['unsolved']} of 0, the others between")
        keep = f"keep: {{column: {column}, min: 0.1, max: 0.9}}"
        print_plain(console(), f"in a config: train: {{kind: registered, key: {result['dataset']}, {keep}}}")
    raise typer.Exit(status)


def _prompts_and_grader(config: Path, sets: list[str]) -> GRPOConfig:
    """The groups of a config that decide the answers and their grades. The file may be that of another algorithm."""
    body = load_config(config, sets)
    names = ("model", "data", "grader", "sampling", "seed", "engine", "storage")
    groups = {name: body[name] for name in names if name in body}
    data = dict(groups.get("data", {}))
    groups["data"] = {name: value for name, value in data.items() if name != "heldout"}
    return parse_config(GRPOConfig, None, [*LENGTH, *(f"{name}={json.dumps(value)}" for name, value in groups.items())])


def _difficulty_evaluation(training: GRPOConfig, model: str, samples: int, correct_from: float) -> EvaluationFlowConfig:
    """The evaluation that measures the pass rates. Raises ValueError for a mixture."""
    source = training.data.train
    if isinstance(source, MixtureDataset):
        raise ValueError("data.train is a mixture, and a column is added to one dataset; give each part by itself")
    # all rows are measured, in whichever order a training reads them
    source = source.model_copy(update=OrderedDataset().order_settings)
    grader = {"name": "reward"} | training.grader.model_dump(mode="json")
    suite = {
        "datasets": [{"name": "train", "source": source}], "graders": [grader],
        "sampling": training.sampling.model_dump(mode="json"), "samples_per_prompt": samples, "seed": training.seed,
        "max_prompt_tokens": training.data.max_prompt_tokens, "truncation": training.data.truncation,
        "pass_at": [1], "correct_from": correct_from,
    }  # fmt: skip
    common = {"engine": training.engine, "storage": training.storage}
    return EvaluationFlowConfig.model_validate({"models": [model], "suite": suite} | common)


@data_app.command("ls")
def ls(storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """Lists the datasets of the store, the newest last: name@version, use, rows, size, source, date."""
    with report_errors():
        store = open_store(storage)
        versions = list_datasets(store)
    if as_json:
        print_json([_row(version) for version in versions])
        return
    shown = table(f"datasets in {store.url}", "dataset", "use", "rows>", "size>", "source", "added")
    rows = []
    for version in versions:
        key = f"{version.name}@{version.version[:SHOWN_VERSION]}"
        added = version.created[:16].replace("T", " ")
        rows.append((key, version.use, version.ref.rows, format_size(version.ref.bytes), version.source, added))
    console().print(add_rows(shown, rows))


@data_app.command("votes")
def votes(storage: Storage = DEFAULT_STORAGE) -> None:
    """Commits the votes of the page's chat as a version of the dataset votes, which dpo reads. Ties are left out."""
    try:
        with report_errors():
            data = register_votes(open_store(storage), code_version=code_version())
    except DatasetError as error:
        raise usage_error(f"no vote prefers an answer yet ({error})") from error
    name, version = keys.dataset_of(data.ref.key)
    print(f"{name}@{version}: {data.rows} rows, {'new' if data.new else 'there already'}")


def _row(version: DatasetVersion) -> dict[str, Any]:
    return {
        "dataset": version.key,
        "use": version.use,
        "rows": version.ref.rows,
        "bytes": version.ref.bytes,
        "source": version.source,
        "created": version.created,
        "skipped": version.skipped,
    }


def _print_hints(store: ObjectStore, data: LoadedDataset, spec: FileDataset, use: DatasetUse) -> None:
    """Says what may not be expected of the dataset. It is committed, so no hint can fail."""
    # a name alone means the newest version, which these rows are not if they were added before it
    name, version = keys.dataset_of(data.ref.key)
    with suppress(DatasetError, StorageError):
        newest = version if data.new else select_version(store, RegisteredDataset(key=name), use).version
        if newest != version:
            print_plain(
                messages(),
                f"{name} alone means the newer version {name}@{newest[:SHOWN_VERSION]}; a config that uses these rows "
                f"needs {name}@{version[:SHOWN_VERSION]}",
            )
    if unread := unread_columns(spec, use):
        names = ", ".join(unread)
        print_plain(
            messages(),
            f"columns that were not read: {names}; --set 'metadata_columns=[{names}]' keeps them in the "
            "metadata of the threads, where graders read them",
        )


def unread_columns(spec: RowsDataset, use: DatasetUse) -> list[str]:
    """The columns of a committed file that this use does not read. Empty if they are not known."""
    with suppress(DatasetError, OSError):
        return spec.unread_columns(use) if isinstance(spec, FileDataset) else []
    return []


@contextmanager
def _progress(path: str) -> Iterator[Callable[[LoadProgress], None]]:
    """Shows the progress of a load on stderr: a bar on a terminal, else a line every few seconds."""
    to = messages()
    if to.is_terminal and not to.is_dumb_terminal:
        with LoadBar(to) as bar:
            yield bar
    else:
        yield LoadLines(path, lambda line: print_plain(to, line))


def _announce(data: LoadedDataset, spec: FileDataset, use: DatasetUse, server: str) -> None:
    if not server or not data.new:
        return
    # imported here, because the import of Prefect takes seconds
    from flows.ops.local_server import use_server
    from flows.runs.events import announce_dataset

    # sends the event before the process ends
    with use_server(server):
        announce_dataset(data, spec, use)
