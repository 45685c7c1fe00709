"""Tests of `ostinato engine plan`: its output, its errors, and the memory that the example configs document."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from engine.memory_plan.shape import ModelShape
from engine.specs.engine import LocalEngineSpec
from flows.cli.main import app
from flows.cli.plan import workload_of
from flows.configs.overrides import parse_config

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "engines").glob("*.toml"))


def plan(*words: str) -> Result:
    return CliRunner().invoke(app, ["engine", "plan", *words])


def written(folder: Path, body: dict[str, Any]) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(body))
    return str(file)


def command_in(example: Path) -> list[str]:
    """The words after `ostinato engine plan` in an example's comment, with its own path absolute."""
    line = next(line for line in example.read_text().splitlines() if "ostinato engine plan" in line)
    words = shlex.split(line.removeprefix("#"))[3:]
    return [str(example) if word.endswith(example.name) else word for word in words]


def test_there_is_an_example_for_each_size_of_machine() -> None:
    assert [file.stem for file in EXAMPLES] == ["eight-gpus", "laptop-cpu", "one-80gb-gpu", "two-nodes"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_fits_and_says_what_it_takes(example: Path) -> None:
    assert isinstance(parse_config(LocalEngineSpec, example), LocalEngineSpec)
    result = plan(*command_in(example), "--json")
    assert result.exit_code == 0, result.output
    documented = dict(re.findall(r"^# plan: (.*): ([\d.]+) GiB$", example.read_text(), flags=re.M))
    planned = {memory["name"]: f"{memory['needed'] / 2**30:.1f}" for memory in json.loads(result.stdout)["memories"]}
    if "cpu" in example.stem:  # compute_dtype is fixed there, so this machine does not matter
        assert len(planned) == 1
    assert documented == planned


def test_the_8b_adapter_of_the_one_gpu_example(tmp_path: Path) -> None:
    example = next(file for file in EXAMPLES if file.stem == "one-80gb-gpu")
    words = ["--config", str(example), "--model", "8B", "--gpu", "h100-80"]
    assert plan(*words).exit_code == 3
    assert plan(*words, "--lora-rank", "16", "--set", "max_tokens_per_forward=4096").exit_code == 0
    # its sampler is vLLM, which has no base in 4 bits
    refused = plan(*words, "--load-in-4bit")
    assert (refused.exit_code, "load_in_4bit=true was given" in refused.output) == (2, True)


def test_an_adapter_on_a_base_in_4_bits_is_planned_and_proposed(tmp_path: Path) -> None:
    words = ["--config", written(tmp_path, {"device": "cuda"}), "--model", "8B", "--device-gib", "24"]
    words += ["--context", "1024", "--set", "max_tokens_per_forward=1024", "--set", "max_rows=8", "--frozen", "0"]
    adapter = plan(*words, "--lora-rank", "16")
    assert adapter.exit_code == 3
    proposal = "an adapter on a base in 4 bits (model.adapter.load_in_4bit=true, --load-in-4bit)"
    assert f"would fit: {proposal}\n" in adapter.stdout
    on_4_bits = plan(*words, "--load-in-4bit")
    assert on_4_bits.exit_code == 0
    assert "LoRA rank 16 on a base in 4 bits" in on_4_bits.stdout


@pytest.mark.parametrize(
    ("rules", "staged"),
    [({}, 1), ({"max_staleness": 4}, 4), ({"max_staleness": 4, "weight_updates": "in_flight"}, 1)],
)
def test_the_policies_that_wait_for_the_samplers_follow_from_the_rules(rules: dict[str, Any], staged: int) -> None:
    shape = ModelShape("m", 1, 1, 1, 1, 1, 1, vocabulary=1, context=64, parameters=1, tied=True)
    body = {"rules": rules}
    assert workload_of(body, LocalEngineSpec(), shape, context=0, lora_rank=0, frozen=0).staged == staged
    assert workload_of(body, LocalEngineSpec(), shape, context=0, lora_rank=8, frozen=0).staged == 1


def test_what_cannot_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    config = written(tmp_path, {"device": "cuda", "trainer": {"kind": "deepspeed", "zero_stage": 1}})
    words = ["--config", config, "--model", "8B", "--gpu", "h100-80", "--devices", "8", "--context", "2048"]
    refused = plan(*words)
    assert refused.exit_code == 3, refused.output
    assert "does not fit: GPU 0 (h100-80): trains and samples needs" in refused.stdout
    ways = json.loads(plan(*words, "--json").stdout)["would_fit"]
    assert ways
    assert all(f"would fit: {way}" in refused.stdout for way in ways)


def test_a_runs_config_says_its_model_its_reference_and_its_adapter(tmp_path: Path, tiny_folder: Path) -> None:
    body: dict[str, Any] = {
        "model": {"key": str(tiny_folder)}, "algorithm": {"kl_beta": 0.0},
        "engine": {"device": "cpu", "max_tokens_per_forward": 256},
    }  # fmt: skip

    def names() -> str:
        document = json.loads(plan("--config", written(tmp_path, body), "--json").stdout)
        assert document["context"] == 256
        return " ".join(part["name"] for part in document["memories"][0]["parts"])

    assert "frozen" not in names()
    body["algorithm"]["kl_beta"] = 0.1
    assert "1 frozen policies" in names()
    body["model"]["adapter"] = {"rank": 4}
    assert "frozen base" in names()
    assert "frozen policies" not in names()  # the base is the reference
    assert "dequantised" not in names()
    body["model"]["adapter"]["load_in_4bit"] = True
    assert "dequantised weight" in names()


async def test_a_registered_model_is_planned_by_its_key(tmp_path: Path, tiny_folder: Path) -> None:
    from engine.local.engine import LocalEngine
    from storage.store.artifacts import Provenance

    url = f"file://{tmp_path}/data"
    engine = LocalEngine(url, LocalEngineSpec(threads=1))
    base = await engine.import_model(
        str(tiny_folder), provenance=Provenance(code_version="test", config_digest="0" * 64, seed=0)
    )
    await engine.close()
    key = base.key.split("/")[1]
    config = written(tmp_path, {"device": "cpu"})
    by_key = json.loads(plan("--config", config, "--model", key, "--storage", url, "--json").stdout)
    by_folder = json.loads(plan("--config", config, "--model", str(tiny_folder), "--json").stdout)
    assert by_key["parameters"] == by_folder["parameters"]


@pytest.mark.parametrize(
    ("body", "words", "message"),
    [({}, [], "no model was given"),
     ({"device": "cuda"}, ["--model", "8B"], "say which: --gpu"),
     ({"device": "cpu"}, ["--model", "8B", "--gpu", "h100-80"], "leave one of them out"),
     ({}, ["--model", "8B", "--gpu", "tpu"], "'tpu' is not known"),
     ({}, ["--model", "unheard-of"], "add --storage"),
     ({}, ["--model", "8B", "--context", "999999"], "exceeds the 131072 tokens"),
     ({"trainer": {"kind": "deepspeed", "zero_stagee": 1}}, ["--model", "8B"], "did you mean 'zero_stage'"),
     ({"engine": {"kind": "http", "url": "http://127.0.0.1:1"}}, ["--model", "8B"], "engine elsewhere")],
)  # fmt: skip
def test_wrong_usage_is_said(tmp_path: Path, body: dict[str, Any], words: list[str], message: str) -> None:
    result = plan("--config", written(tmp_path, body), *words)
    assert result.exit_code == 2, result.output
    assert message in result.output
