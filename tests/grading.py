"""Graders for tests, by import path."""

from __future__ import annotations

import hashlib
import os

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade
from tasks.graders.code import CodeGrader


def even_share(thread: StringThread) -> float:
    """Share of the first six characters with an even code point: about one half by chance, so every group has a
    spread of rewards and every step moves the weights."""
    return sum(ord(character) % 2 == 0 for character in thread.last_content()[:6]) / 6


def by_hash(thread: StringThread) -> float:
    """In [0, 1), a function of the text and blind to its meaning."""
    return int(hashlib.sha256(thread.to_json().encode()).hexdigest()[:8], 16) / 2**32


def constant(_thread: StringThread, *, value: float = 1.0) -> float:
    return value


def even_share_of_most(thread: StringThread, *, failing: str = "0") -> float:
    """`even_share`, but raises on answers to the prompt `failing`."""
    if thread.turns[0].text == failing:
        raise RuntimeError(f"no grade for the prompt {failing}")
    return even_share(thread)


def only_even_prompts(thread: StringThread) -> float:
    """`even_share` of answers to even digits; 0 for all others, whose groups then teach nothing."""
    return even_share(thread) if int(thread.turns[0].text[-1]) % 2 == 0 else 0.0


def nothing(_thread: StringThread) -> float:
    return 0.0


class CodeOfCompletion(CodeGrader):
    """`even_share` as a program's tests see it: a program that counts, run against the six counts that it may print."""

    async def grade(self, thread: StringThread) -> Grade:
        even = f"sum(ord(character) % 2 == 0 for character in {thread.last_content()[:6]!r})"
        program = f"```python\nprint({even} > int(input()))\n```"
        tests = [{"stdin": str(number), "stdout": "True"} for number in range(6)]
        turns = [("user", "q"), ("assistant", program)]
        return await super().grade(StringThread(turns=turns, metadata={"tests": tests}))


class NumberAndActor(BaseGrader):
    """The number that the completion is. The reason is the process that started the worker: one on each machine."""

    async def grade(self, thread: StringThread) -> Grade:
        self.add_log({"graded": 1})
        actor = str(os.getppid())
        return Grade(value=float(thread.last_content()), grader_key=self.grader_key, reasoning=actor)
