"""Tests of the form that Prefect shows for each flow's config, and of its API's response to a bad value."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from uuid import UUID

import httpx
import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema
from pydantic import ValidationError

from flows.configs.common import GRPOConfig
from flows.configs.forms import FURTHER, GROUP_FIELDS_SHOWN
from storage.serialization import Frozen

ROOT = Path(__file__).parents[3]
FORM = {"anyOf", "enum", "type", "$ref", "const"}


def flows() -> dict[str, Flow[..., Any]]:
    """Every deployed flow by name."""
    entries = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    flow_of = {}
    for entry in entries:
        module, _, name = entry["entrypoint"].rpartition(".")
        flow_of[entry["name"]] = getattr(importlib.import_module(module), name)
    return flow_of


NAMES = sorted(entry["name"] for entry in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"])


def schema_of(name: str) -> dict[str, Any]:
    return parameter_schema(flows()[name]).model_dump()


def fields(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(Class.field, schema) of every field of every record."""
    for record, body in schema["definitions"].items():
        for field, inner in body.get("properties", {}).items():
            yield f"{record}.{field}", inner


@pytest.mark.parametrize("name", NAMES)
def test_every_field_can_be_drawn(name: str) -> None:
    """oneOf would be drawn as a JSON editor, a field without a title as the name of its class."""
    schema = schema_of(name)
    assert set(schema["required"]) == {"config"}
    for where, body in fields(schema):
        assert body.get("title"), where
        assert "oneOf" not in body, where
        assert FORM & body.keys() or body == {"title": body["title"]}, where
        for option in body.get("anyOf", []):
            assert "oneOf" not in option and "anyOf" not in option, where


def shown_fields(schema: dict[str, Any], body: dict[str, Any]) -> list[str]:
    """The titles of the inputs that a person sees when the form opens. A constant is no input."""
    if "$ref" in body:
        record = schema["definitions"][body["$ref"].rpartition("/")[2]]
        titles: list[str] = []
        for inner in record["properties"].values():
            titles += shown_fields(schema, inner)
        return titles
    if "anyOf" in body:
        is_folded = "default" in body and body["default"] is None
        return [] if is_folded else shown_fields(schema, body["anyOf"][0])
    return [] if "const" in body else [body.get("title", "")]


@pytest.mark.parametrize("name", NAMES)
def test_a_form_opens_with_few_fields(name: str) -> None:
    schema = schema_of(name)
    shown = shown_fields(schema, schema["properties"]["config"])
    assert len(shown) <= 15, shown


