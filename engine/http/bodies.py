"""JSON bodies of the calls that carry no batch. Names are checked here: nothing path-like gets past the door."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from engine.errors import BadSpec
from engine.protocol import PolicySpec
from storage.chain.records import PolicyRef, StepRequest
from storage.errors import InvalidKey
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance

VERSION = 1
"""Of this interface; a client of another version is refused with both numbers."""
VERSION_HEADER = "X-Ostinato-Version"
STORE_HEADER = "X-Ostinato-Store"
"""Which store the caller means (storage.store.identity.store_id): a server over another one refuses."""
REQUEST_HEADER = "X-Request-Id"
"""32 hex digits, made once per logical call and kept over its retries: the server does the work of one id once."""
MAX_WAIT_SECONDS = 30.0


def _name(value: str) -> str:
    return _checked(keys.validate_name, value)


def _run(value: str) -> str:
    return _checked(keys.validate_run, value)


def _model_key(value: str) -> str:
    name, at, version = value.partition("@")
    _name(name)
    if at:
        _checked(lambda v: keys.model_version(name, v), version)
    return value


def _policy(value: PolicyRef) -> PolicyRef:
    check_policy(value)
    return value


def _checked(validate: object, value: str) -> str:
    try:
        validate(value)  # type: ignore[operator]
    except InvalidKey as error:
        raise ValueError(str(error)) from error
    return value


def check_policy(policy: PolicyRef) -> None:
    """Raises ValueError unless each name in it is one."""
    _run(policy.run)
    _name(policy.stage)
    _name(policy.model)
    if policy.step >= 1 << 31:
        raise ValueError(f"{policy.step} is no step of a chain")


def check_head(policy: PolicyRef) -> PolicyRef:
    """The policy of an Arrow call. Raises BadSpec."""
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
    """What a call says. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ImportModelBody(Body):
    """A registered model by key; with `upload`, the folder that the caller put at uploads/<source>/<upload>."""

    source: ModelKey
    provenance: Provenance
    upload: Digest | None = None

    @model_validator(mode="after")
    def _uploads_have_no_version(self) -> ImportModelBody:
        if self.upload is not None and "@" in self.source:
            raise ValueError("an upload is imported under a name; its version is its content: leave @version out")
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
        self.spec.root.state()  # ValueError: NaN and half surrogates have no canonical bytes
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
        self.request.digest()
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
    """It is done; there is nothing to tell about it."""


class CallStatus(BaseModel):
    """The call is known and not finished: ask again at /v1/calls/{id}."""

    id: str
    state: Literal["waiting"] = "waiting"


class ServerInfo(BaseModel):
    """What a client must know before its first call; answered at once, however busy the engine is."""

    version: int = VERSION
    store_id: str
    max_body_bytes: int


class Health(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """The engine takes calls."""

    status: Literal["ready"] = "ready"
    waiting: int = Field(description="Calls that are not finished.")
