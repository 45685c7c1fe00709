"""JSON bodies of the calls that carry no batch. All names in them are checked here, so that no name can be a path.

Model folders of a client's machine travel through the store, not through HTTP: the client puts the files under a key
that contains the digest of their content. The server checks that they load, publishes them as the embedded engine does,
and deletes the upload. Each part may be repeated at any time.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from engine.errors import BadSpec
from engine.models.folder import ModelFolder, registry_version
from engine.protocol import Engine, MeasureRequest, PolicySpec, PublishDtype, SamplerScale
from storage.chain.records import PolicyRef, StepRequest
from storage.errors import CorruptArtifact, InvalidKey, ObjectNotFound, StorageError
from storage.registry.models import find_published
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, commit_files, read_manifest
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore
from storage.temporary import process_folder

VERSION = 1
"""Version of the interface. A client of another version is refused with both numbers."""
VERSION_HEADER = "X-Ostinato-Version"
STORE_HEADER = "X-Ostinato-Store"
"""Id of the client's store (storage.store.objects.store_id). A server over another store refuses the request."""
REQUEST_HEADER = "X-Request-Id"
"""Id of a call, 32 hex digits. It stays the same on retries, and the server does the work of one id once."""
MAX_WAIT_SECONDS = 30.0
"""Longest time for which a request may wait for a result."""
MAX_SAMPLERS = 4096


def _name(value: str) -> str:
    return _checked(keys.validate_name, value)


def _run(value: str) -> str:
    return _checked(keys.validate_run, value)


def _model_key(value: str) -> str:
    name, separator, version = value.partition("@")
    _name(name)
    if separator:
        _checked(lambda text: keys.model_version(name, text), version)
    return value


def _policy(value: PolicyRef) -> PolicyRef:
    check_policy(value)
    return value


def _checked(validate: Callable[[str], object], value: str) -> str:
    """Returns the value if `validate` accepts it. Raises ValueError, as pydantic expects, in place of InvalidKey."""
    try:
        validate(value)
    except InvalidKey as error:
        raise ValueError(str(error)) from error
    return value


def check_policy(policy: PolicyRef) -> None:
    """Raises ValueError if a name in the policy is invalid."""
    # These names become parts of storage keys, so a name such as ".." must not pass.
    _run(policy.run)
    _name(policy.stage)
    _name(policy.model)
    if policy.step >= 1 << 31:
        raise ValueError(f"{policy.step} is not a step of a chain; give a step below 2^31")


def check_batch_policy(policy: PolicyRef) -> PolicyRef:
    """Returns the policy of a call with an Arrow body. Raises BadSpec if a name in it is invalid."""
    try:
        return _policy(policy)
    except ValueError as error:
        raise BadSpec(str(error)) from error


def _artifact(value: ArtifactRef) -> ArtifactRef:
    _checked(keys.validate_key, value.key)
    return value


