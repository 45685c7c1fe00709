"""Tokenizer, renderer and context length of a model in the object store. A process builds each once per model.

Two stored models with the same content share them. `engine.text.tokenizers` loads a tokenizer from a folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.models.folder import CONFIG_FILE, context_length_in, stored_config
from engine.protocol import PolicySpec
from engine.text.rendering import Renderer
from engine.text.tokenizers import TOKENIZER_FILES, Tokenizer, load_tokenizer
from storage.chain.listing import SERVED
from storage.chain.records import Root
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore

CACHED_MODELS = 8
"""Number of models whose renderer, tokenizer and context length stay in memory."""

DEFAULT_CHAIN = "policy"
"""Name of the chain that represents a stage when the stage has several chains."""


def renderer_of(store: ObjectStore, model: ArtifactRef) -> Renderer:
    """Returns the renderer of a stored model. Raises TokenizerMissing, ChatTemplateMissing, and storage's errors."""
    return _cached_renderer(_StoredModel(store, model))


def tokenizer_of(store: ObjectStore, model: ArtifactRef) -> Tokenizer:
    """Returns the tokenizer of a stored model, which needs no chat template. Raises TokenizerMissing, and storage's
    errors."""
    return _cached_tokenizer(_StoredModel(store, model))


def context_length_of(store: ObjectStore, model: ArtifactRef) -> int | None:
    """Returns the longest sequence of a stored model, in tokens, as its config.json gives it. None: it is not given."""
    return _cached_context_length(_StoredModel(store, model))


class _StoredModel:
    """A key of the caches: equal for two models with the same content, whatever store they are read from."""

    def __init__(self, store: ObjectStore, model: ArtifactRef) -> None:
        self.store, self.model = store, model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StoredModel) and self.model.sha256 == other.model.sha256

    def __hash__(self) -> int:
        return hash(self.model.sha256)


@lru_cache(maxsize=CACHED_MODELS)
def _cached_renderer(stored: _StoredModel) -> Renderer:
    return Renderer(_cached_tokenizer(stored))


@contextmanager
def tokenizer_folder(store: ObjectStore, model: ArtifactRef) -> Iterator[Path]:
    """A folder with the tokenizer's files of a stored model, as transformers reads them, until the end of the context.
    """
    with TemporaryDirectory() as scratch:
        folder, downloads = Path(scratch, "tokenizer"), Path(scratch, "downloads")
        folder.mkdir()
        downloads.mkdir()
        # transformers reads the tokenizer's class from config.json if tokenizer_config.json does not name it.
        names = (*TOKENIZER_FILES, CONFIG_FILE)
        for name, path in materialise_files(store, model.key, downloads, names=names).items():
            # A local store returns its own files, which have other names and lie in other folders.
            (folder / name).symlink_to(path.resolve())
        yield folder


@lru_cache(maxsize=CACHED_MODELS)
def _cached_tokenizer(stored: _StoredModel) -> Tokenizer:
    with tokenizer_folder(stored.store, stored.model) as folder:
        return load_tokenizer(folder, name=stored.model.key)


@lru_cache(maxsize=CACHED_MODELS)
def _cached_context_length(stored: _StoredModel) -> int | None:
    return context_length_in(stored_config(stored.store, stored.model))


def served_policy(model: ArtifactRef) -> PolicySpec:
    """The chain of a served model, which never takes a step. Its run is `served/<name>`, and its stage is
    `0-<digest of the version's content>`."""
    _, name, _ = model.key.split("/")
    root = Root(base=model, base_digest=model.sha256)
    stage = keys.stage_name(0, model.sha256[:16])
    return PolicySpec(run=f"{SERVED}/{name}", stage=stage, model=DEFAULT_CHAIN, root=root)
