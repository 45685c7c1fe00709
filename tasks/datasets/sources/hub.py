"""The dataset of the Hugging Face hub, or of a folder that the library datasets saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from engine import import_paths
from engine.import_paths import ImportPathError, load_object, source_digest
from storage.registry.hub import (
    SCHEME,
    HubError,
    HubRepo,
    checked_hub,
    parse_hub_repo,
    resolve_commit,
    with_commit_of,
)
from storage.serialization import digest
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore
from tasks.datasets import known_files
from tasks.datasets.convert import RowLocation
from tasks.datasets.errors import DatasetError, DatasetNotFound, ExtraNotInstalled
from tasks.datasets.load import DatasetUse, LoadedDataset, OnProgress, OrderedDataset, ReadPosition
from tasks.datasets.read import RowsDataset, allowed_name
from tasks.datasets.sources.file_formats import checked_columns

BATCH_ROWS = 512
"""Rows that are in memory at a time."""
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files by which a folder that datasets saved is recognised: of one dataset, and of several splits."""


class HubDataset(RowsDataset):
    """Rows of a dataset of the Hugging Face hub, or of a folder that the library datasets saved (save_to_disk)."""

    location_fields: ClassVar = frozenset({"path", "name", "split", "revision"})
    images_may_change: ClassVar = False

    kind: Literal["hub"] = "hub"
    path: str = Field(min_length=1)
    """Dataset of the hub, as owner/name, or a folder that datasets saved with save_to_disk. A folder has precedence;
    hf://datasets/owner/name is always the hub's."""
    name: str | None = None
    """Configuration (subset) of the dataset. None: its only or its default one."""
    split: str = Field("train", min_length=1)
    """Split of the dataset: train, test, or a part such as train[:1000] or train[90%:]. A folder with one dataset that
    was saved without splits has only train."""
    revision: str | None = Field(None, min_length=1)
    """Branch, tag or commit of the dataset. None: the default branch. A run keeps the commit that it began with."""
    row_function: str | None = Field(None, pattern=import_paths.PATTERN)
    """Function that makes a row with the usual columns of a row of the dataset, as package.module:name. None: the
    rows are used as they are, with `columns`."""

    @property
    def source(self) -> str:
        """The source of the rows, for error messages and provenance."""
        return f"{self.path} ({self.split})"

    @property
    def store_name(self) -> str:
        return allowed_name(self.path.removeprefix("hf://datasets/").replace("/", "--"))

    @property
    def title(self) -> str:
        return Path(self.path).name

    def check(self, store: ObjectStore) -> None:
        """Raise DatasetError, HubError unless the path names a folder or a repository, and `row_function` a function.

        The hub is not asked, so that a run whose datasets are in the store can be resumed without it."""
        self.hub_repo()
        if self.row_function is not None:
            _row_function(self.row_function)

    def hub_repo(self) -> HubRepo | None:
        """The repository of the hub. None: a folder of this machine. Raises DatasetError, HubError."""
        if not self.path.startswith(SCHEME) and self.saved_folder() is not None:
            return None
        repo = parse_hub_repo(self.path, "dataset")
        if repo is None:
            raise DatasetNotFound(
                f"given path={self.path!r}; expected owner/name of a dataset of the hub, or a folder that datasets "
                f"saved with save_to_disk (in {Path.cwd()})"
            )
        if self.revision is not None and repo.revision is not None:
            raise DatasetError(
                f"given a revision in path={self.path!r} and revision={self.revision!r}; give it once"
            )
        return repo._replace(revision=self.revision or repo.revision)

    def saved_folder(self) -> Path | None:
        """The folder that the path names. None: there is none. Raises DatasetError for a folder of other files."""
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            return None
        if not (folder / SAVED_DATASET).is_file() and not (folder / SAVED_SPLITS).is_file():
            raise DatasetError(
                f"given path={self.path!r}, which is a folder here without {SAVED_DATASET} or {SAVED_SPLITS}; expected "
                f"a folder that datasets saved with save_to_disk. For the hub's dataset, give {SCHEME}datasets/"
                f"{self.path}"
            )
        return folder

    def resolved(
        self, store: ObjectStore, use: DatasetUse, *, run: str | None = None, commits: Mapping[str, str] | None = None
    ) -> Self:
        """The spec with a commit for a branch of the hub: the one in `commits`, or else the current one."""
        repo = self.hub_repo()
        if repo is None or repo.is_pinned:
            return self
        commit = resolve_commit(with_commit_of(repo, commits or {})).revision
        return self.model_copy(update={"path": repo._replace(revision=None).uri, "revision": commit})

    def load(
        self, store: ObjectStore, use: DatasetUse, provenance: Provenance, on_progress: OnProgress
    ) -> LoadedDataset:
        pinned = self.resolved(store, use)
        return super(HubDataset, pinned).load(store, use, provenance, on_progress)

    def fingerprint(self, store: ObjectStore, use: DatasetUse) -> str | None:
        # the rows of a folder may change, and so may a function without a source file
        function = None if self.row_function is None else source_digest(self.row_function)
        if self.hub_repo() is None or (self.row_function is not None and function is None):
            return None
        rows = self.model_dump(mode="json", exclude=set(OrderedDataset.model_fields))
        return digest({"reader": known_files.READER_VERSION, "use": use, "hub": rows, "function": function})

    def raw_rows(self, use: DatasetUse, position: ReadPosition) -> Iterator[tuple[RowLocation, Any]]:
        """Yield the rows, with the columns of this use or, for a `row_function`, with all of them.

        Raises HubError, and DatasetError if the dataset lacks one of the required columns.
        """
        dataset = _open(self)
        function = None if self.row_function is None else _row_function(self.row_function)
        if function is None:
            choose_columns, names = partial(self.columns_of_table, use), dataset.column_names
            columns = checked_columns(
                choose_columns, names, source=self.source, table="dataset", instead=", or give a row_function"
            )
            dataset = dataset.select_columns(columns)

        # Stream the rows as Arrow holds them, a batch at a time.
        position.total = len(dataset)
        for batch in dataset.with_format("arrow").iter(batch_size=BATCH_ROWS):
            for values in batch.to_pylist():
                position.read += 1
                location = RowLocation(self.source, position.read)
                if function is not None:
                    values = _call_row_function(self, function, values, location)
                yield location, values


