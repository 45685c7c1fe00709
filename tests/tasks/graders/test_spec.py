"""Tests of graders by import path: valid specs, and specs that are refused before a run starts."""

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader
from tasks.graders.rules import LastNumber
from tasks.graders.spec import (
    GraderSpec,
    GraderSpecError,
    build,
    grader_spec,
    in_process_spec,
    require_durable,
    source_change,
    source_digest,
)

THREAD = StringThread(turns=[("user", "q"), ("assistant", "abc")], metadata={"answer": 3})

MODULE = """
from functools import partial
from typing import Literal
from tasks.graders.base import BaseGrader, Grade

def length(thread, factor: float = 1.0):
    return factor * len(thread.last_content())

async def alength(thread, *, factor):
    return factor * len(thread.last_content())

def sized(thread, unit: Literal["word", "letter"] | None = None, factor: "Unknown" = 1.0):
    return len(thread.last_content())

def measured(thread, unit: Literal["word", "letter"] | None = None, factor: float = 1.0):
    return len(thread.last_content())

class Mine(BaseGrader):
    def __init__(self, grader_key="mine", *, value):
        super().__init__(grader_key)
        self.value = value
        if value < 0:
            raise ValueError("negative")
    async def grade(self, thread):
        return Grade(value=self.value, grader_key=self.grader_key)

class Half(BaseGrader):
    pass

class NotAGrader:
    pass

number = 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "my_graders.py").write_text(MODULE)
    (tmp_path / "broken_graders.py").write_text("import nonexistent_package_xyz\n")
    (tmp_path / "raising_graders.py").write_text("raise RuntimeError('boom')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("my_graders", "broken_graders", "raising_graders"):
        sys.modules.pop(name, None)


async def score(spec: GraderSpec) -> tuple[str, float]:
    grade = await build(spec).grade(THREAD)
    return grade.grader_key, grade.value


async def test_functions_and_classes(module: Path) -> None:
    assert await score(grader_spec("my_graders:length")) == ("length", 3.0)
    assert await score(grader_spec("my_graders:length", {"factor": 2, "grader_key": "k"})) == ("k", 6.0)
    assert await score(grader_spec("my_graders:alength", {"factor": 2})) == ("alength", 6.0)
    assert await score(grader_spec("my_graders:Mine", {"value": 0.5})) == ("mine", 0.5)
    assert isinstance(build(grader_spec("tasks.graders.rules:LastNumber", {"tolerance": 0.5})), LastNumber)


async def test_arguments_of_an_allowed_value_or_of_unknown_annotations_pass(module: Path) -> None:
    for unit in ("word", None):
        assert await score(grader_spec("my_graders:measured", {"unit": unit})) == ("measured", 3.0)
    assert await score(grader_spec("my_graders:sized", {"unit": "byte"})) == ("sized", 3.0)
    assert await score(grader_spec("tasks.graders.rules:ExactMatch", {"answer_from": "whole"})) == ("exact_match", 0.0)


async def test_a_spec_survives_json(module: Path) -> None:
    spec = grader_spec("my_graders:Mine", {"value": 0.5}, version="1")
    again = GraderSpec.model_validate_json(spec.model_dump_json())
    assert again == spec and len(spec.source_digest or "") == 64
    assert await score(again) == ("mine", 0.5)


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("no_such_module_xyz:f", {}, "no module 'no_such_module_xyz'"),
        ("no_such_package_xyz.sub:f", {}, "no module 'no_such_package_xyz'"),
        ("my_graders:nothing", {}, "my_graders has no 'nothing'"),
        ("my_graders:number", {}, "given a int; expected a BaseGrader subclass or a function"),
        ("my_graders:NotAGrader", {}, "expected a subclass of BaseGrader"),
        ("my_graders:Half", {"grader_key": "h"}, "refused its arguments"),
        ("my_graders:Mine", {}, "missing a required argument: 'value'"),
        ("my_graders:Mine", {"value": -1}, "refused its arguments.*negative"),
        ("my_graders:Mine", {"value": 1, "extra": 1}, "unexpected keyword argument 'extra'"),
        ("my_graders:length", {"facto": 2}, "unexpected keyword argument 'facto'"),
        ("my_graders:length", {"grader_key": 5}, "expected a string"),
        ("my_graders:alength", {}, "missing a required"),
        ("broken_graders:f", {}, "no module 'nonexistent_package_xyz'"),
        ("raising_graders:f", {}, "importing raising_graders raised .*boom"),
        ("__main__:f", {}, "running script"),
        ("tasks.graders.rules:ExactMatch", {"answer_from": "text"},
         r"given answer_from='text'; expected one of \['last_number', 'whole', 'answer_tag'\]"),
        ("my_graders:measured", {"unit": "byte"}, r"unit='byte'; expected one of \['word', 'letter', None\]"),
        ("tasks.graders.rules:RegexMatch", {"pattern": "("}, "refused its arguments"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(module: Path, path: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GraderSpecError, match=message):
        grader_spec(path, arguments)


@pytest.mark.parametrize("path", ["", "module", "module:", ":name", "a b:c", "my-module:f", "../x:f"])
def test_paths_have_one_form(path: str) -> None:
    with pytest.raises(ValidationError):
        GraderSpec(path=path)


def test_a_changed_source_is_reported_and_still_built(module: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = grader_spec("my_graders:length")
    assert source_change(spec) is None
    file = module / "my_graders.py"
    file.write_text(file.read_text() + "# fixed\n")
    with caplog.at_level(logging.WARNING, "ostinato.graders"):
        build(spec)
    assert "source of grader 'my_graders:length' changed" in caplog.text


async def test_closures_live_in_this_process_only() -> None:
    offset = 0.25

    async def f(thread: StringThread) -> float:
        return offset

    grader = BaseGrader.from_function("closure", f)
    unversioned, versioned = in_process_spec(grader), in_process_spec(grader, version="v1")
    assert build(versioned) is grader and versioned.in_process and versioned.source_digest is None
    require_durable(versioned)
    with pytest.raises(GraderSpecError, match="version="):
        require_durable(unversioned)
    with pytest.raises(GraderSpecError, match="not registered in this process"):
        build(GraderSpec(path="in_process:closure", version="v2"))
    with pytest.raises(GraderSpecError, match="without spaces or colons"):
        in_process_spec(BaseGrader.from_function("a b", f))


def test_a_grader_class_of_the_running_script_is_known_by_the_scripts_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert source_digest("__main__:Mine") is None  # a notebook has no file: its author gives a version
    script.__file__ = str(tmp_path / "recipe.py")
    digests = set()
    for text in ("one", "two"):
        Path(script.__file__).write_text(text)
        digests.add(source_digest("__main__:Mine"))
    assert len(digests) == 2 and None not in digests
