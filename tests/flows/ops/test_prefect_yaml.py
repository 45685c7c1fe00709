"""Tests of prefect.yaml: it has the trainings of the catalogue, every entrypoint is a flow, every schedule is paused,
and the automations use every tag.

`python -m tests.flows.ops.test_prefect_yaml` writes the deployments of the trainings into prefect.yaml.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

import prefect.runner
import pytest
import yaml
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema

from flows.catalogue import TRAININGS
from flows.configs.overrides import ConfigError
from flows.ops.automations import HEARTBEAT_TIMEOUT_SECONDS, TAG, automations
from flows.ops.deployments import deployments_in, find_prefect_yaml
from flows.ops.hooks import ON_END
from flows.ops.services import HEARTBEAT_SECONDS
from flows.ops.steps import work_in
from flows.ops.termination import MAX_ATTEMPTS_ENV
from flows.runs.checked_flow import InvalidConfig

FILE = find_prefect_yaml()
ENTRIES = deployments_in(FILE)
FIRST, LAST = "deployments:\n", "  - name: evaluation\n"
"""The lines of the file between which the deployments of the trainings are."""
ENTRY = """\
  - name: {name}
    entrypoint: flows.{name}.{name}
    description: >-
{description}
    tags: [ostinato, training, {tag}]
    concurrency_limit: *limit
    work_pool: *work_pool
    schedules: []

