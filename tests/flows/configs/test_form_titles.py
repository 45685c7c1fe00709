"""Tests of the JSON schema of a config as a form: titles, choices for unions, and the same meaning for a validator."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import Field

from flows.configs.forms import FormConfig, class_title, field_title
from storage.serialization import Frozen


class FileSource(Frozen):
    kind: Literal["file"] = "file"
    path: str
    """Where it is."""


class WebSource(Frozen):
    kind: Literal["web"] = "web"
    url: str = Field(title="Address")


Source = Annotated[FileSource | WebSource, Field(discriminator="kind")]


class JobConfig(FormConfig):
    lr: float = Field(1.0, gt=0)
    source: Source
    others: tuple[Source, ...] = ()
    maybe: Source | None = None
    place: FileSource = FileSource(path=".")
    mode: Literal["fast", "slow"] = "fast"


def schema() -> dict:
    return JobConfig.model_json_schema()


def test_titles_are_words() -> None:
    body = schema()
    assert body["title"] == "Job"
    assert body["$defs"]["FileSource"]["title"] == "File source"
    fields = body["properties"]
    assert [fields[name]["title"] for name in ("lr", "source", "place")] == ["Learning rate", "Source", "Place"]
    assert body["$defs"]["WebSource"]["properties"]["url"]["title"] == "Address"


@pytest.mark.parametrize(
    ("name", "title"),
    [("GRPOAlgorithm", "GRPO algorithm"), ("LocalEngineSpec", "Local engine"), ("DeepSpeedSpec", "DeepSpeed"),
     ("HttpEngineSpec", "HTTP engine"), ("LoraSpec", "LoRA"), ("Spec", "Spec"), ("VllmSpec", "vLLM")],
)  # fmt: skip
def test_titles_of_classes(name: str, title: str) -> None:
    assert class_title(name) == title


def test_titles_of_fields() -> None:
    assert field_title("samples_per_mini_batch") == "Samples per mini batch"
    assert field_title("kl_beta") == "KL beta"
    assert field_title("memory_gib") == "Memory GiB"


def test_the_text_under_a_field_is_its_description() -> None:
    assert schema()["$defs"]["FileSource"]["properties"]["path"]["description"] == "Where it is."


def test_unions_are_one_choice() -> None:
    fields = schema()["properties"]
    both = [{"$ref": "#/$defs/FileSource"}, {"$ref": "#/$defs/WebSource"}]
    assert fields["source"]["anyOf"] == both
    assert fields["others"]["items"]["anyOf"] == both
    assert fields["maybe"]["anyOf"] == [*both, {"type": "null"}]
    assert "oneOf" not in str(schema())


def test_one_possible_value_is_a_menu_of_one() -> None:
    assert schema()["$defs"]["WebSource"]["properties"]["kind"]["enum"] == ["web"]
    assert schema()["properties"]["mode"]["enum"] == ["fast", "slow"]


@pytest.mark.parametrize(
    "change",
    [{}, {"maybe": None}, {"source": {"kind": "web", "url": "u"}}, {"others": [{"kind": "file", "path": "a"}]},
     {"source": {"kind": "ftp", "url": "u"}}, {"source": {"path": "p", "url": "u"}}, {"lr": 0}, {"extra": 1},
     {"mode": "slower"}, {"maybe": {"kind": "web"}}],
)  # fmt: skip
def test_a_validator_reads_it_as_the_record_does(change: dict) -> None:
    config = {"source": {"kind": "file", "path": "p"}} | change
    try:
        JobConfig.model_validate(config)
        fits = True
    except ValueError:
        fits = False
    assert Draft202012Validator(schema()).is_valid(config) == fits
