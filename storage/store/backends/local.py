"""file://: a folder as an object store, durable against power loss.

An object is written to a hidden file in the same folder and synced. One system call gives it its name: `rename`, or
`link` where only the first writer may win. Then the folder is synced, so that the name is durable, too.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal
from uuid import uuid4

from storage.errors import (
    AccessDenied,
    CorruptArtifact,
    InvalidKey,
    ObjectNotFound,
    OtherStore,
    PermanentStorageError,
    StorageError,
    StorageFull,
    StorageUnavailable,
    StoreGone,
    UnsupportedFilesystem,
)
from storage.serialization import FileDigest, digest_file
from storage.store.backends.protocol import HIDDEN_PREFIX, Folder, Leftover, ObjectInfo, PutResult
from storage.store.keys import is_key, store_json


class StoreFolder:
    """The folder of a store, and what earlier checks of this process found there.

    It detects that the folder is gone or holds another store, because a disk was unmounted or a folder was moved: a
    process expects the store that it saw first. `store.json` holds the id of a store. Of a store without an id, only
    the existence of the folder is checked.
    """

    def __init__(self, root: Path, url: str) -> None:
        self._root, self._url = root, url
        self._file = root / store_json()
        self._folder_existed = False
        """Whether an earlier check found the folder."""
        self._id: str | None = None
        """The id that an earlier check read from store.json; None if there was no such file yet."""
        self._file_signature: tuple[int, ...] | None = None
        """Device, inode, time and size of store.json when its id was read. It is read again when one changes."""

    def check(self) -> None:
        """Compares the folder with what earlier checks found. This costs one `stat` if nothing changed.

        Raises:
            StoreGone: the folder or its store.json was there and is gone.
            OtherStore: store.json has another id than before.
            CorruptArtifact: store.json has no id.
        """
        # read first: another thread may create store.json after this one looked for it
        known_id, folder_existed = self._id, self._folder_existed
        # unchanged since the last check: the id need not be read again
        try:
            stat = os.stat(self._file)
            signature = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if signature == self._file_signature:
                return
            store_id = read_store_id(self._file.read_bytes(), str(self._file))
        except (FileNotFoundError, NotADirectoryError):
            self._check_absence(known_id, folder_existed=folder_existed)
            return
        except OSError as error:
            raise storage_error_of(error, store_json(), self._url) from error
        # changed: compare the id with the one that was read first
        if self._id not in (None, store_id):
            raise OtherStore(
                f"{self._url} holds another store than before: {self._file} had the id {self._id}, now it has "
                f"{store_id}; mount the disk or move back the folder of the first one"
            )
        self._folder_existed, self._id, self._file_signature = True, store_id, signature

    def _check_absence(self, known_id: str | None, *, folder_existed: bool) -> None:
        """Handles a folder without store.json: either the store has no id yet, or it is gone.

        `known_id` and `folder_existed` are what was known before the file was looked for. Raises StoreGone if an
        earlier check found store.json, or found the folder and now it is not there."""
        exists = self._root.is_dir()
        if known_id is not None:
            state = "the folder has no such file" if exists else "there is no such folder"
            expected = f"expected {self._file} with the id {known_id}, but {state}"
        elif folder_existed and not exists:
            expected = f"expected the folder {self._root}, but there is none"
        else:
            self._folder_existed |= exists
            return
        raise StoreGone(
            f"the store at {self._url} was there and is gone: {expected}; mount its disk or move the folder back. "
            "No new store was begun in its place"
        )


def read_store_id(data: bytes, where: str) -> str:
    """Returns the id in the bytes of a store.json. Raises CorruptArtifact, which names `where` they are from."""
    try:
        return str(json.loads(data)["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptArtifact(
            f"{where} does not say which store this is ({error!r}); restore it from a backup"
        ) from error


# the disk or a quota is full
_FULL = {errno.ENOSPC, errno.EDQUOT}
# the process has no permission
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
# the same call may succeed later
_TRANSIENT = {
    errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE,
    errno.ENOMEM, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
    errno.ENOENT,  # a folder was removed under a writer
}  # fmt: skip


def storage_error_of(error: OSError, key: str, url: str) -> StorageError:
    """Returns the storage error for an `error` about the object `key` of the store at `url`."""
    if error.errno in _FULL:
        return StorageFull(f"no space for {key!r} in {url}: {error.strerror}; free some, nothing was written")
    if error.errno in _DENIED:
        return AccessDenied(f"{key!r} in {url}: {error}; give this user the permission, or choose another folder")
    if error.errno == errno.ENAMETOOLONG:
        return InvalidKey(
            f"the path of {key!r} in {url} is too long for its file system: {error.strerror}; give shorter names, or "
            "put the store in a folder with a shorter path"
        )
    if error.errno in _TRANSIENT:
        return StorageUnavailable(f"{key!r} in {url}: {error}")
    return PermanentStorageError(f"{key!r} in {url}: {error}")


MAX_DURABLE_FOLDERS = 1000
"""Number of folders whose synced names are remembered."""
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EINVAL}


class LocalBackend:
    """Objects are plain files below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"file://{root}"
        self._folder = StoreFolder(root, self.url)
        self._durable: set[Path] = set()  # cache of the folders whose names are synced

    def get(self, key: str) -> bytes:
        with self._reading(key):
            return self._path(key).read_bytes()

    def open(self, key: str) -> BinaryIO:
        with self._reading(key):
            return open(self._path(key), "rb")

    def exists(self, key: str) -> bool:
        try:
            with self._reading(key):
                return stat.S_ISREG(os.stat(self._path(key)).st_mode)
        except ObjectNotFound:
            return False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._walk(prefix[: prefix.rfind("/") + 1], prefix)

    def put(self, key: str, data: bytes) -> None:
        target = self._path(key)
        with self._writing(key):
            with self._temporary(target.parent) as temporary:
                _write(temporary, data)
                os.replace(temporary, target)
            _sync_folder(target.parent)

    def put_file(self, key: str, path: Path, *, move: bool, resume: bool) -> None:
        """Copies or moves a file into the store. A moved file is linked, and its old name is removed last, so that a
        failed move can be repeated.

        A file that is an object of this store is always linked and keeps its name: objects never change.
        """
        target = self._path(key)
        is_object = path.resolve().is_relative_to(self.root.resolve())
        with self._writing(key):
            with self._temporary(target.parent) as temporary:
                # a link is enough for a file that nothing else will write to
                if not ((move or is_object) and _try_link(path, temporary, shared=is_object)):
                    shutil.copyfile(path, temporary)
                _sync_file(temporary)
                os.replace(temporary, target)
            _sync_folder(target.parent)
            if move and not is_object:
                path.unlink(missing_ok=True)

    def put_if_absent(self, key: str, data: bytes, attempt: str) -> PutResult:
        target = self._path(key)
        with self._writing(key):
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder", str(target))
            # an existing object needs no write; a new one is linked, which fails if another writer was faster
            won = not target.exists() and self._link_if_absent(target, data)
            _sync_folder(target.parent)  # also for a loser, which relies on a name that may not be synced yet
        if won:
            return PutResult(True, data)
        try:
            return PutResult(False, self.get(key))
        except ObjectNotFound as error:
            raise StorageUnavailable(f"{key!r} was there and is gone again in {self.url}") from error

    def delete(self, key: str) -> None:
        """Deletes the object and syncs the folder. Without the sync, a manifest that is deleted before its data could
        exist again after a power loss."""
        target = self._path(key)
        with self._writing(key):
            try:
                target.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return  # there is no such object
            _sync_folder(target.parent)

    def download(self, key: str, to: Path) -> FileDigest:
        with self._reading(key):
            shutil.copyfile(self._path(key), to)
        return digest_file(to)

    def local_path(self, key: str) -> Path | None:
        self._folder.check()  # the caller may create folders at this path
        return self._path(key)

    def now(self) -> float:
        with self._writing("the store's clock"), self._temporary(self.root) as temporary:
            _write(temporary, b"")
            return _last_change(temporary.stat())

    def folder(self, prefix: str) -> Folder:
        folders: list[str] = []
        objects: list[ObjectInfo] = []
        for name, entry, is_folder in self._entries(prefix):
            if not is_folder:
                objects += self._info(name, entry)
            # a folder without objects is left over from a deletion
            elif is_key(entry.name) and any(True for _ in self._walk(f"{name}/", f"{name}/")):
                folders.append(entry.name)
        return Folder(sorted(folders), sorted(objects))

    def leftovers(self, prefix: str) -> Iterator[Leftover]:
        """Returns hidden files and folders: unfinished writes, and scratch folders of engines."""
        for folder, folders, files in os.walk(self.root / prefix.rpartition("/")[0]):
            for name in [name for name in (*folders, *files) if name.startswith(HIDDEN_PREFIX)]:
                path = Path(folder, name)
                # size and time of the last change of the file, or of everything in the folder
                try:
                    size, changed = _size_and_change(path)
                except FileNotFoundError:
                    continue  # the write finished after the folder was read
                except OSError as error:
                    raise storage_error_of(error, str(path), self.url) from error
                is_folder = name in folders
                kind: Literal["scratch folder", "temporary file"] = "scratch folder" if is_folder else "temporary file"
                yield Leftover(str(path.relative_to(self.root)), kind, size, changed)
            # os.walk does not descend into the folders that are removed from its list
            folders[:] = [name for name in folders if not name.startswith(HIDDEN_PREFIX)]

    def remove_leftover(self, name: str) -> None:
        path = self.root / name
        if not path.name.startswith(HIDDEN_PREFIX) or not path.parent.resolve().is_relative_to(self.root.resolve()):
            raise InvalidKey(f"{name!r} is not a leftover of {self.url}; their names begin with {HIDDEN_PREFIX}")
        with self._writing(name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.root / key

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        """Translates the errors of a read. The folder is checked afterwards: a missing file may be on a lost disk."""
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            self._folder.check()
            raise ObjectNotFound(f"no object {key!r} in {self.url}") from error
        except OSError as error:
            raise storage_error_of(error, key, self.url) from error
        self._folder.check()

    @contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        """Translates the errors of a write. The folder is checked before, so that none is created in place of a lost
        one, and afterwards."""
        self._folder.check()
        try:
            yield
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            raise InvalidKey(
                f"{key!r} cannot be an object of {self.url}, because {error.filename} is a folder, or a file where a "
                "folder is needed; give another key"
            ) from error
        except OSError as error:
            raise storage_error_of(error, key, self.url) from error
        self._folder.check()

    def _link_if_absent(self, target: Path, data: bytes) -> bool:
        with self._temporary(target.parent) as temporary:
            _write(temporary, data)
            try:
                os.link(temporary, target)
            except FileExistsError:
                # NFS can lose the reply to a successful link and refuse its own repetition of the request
                return target.is_file() and os.path.samefile(temporary, target)
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise UnsupportedFilesystem(
                        f"{self.root} is on a file system without hard links ({error}), so two writers of a key "
                        "could both win; put the store on a local disk, NFS, or s3://"
                    ) from error
                raise
            return True

    @contextmanager
    def _temporary(self, folder: Path) -> Iterator[Path]:
        """Yields a new hidden path in `folder`, which is created. A file that is left at that path is removed."""
        # in the same folder, so that it can be renamed or linked to its final name
        self._make_folder(folder)
        temporary = folder / f"{HIDDEN_PREFIX}{uuid4().hex}"
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _make_folder(self, folder: Path) -> None:
        """Creates `folder` and syncs the names of its whole path, once per process."""
        if folder in self._durable and folder.is_dir():
            return
        # collect the folders to create before they exist
        missing = [parent for parent in (self.root, *self.root.parents) if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        path = (folder, *folder.parents)
        inside = [part for part in path if part != self.root and part.is_relative_to(self.root)]
        for part in (*inside, *missing):
            if part not in self._durable or part == folder:
                _sync_folder(part.parent)
        # A long run writes to new folders at every step. A folder that was forgotten is synced again.
        if len(self._durable) > MAX_DURABLE_FOLDERS:
            self._durable.clear()
        self._durable.update(inside, missing, [folder])

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        """Yields the objects below `folder` (a relative path that ends with a slash) whose keys begin with `prefix`."""
        for name, entry, is_folder in self._entries(folder):
            if is_folder:
                # only folders that can contain keys with the prefix
                if f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/"):
                    yield from self._walk(f"{name}/", prefix)
            elif name.startswith(prefix):
                yield from self._info(name, entry)

    def _entries(self, folder: str) -> Sequence[tuple[str, os.DirEntry[str], bool]]:
        """Returns (relative path, entry, whether it is a folder) for what lies in a folder."""
        try:
            with self._reading(folder), os.scandir(self.root / folder) as entries:
                return [(f"{folder}{entry.name}", entry, entry.is_dir()) for entry in entries]
        except ObjectNotFound:
            return []

    def _info(self, name: str, entry: os.DirEntry[str]) -> Sequence[ObjectInfo]:
        """Returns the object of a file. Returns nothing for temporary files and those of other programs."""
        if not is_key(name):
            return []
        try:
            status = entry.stat()
        except FileNotFoundError:
            return []  # deleted after the folder was read
        except OSError as error:
            raise storage_error_of(error, name, self.url) from error
        return [ObjectInfo(name, status.st_size, _last_change(status))]


def _try_link(path: Path, temporary: Path, *, shared: bool) -> bool:
    """Tries to give the file a second name. Returns False if it must be copied instead.

    A file that may still be written under another name, or a symbolic link as in a Hugging Face cache, must be copied,
    unless it is `shared` on purpose.
    """
    if path.is_symlink() or (path.stat().st_nlink > 1 and not shared):
        return False
    try:
        os.link(path, temporary)
    except OSError:
        return False
    return True


def _last_change(stat: os.stat_result) -> float:
    """Time at which the file got its bytes or its name, whichever is later: a link to an old file is a new object."""
    return max(stat.st_mtime, stat.st_ctime)


def _size_and_change(path: Path) -> tuple[int, float]:
    """Returns (bytes, time of the last change) of a file, or of all files in a folder."""
    # symbolic links are not followed
    size, last_change = 0, _last_change(path.lstat())
    contents = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
    for file in (path, *contents):
        stat = file.lstat()
        last_change = max(last_change, _last_change(stat))
        if not file.is_dir():
            size += stat.st_size
    return size, last_change


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
