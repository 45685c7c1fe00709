"""Reads rows of a dataset of the Hugging Face hub, or of a folder that the library datasets saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from storage.registry.hub import (
    SCHEME,
    HubError,
    HubRepo,
    checked_hub,
    parse_hub_repo,
    resolve_commit,
    with_commit_of,
)
from tasks.datasets.convert import RowLocation
from tasks.datasets.errors import DatasetError, DatasetNotFound, ExtraNotInstalled
from tasks.datasets.sources.file_formats import ChooseColumns, checked_columns
from tasks.datasets.spec import HubDataset
from tasks.import_paths import ImportPathError, load_object

S = TypeVar("S")

BATCH_ROWS = 512
"""Rows that are in memory at a time."""
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files by which a folder that datasets saved is recognised: of one dataset, and of several splits."""


class HubRow(NamedTuple):
    """A row with its place in the dataset."""

    location: RowLocation
    values: Any
    total_rows: int
    """Number of rows of the dataset."""


def hub_repo_of_dataset(spec: HubDataset) -> HubRepo | None:
    """The repository of the hub that a spec names. None: a folder of this machine. Raises DatasetError, HubError."""
    if not spec.path.startswith(SCHEME) and saved_folder(spec) is not None:
        return None
    repo = parse_hub_repo(spec.path, "dataset")
    if repo is None:
        raise DatasetNotFound(
            f"given path={spec.path!r}; expected owner/name of a dataset of the hub, or a folder that datasets saved "
            f"with save_to_disk (in {Path.cwd()})"
        )
    if spec.revision is not None and repo.revision is not None:
        raise DatasetError(f"given a revision in path={spec.path!r} and revision={spec.revision!r}; give it once")
    return repo._replace(revision=spec.revision or repo.revision)


def saved_folder(spec: HubDataset) -> Path | None:
    """The folder that a path names. None: there is none. Raises DatasetError for a folder of other files."""
    folder = Path(spec.path).expanduser()
    if not folder.is_dir():
        return None
    if not (folder / SAVED_DATASET).is_file() and not (folder / SAVED_SPLITS).is_file():
        raise DatasetError(
            f"given path={spec.path!r}, which is a folder here without {SAVED_DATASET} or {SAVED_SPLITS}; expected a "
            f"folder that datasets saved with save_to_disk. For the hub's dataset, give {SCHEME}datasets/{spec.path}"
        )
    return folder


def pin_hub_dataset(source: S, commits: Mapping[str, str]) -> S:
    """The source with a commit for a branch of the hub: the one in `commits`, or else the current one. Other sources
    are unchanged. Raises DatasetError, HubError."""
    if not isinstance(source, HubDataset):
        return source
    repo = hub_repo_of_dataset(source)
    if repo is None or repo.is_pinned:
        return source
    commit = resolve_commit(with_commit_of(repo, commits)).revision
    return source.model_copy(update={"path": repo._replace(revision=None).uri, "revision": commit})


def check_hub_dataset(spec: HubDataset) -> None:
    """Raise DatasetError, HubError unless the path names a folder or a repository, and `row_function` a function.

    The hub is not asked, so that a run whose datasets are in the store can be resumed without it."""
    hub_repo_of_dataset(spec)
    if spec.row_function is not None:
        _row_function(spec.row_function)


def hub_rows(spec: HubDataset, choose_columns: ChooseColumns) -> Iterator[HubRow]:
    """Yield the rows of the dataset, with the chosen columns or, for a `row_function`, with all of them.

    Raises HubError, and DatasetError if the dataset lacks one of the required columns.
    """
    dataset = _open(spec)
    function = None if spec.row_function is None else _row_function(spec.row_function)
    if function is None:
        names = dataset.column_names
        columns = checked_columns(
            choose_columns, names, source=spec.source, table="dataset", instead=", or give a row_function"
        )
        dataset = dataset.select_columns(columns)

    # Stream the rows as Arrow holds them, a batch at a time.
    number, total = 0, len(dataset)
    for batch in dataset.with_format("arrow").iter(batch_size=BATCH_ROWS):
        for values in batch.to_pylist():
            number += 1
            location = RowLocation(spec.source, number)
            if function is not None:
                values = _call_row_function(spec, function, values, location)
            yield HubRow(location, values, total)


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
    repo = hub_repo_of_dataset(spec)
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
    saved = datasets.load_from_disk(str(saved_folder(spec)))
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
