"""Declares graders by import path, arguments and a digest of their source, so that tasks can rebuild them.

A task never receives a live grader object.
"""

import inspect
import logging
from collections.abc import Mapping
from itertools import chain
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Field, JsonValue

from engine import import_paths
from storage.serialization import Frozen, digest
from tasks.graders.base import BaseGrader, FunctionGrader
from tasks.graders.isolated import IsolatedGrader

logger = logging.getLogger("ostinato.graders")

IN_PROCESS = "in_process"
"""The module part of the path of a grader that exists only as an object of this process."""

Workers = Literal["none", "local", "cluster"]
"""Where a grader runs. none: in this process. local: in worker processes on this machine. cluster: in worker processes
on every machine of the Ray cluster."""


class GraderSpecError(Exception):
    """The grader cannot be built as declared. Raised before a run starts."""

    transient = False


class GraderSpec(Frozen):
    """The declaration of a grader."""

    path: str = Field(pattern=import_paths.PATTERN)
    """The grader as package.module:name: a subclass of BaseGrader, or a plain or async function f(thread, **arguments)
    that returns a number or a Grade."""
    arguments: dict[str, JsonValue] = {}
    """Keyword arguments of the class or function. For a function, grader_key sets the key of its grades."""
    source_digest: str | None = None
    """The sha256 of the module's source when the grader was declared. None: not checked."""
    version: str | None = None
    """A version that stands for the code of a grader without an import path."""
    workers: Workers = "none"
    """Where the grader runs. none: in this process. local: in worker processes on this machine. cluster: in worker
    processes on every machine of the Ray cluster."""

    @property
    def in_process(self) -> bool:
        """Whether the grader is an object of this process, which no other process can build."""
        return self.path.startswith(f"{IN_PROCESS}:")

    def digest(self) -> str:
        """A digest that is equal for graders that give equal grades. Where they run makes no difference."""
        return digest(self.model_dump(mode="json", exclude={"workers"}))


def grader_spec(
    path: str,
    arguments: Mapping[str, JsonValue] | None = None,
    *,
    version: str | None = None,
    workers: Workers = "none",
) -> GraderSpec:
    """Declare an importable grader, with the digest of its source.

    The grader is built once here, so that a wrong path or wrong arguments fail now (GraderSpecError) and not during a
    run. `workers` says where it runs; in worker processes, a crash of the interpreter does not end the run.
    """
    # Build it without a digest: there is nothing to compare the source with yet.
    spec = GraderSpec(path=path, arguments=dict(arguments or {}), version=version, workers=workers)
    build(spec)
    return spec.model_copy(update={"source_digest": source_digest(path)})


def build(spec: GraderSpec) -> BaseGrader:
    """Build the grader that `spec` names. Raises GraderSpecError.

    A changed source is only logged as a warning, so that a run can continue after a bug of its grader was fixed.
    """
    if spec.in_process:
        return _registered(spec)
    change = source_change(spec)
    if change is not None:
        logger.warning(change)

    # With workers, build it here once to check it, and let worker processes build it again. They compare no digest,
    # so that a changed source is reported once and not by each process.
    if spec.workers != "none":
        in_worker = spec.model_copy(update={"workers": "none", "source_digest": None})
        on_cluster = spec.workers == "cluster"
        return IsolatedGrader(build(in_worker).grader_key, in_worker.model_dump_json(), on_cluster=on_cluster)

    # Without, build it in this process.
    target = _resolve(spec.path)
    if inspect.isclass(target):
        return _construct(target, spec)
    if callable(target):
        return _function_grader(target, spec)
    raise GraderSpecError(
        f"grader {spec.path!r}: given a {type(target).__name__}; expected a BaseGrader subclass or a function"
    )


def source_change(spec: GraderSpec) -> str | None:
    """A warning if the source of the grader's module is not the one of the declaration; None if it is."""
    if spec.source_digest is None or spec.in_process:
        return None
    current_digest = source_digest(spec.path)
    if current_digest == spec.source_digest:
        return None
    return (
        f"the source of grader {spec.path!r} changed since the run was declared: sha256 {spec.source_digest[:12]} "
        f"then, {(current_digest or 'no source')[:12]} now. Grades before and after may not be comparable."
    )


