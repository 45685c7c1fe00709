"""Declares environments and agents by import path, with a digest of their source, so that tasks can rebuild them.

A task never receives a live object.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, JsonValue, model_validator

from engine import import_paths
from storage.serialization import Frozen
from tasks.environments.base import Environment, EnvironmentFactory

logger = logging.getLogger("ostinato.environments")

IN_PROCESS = "in_process"
"""The module part of the path of a factory that exists only as an object of this process."""


class EnvironmentSpecError(Exception):
    """The environment cannot be built as declared. Raised before a run starts."""

    transient = False


class EnvironmentSpec(Frozen):
    """The declaration of an environment."""

    path: str = Field(pattern=import_paths.PATTERN)
    """The environment as package.module:name: a subclass of EnvironmentFactory, or a subclass of Environment, which is
    constructed with the metadata of the prompt and the arguments."""
    arguments: dict[str, JsonValue] = {}
    """Keyword arguments of the class."""
    source_digest: str | None = None
    """The sha256 of the module's source when the environment was declared. None: not checked."""
    version: str | None = None
    """A version that stands for the code of a factory without an import path."""

    @property
    def in_process(self) -> bool:
        """Whether the factory is an object of this process, which no other process can build."""
        return self.path.startswith(f"{IN_PROCESS}:")


class _EnvironmentClassFactory(EnvironmentFactory):
    """Creates environments of one Environment subclass."""

    def __init__(self, cls: type[Environment], arguments: Mapping[str, Any]) -> None:
        self.cls, self.arguments = cls, dict(arguments)

    def create_environment(self, metadata: Mapping[str, JsonValue]) -> Environment:
        return self.cls(metadata, **self.arguments)  # type: ignore[call-arg]  # checked by build


def environment_spec(
    path: str, arguments: Mapping[str, JsonValue] | None = None, *, version: str | None = None
) -> EnvironmentSpec:
    """Declare an importable environment, with the digest of its source.

    The factory is built once here, so that a wrong path or wrong arguments fail now (EnvironmentSpecError) and not
    during a run.
    """
    # Build it without a digest: there is nothing to compare the source with yet.
    spec = EnvironmentSpec(path=path, arguments=dict(arguments or {}), version=version)
    build(spec)
    return spec.model_copy(update={"source_digest": _source_digest(path)})


def build(spec: EnvironmentSpec) -> EnvironmentFactory:
    """Build the factory that `spec` names. Raises EnvironmentSpecError.

    A changed source is only logged as a warning, so that a run can continue after a bug of its environment was fixed.
    """
    if spec.in_process:
        return _registered(spec)
    _warn_of_changed_source(spec)

    # Load the class, and wrap an Environment subclass in a factory.
    try:
        target = import_paths.load_object(spec.path)
    except import_paths.ImportPathError as error:
        raise EnvironmentSpecError(f"environment {error}") from error
    if inspect.isclass(target) and issubclass(target, EnvironmentFactory):
        return _construct(target, spec)
    if inspect.isclass(target) and issubclass(target, Environment):
        # An environment is constructed with the metadata of a prompt, for which the empty dict stands here.
        _check_arguments(target, ({},), spec)
        return _EnvironmentClassFactory(target, spec.arguments)
    shown = target.__name__ if inspect.isclass(target) else type(target).__name__
    raise EnvironmentSpecError(
        f"environment {spec.path!r}: given {shown}; expected a subclass of EnvironmentFactory or of Environment"
    )


def _warn_of_changed_source(spec: EnvironmentSpec) -> None:
    if spec.source_digest is None:
        return
    current_digest = _source_digest(spec.path)
    if current_digest != spec.source_digest:
        logger.warning(
            "the source of environment %r changed since the run was declared: sha256 %s then, %s now",
            spec.path, spec.source_digest[:12], (current_digest or "no source")[:12],
        )  # fmt: skip


def _construct(target: type[EnvironmentFactory], spec: EnvironmentSpec) -> EnvironmentFactory:
    _check_arguments(target, (), spec)
    try:
        return target(**spec.arguments)
    except EnvironmentSpecError:
        raise
    except Exception as error:  # the boundary to a user's code
        raise EnvironmentSpecError(
            f"environment {spec.path!r} refused its arguments {spec.arguments}: {error}"
        ) from error


