"""Errors over HTTP: the class name travels, so that a caller catches over HTTP what it catches in this process.

A 5xx says that the same call may succeed later, and nothing else does: 503 for what engine and storage call transient,
500 for a defect, which the client raises as TransientEngineError once its task's few retries are what bounds it (a step
is taken exactly once, so trying again is safe, and a restarted server often cures a sick device).
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine import errors as engine_errors
from engine.errors import BadSpec, EngineError, PermanentEngineError, TransientEngineError
from engine.text import errors as text_errors
from engine.text.errors import TextError
from storage import errors as storage_errors
from storage.errors import StorageError, TransientStorageError

INTERNAL = "InternalError"
"""A defect of the server; its log has the traceback under the request id."""
RETRY_AFTER_SECONDS = 1

STATUSES = {
    401: "no token, or another one",
    403: "a host name that is not loopback, on a server without a token; or the store refuses",
    404: "no such policy, object or call",
    408: "the body did not arrive in time",
    409: "the step, run or id is taken by something else; or a newer epoch acts for the run",
    413: "the body is too large",
    422: "the call contradicts itself or cannot succeed",
    500: "a defect of the server",
    503: "not now: busy, draining, or the store is away",
}
"""What each status says."""
DOOR = (401, 403, 404, 408, 413, 500, 503)
"""What guard and router may answer on any route, before the route is asked."""


class UnknownCall(PermanentEngineError):
    """No call of that id: the server restarted, or the answer was kept long enough. Submit it again."""


class CallConflict(PermanentEngineError):
    """The request id belongs to a call with another content."""


class BodyTooLarge(BadSpec):
    """The body, or what it decodes to, exceeds what is taken at once."""


class NoSuchRoute(PermanentEngineError):
    """No such path or method."""


class BodyTimeout(TransientEngineError):
    """The body did not arrive in time."""


_STATUS: dict[str, int] = {
    "NotAuthenticated": 401,
    "AccessDenied": 403,
    "UnknownPolicy": 404,
    "ObjectNotFound": 404,
    "UnknownCall": 404,
    "NoSuchRoute": 404,
    "CallConflict": 409,
    "BodyTooLarge": 413,
    "BodyTimeout": 408,
    "StepConflict": 409,
    "Fenced": 409,
    "ReplayDiverged": 409,
    "SemanticMismatch": 409,
    "ArtifactConflict": 409,
    "VersionConflict": 409,
    "CorruptArtifact": 409,
    INTERNAL: 500,
}
"""By class name; everything else that is permanent is 422, everything transient 503."""


class ErrorBody(BaseModel):
    """Every answer that is not a result."""

    model_config = ConfigDict(frozen=True)

    error: str = Field(description="Class of the error, as engine.errors and storage.errors name it.")
    message: str = Field(description="What was given, what was expected, what to do.")
    request_id: str = Field(description="The call's id; the server's log lines bear it.")


def _classes(module: object, base: type[Exception]) -> Iterator[tuple[str, type[Exception]]]:
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, base):
            yield name, value


_OWN = (UnknownCall, CallConflict, BodyTooLarge, NoSuchRoute, BodyTimeout)
CLASSES: dict[str, type[Exception]] = dict(
    [
        *_classes(engine_errors, EngineError),
        *_classes(storage_errors, StorageError),
        *_classes(text_errors, TextError),
        *((cls.__name__, cls) for cls in _OWN),
    ]
)
"""Class name -> class."""


def status_of(name: str) -> int:
    """The HTTP status of an error by its class name."""
    error = CLASSES.get(name)
    transient = error is not None and issubclass(error, TransientEngineError | TransientStorageError)
    return _STATUS.get(name, 503 if transient else 422)


def name_of(error: Exception) -> str:
    """The name that travels: of the nearest class that both sides know."""
    for cls in type(error).__mro__:
        if CLASSES.get(cls.__name__) is cls:
            return cls.__name__
    return INTERNAL


def body_of(error: Exception, request_id: str) -> ErrorBody:
    """What travels of an expected error."""
    return ErrorBody(error=name_of(error), message=str(error), request_id=request_id)


def error_from(body: ErrorBody) -> Exception:
    """The exception that the server's caller would have got in process."""
    cls = CLASSES.get(body.error)
    if cls is not None:
        return cls(body.message)
    if body.error == INTERNAL:
        return TransientEngineError(body.message)
    return PermanentEngineError(f"{body.error}: {body.message}")


def parse_error(data: bytes) -> ErrorBody | None:
    """The error in an answer; None when something else than our server answered (a proxy)."""
    try:
        return ErrorBody.model_validate_json(data)
    except ValidationError:
        return None


EXPECTED = (EngineError, StorageError)
"""What a call may end with on purpose; anything else is a defect."""
