"""MathsGrader compares in this process: a line of {"expected", "given", "seconds"} in, of {"right", "found"} out."""

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
    """Not an Exception: math-verify swallows those."""


def _alarm(_signal: int, _frame: Any) -> None:
    raise _TooLong


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Whether two answers are equal, in at most `seconds`; one that takes longer is wrong."""
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        expected = expected_answer(request["expected"])
        if not expected:
            return {"bad_expected": True}
        given = _parse(last_boxes(request["given"]))
        # the library's own limits are off: they would use the same signal
        right = bool(given) and verify(expected, given, timeout_seconds=None)
        return {"right": right, "found": f"found {given[-1]}"[:200] if given else "no answer in the completion"}
    except (_TooLong, MemoryError, RecursionError) as error:
        return {"right": False, "found": f"no comparison: {type(error).__name__.strip('_')}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def expected_answer(text: str) -> list[Any]:
    """What a dataset's answer means: LaTeX, unless it says itself what in it is; [] for none."""
    marked = "$" in text or "\\boxed" in text
    return _parse(text) if marked else _parse(f"${text}$") or _parse(text)


def last_boxes(text: str) -> str:
    """The last \\boxed{…} of `text` and those joined to it by a comma, "and" or "or"; `text` itself if it has none.

    math-verify would take all boxes of a line for one answer, and so a model's second thoughts for a set.
    """
    boxes = list(_boxes(text))
    if not boxes:
        return text
    first = len(boxes) - 1
    while first and _JOINS.fullmatch(text, boxes[first - 1][1], boxes[first][0]):
        first -= 1
    return " and ".join(f"${text[start:end]}$" for start, end in boxes[first:])


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each \\boxed{…} whose braces are balanced, inner ones left out."""
    end = 0
    while (start := text.find(BOXED, end)) >= 0:
        depth, end = 1, start + len(BOXED)
        for brace in _BRACE.finditer(text, end):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                end = brace.end()
                yield start, end
                break


def _parse(text: str) -> list[Any]:
    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def main() -> None:
    """Serve until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _alarm)
    connect().serve(compare)


if __name__ == "__main__":
    main()
