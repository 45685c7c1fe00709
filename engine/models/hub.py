"""Models of a Hugging Face hub: which keys name one, their check, download and import into the registry.

A run needs the hub once per store: the files of a commit are registered like those of a local folder, and a record in
the store says which registered model they became.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from engine.errors import BadModelFolder
from engine.models.folder import CONFIG_FILE, PICKLE_SUFFIXES, ModelFolder, local_folder, read_config
from storage.registry.hub import (
    SCHEME,
    HubRepo,
    checked_hub,
    find_imported,
    parse_hub_repo,
    record_imported,
    resolve_commit,
)
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*")
"""Patterns of the files that are downloaded: weights, configs and tokenizers, but no code and no pickled weights."""
NOT_FILES = ("*/*", "consolidated*.safetensors")
"""Patterns of the files that are not downloaded although they match FILES: those of folders, and second copies of the
weights in Mistral's layout."""


class DownloadBar(tqdm):  # type: ignore[type-arg]
    """A progress bar on a terminal, and nothing where the output is a file or huggingface_hub's bars are disabled."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        from huggingface_hub.utils import are_progress_bars_disabled

        super().__init__(*arguments, **options | {"disable": are_progress_bars_disabled() or None})


def hub_repo_of_key(key: str) -> HubRepo | None:
    """The hub's model that a key names: `owner/name`, `owner/name@revision`, and both after `hf://`. None: another key.

    A local folder of the same name has precedence. Raises BadModelFolder where both can be meant.
    """
    repo = parse_hub_repo(key, "model")
    if repo is None or key.startswith(SCHEME):
        return repo
    folder = local_folder(key)
    if folder is not None:
        if not (folder / CONFIG_FILE).is_file():
            raise BadModelFolder(
                f"given {key!r}, which is a folder here without a {CONFIG_FILE}, and may be a model of the hub; give "
                f"{SCHEME}{key} for the hub's, or the folder of a model"
            )
        return None
    if repo.revision is not None and local_folder(repo.repo) is not None:
        raise BadModelFolder(
            f"given {key!r}, but {repo.repo} is a folder here, and folders have no revisions; give {SCHEME}{key} for "
            f"the model of the hub, or {repo.repo} for the folder"
        )
    return repo


async def import_from_hub(
    store: ObjectStore, repo: HubRepo, import_folder: Callable[[ModelFolder], Awaitable[ArtifactRef]]
) -> ArtifactRef:
    """The registered model of a repository. Downloads it, and registers it by `import_folder`, if the store does not
    have it. Raises HubError, BadModelFolder."""
    repo = await asyncio.to_thread(resolve_commit, repo)
    model = await asyncio.to_thread(find_imported, store, repo)
    if model is not None:
        return model
    model = await import_folder(await asyncio.to_thread(download_model, repo))
    await asyncio.to_thread(record_imported, store, repo, model)
    return model


def check_hub_model(store: ObjectStore, repo: HubRepo) -> None:
    """Raises HubError or BadModelFolder unless the store has the model, or the hub has it in a form that can be used.

    Only the list of files and config.json are downloaded."""
    from huggingface_hub import hf_hub_download

    repo = resolve_commit(repo)
    if find_imported(store, repo) is not None:
        return
    files = _repo_files(repo)
    _check_files(repo, files)
    with checked_hub(repo):
        config = Path(hf_hub_download(repo.repo, CONFIG_FILE, revision=repo.revision))
    _check_digests(repo, [config], files)
    _check_code(repo, read_config(config))


def download_model(repo: HubRepo) -> ModelFolder:
    """Downloads the files of a commit into the cache of huggingface_hub, or finds them there, and checks them.

    After an interruption, the files that are complete are not downloaded again. Raises HubError, BadModelFolder.
    """
    from huggingface_hub import snapshot_download

    files = _repo_files(repo)
    _check_files(repo, files)
    with checked_hub(repo):
        path = snapshot_download(
            repo.repo, revision=repo.revision, allow_patterns=list(FILES), ignore_patterns=list(NOT_FILES),
            tqdm_class=DownloadBar,
        )  # fmt: skip
    _check_digests(repo, sorted(Path(path).iterdir()), files)
    _check_code(repo, read_config(Path(path, CONFIG_FILE)))
    return ModelFolder.of(Path(path), name=repo.repo.replace("/", "--"))


def _check_files(repo: HubRepo, files: list[RepoFile]) -> None:
    """Raises BadModelFolder unless the repository has a config and weights in safetensors files that are downloaded."""
    from huggingface_hub.utils import filter_repo_objects

    names = [file.path for file in files]
    if CONFIG_FILE not in names:
        raise BadModelFolder(
            f"the {repo} has no {CONFIG_FILE}, so it is no model that can be trained. Adapters and GGUF files have "
            "none: give the model that they were made from"
        )
    downloaded = filter_repo_objects(names, allow_patterns=list(FILES), ignore_patterns=list(NOT_FILES))
    if any(name.endswith(".safetensors") for name in downloaded):
        return
    pickled = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
    reason = (
        f"only pickled weights ({', '.join(pickled[:3])}), which can run code when read"
        if pickled
        else "no weights in the layout of Hugging Face"
    )
    raise BadModelFolder(
        f"the {repo} has {reason}; give a revision with *.safetensors files, such as {repo.repo}@refs/pr/1 if its "
        "page shows a pull request that converts them"
    )


def _repo_files(repo: HubRepo) -> list[RepoFile]:
    """The files of a commit, with their digests. Raises HubError."""
    with checked_hub(repo):
        from storage.registry.hub_checks import repo_files

        return repo_files(repo)


def _check_code(repo: HubRepo, config: dict[str, Any]) -> None:
    """Raises BadModelFolder for a model that needs code of its repository, which is never run."""
    if "auto_map" not in config:
        return
    # auto_map alone is no reason: many repositories still name their code although transformers now has the
    # architecture
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if config.get("model_type") not in CONFIG_MAPPING_NAMES:
        raise BadModelFolder(
            f"the {repo} needs code of its repository (auto_map in {CONFIG_FILE}), which is never run; give a model of "
            "an architecture that transformers has"
        )


def _check_digests(repo: HubRepo, paths: list[Path], files: list[RepoFile]) -> None:
    """Raises HubError for a downloaded file whose content is not the one that the commit has."""
    from storage.registry.hub_checks import check_files

    check_files(repo, paths, files)
