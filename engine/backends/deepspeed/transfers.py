"""Uploads and downloads of checkpoints by the ranks, each its own part, while the other thread of the rank computes.

One process transfers as much as its one event loop can handle, which is far less than the network of a machine gives
(docs/scaling.md). The engine's process only commits the manifest. `RankTransfers` is the engine's side, and
`RankStore` that of each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.backends.weight_files.pieces import OPTIMIZER, WEIGHTS, part_file
from engine.cluster.rank_group import RankGroup
from engine.errors import WorkerDied
from storage.serialization import FileDigest, digest_file
from storage.store.artifacts import map_files
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore, open_store


class RankTransfers:
    """Implements engine.backends.protocol.Transfers by calls to the ranks. Only files of s3:// go through them: the
    files of a store on this machine are linked, and one in memory belongs to this process."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def upload(self, url: str, files: Mapping[str, tuple[str, Path]]) -> dict[str, FileDigest]:
        uploaded: dict[str, FileDigest] = {}
        if _is_remote(url):
            for of_rank in self._group.call_beside("upload", url, files).values():
                uploaded |= of_rank
        return uploaded

    def download(self, url: str, key: str, names: Sequence[str], folder: Path) -> bool:
        if not _is_remote(url):
            return False
        self._group.start()
        downloaded: set[str] = set()
        for of_rank in self._group.call_beside("download", url, key, names, folder).values():
            downloaded |= set(of_rank)
        if not self._group.alive:
            raise WorkerDied(f"the ranks ended while they downloaded {key}; the next call starts them again")
        return downloaded == set(names)

    def discard(self, url: str, folder: Path) -> None:
        if _is_remote(url):
            self._group.call_beside("discard", folder)


class RankStore:
    """The transfers of one rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._stores: dict[str, ObjectStore] = {}
        """The stores that this rank has used, by URL. Each has connections of its own."""

    def upload(self, url: str, files: Mapping[str, tuple[str, Path]]) -> dict[str, FileDigest]:
        """Uploads those of the files, given as (key, path) by name, that this rank has written. Returns their digests.

        The files stay on the disk. If this process is killed, the engine's process continues the upload."""
        store = self._open(url)
        names = {part_file(kind, self._rank, self._world_size) for kind in (WEIGHTS, OPTIMIZER)}
        written = [name for name in sorted(names & files.keys()) if files[name][1].is_file()]

        def put(name: str) -> FileDigest:
            key, path = files[name]
            return store.put_file(key, path, resume=True) or digest_file(path)

        return dict(zip(written, map_files(put, written), strict=True))

    def download(self, url: str, key: str, names: Sequence[str], folder: Path) -> list[str]:
        """Downloads every n-th of the files of an artifact, with n ranks, and checks their digests. Returns their
        names. If n ranks wrote the checkpoint, these are the files that the rank with this number wrote."""
        share = sorted(names)[self._rank :: self._world_size]
        materialise_files(self._open(url), key, folder, names=share)
        return share

    def _open(self, url: str) -> ObjectStore:
        if url not in self._stores:
            self._stores[url] = open_store(url)
        return self._stores[url]


def _is_remote(url: str) -> bool:
    return url.startswith("s3://")
