"""Graders as the training classes and callbacks take them."""

from __future__ import annotations

from tasks.graders.base import BaseGrader, FunctionGrader
from tasks.graders.spec import GraderSpec, in_process_spec, require_durable, source_digest
from tasks.sampling.grading import Grading


def grading_of(grader: BaseGrader | GraderSpec | Grading) -> Grading:
    """Raises GraderSpecError for one that no other process could make again."""
    if isinstance(grader, Grading):
        return grader
    if isinstance(grader, FunctionGrader):
        grader = in_process_spec(grader, version=grader.version)
    elif isinstance(grader, BaseGrader):
        # a class has a source to answer for it; a closure has only the version its author gives
        source = source_digest(f"{type(grader).__module__}:{type(grader).__qualname__}")
        grader = in_process_spec(grader, version=source)
    require_durable(grader)
    return Grading(grader=grader)
