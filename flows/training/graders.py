"""Graders in the forms that the training classes and callbacks accept."""

from __future__ import annotations

from tasks.graders.base import BaseGrader, FunctionGrader
from tasks.graders.spec import GraderSpec, in_process_spec, require_durable, source_digest
from tasks.sampling.grading import Grading


def grading_of(grader: BaseGrader | GraderSpec | Grading) -> Grading:
    """How a grader is used. Raises GraderSpecError for a grader that another process could not construct again."""
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
