"""The process in which MathsGrader compares: a line of {"expected", "given", "seconds"} in, of {"right", "found"} out."""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from typing import Any

from math_verify import parse, verify

MEMORY_BYTES = 4 << 30


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
        given = _parse(request["given"])
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


def _parse(text: str) -> list[Any]:
    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def main() -> None:
    """Serve until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _alarm)
    out, sys.stdout = sys.stdout, sys.stderr  # whatever the library prints must not be taken for an answer
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(compare(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
