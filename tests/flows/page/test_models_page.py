"""The section Models: what it shows, downloads, promotions, rollbacks and deletions, each with its refusals."""

from __future__ import annotations

import html
import io
import json
import re
import tarfile
from pathlib import Path

import pytest

from storage.chain.records import Chain, CommitRecord, Numerics, OptimizerSpec, Root, StepRequest
from storage.chain.run_record import create_or_check_run
from storage.registry.decisions import alias_log, champion_of, decisions_of
from storage.registry.models import find_model, list_versions
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.page import HOSTILE, PageClient, publish
from tests.fixtures.runs.toy_run import ToyRun

NUMERICS = Numerics(backend="test", device="none", compute_dtype="float32", threads=1, max_tokens=1)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    store = open_store(tmp_path / "store")
    for version in ("v1", "v2", "v3"):
        publish(store, tmp_path, "m", version, sub__weights="w" * 1000)
    return store


@pytest.fixture
def page(store: ObjectStore) -> PageClient:
    return PageClient(store.url, engine="http://127.0.0.1:9", engine_token="s" * 20, engine_token_file="/a dir/token")


def test_models_are_promoted_and_rolled_back_with_a_reason(page: PageClient, store: ObjectStore) -> None:
    assert '<a href="/models/m">m</a>' in page.text("/models")
    for seen, version in enumerate(("v1", "v2")):
        typed = {"who": "Ada", "why": f"{version} is better", "over": str(seen)}
        assert page.done(f"/models/m/{version}/promote", **typed) == "/models/m"
    assert "Roll back to v1" in page.text("/models/m") and "v2 is better" in page.text("/models/m")
    assert page.done("/models/m/rollback", who="Bo", why="it repeats itself", over="2") == "/models/m"
    champion = champion_of(store, "m")
    assert champion is not None and (champion.version, champion.action) == ("v1", "rollback")
    assert [decision.who for decision in decisions_of(store, "m")] == ["Ada", "Ada", "Bo"]
    # nothing came before v1, so no rollback is offered
    assert "Roll back to" not in page.text("/models/m")


def test_versions_are_listed_by_the_time_of_their_publication(
    page: PageClient, store: ObjectStore, tmp_path: Path
) -> None:
    for version in ("step-9", "step-100", "step-20"):
        publish(store, tmp_path, "timed", version)
    assert re.findall(r'href="/models/timed/([\w-]+)"', page.text("/models/timed")) == ["step-20", "step-100", "step-9"]


def test_a_rollback_that_was_seen_twice_happens_once(page: PageClient, store: ObjectStore) -> None:
    for seen, version in enumerate(("v1", "v2", "v3")):
        page.done(f"/models/m/{version}/promote", who="Ada", why="better", over=str(seen))
    page.done("/models/m/rollback", who="Ada", why="worse", over="3")
    again = page.post("/models/m/rollback", who="Bo", why="worse", over="3")
    assert again.status_code == 409 and "the champion has changed since" in again.text
    assert [entry.version for entry in alias_log(store, "m")] == ["v1", "v2", "v3", "v2"]


def test_a_promotion_over_a_champion_that_was_not_seen_is_refused(page: PageClient, store: ObjectStore) -> None:
    assert 'name="over" value="0"' in page.text("/models/m/v2")
    page.done("/models/m/v1/promote", who="Ada", why="better", over="0")
    refused = page.post("/models/m/v2/promote", who="Bo", why="better", over="0")
    assert refused.status_code == 409 and "the champion has changed since" in refused.text
    assert page.post("/models/m/v2/promote", who="Bo", why="better", over="x").status_code == 422
    assert [entry.version for entry in alias_log(store, "m")] == ["v1"]
    assert 'name="over" value="1"' in page.text("/models/m/v2")


