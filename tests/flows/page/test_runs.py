"""The list of runs and the page of a run, over the store of a real run."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from storage.chain.run_record import create_or_check_run
from storage.registry.models import find_model, list_versions
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.objects import ObjectStore, open_store
from tasks.evaluation.model_comparison import compare
from tests.fixtures.runs.toy_run import ToyRun
from tests.flows.page.conftest import page_client


def test_the_list_shows_state_progress_and_cost(client: TestClient) -> None:
    text = client.get("/runs").text
    row = text[text.index('href="/runs/toy"') : text.index("</tr>", text.index('href="/runs/toy"'))]
    assert "Completed" in row and "4 of 4" in row and re.search(r"<td>[0-9.]+ ?m?s</td>", row)


def test_without_prefect_the_list_says_so_and_takes_the_states_from_the_store(toy_run: ToyRun) -> None:
    text = page_client(toy_run.folder).get("/runs").text
    assert "does not answer" in text and "<td>Finished</td>" in text


def test_a_run_page_shows_its_numbers_and_parts(client: TestClient) -> None:
    page = client.get("/runs/toy").text
    assert "step 4 of 4" in page and "This flow run in Prefect" in page and "every 5s" not in page
    assert client.get("/run-parts/curves/toy").text.count("<figure>") > 4
    assert client.get("/run-parts/curves/toy?step=4").status_code == 204
    origin = client.get("/run-parts/origin/toy").text
    assert re.search(r'Published: <a href="/models/toy/[\w-]+">toy@', origin)
    assert "segment 1" in origin and "toy/0-grpo/policy, steps 1 to 4" in origin
    assert "algorithm.steps" in origin or "algorithm" in origin
    assert client.get("/run-parts/config/toy").text.startswith("# The config of run toy")
    assert "<pre" in client.get("/run-parts/log/toy").text
    report = client.get("/run-parts/report/toy")
    assert report.status_code == 200 and "sandbox" in report.headers["content-security-policy"]


def test_an_open_page_is_loaded_again_when_its_run_begins_or_ends(client: TestClient) -> None:
    # the page showed a flow run that waits, and one that runs
    for seen in ("False-True-False", "True-True-True"):
        assert client.get(f"/run-parts/live/toy?seen={seen}").headers["hx-refresh"] == "true"
    now = client.get("/run-parts/live/toy?seen=True-False-True")
    assert "hx-refresh" not in now.headers and "every 5s" not in now.text


def test_an_evaluation_is_copied_but_not_forked(toy_run: ToyRun, tmp_path: Path) -> None:
    toy = toy_run.copied(tmp_path / "copy")
    (version,) = list_versions(toy.store, "toy")
    model = find_model(toy.store, "toy", version)
    assert model is not None
    source = {"kind": "file", "path": "rows.jsonl"}
    graders = [{"path": "a:b"}]
    other = {
        "flow": "evaluation", "models": ["toy", "folder/m"], "storage": {"url": toy.store.url},
        "suite": {"datasets": [{"source": source}], "graders": graders},
    }  # fmt: skip
    semantic = {"evaluation": {}, "inputs": {"models": {f"toy@{version}": model.sha256, "m@1": "0" * 64}}}
    create_or_check_run(toy.store, "evaluation-1", semantic=semantic, other=other, code_version="test")
    # an earlier version recorded no datasets
    create_or_check_run(toy.store, "evaluation-0", semantic=semantic, other={}, code_version="test")
    client = page_client(toy.folder)
    row = client.get("/runs").text.partition('href="/runs/evaluation-1"')[2].partition("</tr>")[0]
    assert "<td>evaluation</td>" in row and "<td></td>" in row and ">0" not in row
    run = client.get("/runs/evaluation-1").text
    assert "Copy and change" in run and "Config as YAML" in run and "<dt>progress" not in run
    for name in ("evaluation-0", "evaluation-1"):
        assert 'action="/run-actions' not in client.get(f"/runs/{name}").text
    earlier = client.get("/runs/evaluation-0").text
    assert "Copy and change" not in earlier and "Config as YAML" not in earlier
    # the copy has the version that "toy" meant
    form = html.unescape(client.get("/start?copy=evaluation-1").text)
    assert "Start evaluation" in form and f'value="["toy@{version}", "folder/m"]"' in form
    assert 'name="v.suite.datasets" type="text" value="[{"source": {"kind": "file", "path": "rows.jsonl"}}]"' in form
    # the form has no fields for tasks of lm_eval
    other["suite"] = {"kind": "lm_eval", "tasks": ["arc_easy"]}
    create_or_check_run(toy.store, "evaluation-2", semantic=semantic, other=other, code_version="test")
    form = client.get("/start?copy=evaluation-2").text
    assert "Nothing was started" not in form and "arc_easy" in form.partition("<textarea")[2]
    assert "'ostinato evaluate --config FILE'" in client.get("/run-parts/config/evaluation-1").text


def finish_evaluation(store: ObjectStore, run: str, **result: Any) -> None:
    """Records an evaluation of a version that has this result."""
    semantic = {"evaluation": {}, "inputs": {"models": {}}}
    create_or_check_run(store, run, semantic=semantic, other={"flow": "evaluation"}, code_version="test")
    store.put(keys.result_json(run), canonical_json({"run": run, **result}))


def test_an_evaluation_shows_its_scores_and_changes(tmp_path: Path) -> None:
    """Three prompts: the base model solves one of them, and the trained one all three."""
    store = open_store(tmp_path / "store")
    rewards = {"m@1": (0.0, 0.0, 1.0), "m@2": (1.0, 1.0, 1.0)}
    rows = [
        {"model": model, "dataset": "sums", "grader": "exact", "prompt_index": number, "prompt_id": str(number),
         "reward": reward, "graded": 1, "completions": 1}
        for model, of_model in rewards.items() for number, reward in enumerate(of_model)
    ]  # fmt: skip
    comparison = compare(rows)
    sample = {"dataset": "sums", "prompt": "1+1?", "model": "m@2", "answer": "<b>two", "grader": "exact", "reward": 1.0,
              "reason": None}  # fmt: skip
    finish_evaluation(store, "evaluation-1", **comparison.model_dump(mode="json"), samples=[sample])
    page = page_client(tmp_path / "store")
    row = page.get("/runs").text.partition('href="/runs/evaluation-1"')[2].partition("</tr>")[0]
    assert "sums, exact: m@1 0.333" in row and "sums, exact: m@2 1.000" in row
    text = html.unescape(page.get("/runs/evaluation-1").text)
    (paired,) = (difference.paired for difference in comparison.differences)
    assert paired is not None and paired.low is not None and paired.high is not None
    for shown in ("Change from m@1", "0.333</td>", f"+0.667 ({paired.low:+.3f} to {paired.high:+.3f}): ", "m@2</td>"):
        assert shown in text, shown
    assert "answered by m@2" in text and "&lt;b&gt;two" in page.get("/runs/evaluation-1").text
    # the table replaces the raw values
    origin = html.unescape(page.get("/run-parts/origin/evaluation-1").text)
    assert "'mean'" not in origin and "scores" not in origin and '"mean"' not in origin


def test_an_evaluation_by_lm_eval_shows_its_scores(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    score = {"model": "m@1", "task": "arc_easy", "metric": "acc", "value": 0.5, "stderr": 0.1, "questions": 24}
    finish_evaluation(store, "harness", harness=[score])
    page = page_client(tmp_path / "store")
    assert "arc_easy, acc: m@1 0.500" in page.get("/runs").text
    row = page.get("/runs/harness").text.partition("<td>arc_easy</td>")[2].partition("</tr>")[0]
    # 1.96 standard errors on each side
    assert "0.304 to 0.696" in row and "24" in row and "Change from" not in page.get("/runs/harness").text


def test_a_part_without_content_has_no_heading(client: TestClient, tmp_path: Path) -> None:
    assert "<h2" in client.get("/run-parts/samples/toy").text
    create_or_check_run(open_store(tmp_path / "store"), "new", semantic={"a": [1]}, other={}, code_version="test")
    page = page_client(tmp_path / "store")
    assert page.get("/run-parts/samples/new").text.strip() == "" and "Samples" not in page.get("/runs/new").text
    assert "<td class=\"mono\">[1]</td>" in page.get("/run-parts/origin/new").text


def test_the_id_of_a_flow_run_leads_to_its_run(client: TestClient) -> None:
    flow_run = re.search(r"flow-run/([0-9a-f-]{36})", client.get("/runs/toy").text)
    assert flow_run
    answer = client.get(f"/runs/{flow_run[1]}")
    assert (answer.status_code, answer.headers["location"]) == (307, "/runs/toy")


def test_unknown_runs_are_an_error_that_says_where_it_looked(client: TestClient) -> None:
    for name in ("nothing", "00000000-0000-0000-0000-000000000000"):
        answer = client.get(f"/runs/{name}")
        assert answer.status_code == 404 and "This did not work" in answer.text
