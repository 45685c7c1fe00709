"""The weights that a pool's replicas were given last: a replica that is started again takes them."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from engine.backends.vllm.serving.runtime import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Weights:
    """What `load` was asked for. `folder`: of links that keep the files after the caller has removed its own. Without
    `paths` they came by a broadcast, to `group`, and nobody can take them later."""

    paths: tuple[str, ...]
    manifest: Manifest
    state: str
    full: bool
    folder: Path | None = None
    group: str = ""

    @property
    def source(self) -> list[str] | str:
        """As `Extension.ostinato_load` takes it."""
        return list(self.paths) if self.paths else self.group

    @property
    def still_there(self) -> bool:
        return bool(self.paths) and all(Path(path).is_file() for path in self.paths)

    def kept(self) -> Weights:
        """The same files by other names, beside the caller's folder; they take no room of their own while both are
        there. A file system without links keeps nothing."""
        if not self.paths:
            return self
        folder = Path(tempfile.mkdtemp(prefix="ostinato-base-", dir=Path(self.paths[0]).parent.parent))
        links = tuple(str(folder / f"{number}.safetensors") for number in range(len(self.paths)))
        try:
            for path, link in zip(self.paths, links, strict=True):
                os.link(path, link)
        except OSError as error:
            log.warning("the weights are not kept for replicas that are started again: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
            return self
        return replace(self, paths=links, folder=folder)

    def drop(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
