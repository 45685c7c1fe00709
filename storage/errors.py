"""Errors of storage. A transient error may disappear when the same call is repeated; a permanent error will not.

StorageError
├── TransientStorageError      StorageUnavailable  StoreGone  StorageFull  AttemptTooOld
└── PermanentStorageError      ObjectNotFound  NoSuchBucket  OtherStore  AccessDenied  CorruptArtifact
                               UnsupportedFilesystem  InvalidKey  SchemaMismatch  SemanticMismatch  VersionConflict
                               ArtifactConflict  AliasMoved  ForkRefused  NoSuchCheckpoint  CheckpointInUse
                               RunInUse  RunBeingDeleted  ModelInUse  ModelBeingDeleted
                               IndexIncomplete
"""

from __future__ import annotations

from typing import ClassVar


class StorageError(Exception):
    """Base class of all errors that storage raises."""

    transient: ClassVar[bool] = False


class TransientStorageError(StorageError):
    """Raised when the same call may succeed later."""

    transient: ClassVar[bool] = True


# -- transient ---------------------------------------------------------------------------------------------------


class StorageUnavailable(TransientStorageError):
    """Raised when the store did not answer, or answered with a server error, on every attempt that the retry policy
    allows."""


class StoreGone(StorageUnavailable):
    """Raised when the folder of a store, or its store.json, existed and is missing now. An unmounted disk may be
    mounted again."""


class StorageFull(TransientStorageError):
    """Raised when no space or quota is left. No part of the object is visible."""


class AttemptTooOld(TransientStorageError):
    """Raised when an attempt took so long that garbage collection may have deleted its data. Start a new attempt."""


class PermanentStorageError(StorageError):
    """Raised when the same call will fail again until something is changed."""


# -- permanent: objects and stores ---------------------------------------------------------------------------------


class ObjectNotFound(PermanentStorageError):
    """Raised when there is no object at the key."""


class NoSuchBucket(PermanentStorageError):
    """Raised when the bucket does not exist, so that nothing is known about its objects."""


class OtherStore(PermanentStorageError):
    """Raised when the folder holds another store than the one this process used before."""


class AccessDenied(PermanentStorageError):
    """Raised when the store rejects the credentials or denies access."""


# -- permanent: contents -------------------------------------------------------------------------------------------


class CorruptArtifact(PermanentStorageError):
    """Raised when bytes differ from what their manifest says, cannot be parsed, or were written by a newer version."""


class IndexIncomplete(PermanentStorageError):
    """Raised when the store has lost its index, so that what uses a run is not known."""


class UnsupportedFilesystem(PermanentStorageError):
    """Raised when a store cannot guarantee that exactly one of several writers of a key wins."""


class InvalidKey(PermanentStorageError):
    """Raised when a key or a name has characters or segments that are not allowed."""


class SchemaMismatch(PermanentStorageError):
    """Raised when a table does not have the declared columns."""


# -- permanent: conflicts with what is committed -------------------------------------------------------------------


class SemanticMismatch(PermanentStorageError):
    """Raised when the run key belongs to a run with another semantic configuration."""


class ArtifactConflict(PermanentStorageError):
    """Raised when the key holds an artifact that was made from another parent."""


class VersionConflict(PermanentStorageError):
    """Raised when the model version already names other content."""


class AliasMoved(PermanentStorageError):
    """Raised when an alias was moved by another writer after it was read."""


class ForkRefused(PermanentStorageError):
    """Raised when the key of a fork is taken, or when a run is an unfinished fork."""


class NoSuchCheckpoint(PermanentStorageError):
    """Raised when no checkpoint has the name, or more than one has it."""


class CheckpointInUse(PermanentStorageError):
    """Raised when a checkpoint is to be removed while a fork, a run in progress, a champion or a rebase refers to
    it."""


class RunInUse(PermanentStorageError):
    """Raised when a run is to be deleted while it may be in progress, or while a fork, another run or a model needs
    it."""


class ModelInUse(PermanentStorageError):
    """Raised when a version of a model is to be deleted while it is the champion or a run was trained from it."""


class ModelBeingDeleted(PermanentStorageError):
    """Raised when the version of a model is deleted in part, because its deletion has not ended yet."""


class RunBeingDeleted(PermanentStorageError):
    """Raised when the run is deleted in part, because its deletion has not ended yet."""