def source_digest(path: str) -> str | None:
    """sha256 of the source file of the module in `path`; None for a module without one. Raises GraderSpecError."""
    try:
        return import_paths.source_digest(path)
    except import_paths.ImportPathError as error:
        raise GraderSpecError(f"grader {error}") from error


def _resolve(path: str) -> Any:
    try:
        return import_paths.load_object(path)
    except import_paths.ImportPathError as error:
        raise GraderSpecError(f"grader {error}") from error


def _construct(target: type, spec: GraderSpec) -> BaseGrader:
    if not issubclass(target, BaseGrader):
        raise GraderSpecError(f"grader {spec.path!r}: given class {target.__name__}; expected a subclass of BaseGrader")
    _check_arguments(target, (), spec)
    try:
        return target(**spec.arguments)  # type: ignore[arg-type]
    except Exception as error:  # the boundary to a user's code
        raise GraderSpecError(f"grader {spec.path!r} refused its arguments {spec.arguments}: {error}") from error


def _function_grader(target: Any, spec: GraderSpec) -> BaseGrader:
    # A function has no key of its own. It comes from the arguments or is the name of the function.
    arguments: dict[str, Any] = dict(spec.arguments)
    key = arguments.pop("grader_key", spec.path.partition(":")[2])
    if not isinstance(key, str):
        raise GraderSpecError(f"grader {spec.path!r}: given grader_key={key!r}; expected a string")
    _check_arguments(target, (None,), spec.model_copy(update={"arguments": arguments}))
    return FunctionGrader(key, target, arguments)


def _check_arguments(target: Any, positional: tuple[Any, ...], spec: GraderSpec) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError) as error:
        raise GraderSpecError(f"grader {spec.path!r}: given an object without a Python signature: {error}") from error
    try:
        signature.bind(*positional, **spec.arguments)
    except TypeError as error:
        raise GraderSpecError(
            f"grader {spec.path!r}: given the arguments {sorted(spec.arguments)}; expected {signature}: {error}"
        ) from error
    for name, choices in _choices(target).items():
        if name in spec.arguments and spec.arguments[name] not in choices:
            raise GraderSpecError(
                f"grader {spec.path!r}: given {name}={spec.arguments[name]!r}; expected one of {choices}"
            )


def _choices(target: Any) -> dict[str, list[Any]]:
    """The values of each parameter of a class or a function that is annotated with a Literal, or with one and None."""
    try:
        annotations = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError, AttributeError):
        return {}  # annotations of a user's code that name nothing at run time
    choices = {}
    for name, annotation in annotations.items():
        parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        if all(part is NoneType or get_origin(part) is Literal for part in parts):
            values = [get_args(part) or (None,) for part in parts]
            choices[name] = list(chain.from_iterable(values))
    return choices


_in_process: dict[tuple[str, str | None], BaseGrader] = {}


def in_process_spec(grader: BaseGrader, *, version: str | None = None) -> GraderSpec:
    """Register a grader that has no import path (such as BaseGrader.from_function of a closure) and return its spec.

    The spec can be built in this process only. `version` stands for the code, since nothing can check that a later
    process registers the same code; `require_durable` requires it. Registering a key and version again replaces it.
    """
    # The key becomes a part of the path, which must match the pattern of import paths.
    if not grader.grader_key or any(mark in grader.grader_key for mark in " \t\n:"):
        raise GraderSpecError(f"given grader_key={grader.grader_key!r}; expected a name without spaces or colons")
    _in_process[(grader.grader_key, version)] = grader
    return GraderSpec(path=f"{IN_PROCESS}:{grader.grader_key}", version=version)


def require_durable(spec: GraderSpec) -> None:
    """Raise GraderSpecError for an in-process grader without a version, which a resumed run could not identify."""
    if spec.in_process and spec.version is None:
        raise GraderSpecError(
            f"grader {spec.path!r}: given a function without an import path; a durable run expects one that can be "
            f"imported again ('package.module:name'), or version='…' to stand for its code."
        )


def _registered(spec: GraderSpec) -> BaseGrader:
    key = spec.path.partition(":")[2]
    grader = _in_process.get((key, spec.version))
    if grader is None:
        raise GraderSpecError(
            f"grader {key!r}, version {spec.version!r}, is not registered in this process; it exists only where "
            f"in_process_spec was called. Call it again before resuming, or give the grader an import path."
        )
    return grader
