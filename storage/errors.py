"""What can go wrong with bytes, split by the only question a caller asks: may I try again?

StorageError
├── TransientStorageError      StorageUnavailable  StoreGone  StorageFull  AttemptTooOld
└── PermanentStorageError      ObjectNotFound  NoSuchBucket  OtherStore  AccessDenied  CorruptArtifact
                               UnsupportedFilesystem  InvalidKey  SchemaMismatch  SemanticMismatch  VersionConflict
                               ArtifactConflict  AliasMoved  ForkRefused  NoSuchCheckpoint  CheckpointInUse
"""

from __future__ import annotations

from typing import ClassVar


class StorageError(Exception):
    """Anything that storage refuses or fails to do."""

    transient: ClassVar[bool] = False


class TransientStorageError(StorageError):
    """The same call may work later."""

    transient: ClassVar[bool] = True


class StorageUnavailable(TransientStorageError):
    """The store did not answer, or answered with an error of its own, more often than the retries allow."""


class StoreGone(StorageUnavailable):
    """The folder of a store, or its store.json, was there and is gone: an unmounted disk may come back."""


class StorageFull(TransientStorageError):
    """No space or quota is left. Nothing of the object is visible."""


class AttemptTooOld(TransientStorageError):
    """An attempt that took longer than garbage collection waits: its data may be gone. A new attempt starts anew."""


class PermanentStorageError(StorageError):
    """The same call fails again until somebody changes something."""


class ObjectNotFound(PermanentStorageError):
    """There is no such object."""


class NoSuchBucket(PermanentStorageError):
    """There is no such bucket, so nothing is known about its objects."""


class OtherStore(PermanentStorageError):
    """Another store lies where the store of this process was."""


class AccessDenied(PermanentStorageError):
    """The store knows the caller, or does not, and refuses."""


class CorruptArtifact(PermanentStorageError):
    """Bytes that are not what their manifest says: torn, altered, unparseable, or written by a newer version."""


class UnsupportedFilesystem(PermanentStorageError):
    """A store that cannot tell one writer of many that it won."""


class InvalidKey(PermanentStorageError):
    """A key or a name that is not made of plain segments."""


class SchemaMismatch(PermanentStorageError):
    """A table that is not of the declared schema."""


class SemanticMismatch(PermanentStorageError):
    """A run key that is taken by a run with another semantic configuration."""


class ArtifactConflict(PermanentStorageError):
    """A key that holds an artifact of another origin."""


class VersionConflict(PermanentStorageError):
    """A model version that names other content already."""


class AliasMoved(PermanentStorageError):
    """An alias that somebody else moved since it was looked at."""


class ForkRefused(PermanentStorageError):
    """A fork onto a key that is taken, or a run whose fork is not finished."""


class NoSuchCheckpoint(PermanentStorageError):
    """A name that no checkpoint bears, or more than one."""


class CheckpointInUse(PermanentStorageError):
    """A checkpoint that is to be removed and that a fork, a run in progress, a champion or a rebase refers to."""