def test_the_open_fields_of_sft() -> None:
    schema = schema_of("sft")
    assert shown_fields(schema, schema["properties"]["config"]) == [
        "Run", "Seed", "Key", "Path", "Samples per batch", "Kind", "Learning rate",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_unfolded_group_begins_with_its_defaults(name: str) -> None:
    """A form fills an unfolded group with the defaults of its class, so the flow's default must not differ there."""
    config = next(iter(inspect.signature(flows()[name].fn, eval_str=True).parameters.values())).annotation
    pending, seen = [config], set()
    while pending:
        record = pending.pop()
        if record in seen:
            continue
        seen.add(record)
        for field, info in record.model_fields.items():
            pending += [part for part in classes_of(info.annotation) if part not in seen]
            if isinstance(info.default, Frozen):
                unfolded = type(info.default)()
                differing = {key for key, value in unfolded if getattr(info.default, key) != value}
                assert differing <= GROUP_FIELDS_SHOWN, (record, field)


def classes_of(annotation: Any) -> list[type[Frozen]]:
    """The records that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        return [annotation]
    classes = []
    for part in get_args(annotation):
        classes += classes_of(part)
    return classes


def test_a_form_and_a_file_give_the_same_config() -> None:
    flat = GRPO | {
        "optimizer": {"lr": 1e-5, "weight_decay": 0.1}, "data": {"train": GYM | {"unique": True}, "truncation": "left"},
        "evaluation": {"before": False},
    }  # fmt: skip
    form = GRPO | {
        "optimizer": {"lr": 1e-5, "further settings": {"weight_decay": 0.1}},
        "data": {
            "train": GYM | {"further settings": {"unique": True}},
            "further settings": {"truncation": "left"},
        },
        "evaluation": {"before": False}, "engine": None, "checkpoints": None, "rules": None,
    }  # fmt: skip
    assert GRPOConfig.model_validate(form) == GRPOConfig.model_validate(flat)


def test_an_unknown_further_setting_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"optimizer\.weight_dekay"):
        GRPOConfig.model_validate(GRPO | {"optimizer": {"further settings": {"weight_dekay": 0.1}}})


@pytest.mark.parametrize("name", NAMES)
def test_titles_are_words_and_records_say_what_they_are(name: str) -> None:
    schema = schema_of(name)
    assert schema["properties"]["config"]["description"]
    for record, body in schema["definitions"].items():
        if "properties" in body:
            assert body.get("description"), record
            assert not body["title"].endswith(("Config", "Spec")), record
            assert "_" not in body["title"], record
    for where, body in fields(schema):
        assert "_" not in body["title"], where


def test_the_form_of_grpo() -> None:
    """Spot checks, from the config's own text."""
    schema = schema_of("grpo")["definitions"]
    assert list(schema["GRPOConfig"]["properties"]) == [
        "run", "seed", "model", "data", "grader", "sampling", "algorithm", "optimizer", "engine", "storage",
        "checkpoints", "logging", "evaluation", "regularisation", "rules",
    ]  # fmt: skip
    algorithm = schema["GRPOAlgorithm"]["properties"][FURTHER]["anyOf"][0]["properties"]
    assert algorithm["kl_beta"]["description"] == "Coefficient of the KL term. With 0, no reference model is computed."
    assert algorithm["kl_beta"]["default"] == 0.01
    assert algorithm["kl_beta"]["minimum"] == 0
    assert algorithm["kl_estimator"]["enum"] == ["k1", "abs", "k2", "k3"]
    assert schema["OptimizerConfig"]["properties"]["lr"]["title"] == "Learning rate"
    train = schema["PromptDataConfig"]["properties"]["train"]
    kinds = ["FileDataset", "HubDataset", "PythonDataset", "ReasoningGymDataset", "RegisteredDataset", "MixtureDataset"]
    assert [option["$ref"].rpartition("/")[2] for option in train["anyOf"]] == kinds
    assert schema["FileDataset"]["title"] == "File dataset"
    assert schema["FileDataset"]["properties"]["kind"]["enum"] == ["file"]


GYM = {"kind": "reasoning_gym", "name": "chain_sum", "size": 10}
GRPO = {
    "model": {"key": "m"}, "data": {"train": GYM}, "grader": {"path": "tests.fixtures.toy:digit_share"},
    "algorithm": {"steps": 3},
}  # fmt: skip
SFT = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "chats.jsonl"}}}
PAIRS = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "pairs.jsonl"}}}
EPISODES = {name: group for name, group in GRPO.items() if name != "grader"} | {
    "environment": {"path": "tests.fixtures.guessing:Guessing"}
}
STAGES = {"model": {"key": "m"}, "data": SFT["data"] | {"prompts": GYM}, "grader": GRPO["grader"]}
SUITE = {"datasets": [{"source": GYM}], "graders": [{"path": "tests.fixtures.toy:digit_share"}]}
TRAINING = {"kind": "grpo", "config": GRPO}
GOOD: dict[str, dict[str, Any]] = {
    "grpo": GRPO,
    "gspo": GRPO,
    "ppo": GRPO,
    "distill": GRPO | {"teacher": {"key": "t"}},
    "rft": {name: group for name, group in GRPO.items() if name != "algorithm"},
    "env_grpo": EPISODES,
    "env_gspo": EPISODES,
    "env_ppo": EPISODES,
    "sft": SFT,
    "dpo": PAIRS,
    "simpo": PAIRS,
    "orpo": PAIRS,
    "kto": PAIRS,
    "reward_model": PAIRS,
    "sft_to_gspo": STAGES | {"gspo": {"algorithm": {"steps": 3}}},
    "evaluation": {"models": ["m"], "suite": SUITE},
    "recurring": {"model": "helper", "training": TRAINING, "suite": SUITE},
    "sweep": {"name": "s", "training": TRAINING, "search": {"kind": "grid", "values": {"seed": [0, 1]}}},
}


def test_there_is_a_good_config_of_every_flow() -> None:
    assert sorted(GOOD) == NAMES


@pytest.fixture(scope="module")
def deployments(prefect_server: str) -> dict[str, UUID]:
    """Every flow deployed as `ostinato deploy` does it: the server checks parameters against the schema."""
    deployments = {}
    with get_client(sync_client=True) as client:
        for name, flow in flows().items():
            body = client.create_flow(flow)
            deployments[name] = client.create_deployment(
                body,
                f"form-{name}",
                parameter_openapi_schema=parameter_schema(flow).model_dump(),
                enforce_parameter_schema=True,
            )
    return deployments


