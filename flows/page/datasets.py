"""The section Datasets: upload or name one, see its rows, columns, versions and the runs that used it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from flows.catalogue import TRAININGS
from flows.cli.data import add_dataset, unread_columns
from flows.cli.output import format_size
from flows.configs.overrides import ConfigError, parse_config
from flows.page.security import MAX_FORM_BYTES, Form
from flows.page.shared import Page, PageError, start_link
from flows.runs.events import announce_dataset
from storage.errors import StorageError
from storage.inspect.lineage import runs_by_dataset
from storage.registry.datasets import DatasetVersion, list_datasets
from storage.store import keys
from storage.store.artifacts import read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import RowReader
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import DatasetUse, LoadedDataset
from tasks.datasets.read import RowsDataset, allowed_name
from tasks.datasets.sources.file_formats import SUFFIXES, checked_suffix
from tasks.datasets.spec import FileDataset, HubDataset

PREVIEW_ROWS = 20
"""Rows on one page of the preview."""


def router(page: Page) -> APIRouter:
    """Returns the routes of the section."""
    router = APIRouter()
    store = page.store

    @router.get("/datasets")
    def show_datasets(request: Request) -> Response:
        return _show_all(page, request, Form())

    @router.post("/datasets")
    def add(request: Request) -> Response:
        """Adds a file that is uploaded, or a dataset of the hub."""
        form: Form = request.state.form
        try:
            data, unread = _add(store, form)
        except (ConfigError, DatasetError, StorageError) as error:
            return _show_all(page, request, form, problem=str(error))
        name, version = keys.dataset_of(data.ref.key)
        query = "?" + urlencode({"unread": ", ".join(unread)}) if unread else ""
        return RedirectResponse(f"/datasets/{name}/{version}{query}", status_code=303)

    @router.get("/datasets/{name}/{version}")
    def show(request: Request, name: str, version: str, start: int = 0, unread: str = "") -> Response:
        versions = list_datasets(store, name)
        for dataset in versions:
            if dataset.version == version:
                values = _dataset(store, dataset, versions, max(0, start))
                return page.render(request, "dataset.html", unread=unread, **values)
        raise PageError(f"No dataset {name[:80]}@{version[:12]} is in {store.url}.", "Choose one under Datasets.", 404)

    return router


def _show_all(page: Page, request: Request, form: Form, problem: str = "") -> Response:
    """The list of datasets and the form that adds one, with what was typed."""
    by_name = {version.name: version for version in list_datasets(page.store)}
    rows = [(version, format_size(version.ref.bytes)) for version in by_name.values()]
    return page.render(
        request, "datasets.html", status=422 if problem else 200, rows=rows[::-1], uses=get_args(DatasetUse), form=form,
        problem=problem, suffixes=",".join(SUFFIXES), limit=format_size(MAX_FORM_BYTES),
    )  # fmt: skip


def _add(store: ObjectStore, form: Form) -> tuple[LoadedDataset, list[str]]:
    """Loads the dataset that the form describes, and returns it with the names of the columns that were not read.
    Raises ConfigError, DatasetError, StorageError."""
    upload, hub = form.files.get("file"), form.get("path")
    if (upload is None) == (not hub):
        raise DatasetError("choose a file to upload, or give the name of a dataset of the hub, and not both")
    # the settings of the rows, in the syntax of configs
    settings = [f"{name}={value}" for name in ("columns", "metadata_columns") if (value := form.get(name))]
    settings.append(f"on_bad_row={'skip' if form.get('skip') else 'error'}")
    if upload is None:
        settings += [f"{name}={value}" for name in ("name", "split") if (value := form.get(name))]
        return _load(store, form, parse_config(HubDataset, None, [f"path={json.dumps(hub)}", *settings]))
    with tempfile.TemporaryDirectory(prefix="ostinato-upload-") as folder:
        path = Path(folder, allowed_name(Path(upload.name).stem) + checked_suffix(upload.name, upload.data))
        path.write_bytes(upload.data)
        spec = parse_config(FileDataset, None, [f"path={json.dumps(str(path))}", *settings])
        try:
            return _load(store, form, _Uploaded.model_validate(spec.model_dump()))
        except DatasetError as error:
            # the user knows the file's name, not our folder
            raise DatasetError(str(error).replace(f"{folder}/", "")) from error


class _Uploaded(FileDataset):
    """A file dataset whose source is the name of the file, and not its place on this machine."""

    @property
    def source(self) -> str:
        return Path(self.path).name


def _load(store: ObjectStore, form: Form, spec: RowsDataset) -> tuple[LoadedDataset, list[str]]:
    use: Any = form.get("use")
    if use not in get_args(DatasetUse):
        raise DatasetError(f"given the use {use[:20]!r}; expected one of {', '.join(get_args(DatasetUse))}")
    data = add_dataset(store, spec, use)
    announce_dataset(data, spec, use)
    return data, unread_columns(spec, use)


def _dataset(store: ObjectStore, dataset: DatasetVersion, versions: list[DatasetVersion], start: int) -> dict[str, Any]:
    """The values of the page of a version."""
    total = dataset.ref.rows or 0
    extra = read_manifest(store, dataset.ref.key).extra
    spec = extra.get("spec")
    source = {"kind": "registered", "key": dataset.key}
    reasons = extra.get("skipped_reasons")
    trainings = [name for name, training in TRAININGS.items() if training.dataset_use == (dataset.use or "")]
    return {
        "dataset": dataset, "size": format_size(dataset.ref.bytes), "versions": versions[::-1], "start": start,
        "rows": list(_rows(store, dataset, start, min(start + PREVIEW_ROWS, total))),
        "next": start + PREVIEW_ROWS if start + PREVIEW_ROWS < total else None,
        "previous": max(0, start - PREVIEW_ROWS) if start else None,
        "settings": sorted(spec.items()) if isinstance(spec, dict) else [],
        "reasons": reasons if isinstance(reasons, list) else [],
        "runs": runs_by_dataset(store).get(dataset.ref.sha256, []),
        "trainings": [(name, start_link(name, data__train=source)) for name in trainings],
    }  # fmt: skip


def _rows(store: ObjectStore, dataset: DatasetVersion, start: int, end: int) -> Any:
    """Yields (number from 1, (title, turns) of each conversation, metadata as JSON) of the rows."""
    if start >= end:
        return
    reader = RowReader(store, dataset.ref)
    try:
        rows = reader.rows(range(start, end))
    finally:
        reader.close()
    for number, row in enumerate(rows, start=start + 1):
        conversations = []
        for column in ("thread", "chosen", "rejected"):
            if column in row:
                turns = json.loads(row[column])["turns"]
                conversations.append((column, [(turn["role"], _text(turn["content"])) for turn in turns]))
        yield number, conversations, "" if row["metadata"] == "{}" else row["metadata"]


def _text(content: Any) -> str:
    """The text of a turn. An image is named as such, and a tool call is written as in `add({"a": 1})`."""
    parts = [{"text": content}] if isinstance(content, str) else content
    texts = []
    for part in parts:
        if part.get("kind") == "tool_call":
            texts.append(f"{part['name']}({json.dumps(part['arguments'], ensure_ascii=False)})")
        else:
            texts.append(part.get("text") or f"[{part.get('kind', 'image')}]")
    return "".join(texts)
