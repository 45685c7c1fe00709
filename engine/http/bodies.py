"""JSON bodies of the calls that carry no batch. All names in them are checked here, so that no name can be a path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from engine.errors import BadSpec
from engine.protocol import MeasureRequest, PolicySpec
from storage.chain.records import PolicyRef, StepRequest
from storage.errors import InvalidKey
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance

VERSION = 1
"""Version of the interface. A client of another version is refused with both numbers."""
VERSION_HEADER = "X-Ostinato-Version"
STORE_HEADER = "X-Ostinato-Store"
"""Id of the client's store (storage.store.objects.store_id). A server over another store refuses the request."""
REQUEST_HEADER = "X-Request-Id"
"""Id of a call, 32 hex digits. It stays the same on retries, and the server does the work of one id once."""
MAX_WAIT_SECONDS = 30.0
"""Longest time for which a request may wait for a result."""


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
    epoch: Epoch = 0


class ReleaseBody(Body):
    run: Run
    epoch: Epoch = 0


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


class Health(BaseModel):
    """The process runs."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """The engine takes calls."""

    status: Literal["ready"] = "ready"
    waiting: int = Field(description="Calls that are not finished.")