"""


def with_trainings(text: str) -> str:
    """The text of prefect.yaml with the deployments of the trainings as the catalogue has them."""
    head, _, rest = text.partition(FIRST)
    entries = ""
    for training in TRAININGS.values():
        sentences = "Publishes the model and reports. The same run key goes on where the run stands."
        text = f"      {training.summary} {sentences}"
        description = textwrap.fill(text, 120, subsequent_indent=6 * " ")
        entries += ENTRY.format(name=training.name, description=description, tag=training.tag)
    return head + FIRST + entries + LAST + rest.partition(LAST)[2]


def test_the_file_has_the_trainings_of_the_catalogue() -> None:
    text = FILE.read_text()
    assert text == with_trainings(text), "stale: run python -m tests.flows.ops.test_prefect_yaml"


def flow_of(entry: dict[str, Any]) -> Flow[..., Any]:
    module, _, name = entry["entrypoint"].rpartition(".")
    flow = getattr(import_module(module), name)
    assert isinstance(flow, Flow)
    return flow


def test_there_is_one_deployment_per_flow() -> None:
    assert Path(__file__).parents[3] / "prefect.yaml" == FILE
    names = [entry["name"] for entry in ENTRIES]
    assert sorted(names) == sorted([*TRAININGS, "evaluation", "recurring", "sweep"])


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_a_deployment_is_complete(entry: dict[str, Any]) -> None:
    flow = flow_of(entry)
    assert flow.name == entry["name"]
    assert TAG in entry["tags"]
    assert len(entry["description"]) > 60
    assert entry["concurrency_limit"]["limit"] >= 1
    assert entry["work_pool"]["job_variables"] == {"stream_output": False}
    assert list(parameter_schema(flow).properties) == ["config"]
    for schedule in entry["schedules"]:
        assert schedule["active"] is False
        assert schedule["slug"]
        CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("grpo", "demo"), ("sft", "sft"), ("recurring", "recurring"),
        ("env_grpo", "env_grpo"), ("env_gspo", "env_grpo"),
        *((name, name) for name in ("gspo", "ppo", "distill", "env_ppo", "rft", "dpo", "simpo", "orpo", "kto")),
        ("reward_model", "reward_model"), ("sft_to_gspo", "sft_to_gspo"),
    ],
)  # fmt: skip
def test_the_example_config_is_a_valid_parameter(name: str, config: str) -> None:
    (entry,) = [entry for entry in ENTRIES if entry["name"] == name]
    body = yaml.safe_load((FILE.parent / "examples" / f"{config}.yaml").read_text())
    config = flow_of(entry).validate_parameters({"config": body})["config"]
    filled = config.model_dump(mode="json")  # as a form does: every default is given
    assert flow_of(entry).validate_parameters({"config": filled})["config"] == config
    refused = flow_of(entry).validate_parameters({"config": body | {"modle": 1}})["config"]
    assert isinstance(refused, InvalidConfig)
    assert refused.reason == "the config does not fit: modle: unknown key; did you mean 'model'?"


@pytest.mark.parametrize("name", [entry["name"] for entry in ENTRIES])
def test_a_flow_gives_back_what_it_holds_however_it_ends(name: str) -> None:
    (entry,) = [entry for entry in ENTRIES if entry["name"] == name]
    flow = flow_of(entry)
    hooks = {"on_failure": flow.on_failure_hooks, "on_crashed": flow.on_crashed_hooks}
    assert {**hooks, "on_cancellation": flow.on_cancellation_hooks} == ON_END


def test_a_process_works_in_the_folder_that_was_deployed_from_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, check = yaml.safe_load(FILE.read_text())["pull"]
    assert check == {"flows.ops.steps.check_parameters": {}}
    assert step == {"flows.ops.steps.work_in": {"folder": "{{ $OSTINATO_FOLDER }}"}}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    assert work_in("/no/such/folder") == {"directory": str(tmp_path)}
    (tmp_path / "deployed").mkdir()
    assert work_in(str(tmp_path / "deployed")) == {"directory": str(tmp_path / "deployed")}
    assert Path.cwd() == tmp_path / "deployed"


def test_a_hook_finds_our_packages_wherever_its_script_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Path(prefect.runner.__file__).parent / "storage.py").is_file()  # beside the script that runs hooks
    (tmp_path / "storage.py").touch()
    (tmp_path / "hook.py").write_text("import storage.errors")
    command = [sys.executable, str(tmp_path / "hook.py")]
    monkeypatch.setenv("PYTHONPATH", str(FILE.parent))
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    assert subprocess.run(command, capture_output=True).returncode == 1
    work_in("/no/such/folder")
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_a_second_scheduled_run_does_not_wait_behind_the_first() -> None:
    (entry,) = [entry for entry in ENTRIES if entry["name"] == "recurring"]
    assert entry["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}


def test_automations_wait_for_silence_and_touch_only_our_runs() -> None:
    silent, crashed, _ = automations()
    assert HEARTBEAT_TIMEOUT_SECONDS >= 3 * HEARTBEAT_SECONDS
    for automation in (silent, crashed):
        trigger: Any = automation.trigger
        assert trigger.posture.value == "Proactive"
        assert trigger.expect == {"prefect.flow-run.*"}
        assert trigger.match_related.model_dump()["prefect.resource.id"] == f"prefect.tag.{TAG}"
        assert trigger.for_each == {"prefect.resource.id"}
    assert [each.actions[0].state.value for each in (silent, crashed)] == ["CRASHED", "SCHEDULED"]  # type: ignore[union-attr]


def test_crashes_are_counted_for_each_of_our_runs_no_earlier_than_by_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_ATTEMPTS_ENV, "3")
    trigger: Any = automations()[2].trigger
    assert (trigger.posture.value, trigger.expect) == ("Reactive", {"prefect.flow-run.Crashed"})
    assert trigger.threshold == 6  # a crash is reported by the process that ran it, and by the worker
    assert trigger.match_related.model_dump()["prefect.resource.id"] == f"prefect.tag.{TAG}"
    assert trigger.for_each == {"prefect.resource.id"}
    (action,) = automations()[2].actions
    assert action.state.value == "FAILED"  # type: ignore[union-attr]


def test_a_file_that_is_missing_or_no_prefect_yaml_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prefect.yaml found"):
        find_prefect_yaml(tmp_path / "prefect.yaml")
    (tmp_path / "prefect.yaml").write_text("deployments: " + 5000 * "[")
    with pytest.raises(ConfigError, match="cannot be read"):
        deployments_in(tmp_path / "prefect.yaml")
    (tmp_path / "prefect.yaml").write_text("deployments: {a: b}")
    with pytest.raises(ConfigError, match="no list of deployments"):
        deployments_in(tmp_path / "prefect.yaml")


if __name__ == "__main__":
    FILE.write_text(with_trainings(FILE.read_text()))