def test_a_decision_without_a_reason_keeps_what_was_typed(page: PageClient, store: ObjectStore) -> None:
    refused = page.post("/models/m/v1/promote", who="Ada", why=" ")
    assert refused.status_code == 422 and 'value="Ada"' in refused.text and "Give a reason" in refused.text
    refused = page.post("/models/m/rollback", who="", why="worse", over="1")
    assert refused.status_code == 422
    assert decisions_of(store, "m") == []


def test_a_get_changes_nothing(page: PageClient, store: ObjectStore) -> None:
    before = [info.key for info in store.list()]
    for path in ("/models/m/v1/promote", "/models/m/v1/delete", "/models/m/rollback", "/models/m", "/models/m/v1"):
        page.get(path)
    assert [info.key for info in store.list()] == before
    assert page.client.post("/models/m/v1/delete").status_code == 403


def test_a_version_is_deleted_unless_something_needs_it(page: PageClient, store: ObjectStore) -> None:
    model = find_model(store, "m", "v1")
    assert model is not None
    Chain(store, "tuned", "0-sft", "policy").create_root(Root(base=model, base_digest=model.sha256))
    refused = page.post("/models/m/v1/delete")
    assert refused.status_code == 409 and "tuned began at m@v1" in refused.text
    page.done("/models/m/v2/promote", who="Ada", why="better", over="0")
    assert "is the champion" in page.post("/models/m/v2/delete").text
    assert page.done("/models/m/v3/delete") == "/models/m"
    assert list_versions(store, "m") == ["v1", "v2"]
    assert page.get("/models/m/v3").status_code == 404


def test_files_are_downloaded_one_by_one_and_as_a_tar(page: PageClient) -> None:
    file = page.get("/models/m/v1/files/sub/weights")
    assert file.content == b"w" * 1000 and file.headers["content-length"] == "1000"
    assert file.headers["content-disposition"] == 'attachment; filename="weights"'
    archive = page.get("/models/m/v1/tar")
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        assert sorted(tar.getnames()) == ["m-v1/config.json", "m-v1/note.txt", "m-v1/sub/weights"]
        weights = tar.extractfile("m-v1/sub/weights")
        assert weights is not None and weights.read() == b"w" * 1000


@pytest.mark.parametrize("name", ["ä", "a%2Fb", "%22x%22", "..%2F..", "%00", "<script>", "a" * 300, "%F0%9F%92%A9"])
def test_odd_names_are_refused_in_words(page: PageClient, name: str) -> None:
    for path in (f"/models/{name}", f"/models/m/{name}", f"/models/m/v1/files/{name}", f"/models/{name}/v1/tar"):
        reply = page.get(path)
        assert reply.status_code in (404, 409), path
        assert "<script>" not in reply.text.replace("<script src=", "")
    for path in (f"/models/{name}/rollback", f"/models/m/{name}/promote", f"/models/m/{name}/delete"):
        assert page.post(path, who="Ada", why="because", over="1").status_code in (404, 409), path


def test_evaluations_are_shown_with_intervals_and_escaped_samples(page: PageClient, store: ObjectStore) -> None:
    score = {"dataset": "sums", "grader": "exact", "mean": 0.5, "low": 0.4, "high": 0.6, "prompts": 8,
             "completions": 8, "masked": 0}  # fmt: skip
    sample = {"dataset": "sums", "prompt": "1+1?", "model": "m@v1", "answer": HOSTILE, "grader": "exact",
              "reward": 1.0, "reason": None}  # fmt: skip
    result = {"run": "evaluation-1", "scores": [score | {"model": "m@v1"}, score | {"model": "m@v2"}],
              "differences": [], "samples": [sample, sample | {"model": "m@v2", "answer": "of another"}]}  # fmt: skip
    Chain(store, "evaluation-1", "0-e", "policy").create_root(Root(base_digest="b"))
    store.put(keys.result_json("evaluation-1"), canonical_json(result))
    text = page.text("/models/m/v1")
    assert "0.400 to 0.600" in text and 'href="/runs/evaluation-1"' in text
    assert html.escape("<script>document.title") in text and "<script>document" not in text
    assert "of another" not in text
    assert "No finished evaluation" in page.text("/models/m/v3")


