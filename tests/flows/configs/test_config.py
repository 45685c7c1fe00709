"""Tests of configs: validation errors, and the run keys that the command line stores."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from flows.cli.runner import find_or_create_run_key, forget_run_key
from flows.configs.common import FlowConfig, GRPOConfig, SFTConfig
from flows.configs.overrides import ConfigError, parse_config
from flows.runs.code_version import code_version
from tests.fixtures.configs import with_changes

GRPO = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p"}}, "grader": {"path": "a:b"}}
SFT = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p"}}}


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config with dotted changes, __ for dots. Steps are given unless a change says otherwise."""
    config: dict[str, Any] = {group: dict(keys) for group, keys in base.items()}
    config["algorithm"] = {"steps": 4}
    return with_changes(config, changes)


def refusal(model: type[FlowConfig], config: dict[str, Any], tmp_path: Path) -> str:
    """What a person reads about a config that cannot be used."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError) as refused:
        parse_config(model, path)
    return str(refused.value)


# -- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # what was given, and what to do
        ({"algorithm__clip_rnage": 0.2}, ["algorithm.clip_rnage", "unknown key", "did you mean 'clip_range'"]),
        ({"optimiser": {"lr": 1.0}}, ["optimiser", "unknown key", "did you mean 'optimizer'"]),
        (
            {"algorithm__samples_per_batch": 20, "algorithm__completions_per_sample": 8},
            ["samples_per_batch=20", "multiple of completions_per_sample=8"],
        ),
        ({"algorithm__clip_range": 0.0}, ["algorithm.clip_range", "greater than 0", "0.0"]),
        ({"algorithm__clip_range": -0.1}, ["algorithm.clip_range", "greater than 0", "-0.1"]),
        ({"algorithm__clip_range": 1.5}, ["algorithm.clip_range", "less than or equal to 1", "1.5"]),
        ({"algorithm__clip_range_high": 0.0}, ["algorithm.clip_range_high", "greater than 0", "0.0"]),
        ({"algorithm__kl_beta": -1.0}, ["algorithm.kl_beta", "greater than or equal to 0", "-1.0"]),
        ({"algorithm__steps": 0}, ["algorithm.steps", "greater than or equal to 1", "0"]),
        ({"algorithm__steps": 4, "algorithm__epochs": 2}, ["steps=4", "epochs=2", "give one"]),
        ({"algorithm__steps": None}, ["algorithm.steps", "algorithm.epochs", "'cosine'", "give steps", "'constant'"]),
        (
            {"algorithm__steps": None, "optimizer__schedule": "constant"},
            ["without steps or epochs", "checkpoints.frequency=null", "checkpoints.every_steps"],
        ),
        (
            {"algorithm__old_logprobs": "sampler", "regularisation__importance_cap": 2.0},
            ["importance_cap=2.0 has no effect", "old_logprobs='sampler'", "leave it out"],
        ),
        (
            {"rules__max_staleness": 1, "sampling__top_p": 0.9},
            ["the correction for max_staleness=1 compares", "top_p=0.9", "leave top_p and top_k out"],
        ),
        (
            {"rules__weight_updates": "in_flight"},
            ["weight_updates='in_flight'", "max_staleness=0", "give max_staleness of 1 or more"],
        ),
        (
            {"rules__max_staleness": 1, "rules__segment_seconds": 5.0},
            ["segment_seconds=5", "'between'", "leave segment_seconds out"],
        ),
        (
            {"rules__max_staleness": 1, "rules__weight_updates": "in_flight", "rules__segment_seconds": 0},
            ["rules.segment_seconds", "greater than 0"],
        ),
        (
            {"sampling__json_schema": '{"type": "object"}', "rules__max_staleness": 1,
             "rules__weight_updates": "in_flight"},
            ["the correction for max_staleness=1", "json_schema={", "leave top_p and top_k out"],
        ),
        (
            {"sampling__top_p": 0.9, "regularisation__importance_cap": 2.0},
            ["importance_cap=2.0 compares", "top_p=0.9", "leave top_p and top_k out"],
        ),
        (
            {"sampling__json_schema": '{"type": "object"}', "regularisation__importance_cap": 2.0},
            ["importance_cap=2.0 compares", "json_schema={", "leave top_p and top_k out"],
        ),
        (
            {"algorithm__old_logprobs": "sampler", "regularisation__importance_mask": {"kind": "token_ratio"}},
            ["importance_mask of kind 'token_ratio' has no effect", "'probability'", "old_logprobs='trainer'"],
        ),
        (
            {"regularisation__importance_mask": {"kind": "token_ratio", "low": 1.5}},
            ["regularisation.importance_mask.low", "less than or equal to 1", "1.5"],
        ),
        (
            {"regularisation__importance_mask": {"kind": "icepop"}},
            ["kind='icepop'", "give one of token_ratio, sequence_ratio, probability"],
        ),
        ({"sampling__temperature": 0.0}, ["sampling.temperature=0", "use"]),
        ({"sampling__temperature": -1.0}, ["sampling.temperature", "greater than or equal to 0", "-1.0"]),
        ({"optimizer__lr": "fast"}, ["optimizer.lr", "number", "'fast'"]),
        ({"optimizer__lr": 1e38}, ["optimizer.lr", "less than or equal to 1000", "1e+38"]),
        ({"optimizer__weight_decay": 1e38}, ["optimizer.weight_decay", "less than or equal to 1000", "1e+38"]),
        ({"algorithm__kl_beta": 1e308}, ["algorithm.kl_beta", "less than or equal to 10000", "1e+308"]),
        ({"optimizer__schedule": "cosin"}, ["optimizer.schedule", "'cosine'", "'constant'", "'cosin'"]),
        ({"data__truncation": "middle"}, ["data.truncation", "'left'", "'drop'", "'middle'"]),
        ({"model__publish_as": "a name"}, ["model.publish_as", "'a name' is not a name"]),
        ({"model__name": "../up"}, ["model.name", "'../up' is not a name"]),
        ({"engine": {"deterministic": True, "compute_dtype": "bfloat16"}}, ["deterministic=true", "compute_dtype"]),
        ({"checkpoints__frequency": 1.5}, ["checkpoints.frequency", "less than or equal to 1", "1.5"]),
    ],
)
def test_a_bad_grpo_config_is_refused_with_what_was_given_and_what_to_do(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    message = refusal(GRPOConfig, changed(GRPO, **changes), tmp_path)
    for word in words:
        assert word in message, message
    assert "1 problem" in message


def test_the_config_that_the_bad_ones_are_changes_of_is_fine() -> None:
    GRPOConfig.model_validate(changed(GRPO))
    SFTConfig.model_validate(changed(SFT))
    endless = changed(GRPO, algorithm__steps=None, optimizer__schedule="constant", checkpoints={"frequency": None})
    GRPOConfig.model_validate(endless)


def test_rules_that_are_not_given_are_not_in_the_config_of_a_run() -> None:
    """So configs of before these rules have the digests that they had."""
    rules = GRPOConfig.model_validate(changed(GRPO)).model_dump()["rules"]
    assert not {"weight_updates", "segment_seconds"} & rules.keys()
    given = {"rules__max_staleness": 1, "rules__weight_updates": "in_flight", "rules__segment_seconds": 5.0}
    rules = GRPOConfig.model_validate(changed(GRPO, **given)).model_dump()["rules"]
    assert (rules["weight_updates"], rules["segment_seconds"]) == ("in_flight", 5.0)


def test_every_wrong_key_is_listed_at_once(tmp_path: Path) -> None:
    config = changed(GRPO, algorithm__clip_range=0.0, optimizer__lr=-1.0, model={}, sed=1)
    message = refusal(GRPOConfig, config, tmp_path)
    assert "4 problems" in message
    for key in ("algorithm.clip_range", "optimizer.lr", "model.key: missing", "sed: unknown key; did you mean 'seed'"):
        assert key in message


def test_a_store_may_be_given_by_its_url_alone(tmp_path: Path) -> None:
    config = GRPOConfig.model_validate(changed(GRPO, storage="s3://bucket/runs"))
    assert config == GRPOConfig.model_validate(changed(GRPO, storage={"url": "s3://bucket/runs"}))
    assert config.model_dump()["storage"] == {"url": "s3://bucket/runs"}


def test_sft_takes_steps_or_epochs(tmp_path: Path) -> None:
    message = refusal(SFTConfig, changed(SFT, algorithm__epochs=2), tmp_path)
    assert "steps=4" in message and "epochs=2" in message and "give one" in message


@pytest.mark.parametrize("key", ["max_prompt_tokens", "truncation"])
def test_sft_refuses_what_it_has_no_use_for(key: str, tmp_path: Path) -> None:
    assert f"data.{key}: unknown key" in refusal(SFTConfig, changed(SFT, **{f"data__{key}": None}), tmp_path)


def test_a_config_is_frozen() -> None:
    config = GRPOConfig.model_validate(changed(GRPO))
    with pytest.raises(ValidationError, match="frozen"):
        config.algorithm.clip_range = 0.5  # type: ignore[misc]


# -- size and documentation --------------------------------------------------------------------------------------


def groups_of(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The groups of a config by name: fields that hold keys of their own."""
    return {
        name: field.annotation
        for name, field in model.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


@pytest.mark.parametrize("model", [GRPOConfig, SFTConfig])
def test_a_config_has_at_most_twelve_groups_of_sixteen_keys(model: type[FlowConfig]) -> None:
    groups = groups_of(model)
    assert {"model", "data", "algorithm", "optimizer", "checkpoints", "storage"} <= set(groups)
    assert len(groups) <= 12
    assert len(model.model_fields) <= 15
    for name, group in groups.items():
        assert len(group.model_fields) <= 16, f"{name} has {len(group.model_fields)} keys"


@pytest.mark.parametrize("model", [GRPOConfig, SFTConfig])
def test_each_group_refuses_unknown_keys_and_says_what_it_is(model: type[FlowConfig]) -> None:
    for name, group in groups_of(model).items():
        assert group.model_config.get("extra") == "forbid" and group.model_config.get("frozen"), name
        assert group.__doc__ or name == "storage", name


def test_names_and_patience_do_not_decide_the_result() -> None:
    config = GRPOConfig.model_validate(changed(GRPO))
    for change in (
        {"model": {"key": "m", "publish_as": "n", "publish_dtype": "float16", "publish_unchanged": True}},
        {"rules": {"max_idle_steps": 3}},
        {"grader": {"path": "a:b", "timeout_seconds": 1.0, "retries": 0, "concurrency": 1}},
        {"checkpoints": {"frequency": 0.5}},
        {"storage": {"url": "elsewhere"}},
        {"run": "key"},
        {"engine": {"threads": 1}},
    ):
        assert GRPOConfig.model_validate(changed(GRPO, **change)).semantic() == config.semantic(), change
    for change in (
        {"seed": 1},
        {"optimizer__lr": 1e-3},
        {"sampling__top_p": 0.9},
        {"grader": {"path": "a:c"}},
        {"grader": {"path": "a:b", "arguments": {"x": 1}}},
        {"data__max_prompt_tokens": 9, "data__truncation": "drop"},
        {"model": {"key": "other"}},
    ):
        assert GRPOConfig.model_validate(changed(GRPO, **change)).semantic() != config.semantic(), change


# -- the command line --------------------------------------------------------------------------------------------


def cli(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`ostinato …`, in a process of its own, which ends by saying which heavy modules were imported."""
    code = (
        "import sys\n"
        "from flows.cli.main import app\n"
        "try:\n"
        "    app()\n"
        "finally:\n"
        "    heavy = [name for name in ('torch', 'transformers', 'prefect') if name in sys.modules]\n"
        "    print('IMPORTED', heavy, file=sys.stderr)\n"
    )
    root = Path(__file__).parents[3]
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "COLUMNS": "200", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_line_refuses_a_bad_config_before_torch_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(changed(GRPO, algorithm__clip_range=0.0)))
    done = cli(tmp_path, "run", "grpo", "--config", str(path), "--set", "optimizer.lr=fast")
    assert done.returncode == 2, done.stderr
    assert "2 problems" in done.stdout
    assert "algorithm.clip_range" in done.stdout and "optimizer.lr" in done.stdout
    assert "IMPORTED []" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".ostinato").exists(), "a refused config must not be remembered as a run"


def test_a_set_puts_a_value_over_the_files(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(changed(GRPO, optimizer__lr=1e-3)))
    config = parse_config(GRPOConfig, path, ["optimizer.lr=5e-4", "algorithm.steps=9", "model.publish_as=name"])
    assert (config.optimizer.lr, config.algorithm.steps, config.model.publish_as) == (5e-4, 9, "name")
    # a set that leads to a contradiction is refused like a file that holds one
    with pytest.raises(ConfigError, match=re.escape("both steps=4 and epochs=2")):
        parse_config(GRPOConfig, path, ["algorithm.epochs=2"])


@pytest.mark.parametrize(
    "words",
    [
        ["run", "grpo"],
        pytest.param(["run", "grpo", "--config", "absent.yaml"], marks=pytest.mark.slow),
        pytest.param(["run", "gspoo", "--config", "x"], marks=pytest.mark.slow),
    ],
)
def test_wrong_words_are_a_usage_error(words: list[str], tmp_path: Path) -> None:
    done = cli(tmp_path, *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_without_git_the_code_version_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("OSTINATO_CODE_VERSION", raising=False)
    assert code_version() == "unknown"


# -- remembered runs ---------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_key_of_an_unfinished_equal_run_is_used_again(here: Path) -> None:
    config = GRPOConfig.model_validate(changed(GRPO))
    first, was_there = find_or_create_run_key(config, new=False)
    assert not was_there and first.startswith("grpo-")
    equal = GRPOConfig.model_validate(changed(GRPO, checkpoints={"frequency": 0.5}, model__publish_as="other"))
    assert find_or_create_run_key(equal, new=False) == (first, True)


@pytest.mark.parametrize(
    "change", [{"optimizer__lr": 1e-3}, {"seed": 1}, {"storage": {"url": "elsewhere"}}, {"algorithm__steps": 5}]
)
def test_another_config_or_store_is_another_run(here: Path, change: dict[str, Any]) -> None:
    first, _ = find_or_create_run_key(GRPOConfig.model_validate(changed(GRPO)), new=False)
    other, was_there = find_or_create_run_key(GRPOConfig.model_validate(changed(GRPO, **change)), new=False)
    assert other != first and not was_there


def test_new_starts_another_run_and_takes_its_place(here: Path) -> None:
    config = GRPOConfig.model_validate(changed(GRPO))
    first, _ = find_or_create_run_key(config, new=False)
    second, was_there = find_or_create_run_key(config, new=True)
    assert second != first and not was_there
    assert find_or_create_run_key(config, new=False) == (second, True)


def test_a_finished_run_is_forgotten_and_others_are_not(here: Path) -> None:
    config, other = (GRPOConfig.model_validate(changed(GRPO, seed=seed)) for seed in (0, 1))
    first, _ = find_or_create_run_key(config, new=False)
    key_of_other, _ = find_or_create_run_key(other, new=False)
    forget_run_key(config)
    again, was_there = find_or_create_run_key(config, new=False)
    assert again != first and not was_there
    assert find_or_create_run_key(other, new=False) == (key_of_other, True)
