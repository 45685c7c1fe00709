"""The worker process of MathsGrader: compares two answers per request with math-verify.

A request is {"expected", "given", "seconds"}. The answer is {"right", "found"}, or {"bad_expected"} if the expected
text holds no answer.
"""

from __future__ import annotations

import logging
import re
import resource
import signal
from collections.abc import Iterator
from typing import Any

from math_verify import parse, verify

from tasks.graders.running.worker_process import connect

MEMORY_BYTES = 4 << 30
BOXED = "\\boxed{"
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_JOINS = re.compile(r"\s*\$*\s*(?:,\s*(?:and|or)?|and|or)\s*\$*\s*")


class _TooLong(BaseException):
    """Raised by the alarm. It is no Exception, since math-verify catches those."""


def _alarm(_signal: int, _frame: Any) -> None:
    raise _TooLong


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Compare two answers in at most `seconds`. A comparison that takes longer counts as wrong."""
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        expected = expected_answer(request["expected"])
        if not expected:
            return {"bad_expected": True}
        answer = _parse(last_boxes(request["given"]))
        # The library's own time limits are off, since they use the same signal.
        right = bool(answer) and verify(expected, answer, timeout_seconds=None)
        if not answer:
            return {"right": False, "found": "no answer in the completion"}
        # the first item is the expression, in which 1/2 and 2/4 are equal, the last one its text
        return {"right": right, "found": f"found {answer[-1]}"[:200], "answer": str(answer[0])}
    except (_TooLong, MemoryError, RecursionError) as error:
        return {"right": False, "found": f"no comparison: {type(error).__name__.strip('_')}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def expected_answer(text: str) -> list[Any]:
    """Parse the answer of a dataset: text with $ or \\boxed as it is, other text as LaTeX if possible. [] if none."""
    has_markup = "$" in text or "\\boxed" in text
    if has_markup:
        return _parse(text)
    # Datasets often store LaTeX without dollars, such as \\frac{1}{2}, which parses as LaTeX only between them.
    return _parse(f"${text}$") or _parse(text)


def last_boxes(text: str) -> str:
    """The last \\boxed{…} of `text` and those joined to it by a comma, "and" or "or". Without a box, `text` itself.

    math-verify takes all boxes of a line as one answer, so a model that corrects itself would seem to answer a set.
    """
    boxes = list(_boxes(text))
    if not boxes:
        return text
    # Go back from the last box while only a comma, "and" or "or" separates it from the box before.
    first = len(boxes) - 1
    while first and _JOINS.fullmatch(text, boxes[first - 1][1], boxes[first][0]):
        first -= 1
    return " and ".join(f"${text[start:end]}$" for start, end in boxes[first:])


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each outermost \\boxed{…} whose braces are balanced."""
    end = 0
    while (start := text.find(BOXED, end)) >= 0:
        # Find the closing brace. A box that is never closed ends the search for this one, and is left out.
        depth, end = 1, start + len(BOXED)
        for brace in _BRACE.finditer(text, end):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                end = brace.end()
                yield start, end
                break


def _parse(text: str) -> list[Any]:
    expressions: list[Any] = parse(text, parsing_timeout=None)
    return expressions


def main() -> None:
    """Serve until the input ends."""
    # SymPy may use up the memory or run forever. Both then end as an exception inside `compare`.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _alarm)
    connect().serve(compare)


if __name__ == "__main__":
    main()
