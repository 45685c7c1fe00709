"""Tests of `ostinato config` and `ostinato --version`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, JsonValue
from pydantic.json_schema import SkipJsonSchema
from typer.testing import CliRunner

from flows.cli.main import app
from flows.configs.keys import config_keys
from flows.configs.reinforcement import BatchRules
from storage.serialization import Coefficient, Frozen


class Left(Frozen):
    """The left one."""

    kind: Literal["left"] = "left"
    depth: int = 1


class Right(Frozen):
    """The right one."""

    kind: Literal["right"] = "right"
    depth: int = 2


class Example(Frozen):
    """One key of each type."""

    needed: str
    """A text
    of two lines."""
    number: int = Field(3, ge=1, lt=10)
    either: Annotated[float, Field(gt=0)] | Literal["auto"] | None = None
    factor: Coefficient = 0.5
    names: tuple[str, ...] = ("a", "b")
    values: dict[str, list[JsonValue]] = Field({}, min_length=2)
    group: Left = Left(depth=7)
    choice: Annotated[Left | Right, Field(discriminator="kind")] = Right()
    parts: tuple[Right, ...] = ()
    internal: SkipJsonSchema[bool] = False


def output_of(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status, result.output
    return result.output


def paths_in(output: str) -> list[str]:
    return [line.partition(":")[0] for line in output.splitlines() if not line.startswith(" ")]


def test_each_key_has_its_type_default_and_meaning() -> None:
    rows: Any = {}
    for key in config_keys(Example):
        text = key.type_text(lambda group: group.__name__)
        rows.setdefault(key.path, []).append((text, key.default, key.meaning, key.kinds))
    left, right = ("choice.kind=left",), ("choice.kind=right",)
    assert rows == {
        "needed": [("str", None, "A text of two lines.", ())],
        "number": [("int (≥ 1, < 10)", "3", "", ())],
        "either": [('float (> 0), "auto" or null', "null", "", ())],
        "factor": [("float (≥ 0)", "0.5", "", ())],
        "names": [("list of str", '["a", "b"]', "", ())],
        "values": [("map of str to list of any value (length ≥ 2)", "{}", "", ())],
        "group": [("Left", '{"depth": 7}', "The left one.", ())],
        "group.kind": [('"left"', '"left"', "The left one.", ())],
        "group.depth": [("int", "1", "", ())],
        "choice": [("Left or Right", '{"kind": "right"}', "", ())],
        "choice.kind": [('"left"', '"left"', "The left one.", left), ('"right"', '"right"', "The right one.", right)],
        "choice.depth": [("int", "1", "", left), ("int", "2", "", right)],
        "parts": [("list of Right", "[]", "The right one.", ())],
        "parts.kind": [('"right"', '"right"', "The right one.", ())],
        "parts.depth": [("int", "2", "", ())],
    }


def test_one_key_is_printed_with_its_docstring() -> None:
    first, *rest = output_of("config", "grpo", "rules.max_staleness").splitlines()
    assert first == "rules.max_staleness: int (≥ 0) = 0"
    meaning = " ".join(line.strip() for line in rest)
    assert meaning == " ".join(str(BatchRules.model_fields["max_staleness"].description).split()).replace("`", "")
    assert output_of("config", "grpo", "model.key").startswith("model.key: str  (required)\n")


def test_a_group_is_printed_with_the_keys_below_it() -> None:
    output = output_of("config", "grpo", "engine.sampler")
    assert {"engine.sampler", "engine.sampler.kind", "engine.sampler.replicas"} <= {*paths_in(output)}
    assert all(path.startswith("engine.sampler") for path in paths_in(output))
    # a key of one kind names it as --set does
    kinds = "[engine.kind=local, engine.sampler.kind=vllm]"
    assert f"engine.sampler.replicas: int (≥ 0) = 0  {kinds}\n" in output
    # an item of a list is addressed as in the error of a wrong config
    assert paths_in(output_of("config", "evaluation", "suite.graders.0.path")) == ["suite.graders.path"]


def test_a_training_is_printed_with_all_its_keys() -> None:
    paths = paths_in(output_of("config", "dpo"))
    assert {"run", "seed", "data.train.path", "data.heldout.path", "algorithm.kl_beta", "engine.url"} <= {*paths}
    assert "sampling" not in paths


def test_the_config_of_a_child_run_is_printed_when_it_is_asked_for() -> None:
    named = output_of("config", "recurring")
    assert "training.config: config of grpo  (required)  [training.kind=grpo]\n" in named
    assert "training.config.optimizer" not in paths_in(named)
    asked = output_of("config", "recurring", "training.config.optimizer.lr")
    assert {*paths_in(asked)} == {"training.config.optimizer.lr"}
    assert "= 1e-05  [training.kind=sft]\n" in asked


@pytest.mark.parametrize(
    ("arguments", "problem", "nearest"),
    [
        (["gpro"], "no flow is named 'gpro'", "grpo"),
        ([], "no flow is given", "recurring"),
        (["grpo", "rules.max_stalenes"], "the config of grpo has no key 'rules.max_stalenes'", "rules.max_staleness"),
        (["grpo", "max_staleness"], "the config of grpo has no key 'max_staleness'", "rules.max_staleness"),
        (["grpo", "optimiser.lr"], "the config of grpo has no key 'optimiser.lr'", "optimizer.lr"),
        (["grpo", "xyz"], "the config of grpo has no key 'xyz'", "'ostinato config grpo' prints all keys"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_names(arguments: list[str], problem: str, nearest: str) -> None:
    first, _, rest = output_of("config", *arguments, status=2).partition("; ")
    assert first == problem
    assert nearest in rest


def test_the_version_is_that_of_the_package_and_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    package = version("ostinato")
    monkeypatch.setenv("OSTINATO_CODE_VERSION", "4f881fc49456")
    assert output_of("--version") == f"ostinato {package} (4f881fc49456)\n"
    # that of an installed wheel
    monkeypatch.setenv("OSTINATO_CODE_VERSION", package)
    assert output_of("--version") == f"ostinato {package}\n"
