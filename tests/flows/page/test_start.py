"""The form that starts a run: fields, errors at their fields, copies of runs, and the start itself."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.states import Completed
from starlette.testclient import TestClient

from engine.specs.engine import HttpEngineSpec
from flows.catalogue import TRAININGS
from flows.configs.keys import config_keys
from flows.configs.overrides import load_yaml
from flows.page import start as start_section
from storage.registry.models import find_model, list_models, list_versions
from storage.store.objects import open_store
from tests.fixtures.page import publish
from tests.fixtures.runs.toy_run import ToyRun
from tests.flows.page.conftest import page_client


@pytest.fixture
def page(tmp_path: Path) -> TestClient:
    return page_client(tmp_path / "store")


def right_values(folder: Path, tiny: Path) -> dict[str, str]:
    (folder / "prompts.jsonl").write_text('{"prompt": "1"}\n' * 40)
    return {
        "training": "grpo", "v.model.key": str(tiny), "v.data.train": str(folder / "prompts.jsonl"),
        "v.grader.path": "tests.fixtures.toy:digit_share", "v.algorithm.steps": "2", "v.sampling.max_new_tokens": "6",
        "v.algorithm.samples_per_batch": "16", "v.algorithm.samples_per_mini_batch": "16",
    }  # fmt: skip


def start(page: TestClient, sent: dict[str, str]) -> Any:
    """Checks the values, and presses the button that the page shows then."""
    button = re.search(r'name="start" value="(\w+)"', page.post("/start", data=sent).text)
    assert button is not None
    return page.post("/start", data=sent | {"start": button[1]})


def error_of(text: str, path: str) -> str:
    """The error at the field of a key."""
    found = re.search(rf'<p class="error" id="e-v\.{re.escape(path)}">(.*?)</p>', text, re.S)
    return html.unescape(found[1]) if found else ""


def value(text: str, path: str) -> str:
    """The value in the field of a key."""
    found = re.search(rf'name="v\.{re.escape(path)}"[^>]* value="([^"]*)"', text)
    assert found, path
    return html.unescape(found[1])


def test_every_training_has_a_field_for_each_key(page: TestClient) -> None:
    listed = page.get("/start").text
    for name, training in TRAININGS.items():
        assert f"/start?training={name}" in listed
        text = page.get(f"/start?training={name}").text
        fields = set(re.findall(r'name="v\.([\w.]+)"', text))
        # the keys of a group of several kinds are written in its own field
        for key in config_keys(training.config):
            parts = key.path.split(".")
            assert any(".".join(parts[:count]) in fields for count in range(1, len(parts) + 1)) or any(
                field.startswith(f"{key.path}.") for field in fields
            ), key.path


def test_the_lists_of_a_field_have_what_the_store_has(page: TestClient, tmp_path: Path) -> None:
    publish(open_store(tmp_path / "store"), tmp_path, "m", "v1")
    for training, offered in {
        "distill": {"model.key": "m@v1", "teacher.key": "m@v1", "data.heldout": "{split: 0.1}"},
        "dpo": {"model.key": "m@v1", "data.heldout": "{split: 0.1}", "data.train": "{kind: file, "},
        "evaluation": {"models": "[m@v1]"},
    }.items():
        text = page.get(f"/start?training={training}").text
        for path, choice in offered.items():
            assert f'list="l-v.{path}"' in text
            listed = text.partition(f'<datalist id="l-v.{path}">')[2].partition("</datalist>")[0]
            assert f'<option value="{choice}' in listed, (training, path)


def test_all_errors_stand_at_their_fields_and_what_was_typed_is_kept(page: TestClient) -> None:
    sent = {
        "training": "grpo",
        "v.model.key": "/no/such/model",  # not there
        "v.data.train": "/no/such/rows.jsonl",  # not there
        "v.data.heldout": "{kind: fil, split: 0.2}",  # no such kind
        "v.algorithm.steps": "2",
        "v.optimizer.lr": "fast",  # no number
        "v.sampling.stop": "[a",  # not closed
        "v.optimizer.warmup_steps": "9",  # longer than the run
        "v.run": "<script>alert(1)</script>",
    }
    answer = page.post("/start", data=sent)
    assert answer.status_code == 422
    text = answer.text
    assert "given kind='fil'; give one of file, hub" in error_of(text, "data.heldout")
    assert "cannot be parsed" in error_of(text, "sampling.stop")
    assert "/no/such/model" in error_of(text, "model.key")
    assert "/no/such/rows.jsonl" in error_of(text, "data.train")
    assert "number" in error_of(text, "optimizer.lr")
    assert "missing" in error_of(text, "grader.path")
    assert "is more than" in error_of(text, "optimizer.warmup_steps")
    assert 'value="fast"' in text and 'value="{kind: fil, split: 0.2}"' in text
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text
    assert "Start the run" not in text


def test_a_right_config_shows_the_estimate_and_a_button(page: TestClient, tmp_path: Path, tiny_folder: Path) -> None:
    text = page.post("/start", data=right_values(tmp_path, tiny_folder)).text
    assert "The config is right. No estimate: the run has an engine of its own" in text
    assert "Start the run" in text
    # the form keeps its key, so that a second press is recognised
    assert re.search(r'name="key" value="[0-9a-f]{32}"', text)
    # Enter in a field presses the first button of the form, as HTML defines it
    first = re.search(r"<button [^>]*>", text[text.index('name="key"') :])
    assert first is not None and 'value="check"' in first[0]


def test_values_that_were_changed_after_the_estimate_start_nothing(
    page: TestClient, tmp_path: Path, tiny_folder: Path
) -> None:
    """Prefect is not there, so a start would be an error page."""
    sent = right_values(tmp_path, tiny_folder)
    assert start(page, sent).status_code == 502
    shown = re.search(r'name="start" value="(\w+)"', page.post("/start", data=sent).text)
    assert shown is not None
    for button in (shown[1], "start"):
        answer = page.post("/start", data=sent | {"v.seed": "1", "start": button})
        assert answer.status_code == 200 and "Nothing was started: the values have changed" in answer.text
        assert shown[1] not in answer.text and 'name="start"' in answer.text


def test_the_key_of_another_run_is_refused_at_its_field(toy_run: ToyRun, tmp_path: Path, tiny_folder: Path) -> None:
    sent = right_values(tmp_path, tiny_folder) | {"v.run": "toy"}
    answer = page_client(toy_run.folder).post("/start", data=sent)
    message = error_of(answer.text, "run")
    assert "run 'toy' was started with another configuration" in message
    assert "algorithm.steps: the run has 4, given 2" in message
    assert answer.status_code == 422 and "Start the run" not in answer.text


def test_fields_and_yaml_have_the_same_values(page: TestClient) -> None:
    fields = {"training": "evaluation", "v.models": "[m@v1, m@v2]", "v.run": "mine", "v.engine": ""}
    text = page.post("/start", data=fields | {"action": "yaml"}).text
    yaml = html.unescape(text[text.index("<textarea") : text.index("</textarea>")].partition(">")[2]).strip()
    assert load_yaml(yaml) == {"models": ["m@v1", "m@v2"], "run": "mine"}
    text = page.post("/start", data={"training": "evaluation", "yaml": yaml, "action": "fields"}).text
    assert 'name="yaml"' not in text and "Nothing was started" not in text
    assert (value(text, "models"), value(text, "run")) == ('["m@v1", "m@v2"]', "mine")
    # what a field cannot show is not lost
    for wrong, problem in (("run: [", "cannot be parsed"), ("rum: mine", "has no field")):
        kept = page.post("/start", data={"training": "evaluation", "yaml": wrong, "action": "fields"})
        assert kept.status_code == 422 and problem in kept.text and f"{wrong}</textarea>" in kept.text
    unread = page.post("/start", data=fields | {"v.models": "[m@v1", "action": "yaml"})
    assert "cannot be parsed" in error_of(unread.text, "models") and 'name="yaml"' not in unread.text


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:9", "http://127.0.0.1:1"])
def test_only_the_engine_of_the_page_is_asked_with_its_own_token(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    asked: list[HttpEngineSpec] = []

    async def expected(config: Any, store: Any, engine: HttpEngineSpec) -> str:
        asked.append(engine)
        return "estimate of the test"

    monkeypatch.setattr(start_section, "expected_of_run", expected)
    page = page_client(tmp_path / "store", engine="http://127.0.0.1:9")
    engine = {"v.engine": f"{{kind: http, url: {url}, token_env: HOME}}"} if url else {}
    text = page.post("/start", data=right_values(tmp_path, tiny_folder) | engine).text
    if url == "http://127.0.0.1:1":
        assert asked == [] and "No estimate: the run has an engine of its own" in text
    else:
        assert asked == [HttpEngineSpec(url="http://127.0.0.1:9", patience_seconds=5)]
        assert "stimate of the test" in text


def test_yaml_may_be_pasted(page: TestClient, tmp_path: Path, tiny_folder: Path) -> None:
    wrong = page.post("/start", data={"training": "sft", "yaml": "model: {key: x}\nmodel: {}"})
    assert wrong.status_code == 422 and "twice" in wrong.text and "model: {key: x}" in wrong.text
    yaml = f"model: {{key: {tiny_folder}}}\ndata: {{train: {{kind: file, path: /no/rows.jsonl}}}}"
    text = page.post("/start", data={"training": "sft", "yaml": yaml}).text
    assert "data.train" in text and "/no/rows.jsonl" in text


def test_a_copy_names_the_version_that_the_run_began_with(toy_run: ToyRun, tmp_path: Path) -> None:
    toy = toy_run.copied(tmp_path / "copy")
    record = json.loads(toy.store.get("runs/toy/run.json"))
    base = record["semantic"]["inputs"]["model"]
    (name, version), = [
        (name, version) for name in list_models(toy.store) for version in list_versions(toy.store, name)
        if find_model(toy.store, name, version).sha256 == base  # type: ignore[union-attr]
    ]  # fmt: skip
    record["semantic"]["model"]["key"] = name
    toy.store.put("runs/toy/run.json", json.dumps(record).encode())
    assert value(page_client(toy.folder).get("/start?copy=toy").text, "model.key") == f"{name}@{version}"


def test_copy_and_change_has_the_recorded_values_without_run_and_store(toy_run: ToyRun) -> None:
    text = page_client(toy_run.folder).get("/start?copy=toy").text
    assert (value(text, "run"), value(text, "storage.url")) == ("", "")
    assert value(text, "algorithm.steps") == "4"
    assert value(text, "grader.path") == "tests.fixtures.grading:even_share"
    assert value(text, "data.train").startswith('{"kind": "file", "path"')
    assert "deterministic" in value(text, "engine")


@pytest.fixture
def deployed(prefect_server: str) -> str:
    """A server with the deployment grpo, without a worker."""
    with get_client(sync_client=True) as client:
        flow = client.create_flow_from_name("grpo")
        client.create_deployment(flow, name="grpo")
    return prefect_server


def test_a_second_press_of_start_starts_nothing(deployed: str, tmp_path: Path, tiny_folder: Path) -> None:
    page = page_client(tmp_path / "store", deployed)
    sent = right_values(tmp_path, tiny_folder) | {"key": "f" * 32}
    first, second = start(page, sent), start(page, sent)
    assert first.status_code == second.status_code == 303
    assert first.headers["location"] == second.headers["location"]
    # other values are another run
    changed = start(page, sent | {"v.seed": "1"})
    assert changed.headers["location"] != first.headers["location"]
    # the page of a flow run that waits for a worker
    waiting = page.get(first.headers["location"])
    assert waiting.status_code == 200 and "Scheduled" in waiting.text and "every 5s" in waiting.text
    assert first.headers["location"] in page.get("/runs").text


def test_an_evaluation_that_waits_is_in_the_list_and_a_completed_one_is_not_there_twice(
    prefect_server: str, tmp_path: Path
) -> None:
    with get_client(sync_client=True) as client:
        flow = client.create_flow_from_name("evaluation")
        deployment = client.create_deployment(flow, name="evaluation")
        flow_run = client.create_flow_run_from_deployment(deployment).id
        page = page_client(tmp_path / "store", prefect_server)
        assert f'href="/runs/{flow_run}"' in page.get("/runs").text
        client.set_flow_run_state(flow_run, Completed(), force=True)
        assert f'href="/runs/{flow_run}"' not in page.get("/runs").text


def test_without_the_deployment_the_page_says_how_to_create_it(
    prefect_server: str, tmp_path: Path, tiny_folder: Path
) -> None:
    page = page_client(tmp_path / "store", prefect_server)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "completion": "2"}\n')
    sent = {"training": "sft", "v.model.key": str(tiny_folder), "v.data.train": str(rows)}
    answer = start(page, sent)
    assert answer.status_code == 409 and "ostinato deploy" in answer.text
