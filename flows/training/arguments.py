"""The arguments of the training classes: checks when a class is created, so that a run does not fail in the middle, and
further names, older ones and those that published examples use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Real
from typing import Any, TypeVar, overload

from tasks.graders.base import BaseGrader, FunctionGrader
from tasks.graders.spec import GraderSpec, in_process_spec, require_durable, source_digest
from tasks.plans import Grading

Class = TypeVar("Class", bound=type)

OLDER_NAMES = {"policy_model": "model", "beta": "kl_beta"}
"""Older names of arguments. They are accepted with a warning."""
PPO_ALIASES = {"lr_scheduler_policy": "lr_scheduler", "lr_scheduler_value": "value_lr_scheduler"}
"""Further names of arguments of PPO. They are accepted without a warning."""


@overload
def whole_number(name: str, value: float) -> int: ...


@overload
def whole_number(name: str, value: float | None) -> int | None: ...


def whole_number(name: str, value: float | None) -> int | None:
    """The value as an int. 2.0 and integers of numpy are accepted, and None stays None. Raises ValueError for anything
    but a whole number above 0."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or value != value // 1 or value < 1:
        raise ValueError(f"{name}={value!r}; give a whole number, 1 or more")
    return int(value)


def check_one_length(length: str, steps: int | None, epochs: int | None) -> None:
    """Raises ValueError when both a number of steps, by the argument `length`, and a number of epochs are given."""
    if steps is not None and epochs is not None:
        raise ValueError(f"both {length}={steps} and epochs={epochs} were given; give one of them")


def grading_of(grader: BaseGrader | GraderSpec | Grading) -> Grading:
    """The grader with its limits. Raises GraderSpecError for a grader that another process cannot create again."""
    if isinstance(grader, Grading):
        return grader
    if not isinstance(grader, BaseGrader | GraderSpec):
        raise TypeError(f"{grader!r:.80} was given as the grader; give a BaseGrader, a GraderSpec or a Grading")
    if isinstance(grader, FunctionGrader):
        grader = in_process_spec(grader, version=grader.version)
    elif isinstance(grader, BaseGrader):
        # a class is identified by its source; a closure has only the version that its author gives
        source = source_digest(f"{type(grader).__module__}:{type(grader).__qualname__}")
        grader = in_process_spec(grader, version=source)
    require_durable(grader)
    return Grading(grader=grader)


def accept_aliases(
    older: Mapping[str, str] = OLDER_NAMES, also: Mapping[str, str] | None = None
) -> Callable[[Class], Class]:
    """A class decorator: the constructor also accepts the arguments under the names that are the keys of `older`, with
    a DeprecationWarning, and of `also`. Giving an argument under both of its names is a TypeError."""
    names = {**older, **(also or {})}

    def decorate(cls: Class) -> Class:
        constructor = cls.__init__  # type: ignore[misc]

        @wraps(constructor)
        def init(self: Any, *args: Any, **arguments: Any) -> None:
            # move each argument to its own name
            for alias in arguments.keys() & names.keys():
                name = names[alias]
                if name in arguments:
                    raise TypeError(
                        f"{cls.__name__}: {alias} is another name of {name}, and both were given; give one of them"
                    )
                if alias in older:
                    text = f"{cls.__name__}: {alias} is called {name} now"
                    warnings.warn(text, DeprecationWarning, stacklevel=2)
                arguments[name] = arguments.pop(alias)
            constructor(self, *args, **arguments)

        cls.__init__ = init  # type: ignore[misc]
        return cls

    return decorate
