"""Errors over HTTP. The name of the error class is sent, so that a client raises the class that the engine raised.

Only a 5xx status means that the same call may succeed later: 503 for the transient errors of engine and storage, 500
for a defect of the server. The client raises a defect as TransientEngineError, so that the task retries it a few
times. That is safe, since a step is taken exactly once, and it helps, since a restart of the server often repairs a
failed device."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine import errors as engine_errors
from engine.errors import BadSpec, EngineBusy, EngineError, PermanentEngineError, TransientEngineError
from storage import errors as storage_errors
from storage.errors import StorageError, TransientStorageError

INTERNAL = "InternalError"
"""Name that is sent for a defect of the server. The server's log has the traceback under the request id."""
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
"""Meaning of each error status, for the documentation."""
GUARD_STATUSES = (401, 403, 404, 408, 413, 500, 503)
"""Statuses that the guard and the router may send on any route."""


class UnknownCall(PermanentEngineError):
    """The server has no call with this id: it restarted, or the result has expired. Submit the call again."""


class CallConflict(PermanentEngineError):
    """The request id belongs to another call."""


class BodyTooLarge(BadSpec):
    """The body, or what it decodes to, is larger than the server takes in one call."""


class NoSuchRoute(PermanentEngineError):
    """The path or the method does not exist."""


class BodyTimeout(TransientEngineError):
    """The body did not arrive in time."""


class NotAdmitted(EngineBusy):
    """The server has as many unfinished calls, or as many bytes of them, as it takes. Nothing of this call was kept."""


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
"""Statuses by class name. Other permanent errors have 422, other transient errors 503."""


class ErrorBody(BaseModel):
    """The body of every error response."""

    model_config = ConfigDict(frozen=True)

    error: str = Field(description="Class of the error in engine.errors or storage.errors.")
    message: str = Field(description="What was given, what was expected, what to do.")
    request_id: str = Field(description="Id of the call, which is also in the server's log.")


def _classes(module: object, base: type[Exception]) -> Iterator[tuple[str, type[Exception]]]:
    """Yields (name, class) of the subclasses of `base` in a module."""
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, base):
            yield name, value


_HTTP_ERRORS = (UnknownCall, CallConflict, BodyTooLarge, NoSuchRoute, BodyTimeout, NotAdmitted)
ERROR_CLASSES: dict[str, type[Exception]] = dict(
    [
        *_classes(engine_errors, EngineError),
        *_classes(storage_errors, StorageError),
        *((cls.__name__, cls) for cls in _HTTP_ERRORS),
    ]
)
"""Error class by the name that is sent."""


def http_status(name: str) -> int:
    """Returns the HTTP status of an error class by its name."""
    if name in _STATUS:
        return _STATUS[name]
    error = ERROR_CLASSES.get(name)
    is_transient = error is not None and issubclass(error, TransientEngineError | TransientStorageError)
    return 503 if is_transient else 422


def wire_name(error: Exception) -> str:
    """Returns the name that is sent for an error: that of its nearest class that the client knows."""
    # A private subclass, such as NoRoomYet, is sent as the public class that it derives from.
    for cls in type(error).__mro__:
        if ERROR_CLASSES.get(cls.__name__) is cls:
            return cls.__name__
    return INTERNAL


def error_body(error: Exception, request_id: str) -> ErrorBody:
    """Returns the response body of an expected error."""
    return ErrorBody(error=wire_name(error), message=str(error), request_id=request_id)


def error_of_body(body: ErrorBody) -> Exception:
    """Returns the exception that an error response stands for."""
    cls = ERROR_CLASSES.get(body.error)
    if cls is not None:
        return cls(body.message)
    # A defect may pass on a retry. An unknown name comes from a newer server, and its error must not be retried.
    if body.error == INTERNAL:
        return TransientEngineError(body.message)
    return PermanentEngineError(f"{body.error}: {body.message}")


def parse_error(data: bytes) -> ErrorBody | None:
    """Returns the error in a response, or None if the response does not come from our server but, say, a proxy."""
    try:
        return ErrorBody.model_validate_json(data)
    except ValidationError:
        return None


EXPECTED_ERRORS = (EngineError, StorageError)
"""Base classes of the errors that a call may raise on purpose. Any other error is a defect."""
