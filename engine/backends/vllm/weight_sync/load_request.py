"""The last weights that were sent to a pool's replicas. A replica that is started again loads them."""

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
class LoadRequest:
    """The arguments of one `load`."""

    paths: tuple[str, ...]
    """The safetensors files. Empty if the weights were broadcast; they cannot be loaded again then."""
    manifest: Manifest
    state: str
    full: bool
    """Whether every column is read back, instead of a sample."""
    link_folder: Path | None = None
    """Folder of links to the files, which keep them after the caller has removed its own; see `with_linked_files`."""
    group: str = ""
    """Name of the broadcast group that the weights are sent to."""

    @property
    def source(self) -> list[str] | str:
        """The `source` argument of `Extension.ostinato_load`: paths, or the name of a broadcast group."""
        return list(self.paths) if self.paths else self.group

    @property
    def files_exist(self) -> bool:
        """Whether a replica can load the weights again."""
        return bool(self.paths) and all(Path(path).is_file() for path in self.paths)

    def with_linked_files(self) -> LoadRequest:
        """A request for hard links to the same files, in a new folder next to the caller's.

        The links take no space while the original files exist. Without support for links in the file system, this
        returns the request itself.
        """
        if not self.paths:
            return self
        # A hard link must be in the file system of its file. The caller deletes the files' own folder.
        folder = Path(tempfile.mkdtemp(prefix="ostinato-base-", dir=Path(self.paths[0]).parent.parent))
        links: list[str] = []
        try:
            for number, path in enumerate(self.paths):
                link = folder / f"{number}.safetensors"
                os.link(path, link)
                links.append(str(link))
        except OSError as error:
            log.warning("the weights are not kept for replicas that are started again: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
            return self
        return replace(self, paths=tuple(links), link_folder=folder)

    def remove_links(self) -> None:
        """Deletes the links of `with_linked_files`."""
        if self.link_folder is not None:
            shutil.rmtree(self.link_folder, ignore_errors=True)