def test_a_version_says_how_to_call_and_to_evaluate_it(page: PageClient) -> None:
    text = html.unescape(page.text("/models/m/v1"))
    assert "curl http://127.0.0.1:9/v1/chat/completions" in text and '"model": "m@v1"' in text
    assert "$(cat '/a dir/token')" in text and "s" * 20 not in text
    link = "/start?training=evaluation&models=%5Bm%40v1%5D"
    assert link in text
    form = page.text(link)
    assert 'name="v.models" type="text" value="[m@v1]"' in form and 'name="v.suite.datasets"' in form
    # what is missing is said at its field
    refused = page.post("/start", training="evaluation", **{"v.models": "[m@v1]", "action": "check"})
    assert refused.status_code == 422 and 'id="e-v.suite.graders"' in refused.text


def test_an_evaluation_begins_with_what_the_run_of_the_version_knows(toy_run: ToyRun, tmp_path: Path) -> None:
    toy = toy_run.copied(tmp_path / "copy")
    record = json.loads(toy.store.get("runs/toy/run.json"))
    heldout = {"kind": "registered", "key": "sums@1"}
    record["other"]["data"] = {"heldout": heldout}
    toy.store.put("runs/toy/run.json", json.dumps(record).encode())
    page, model = PageClient(toy.store.url), json.loads(toy.store.get("runs/toy/result.json"))["model"]
    text = html.unescape(page.text(f"/models/{model.replace('@', '/')}"))
    link = re.search(r'href="(/start\?training=evaluation[^"]*)"', text)
    assert link is not None
    form = html.unescape(page.text(link[1]))
    assert f'name="v.models" type="text" value="[{model}]"' in form
    assert 'name="v.suite.datasets" type="text" value="[{source: {kind: registered, key: sums@1}}]"' in form
    assert 'name="v.suite.graders" type="text" value="[{path: \'tests.fixtures.grading:even_share\'}]"' in form
    # without such a run, the help of the fields has examples
    base = "/start?training=evaluation"
    assert "such as [{path: tasks.graders:ExactMatch}]" in page.text(base)
    assert "such as [{source: {kind: registered, key: sums}}]" in page.text(base)


def test_the_lineage_of_a_trained_version_names_its_base_and_its_run(
    page: PageClient, store: ObjectStore, tmp_path: Path
) -> None:
    base = find_model(store, "m", "v1")
    assert base is not None
    create_or_check_run(
        store, "tuned", semantic={"inputs": {"dataset": "d" * 64, "model": base.sha256}}, other={}, code_version="test"
    )
    chain = Chain(store, "tuned", "0-sft", "policy")
    chain.create_root(Root(base=base, base_digest=base.sha256))
    batch = ArtifactRef(kind="batch", key="b", sha256="0", bytes=1, rows=1, parents=())
    for step in range(2):
        request = StepRequest(parent=chain.policy(step), batch=batch, loss={}, optimizer=OptimizerSpec(lr=1.0))
        chain.commit(CommitRecord(
            request=request, state=request.next_state(), updates=1, numerics=NUMERICS, weights_digest="0"
        ))
    publish(store, tmp_path, "tuned", "1", parents=[chain.head().uri])
    row = page.text("/models/tuned").partition('href="/models/tuned/1"')[2].partition("</tr>")[0]
    assert '<a href="/runs/tuned">tuned</a>' in row
    imported = page.text("/models/m").partition('href="/models/m/v1"')[2].partition("</tr>")[0]
    assert "/runs/" not in imported and "<td>–</td>" in imported
    text = page.text("/models/tuned/1")
    assert 'Base model: <a href="/models/m/v1">m@v1</a>' in text
    assert '<a href="/runs/tuned">tuned</a>, steps 1 to 2' in text
    assert "2 gradient steps" in text  # of the card