Name = Annotated[str, AfterValidator(_name), Field(description="1 to 128 letters, digits, dots, underscores, hyphens.")]
Run = Annotated[str, AfterValidator(_run), Field(description="A name, or deployment/time.")]
ModelKey = Annotated[str, AfterValidator(_model_key), Field(description="name or name@version in the registry.")]
Policy = Annotated[PolicyRef, AfterValidator(_policy)]
Epoch = Annotated[int, Field(ge=0, lt=1 << 63, description="Fencing epoch of the caller's lease.")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Body(BaseModel):
    """Base class of JSON bodies. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ImportModelBody(Body):
    """Names a registered model by its key; with `upload`, the folder that the client put at
    uploads/<source>/<upload>."""

    source: ModelKey
    provenance: Provenance
    upload: Digest | None = None

    @model_validator(mode="after")
    def _uploads_have_no_version(self) -> ImportModelBody:
        if self.upload is not None and "@" in self.source:
            raise ValueError("the version of an upload is the digest of its content: give a name without @version")
        return self


class CreatePolicyBody(Body):
    spec: PolicySpec

    @model_validator(mode="after")
    def _names(self) -> CreatePolicyBody:
        _run(self.spec.run)
        _name(self.spec.stage)
        _name(self.spec.model)
        if self.spec.root.base is not None:
            _artifact(self.spec.root.base)
        if self.spec.root.start is not None:
            check_policy(self.spec.root.start)
        # Raises ValueError for NaN and half surrogate pairs, which have no canonical bytes.
        self.spec.root.state()
        return self


class StepBody(Body):
    request: StepRequest
    epoch: Epoch = 0

    @model_validator(mode="after")
    def _names(self) -> StepBody:
        check_policy(self.request.parent)
        if self.request.reference is not None:
            check_policy(self.request.reference)
        _artifact(self.request.batch)
        # As above: a request without canonical bytes has no digest.
        self.request.digest()
        return self


class MeasureBody(Body):
    request: MeasureRequest
    epoch: Epoch = 0

    @model_validator(mode="after")
    def _names(self) -> MeasureBody:
        check_policy(self.request.policy)
        _artifact(self.request.batch)
        return self


class SaveCheckpointBody(Body):
    policy: Policy
    provenance: Provenance
    name: Name | None = None
    epoch: Epoch = 0


class ExportModelBody(Body):
    policy: Policy
    model_name: Name
    provenance: Provenance
    dtype: PublishDtype = "base"
    epoch: Epoch = 0


class StagePolicyBody(Body):
    policy: Policy
    epoch: Epoch = 0


class ReleaseBody(Body):
    run: Run
    epoch: Epoch = 0


class ScaleSamplersBody(Body):
    """Asks for a number of vLLM replicas."""

    samplers: int = Field(ge=1, le=MAX_SAMPLERS, description="Replicas of each model.")


class Acknowledged(BaseModel):
    """The response to a call that returns nothing."""


class CallStatus(BaseModel):
    """The call is not finished. Poll /v1/calls/{id}."""

    id: str
    state: Literal["waiting"] = "waiting"


class ServerInfo(BaseModel):
    """What a client must know before its first call. It does not wait for the engine."""

    version: int = VERSION
    store_id: str
    max_body_bytes: int
    max_calls: int = Field(description="Most unfinished calls of one verb of one run. A client that has more waits.")


class Health(BaseModel):
    """The process runs."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """The engine takes calls."""

    status: Literal["ready"] = "ready"
    waiting: int = Field(description="Calls that are not finished.")


class ServedEngine(Engine, Protocol):
    """The engine of a server. It has calls that no flow makes."""

    async def import_folder(self, folder: ModelFolder, *, provenance: Provenance) -> ArtifactRef:
        """Publishes a checked folder of this machine in the registry. Idempotent."""
        ...

    async def scale_samplers(self, count: int) -> SamplerScale:
        """Changes the number of vLLM replicas of each model, while calls run, and does not wait for them.

        Raises BadSpec if the samplers are no replicas, or if the cluster can never run so many."""
        ...


def stage_upload(store: ObjectStore, folder: ModelFolder, digest: str, *, provenance: Provenance) -> ArtifactRef:
    """Uploads the folder to the store for the server. Idempotent; the local files stay."""
    key = keys.upload(folder.name, digest)
    return commit_files(store, key, folder.files, kind="upload", provenance=provenance, move=False)


def drop_published_upload(store: ObjectStore, name: str, digest: str) -> ArtifactRef | None:
    """Deletes what is left of an upload that was published, and returns the model. None: it was not published."""
    ref = find_published(store, name, registry_version(digest))
    if ref is None or ref.sha256 != digest:
        return None
    discard_upload(store, name, digest)
    return ref


def fetch_upload(store: ObjectStore, name: str, digest: str, scratch: Path) -> ModelFolder:
    """Downloads an uploaded folder. Raises ObjectNotFound, CorruptArtifact, BadModelFolder."""
    files = materialise_files(store, keys.upload(name, digest), scratch)
    folder = ModelFolder.of(next(iter(files.values())).parent, name=name)
    # A local store gives its own files, which may be deleted at this moment.
    if folder.digest() != digest:
        key = keys.upload(name, digest)
        raise CorruptArtifact(f"the content of the upload {key} does not match its digest; import the folder again")
    return folder


def discard_upload(store: ObjectStore, name: str, digest: str) -> None:
    """Deletes the upload, its manifest first, so that no manifest ever names missing files."""
    key = keys.upload(name, digest)
    try:
        manifest = read_manifest(store, key)
    except ObjectNotFound:
        return
    store.delete(keys.manifest_of_files(key))
    for entry in manifest.files:
        store.delete(entry.key)


async def import_upload(
    engine: ServedEngine, store: ObjectStore, name: str, digest: str, *, provenance: Provenance
) -> ArtifactRef:
    """Publishes an uploaded folder and deletes the upload. Idempotent.

    Raises ObjectNotFound when neither the upload nor the model published from it exists.
    """
    published = await asyncio.to_thread(drop_published_upload, store, name, digest)
    if published is not None:
        return published
    with tempfile.TemporaryDirectory(prefix="upload-", dir=process_folder()) as scratch:
        try:
            folder = await asyncio.to_thread(fetch_upload, store, name, digest, Path(scratch))
            ref = await engine.import_folder(folder, provenance=provenance)
        except (StorageError, OSError, ValueError):
            # Another call or server may have published the model and deleted the files in the meantime.
            published = await asyncio.to_thread(drop_published_upload, store, name, digest)
            if published is None:
                raise
            return published
    await asyncio.to_thread(discard_upload, store, name, digest)
    return ref
