"""`ostinato data add FILE`: commits a dataset version to the store, and announces a new version as an event."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from flows.cli.output import DEFAULT_STORAGE, AsJson, Storage, print_json, report_errors, usage_error
from flows.configs.overrides import ConfigError, parse_config
from flows.runs.code_version import code_version
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.spec import DatasetUse, FileDataset

data_app = typer.Typer(help="Datasets in the store.", no_args_is_help=True)

Server = Annotated[str, typer.Option("--server", help="Prefect API url that gets the event; else $PREFECT_API_URL.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="A key of the file dataset: columns.prompt=question.")]


@data_app.callback()
def _group() -> None:
    """Keeps `add` a subcommand. Without a callback, typer would make it the only command."""


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
    """Checks every row and commits the dataset. A new version sends the event ostinato.dataset.registered; the same
    rows are the same version."""
    # load and commit
    try:
        spec = parse_config(FileDataset, None, [f"path={path}", *(sets or [])])
        with report_errors():
            # a dataset does not depend on a seed
            provenance = Provenance(
                code_version=code_version(), config_digest=digest(canonical_json(spec.model_dump(mode="json"))), seed=0
            )
            data = load_dataset(open_store(storage), spec, kind=use, provenance=provenance)
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


def _announce(data: LoadedDataset, spec: FileDataset, use: DatasetUse, server: str) -> None:
    if not server or not data.new:
        return
    # imported here, because the import of Prefect takes seconds
    from flows.ops.local_server import use_server
    from flows.runs.events import announce_dataset

    # sends the event before the process ends
    with use_server(server):
        announce_dataset(data, spec, use)