def _call_row_function(spec: HubDataset, function: Any, values: dict[str, Any], location: RowLocation) -> Any:
    try:
        return function(values)
    except Exception as error:  # the boundary to a user's code
        raise DatasetError(f"{location.source}, row {location.row}: {spec.row_function!r} raised {error!r}") from error


def _row_function(path: str) -> Any:
    try:
        function = load_object(path)
    except ImportPathError as error:
        raise DatasetError(f"row_function {error}") from error
    if not callable(function):
        raise DatasetError(f"row_function {path!r} is a {type(function).__name__}; expected a function of a row")
    return function


def _open(spec: HubDataset) -> Any:
    """The `datasets.Dataset` of the spec. It is downloaded unless it is in the cache of the library."""
    datasets = _library()
    repo = spec.hub_repo()
    if repo is None:
        return _open_saved(datasets, spec)
    repo = resolve_commit(repo)
    builder = _builder(spec, repo)
    with checked_hub(repo), _library_errors_as_dataset_errors(repo):
        builder.download_and_prepare()
        _check_digests(repo)
        return builder.as_dataset(split=spec.split)


def _check_digests(repo: HubRepo) -> None:
    """Raises HubError for a downloaded file of the dataset whose content is not the one that the commit has."""
    from storage.registry.hub_checks import check_files, repo_files, snapshot_folder

    paths = [path for path in sorted(snapshot_folder(repo).rglob("*")) if path.is_file()]
    if not paths:
        return
    try:
        with checked_hub(repo):
            files = repo_files(repo)
    except HubError:
        files = []  # without the hub, a file is compared with the digest by which the cache names it
    check_files(repo, paths, files)


def _open_saved(datasets: Any, spec: HubDataset) -> Any:
    """The `datasets.Dataset` of a folder. One that was saved alone has no splits, and counts as train."""
    saved = datasets.load_from_disk(str(spec.saved_folder()))
    splits = saved if isinstance(saved, dict) else {"train": saved}
    if spec.split in splits:
        return splits[spec.split]
    rows_of_splits = {name: len(split) for name, split in splits.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(spec.split).to_absolute(rows_of_splits)
    except (ValueError, AssertionError) as error:
        raise DatasetError(
            f"{spec.path} has no split {spec.split!r}; it has {', '.join(splits)}. Give one as split, or a part such "
            f"as {next(iter(splits))}[:100]"
        ) from error
    return datasets.concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])


def _builder(spec: HubDataset, repo: HubRepo) -> Any:
    """The `datasets.DatasetBuilder` of a commit. Data files and configuration are known, and nothing is downloaded."""
    from huggingface_hub import HfApi

    datasets = _library()
    with checked_hub(repo), _library_errors_as_dataset_errors(repo):
        try:
            builder = datasets.load_dataset_builder(repo.repo, spec.name, revision=repo.revision)
        except FileNotFoundError:
            # the library drops the hub's reason, which a request for access gives again
            HfApi().auth_check(repo.repo, repo_type="dataset")
            raise
    # without the hub, the library gives the newest dataset of its cache, whatever its commit
    if builder.hash != repo.revision:
        raise HubError(f"the {repo} is not on this machine, and the hub cannot be reached; connect, or give a folder")
    return builder


@contextmanager
def _library_errors_as_dataset_errors(repo: HubRepo) -> Iterator[None]:
    """Raises DatasetError in place of the library's errors about configurations, splits and files, which do not say of
    which dataset they are."""
    try:
        yield
    except Exception as error:
        # a missing file is a ValueError or a FileNotFoundError, and code in a repository a RuntimeError
        expected = ValueError | RuntimeError | FileNotFoundError | _library().exceptions.DatasetsError
        # pyarrow raises an OSError without a number for a damaged file
        is_damage = isinstance(error, OSError) and error.errno is None
        if not isinstance(error, expected) and not is_damage:
            raise
        reason = str(error)
        # the library's error about a file that cannot be read says only that there was one
        if type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
            reason += f": {error.__cause__}"
        lines = " ".join(reason.split())
        raise DatasetError(f"the {repo} cannot be loaded: {lines} (fields: name, split)") from error


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ExtraNotInstalled("datasets of the hub need the package datasets; pip install 'ostinato[hub]'") from error
    return datasets
