"""Tests of environments by import path: valid specs, and specs that are refused before a run begins."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from tasks.environments.base import Environment, EnvironmentFactory
from tasks.environments.spec import EnvironmentSpec, EnvironmentSpecError, build, environment_spec, in_process_spec
from tests.fixtures.guessing import Guess


class NoReaction(Environment):
    """Forgot to define react_to."""


class Unmakeable(EnvironmentFactory):
    def __init__(self, ready: bool) -> None:
        if not ready:
            raise ValueError("not ready")

    def create_environment(self, metadata: Mapping[str, Any]) -> Environment:
        raise AssertionError


class Local(EnvironmentFactory):
    def create_environment(self, metadata: Mapping[str, Any]) -> Environment:
        return Guess(metadata)


def test_an_environment_class_is_made_with_metadata_and_arguments() -> None:
    spec = environment_spec("tests.fixtures.guessing:Guess", {"guesses": 5})
    created = build(spec).create_environment({"secret": 4})
    assert isinstance(created, Guess) and (created.secret, created.left) == ("4", 5)


def test_a_factory_is_made_with_its_arguments() -> None:
    spec = environment_spec("tests.fixtures.guessing:GuessFactory", {"guesses": 2})
    created = build(spec).create_environment({"secret": 1})
    assert isinstance(created, Guess) and created.left == 2


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("tests.nowhere:Guess", {}, "no module 'tests.nowhere'"),
        ("tests.fixtures.guessing:Guessing", {}, "tests.fixtures.guessing has no 'Guessing'"),
        (
            "tests.fixtures.guessing:Guess",
            {"tries": 3},
            r"given metadata and the arguments \['tries'\]; expected .*guesses",
        ),
        ("tests.fixtures.guessing:write_secrets", {}, "given function; expected a subclass of EnvironmentFactory or"),
        ("tasks.graders.rules:LastNumber", {}, "given LastNumber; expected a subclass of EnvironmentFactory or"),
        ("tests.tasks.environments.test_spec:NoReaction", {}, "is abstract; it must define react_to"),
        ("tests.tasks.environments.test_spec:Unmakeable", {"ready": False}, "refused its arguments .*: not ready"),
        ("__main__:Guess", {}, "given a name of the running script"),
    ],
)
def test_what_cannot_be_built_is_refused_now(path: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentSpecError, match=message):
        environment_spec(path, arguments)


def test_a_changed_source_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    spec = environment_spec("tests.fixtures.guessing:Guess")
    assert spec.source_digest
    with caplog.at_level(logging.WARNING, "ostinato.environments"):
        build(spec)
        assert not caplog.records
        build(spec.model_copy(update={"source_digest": "0" * 64}))
    assert "changed since the run was declared" in caplog.text


def test_a_factory_of_this_process_is_known_by_the_source_of_its_class() -> None:
    spec = in_process_spec(Local())
    assert spec.in_process and len(str(spec.version)) == 64
    assert isinstance(build(spec).create_environment({"secret": 1}), Guess)
    with pytest.raises(EnvironmentSpecError, match="is not registered in this process"):
        build(spec.model_copy(update={"version": "another"}))


def test_a_factory_without_a_source_needs_a_version() -> None:
    created = type("Made", (Local,), {"__module__": "builtins"})()
    with pytest.raises(EnvironmentSpecError, match="has no source.*version="):
        in_process_spec(created)
    assert in_process_spec(created, version="1").version == "1"


def test_a_path_is_checked_before_anything_is_imported() -> None:
    with pytest.raises(ValueError, match="path"):
        EnvironmentSpec(path="no colon")


