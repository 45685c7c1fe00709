"""Tests of environments of verifiers, which play as its own loop does. Without the library the error names the
package."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import types
from typing import Any

import pytest

from engine.text.threads import StringThread
from tasks.environments.spec import environment_spec
from tasks.environments.verifiers import VerifiersEnvironment, VerifiersMissing, verifiers_threads

PATH = "tasks.environments.verifiers:VerifiersFactory"
needs_library = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed")


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(VerifiersMissing, match=r"pip install 'verifiers>=0.1.12,<0.2'"):
        environment_spec(PATH, {"environment": "wordle"})


def test_another_version_of_the_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    later = types.ModuleType("verifiers")
    later.__version__ = "0.4.0"  # type: ignore[attr-defined]
    later.types = types.ModuleType("verifiers.types")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", later)
    monkeypatch.setitem(sys.modules, "verifiers.types", later.types)  # type: ignore[attr-defined]
    with pytest.raises(VerifiersMissing, match="verifiers 0.4.0 has no load_environment; expected 0.1.12 up to 0.2"):
        environment_spec(PATH, {"environment": "wordle"})


@pytest.fixture
def hotter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An environment of the library in a module of its own, as `load_environment` finds it: `hotter`."""
    import verifiers as vf
    from datasets import Dataset

    class Hotter(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            if messages[-1].content == state["answer"]:
                state["final_env_response"] = [{"role": "user", "content": "Yes."}]
                return state["final_env_response"]
            return [{"role": "user", "content": "No."}]

    def right(completion: Any, answer: str) -> float:
        answers = [message.content for message in completion if message.role == "assistant"]
        return float(answers[-1] == answer) / len(answers)

    def load_environment(turns: int = 3) -> Any:
        rows = [{"prompt": [{"role": "user", "content": "Guess."}], "answer": "7"}]
        return Hotter(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=turns)

    module = types.ModuleType("hotter")
    module.load_environment = load_environment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hotter", module)
    return load_environment()


def play(environment: Any, thread: StringThread, answers: list[str]) -> list[Any]:
    async def run() -> list[Any]:
        played = VerifiersEnvironment(environment, thread.metadata)
        following: Any = await played.initialize_state(thread)
        collected = [following]
        for answer in answers:
            following, grade = await played.react_to(following.assistant(answer))
            collected.append((following, grade))
        return collected

    return asyncio.run(run())


@needs_library
def test_turns_and_the_rubric_are_the_librarys(hotter: Any) -> None:
    (thread,) = verifiers_threads("hotter")
    assert thread.turns == (("user", "Guess."),) and thread.metadata["answer"] == "7"
    first, second, third = play(hotter, thread, ["5", "7"])
    assert first.turns == thread.turns
    following, grade = second
    assert grade is None
    assert following.turns == (("user", "Guess."), ("assistant", "5"), ("user", "No."))
    assert third[0] is None and third[1].value == 0.5  # right at the second guess


@needs_library
def test_the_librarys_own_limit_ends_an_episode(hotter: Any) -> None:
    (thread,) = verifiers_threads("hotter")
    *_, last = play(hotter, thread, ["1", "2", "3"])
    assert last[0] is None and last[1].value == 0.0


@needs_library
def test_it_is_an_environment_by_path(hotter: Any) -> None:
    environment_spec(PATH, {"environment": "hotter", "arguments": {"turns": 2}})
