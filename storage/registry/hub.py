"""Names of repositories on a Hugging Face hub, the commits that their branches mean, and the hub's errors in sentences.

The hub is the server of HF_ENDPOINT. Cache, token and offline mode are those of the package huggingface_hub.
"""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import fsspec

from storage.errors import CorruptArtifact, PermanentStorageError
from storage.registry.models import find_model, registered_key
from storage.secrets import refuse_secrets
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Manifest, read_manifest
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore, read_json
from storage.temporary import process_folder

SCHEME = "hf://"
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_REVISION = r"(?:@(?P<revision>[A-Za-z0-9_][\w./+-]*))?"
_WITH_OWNER = re.compile(rf"(?P<repo>{_NAME}/{_NAME}){_REVISION}", re.ASCII)
_AFTER_SCHEME = re.compile(rf"(?:(?P<kind>models|datasets)/)?(?P<repo>(?:{_NAME}/)?{_NAME}){_REVISION}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
NO_CONNECTION = ("ConnectError", "ConnectTimeout")
"""Names of the HTTP client's errors before a connection. Which package the client is depends on huggingface_hub."""
_UNREADABLE = (
    ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError, StopIteration,
)  # fmt: skip
"""Errors of Python that huggingface_hub raises for replies that do not have the hub's form."""

RepoKind = Literal["model", "dataset"]


class HubError(PermanentStorageError):
    """Raised when the hub does not have, or does not give, what was asked for."""


class HubRepo(NamedTuple):
    """A repository of the hub at a revision."""

    kind: RepoKind
    repo: str
    """`owner/name`, or the name alone of an old repository without owner."""
    revision: str | None = None
    """Branch, tag or commit. None: the default branch."""

    @property
    def uri(self) -> str:
        """`hf://owner/name@revision`, with `datasets/` before a dataset. `parse_hub_repo` reads it back."""
        # hf://models/x is the model x, so the model x of an owner named models is hf://models/models/x
        needs_kind = self.kind == "dataset" or self.repo.startswith(("models/", "datasets/"))
        folder = f"{self.kind}s/" if needs_kind else ""
        return f"{SCHEME}{folder}{self.repo}" + (f"@{self.revision}" if self.revision else "")

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never moves."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{self.kind} {self.repo!r}" + (f" at {self.revision!r}" if self.revision else "")


def parse_hub_repo(text: str, kind: RepoKind) -> HubRepo | None:
    """Reads `owner/name`, `owner/name@revision`, and both after `hf://`. None: the text is none of these.

    Raises HubError for other text after `hf://`, SecretInURL for a password in it."""
    refuse_secrets(text)
    if not text.startswith(SCHEME):
        match = _WITH_OWNER.fullmatch(text)
        return None if match is None else HubRepo(kind, match["repo"], match["revision"])
    match = _AFTER_SCHEME.fullmatch(text.removeprefix(SCHEME))
    if match is None or match["kind"] not in (None, f"{kind}s"):
        prefix = f"{SCHEME}datasets/" if kind == "dataset" else SCHEME
        raise HubError(
            f"given {text!r}; expected a {kind} of the hub: {prefix}owner/name or {prefix}owner/name@revision"
        )
    return HubRepo(kind, match["repo"], match["revision"])


def with_commit_of(repo: HubRepo, commits: Mapping[str, str]) -> HubRepo:
    """The repository at the commit that `commits` has for its address, or unchanged."""
    return repo._replace(revision=commits.get(repo.uri, repo.revision))


def resolve_commit(repo: HubRepo) -> HubRepo:
    """The repository at the commit that its branch or tag means now. Raises HubError.

    When the hub cannot be reached, huggingface_hub gives the commit that the branch meant at its last download here.
    """
    if repo.is_pinned:
        return repo
    from huggingface_hub import HfApi

    with checked_hub(repo):
        revision = HfApi().resolve_revision(repo.repo, repo_type=repo.kind, revision=repo.revision)
    resolved = repo._replace(revision=revision.resolved)
    if not resolved.is_pinned:
        # the cache of huggingface_hub keeps what a hub gave before
        raise HubError(
            f"the cache of huggingface_hub names no commit for the {repo}; delete the repository below "
            f"{_cache_folders(repo)} and run it again"
        )
    return resolved


def find_imported(store: ObjectStore, repo: HubRepo) -> ArtifactRef | None:
    """The registered model that was made of this commit. None: the store has none. None also for a branch."""
    try:
        body = read_json(store, _record_key(repo))
    except CorruptArtifact:
        return None
    if body is None:
        return None
    name, _, version = str(body.get("model")).partition("@")
    return find_model(store, name, version) if keys.is_name(name) and keys.is_name(version) else None


def record_imported(store: ObjectStore, repo: HubRepo, model: ArtifactRef) -> None:
    """Records the registered model that was made of this commit. Raises ValueError for a branch, which may move."""
    if not repo.is_pinned:
        raise ValueError(f"given the {repo}; expected it at a commit")
    store.put(_record_key(repo), canonical_json({"source": repo.uri, "model": registered_key(model)}))


def _record_key(repo: HubRepo) -> str:
    return keys.loaded_files(digest(canonical_json({"hub": repo.uri})))


@contextmanager
def checked_hub(repo: HubRepo) -> Iterator[None]:
    """Checks the hub's replies before huggingface_hub and datasets use them (storage.registry.hub_checks).

    Raises HubError, with a sentence that says what to do, in place of the errors of these libraries."""
    from huggingface_hub import constants

    from storage.registry.hub_checks import install_checks

    install_checks()
    refuse_secrets(constants.ENDPOINT, "HF_ENDPOINT")
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        explanation = _explanation(repo, error)
        if explanation is None:
            raise
        raise HubError(explanation) from error


def _explanation(repo: HubRepo, error: BaseException) -> str | None:
    """What the error means and what to do about it. None: the error is not one of the hub or of the connection."""
    from huggingface_hub import constants, errors

    # an error of the datasets library has that of the hub as its cause
    causes = list(_causes(error))

    def caused_by(*kinds: type[BaseException]) -> BaseException | None:
        return next((cause for cause in causes if isinstance(cause, kinds)), None)

    if refusal := caused_by(HubError):
        return str(refusal)
    hub = constants.ENDPOINT
    page = f"{hub}/{'datasets/' if repo.kind == 'dataset' else ''}{repo.repo}"
    login = "log in by 'hf auth login', or set HF_TOKEN"
    no_folder = "" if Path(repo.repo).is_dir() else f", and there is no such folder in {Path.cwd()}"
    if invalid := caused_by(errors.HFValidationError):
        return f"the {repo} cannot exist on a hub{no_folder}: {_first_line(invalid)}. Check the name"
    if caused_by(errors.GatedRepoError):
        return f"the {repo} is gated: only accounts with access get its files. Ask for access on {page}, then {login}"
    if caused_by(errors.RevisionNotFoundError):
        return (
            f"the {repo.kind} {repo.repo!r} has no revision {repo.revision!r}; give a branch, tag or commit of {page}"
        )
    if caused_by(errors.RepositoryNotFoundError):
        return f"{hub} has no {repo}, or it is private{no_folder}; check the name, or {login}"
    if caused_by(errors.DisabledRepoError):
        return f"{hub} has disabled the {repo}; take another one"
    is_away = caused_by(errors.OfflineModeIsEnabled, errors.RevisionResolutionError, errors.LocalEntryNotFoundError)
    if is_away or any(type(cause).__name__ in NO_CONNECTION for cause in causes):
        return (
            f"the {repo} is not, or not completely, on this machine, and {_unreachable()}; connect and run it again, "
            "or give a local folder"
        )
    if answer := caused_by(errors.HfHubHTTPError):
        return f"{hub} refused to give the {repo}: {_first_line(answer)}. Try again later, or {login}"
    if broken := caused_by(errors.HTTPError) or _size_mismatch(causes):
        return f"the download of the {repo} broke off ({_first_line(broken)}); run it again: complete files are kept"
    if any(_is_disk_full(cause) for cause in causes):
        return f"the disk is full: the {repo} does not fit below {_cache_folders(repo)}; free space, or set HF_HOME"
    if isinstance(error, _UNREADABLE) or type(error).__name__ == "InvalidURL":
        return f"{hub} gave a reply about the {repo} that cannot be used ({_first_line(error)}); check HF_ENDPOINT"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_disk_full(error: BaseException) -> bool:
    # datasets compares the free space with the size that a repository announces, and its error has no number
    return isinstance(error, OSError) and (error.errno == errno.ENOSPC or "Not enough disk space" in str(error))


def _cache_folders(repo: HubRepo) -> str:
    """The folders that the files of a repository are written to. A dataset is downloaded to one, and prepared in
    another."""
    from huggingface_hub import constants

    if repo.kind == "model":
        return str(constants.HF_HUB_CACHE)
    from datasets import config

    return f"{constants.HF_HUB_CACHE} and {config.HF_DATASETS_CACHE}"


def _size_mismatch(causes: list[BaseException]) -> BaseException | None:
    """The error of huggingface_hub for a file with fewer bytes than announced, which has no class of its own."""
    for cause in causes:
        if isinstance(cause, OSError) and "Consistency check failed" in str(cause):
            return cause
    return None


def _unreachable() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so the hub is not asked"
    return f"{constants.ENDPOINT} cannot be reached"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


CARD = "README.md"
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"})
"""Protocols of object stores. They have no folders, and fsspec's makedirs would create a bucket if its name is
misspelled."""


class PushRefused(PermanentStorageError):
    """Raised when the target holds other files, or cannot be written."""


def push_model(store: ObjectStore, name: str, version: str, url: str, *, card: str, force: bool = False) -> list[str]:
    """Copies the files of a version, then `card` as README.md, and returns the names of all files.

    The card is written last, so that a folder with a card is complete. A repetition completes an interrupted push. A
    folder with other files is refused; with `force`, files are added to it and overwritten. `hf://owner/name` is a
    repository of a Hugging Face hub, and is written in one commit.

    Raises PushRefused, ObjectNotFound, CorruptArtifact, SecretInURL.
    """
    refuse_secrets(url)
    manifest = read_manifest(store, keys.model_version(name, version))
    with tempfile.TemporaryDirectory(prefix="push-", dir=process_folder()) as folder:
        files = materialise_files(store, manifest.key, Path(folder))  # digests are checked
        if url.startswith("hf://"):
            _to_hub(url.removeprefix("hf://"), files, card, message=f"{name}@{version}")
        else:
            _to_filesystem(url, manifest, files, card, force=force)
    return sorted({*files, CARD})


def _to_filesystem(url: str, manifest: Manifest, files: dict[str, Path], card: str, *, force: bool) -> None:
    # the file system of the URL
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise PushRefused(f"nothing can be pushed to {url!r}: {error}") from error
    sizes = {entry.name: entry.bytes for entry in manifest.files}
    try:
        # refuse a folder with files that an interrupted push of this version cannot have left
        existing_sizes = _existing_sizes(filesystem, root)
        others = sorted(name for name, size in existing_sizes.items() if name != CARD and sizes.get(name) != size)
        if others and not force:
            raise PushRefused(
                f"{url} holds other files ({', '.join(others[:5])}); push to an empty folder, or use "
                "--force to add files and overwrite existing ones"
            )
        # copy the files, then the card
        for name, path in files.items():
            if name == CARD:
                continue
            target = f"{root}/{name}"
            _make_folder(filesystem, target.rpartition("/")[0])
            filesystem.put_file(str(path), target)
        _make_folder(filesystem, root)
        filesystem.pipe_file(f"{root}/{CARD}", card.encode())
    except OSError as error:
        raise PushRefused(f"{url} cannot be written: {error}") from error


def _make_folder(filesystem: Any, folder: str) -> None:
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    if not protocols & BUCKETS:
        filesystem.makedirs(folder, exist_ok=True)


def _existing_sizes(filesystem: Any, root: str) -> dict[str, int]:
    """Returns the size in bytes of each file in the folder, by name."""
    if not filesystem.exists(root):
        return {}
    listed = filesystem.find(root, detail=True)
    prefix = f"{root.rstrip('/')}/"
    return {path.removeprefix(prefix): info["size"] for path, info in listed.items()}


def _to_hub(repository: str, files: dict[str, Path], card: str, *, message: str) -> None:
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise PushRefused("hf:// needs the package huggingface_hub; pip install huggingface_hub") from error
    api = HfApi()
    operations = []
    for name, path in files.items():
        if name != CARD:
            operations.append(CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)))
    operations.append(CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=card.encode()))
    # one commit, so that the repository is never incomplete
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        api.create_commit(repository, operations, commit_message=message)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise PushRefused(f"hf://{repository} cannot be written: {error}") from error
