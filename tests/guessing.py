"""A toy to act in: guess the secret digit of the prompt in three turns (tests.guessing:Guess)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.text.threads import StringThread
from tasks.environments.base import Environment, EnvironmentFactory, Grades, Limit, Reaction
from tests.toy import digit_share


class Guess(Environment):
    """The last turn is graded: by the share of its characters that are the secret, so that an untrained model's grades
    differ. `grade_each` grades every turn; `forget` shows the assistant nothing but the hint."""

    def __init__(
        self, metadata: Mapping[str, Any], *, guesses: int = 3, grade_each: bool = False, forget: bool = False
    ) -> None:
        self.secret, self.left = str(metadata["secret"]), guesses
        self.grade_each, self.forget = grade_each, forget

    async def initialize_state(self, thread: StringThread) -> StringThread:
        return thread.user("Guess.")

    async def react_to(self, thread: StringThread) -> Reaction:
        self.left -= 1
        answer = thread.last_content()
        if self.secret in answer or self.left == 0:
            return None, self.grade(answer)
        grade = self.grade(answer) if self.grade_each else None
        hint = f"No{self.random.choice('.!')}"
        return (StringThread([("user", hint)], thread.metadata) if self.forget else thread.user(hint)), grade

    async def on_limit(self, thread: StringThread, limit: Limit) -> Grades | None:
        return None if self.grade_each else self.grade(thread.last_content())

    def grade(self, answer: str) -> float:
        # every second character code is even, so that an untrained model earns something
        return (self.secret in answer) + sum(ord(letter) % 2 == 0 for letter in answer) / 12


class Unlucky(Guess):
    """Cannot be played where the secret is one of `digits`; None: nowhere."""

    def __init__(self, metadata: Mapping[str, Any], *, digits: Sequence[int] | None = None) -> None:
        super().__init__(metadata)
        self.unlucky = digits is None or int(self.secret) in digits

    async def react_to(self, thread: StringThread) -> Reaction:
        if self.unlucky:
            raise RuntimeError("no more luck")
        return await super().react_to(thread)


class SayAgain(Environment):
    """Two turns, each graded by the share of its first characters that are the prompt's digit: what a tiny model learns
    from random weights."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.turns = 0

    async def react_to(self, thread: StringThread) -> Reaction:
        self.turns += 1
        return (None if self.turns == 2 else thread.user("again")), digit_share(thread)


class TellApart(Environment):
    """Two turns, each graded from 0 to 1 by its first six characters: a sixth for each that is the prompt's digit, a
    ninth of that for each other digit. To say digits pays, and over the ten prompts no digit pays more than another: a
    policy that does not look at the prompt earns 0.2 a turn at most, whatever it says. `once`: both turns are graded
    together, with the last."""

    def __init__(self, metadata: Mapping[str, Any], *, once: bool = False) -> None:
        self.once, self.grades = once, list[float]()

    async def react_to(self, thread: StringThread) -> Reaction:
        self.grades.append(digits_told_apart(thread))
        if len(self.grades) == 1:
            return thread.user("again"), None if self.once else self.grades[0]
        return None, sum(self.grades) if self.once else self.grades[1]


def digits_told_apart(thread: StringThread) -> float:
    """From 0 to 1; on average over the ten prompts 0.2 for six digits that are the same for all, whichever."""
    said = [letter for letter in thread.last_content()[:6] if letter in "0123456789"]
    right = said.count(thread.turns[0].text[-1])
    return (right + (len(said) - right) / 9) / 6


class GuessFactory(EnvironmentFactory):
    """Makes `Guess` with the same arguments each time."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def create_environment(self, metadata: Mapping[str, Any]) -> Environment:
        return Guess(metadata, **self.arguments)


def write_secrets(path: Path) -> Path:
    """Prompts "0" … "9" as JSONL, each with its digit as the secret."""
    rows = [{"prompt": str(digit), "metadata": {"secret": digit}} for digit in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def guess_config(folder: Path, tiny_folder: Path, **changes: Any) -> dict[str, Any]:
    """A config of env_grpo on the toy; `changes` are dotted overrides with __ for dots."""
    config: dict[str, Any] = {
        "model": {"key": str(tiny_folder), "publish_as": "toy"},
        "data": {"train": {"kind": "file", "path": str(write_secrets(folder / "secrets.jsonl"))}},
        "environment": {"path": "tests.guessing:Guess", "max_turns": 3},
        "sampling": {"max_new_tokens": 6},
        "algorithm": {
            "steps": 3,
            "samples_per_batch": 16,
            "samples_per_mini_batch": 16,
            "completions_per_sample": 4,
            "clip_range": 0.2,
            "kl_beta": 0.01,
            "prompts_per_shard": 2,
        },
        "optimizer": {"lr": 1e-3, "schedule": "constant"},
        "checkpoints": {"frequency": None, "recovery_steps": 2},
        "engine": {"deterministic": True, "threads": 1},
        "storage": {"url": str(folder / "data")},
    }
    for name, value in changes.items():
        group, _, key = name.partition("__")
        if key:
            config.setdefault(group, {})[key] = value
        else:
            config[group] = value
    return config
