"""Checks the arguments of the training classes when a class is created, so that a run does not fail in the middle."""

from __future__ import annotations

from numbers import Real
from typing import overload

from tasks.graders.base import BaseGrader, FunctionGrader
from tasks.graders.spec import GraderSpec, in_process_spec, require_durable, source_digest
from tasks.plans import Grading


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