def submit(api: str, deployment: UUID, config: dict[str, Any]) -> httpx.Response:
    """What the form does."""
    later = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2100-01-01T00:00:00Z"}}
    body = {"parameters": {"config": config}, "state": later}
    for _ in range(10):
        answer = httpx.post(f"{api}/deployments/{deployment}/create_flow_run", json=body, trust_env=False, timeout=60)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:  # SQLite is busy: Prefect's clients ask again, too
            break
        time.sleep(0.5)
    return answer


@pytest.mark.parametrize("name", NAMES)
def test_a_good_config_is_taken(name: str, prefect_server: str, deployments: dict[str, UUID]) -> None:
    answer = submit(prefect_server, deployments[name], GOOD[name])
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize(
    "algorithm", [{"steps": None, "further settings": {"epochs": 1}}, {"steps": 3, "epochs": None, "kl_beta": 0.1}]
)
def test_the_folded_and_the_flat_layout_are_taken(
    algorithm: dict[str, Any], prefect_server: str, deployments: dict[str, UUID]
) -> None:
    answer = submit(prefect_server, deployments["grpo"], GRPO | {"algorithm": algorithm, "engine": None})
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize("layout", [{"kl_beta": -1}, {"further settings": {"kl_beta": -1}}])
def test_a_bad_folded_value_is_refused(
    layout: dict[str, Any], prefect_server: str, deployments: dict[str, UUID]
) -> None:
    answer = submit(prefect_server, deployments["grpo"], GRPO | {"algorithm": {"steps": 3} | layout})
    assert answer.status_code == 409, answer.text


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("grpo", GRPO | {"optimizer": {"lr": -1}}, "config.optimizer.lr", "-1 is less than or equal to the minimum of 0"),
    ("grpo", GRPO | {"algorithm": {"steps": 3, "kl_estimator": "k9"}}, "config.algorithm.kl_estimator", "k9"),
    ("grpo", GRPO | {"algorithm": {"steps": 3, "stepz": 3}}, "config.algorithm", "stepz"),
    ("grpo", GRPO | {"algorithm": {}}, "config.algorithm", "'steps' is a required property"),
    ("grpo", GRPO | {"data": {"train": {"kind": "web"}}}, "config.data.train", "web"),
    ("grpo", {"data": {"train": GYM}}, "config", "'model' is a required property"),
    ("sft", SFT | {"algorithm": {"samples_per_batch": 0}}, "config.algorithm.samples_per_batch", "minimum of 1"),
    ("dpo", PAIRS | {"algorithm": {"kl_beta": 0}}, "config.algorithm.kl_beta", "0"),
    ("dpo", PAIRS | {"data": {"train": GYM}}, "config.data.train", "'name'"),
    ("sft_to_gspo", STAGES | {"sft": {"optimizer": {"lr": 0}}}, "config.sft.optimizer.lr", "0"),
    ("evaluation", {"models": ["m"], "suite": SUITE | {"graders": []}}, "config.suite.graders", "[]"),
    ("recurring", GOOD["recurring"] | {"approval": {"timeout_seconds": 0}}, "config.approval.timeout_seconds", "0"),
    ("sweep", GOOD["sweep"] | {"parallel": 0}, "config.parallel", "minimum of 1"),
]


@pytest.mark.parametrize(("name", "config", "field", "reason"), BAD)
def test_a_bad_value_is_refused_and_the_field_named(
    name: str, config: dict[str, Any], field: str, reason: str, prefect_server: str, deployments: dict[str, UUID]
) -> None:
    answer = submit(prefect_server, deployments[name], config)
    assert answer.status_code == 409
    assert f"'{field}'" in answer.json()["detail"]
    assert reason in answer.json()["detail"]


async def test_what_a_schema_cannot_say_is_refused_before_the_flow_runs(prefect_server: str) -> None:
    split = GRPO | {"algorithm": {"steps": 3, "samples_per_batch": 10, "completions_per_sample": 4}}
    state = await flows()["grpo"](config=split, return_state=True)
    assert state.is_failed()
    assert "samples_per_batch=10 splits a group; use a multiple of completions_per_sample=4" in (state.message or "")
