"""`ostinato data add FILE` commits a dataset version to the store, and announces a new version as an event.
`ostinato data ls` lists the datasets of the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Literal

import typer

from flows.cli.output import (
    DEFAULT_STORAGE,
    AsJson,
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
from flows.configs.overrides import ConfigError, parse_config
from flows.display.terminal import LoadBar, LoadLines
from flows.runs.code_version import code_version
from storage.errors import StorageError
from storage.registry.datasets import DatasetVersion, list_datasets
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore, open_store
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import LoadedDataset, LoadProgress, load_dataset
from tasks.datasets.registered import select_version
from tasks.datasets.spec import DatasetUse, FileDataset, RegisteredDataset

data_app = typer.Typer(help="Datasets in the store.", no_args_is_help=True)

Server = Annotated[str, typer.Option("--server", help="Prefect API url that gets the event; else $PREFECT_API_URL.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="A key of the file dataset: columns.prompt=question.")]
SHOWN_VERSION = 12
"""Characters of a version in the table. A config accepts them in place of the whole version."""


@data_app.command("add")
def add(
    path: Annotated[str, typer.Argument(metavar="FILE", help="JSON lines or Parquet, or a pattern: data/*.parquet.")],
    use: Annotated[
        Literal["prompt", "completion", "preference", "rating"],
        typer.Option(
            help="prompt: prompts to complete (grpo). completion: answers to learn (sft). preference: chosen and "
            "rejected answers (dpo). rating: answers with a number (reward_model)."
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
            # a dataset does not depend on a seed
            provenance = Provenance(
                code_version=code_version(), config_digest=digest(canonical_json(spec.model_dump(mode="json"))), seed=0
            )
            with _progress(path) as on_progress:
                data = load_dataset(store, spec, use=use, provenance=provenance, on_progress=on_progress)
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
    with suppress(DatasetError, OSError):
        if unread := spec.unread_columns(use):
            names = ", ".join(unread)
            print_plain(
                messages(),
                f"columns that were not read: {names}; --set 'metadata_columns=[{names}]' keeps them in the "
                "metadata of the threads, where graders read them",
            )


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