def _check_arguments(target: type, positional: tuple[Any, ...], spec: EnvironmentSpec) -> None:
    if inspect.isabstract(target):
        missing = ", ".join(sorted(target.__abstractmethods__))  # type: ignore[attr-defined]
        raise EnvironmentSpecError(f"environment {spec.path!r} is abstract; it must define {missing}")
    signature = inspect.signature(target)
    try:
        signature.bind(*positional, **spec.arguments)
    except TypeError as error:
        parameters = "metadata and the arguments" if positional else "the arguments"
        raise EnvironmentSpecError(
            f"environment {spec.path!r}: given {parameters} {sorted(spec.arguments)}; expected {signature}: {error}"
        ) from error


_in_process: dict[tuple[str, str | None], EnvironmentFactory] = {}


def in_process_spec(factory: EnvironmentFactory, *, version: str | None = None) -> EnvironmentSpec:
    """Register a factory that is an object of this process and return its spec.

    `version` stands for the code of the factory, since nothing can check that a later process registers the same one.
    None: the digest of the source of its class.
    """
    cls = type(factory)
    version = version or _source_digest(f"{cls.__module__}:{cls.__qualname__}")
    if version is None:
        raise EnvironmentSpecError(
            f"environment factory {cls.__name__}: its class has no source; a durable run expects an import path "
            "('package.module:name'), or version='…' to stand for its code"
        )
    _in_process[(cls.__qualname__, version)] = factory
    return EnvironmentSpec(path=f"{IN_PROCESS}:{cls.__qualname__}", version=version)


def _registered(spec: EnvironmentSpec) -> EnvironmentFactory:
    name = spec.path.partition(":")[2]
    factory = _in_process.get((name, spec.version))
    if factory is None:
        raise EnvironmentSpecError(
            f"environment factory {name!r}, version {spec.version!r}, is not registered in this process; it exists "
            "only where in_process_spec was called. Call it again before resuming, or give it an import path."
        )
    return factory


def _source_digest(path: str) -> str | None:
    try:
        return import_paths.source_digest(path)
    except import_paths.ImportPathError as error:
        raise EnvironmentSpecError(f"environment {error}") from error


# -- agents --------------------------------------------------------------------------------------------------


class AgentSpecError(EnvironmentSpecError):
    """The agent cannot be started as declared. Raised before a run starts."""


class AgentSpec(Frozen):
    """The declaration of an agent: a function by its import path, or a command."""

    path: str | None = Field(None, pattern=import_paths.PATTERN)
    """An async function as package.module:name, which is called with the task and a client of the `openai` package."""
    command: tuple[str, ...] = ()
    """A program and its arguments."""
    source_digest: str | None = None
    """The sha256 of the module's source when the agent was declared. None: it has no import path, or no source."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        check_agent(self.path, self.command)
        return self

    @property
    def words(self) -> list[str]:
        """The command that runs the agent."""
        if self.path is None:
            return list(self.command)
        return [sys.executable, "-m", "tasks.environments.agent_main", self.path]

    @property
    def name(self) -> str:
        return self.path or " ".join(self.command)


def check_agent(path: str | None, command: tuple[str, ...]) -> None:
    """Raises ValueError unless exactly one of both is given."""
    if (path is None) == (not command):
        number = "both" if path else "neither"
        raise ValueError(f"an agent is a function (path) or a command, and {number} was given; give one of them")


def agent_spec(path: str | None = None, command: tuple[str, ...] = ()) -> AgentSpec:
    """Declares an agent, with the digest of its source. Raises AgentSpecError if it cannot be started here."""
    spec = AgentSpec(path=path, command=command)
    if path is None:
        if shutil.which(command[0], path=search_path()) is None:
            raise AgentSpecError(
                f"agent: there is no program {command[0]!r} in PATH; give the path of a program, as in "
                "command: [python, agent.py]"
            )
        return spec
    try:
        function, source_digest = import_paths.load_object(path), import_paths.source_digest(path)
    except import_paths.ImportPathError as error:
        raise AgentSpecError(f"agent {error}") from error
    if not inspect.iscoroutinefunction(function):
        raise AgentSpecError(
            f"agent {path!r}: given {type(function).__name__}; expected an async function run(task, client)"
        )
    try:
        inspect.signature(function).bind({}, None)
    except TypeError as error:
        raise AgentSpecError(
            f"agent {path!r}: given {inspect.signature(function)}; expected run(task, client): {error}"
        ) from error
    return spec.model_copy(update={"source_digest": source_digest})


def search_path() -> str:
    """PATH with the folder of this interpreter first, so that `python` is this one."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
