"""`grpo` from end to end on a toy: what a run leaves behind, and what the same key does a second time."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import httpx
import pandas
import pytest

import flows.grpo
import flows.ops.hooks
import flows.runs.session
import flows.training.shards
import tasks.report
from engine.connect import connect
from engine.local.engine import LocalEngine
from engine.workspace import Workspace
from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from storage.chain.leases import is_held
from storage.chain.records import Chain
from storage.errors import SemanticMismatch
from storage.store import keys
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.toy import toy_config, write_prompts

STAGE = "0-grpo"
HELDOUT_PROMPTS = 4


class Toy:
    """Runs of the toy task that share one store."""

    def __init__(self, folder: Path, tiny_folder: Path) -> None:
        self.folder, self.tiny_folder = folder, tiny_folder
        self.data = folder / "data"

    def config(self, run: str, **changes: Any) -> GRPOConfig:
        # the toy's own reward is 0 for nearly every completion of an untrained model: no step would move the weights
        changes = {"grader__path": "tests.fixtures.grading:even_share"} | changes
        return GRPOConfig.model_validate(toy_config(self.folder, self.tiny_folder, run=run, **changes))

    def run(self, run: str, **changes: Any) -> dict[str, Any]:
        return asyncio.run(grpo(self.config(run, **changes)))

    @property
    def store(self) -> ObjectStore:
        return open_store(str(self.data))

    def chain(self, run: str) -> Chain:
        return Chain(self.store, run, STAGE, "policy")

    def digests(self, run: str) -> list[str | None]:
        """Of the weights after each committed step."""
        chain = self.chain(run)
        records = [chain.record(step) for step in chain.steps()]
        return [record.weights_digest for record in records if record is not None]

    def files(self, run: str, kind: str, suffix: str = ".parquet") -> list[Path]:
        return sorted((self.data / "runs" / run / "stages" / STAGE).glob(f"{kind}/**/*{suffix}"))


@pytest.fixture
def toy(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> Toy:
    return Toy(tmp_path, tiny_folder)


@pytest.fixture(scope="module")
def finished(
    prefect_server: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> tuple[Toy, dict[str, Any]]:
    """A finished run of three steps, `done`, with a held-out evaluation. Tests read it, and leave it as it is."""
    toy = Toy(tmp_path_factory.mktemp("finished"), tiny_folder)
    heldout = {"kind": "file", "path": str(write_prompts(toy.folder / "heldout.jsonl")), "limit": HELDOUT_PROMPTS}
    return toy, toy.run("done", **three_steps(heldout))


def three_steps(heldout: dict[str, Any]) -> dict[str, Any]:
    return {"algorithm__steps": 3, "data__heldout": heldout, "model__name": "policy"}


def events(worklog: Path, *names: str) -> list[tuple[str, int]]:
    """(event, step) of the lines of these events, in order."""
    lines = [json.loads(line) for line in worklog.read_text().splitlines()]
    return [(line["event"], line["step"]) for line in lines if line["event"] in names]


# -- what a run leaves behind ------------------------------------------------------------------------------------


def test_each_step_is_one_record_and_one_line_of_metrics(finished: tuple[Toy, dict[str, Any]]) -> None:
    toy, result = finished
    assert list(toy.chain("done").steps()) == [1, 2, 3]
    head = toy.chain("done").head()
    assert result["policy"] == head.uri
    metrics = [json.loads(path.read_text()) for path in toy.files("done", "metrics", ".json")]
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert all(line["completions"] == 16 and line["masked"] == 0 for line in metrics)
    assert [line["prompts"] for line in metrics[:2]] == [4, 4]
    assert all(line["completion_length_mean"] == 6.0 and line["completion_tokens"] == 96 for line in metrics)
    assert [line["resumed"] for line in metrics] == [False, False, False]
    # the first step is taken from the reference itself
    assert metrics[0]["kl_mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[2]["kl_mean"] > 1e-6


def test_steps_change_the_weights_and_spend_prompts_once(finished: tuple[Toy, dict[str, Any]]) -> None:
    toy, _ = finished
    assert len(set(toy.digests("done"))) == 3
    records = list(toy.chain("done").records(0, 3))
    # four prompts a step, ten in an epoch
    assert [record.request.cursor_in for record in records] == [
        {"epoch": 0, "index": 0}, {"epoch": 0, "index": 4}, {"epoch": 0, "index": 8},
    ]  # fmt: skip
    assert records[-1].cursor_out == {"epoch": 1, "index": 2}
    rollouts = [pandas.read_parquet(path) for path in toy.files("done", "steps/*/rollouts")]
    seen = pandas.concat(rollouts)["prompt_index"].value_counts().to_dict()
    assert sorted(seen.values()) == [4] * 8 + [8] * 2  # four completions each; two prompts came again in epoch 1
    assert len({row for table in rollouts for row in table["seed"]}) == 48


def test_tables_open_with_pandas(finished: tuple[Toy, dict[str, Any]]) -> None:
    toy, _ = finished
    rollouts, graded = toy.files("done", "steps/000000/rollouts"), toy.files("done", "steps/000000/graded")
    assert len(rollouts) == len(graded) == 2  # two shards of two prompts
    for sampled_file, graded_file in zip(rollouts, graded, strict=True):
        sampled, grades = pandas.read_parquet(sampled_file), pandas.read_parquet(graded_file)
        assert len(sampled) == 8
        assert sampled[["prompt_id", "completion"]].equals(grades[["prompt_id", "completion"]])
        for text, thread, reward in zip(sampled["text"], sampled["thread"], grades["reward"], strict=True):
            assert json.loads(thread)["turns"][0]["role"] == "user"
            assert reward == pytest.approx(len([c for c in text[:6] if ord(c) in range(0, 1 << 21, 2)]) / 6)
    (batch_file,) = toy.files("done", "steps/000000/batch")
    batch = pandas.read_parquet(batch_file)
    assert len(batch) == 16
    for _, row in batch.iterrows():
        trained = int((row["weights"] > 0).sum())
        assert trained == 6
        assert len(row["token_ids"]) == len(row["weights"])
        for column in ("advantages", "old_logprobs", "reference_logprobs", "sampler_logprobs"):
            assert len(row[column]) == trained
        # the same weights in the same precision; the sampler's distribution leaves end-of-sequence out of six tokens
        # (min_new_tokens), which an untrained model gives about one probability of 261
        gap = row["sampler_logprobs"] - row["old_logprobs"]
        assert gap.min() > 0 and gap.max() < 2 / 261
    # a group's advantages sum to zero, and some group teaches something
    batch["advantage"] = [row[0] for row in batch["advantages"]]
    assert batch.groupby("group")["advantage"].sum().abs().max() < 1e-5
    assert batch["advantage"].abs().max() > 0.5


def test_the_published_model_is_a_plain_folder_that_answers(finished: tuple[Toy, dict[str, Any]]) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    toy, result = finished
    name, _, version = result["model"].partition("@")
    folder = toy.data / "models" / name / version
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert answer.shape[1] == prompt["input_ids"].shape[1] + 4
    trained, base = load_file(folder / "model.safetensors"), load_file(toy.tiny_folder / "model.safetensors")
    assert any(not torch.equal(trained[name].float(), base[name].float()) for name in base)


def test_heldout_prompts_are_evaluated_before_and_after_and_compared_in_pairs(
    finished: tuple[Toy, dict[str, Any]],
) -> None:
    toy, result = finished
    first, second = toy.files("done", "evaluations")
    before, after = pandas.read_parquet(first), pandas.read_parquet(second)
    assert first.name.startswith("000000-") and second.name.startswith("000003-")
    assert list(before["prompt_id"]) == list(after["prompt_id"])
    assert result["heldout"]["n"] == len(before) == HELDOUT_PROMPTS
    assert result["heldout"]["before_mean"] == pytest.approx(before["reward"].mean())
    assert result["heldout"]["after_mean"] == pytest.approx(after["reward"].mean())
    assert result["heldout"]["difference"] == pytest.approx((after["reward"] - before["reward"]).mean())


def test_the_report_stands_beside_the_run(finished: tuple[Toy, dict[str, Any]]) -> None:
    toy, result = finished
    page = Path(result["report"]).read_text()
    assert Path(result["report"]) == toy.data / keys.report("done")
    assert "done" in page and "<html" in page.lower()


@pytest.mark.slow
def test_the_report_shows_as_many_samples_as_asked_for(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    heldout = {"kind": "file", "path": str(write_prompts(toy.folder / "heldout.jsonl")), "limit": HELDOUT_PROMPTS}
    seen = []
    render = tasks.report.render_report
    monkeypatch.setattr(tasks.report, "render_report", lambda data: seen.append(data) or render(data))
    toy.run("few", algorithm__steps=1, data__heldout=heldout, evaluation={"samples_shown": 1})
    assert [(len(data.samples_before), len(data.samples_after)) for data in seen] == [(1, 1)]


# -- the same key again ------------------------------------------------------------------------------------------


def test_a_finished_key_answers_at_once(finished: tuple[Toy, dict[str, Any]], worklog: Path) -> None:
    toy, result = finished
    config = json.loads((toy.data / keys.run_json("done")).read_text())["semantic"]
    assert config["algorithm"]["steps"] == 3
    assert toy.run("done", **three_steps(_heldout(toy))) == result
    lines = [json.loads(line)["event"] for line in worklog.read_text().splitlines()]
    assert lines == ["open"]


def test_another_hyper_parameter_under_the_key_is_refused_with_both_values(
    finished: tuple[Toy, dict[str, Any]], worklog: Path
) -> None:
    toy, _ = finished
    with pytest.raises(SemanticMismatch) as refused:
        toy.run("done", optimizer__lr=5e-4, algorithm__clip_range=0.3, **three_steps(_heldout(toy)))
    message = str(refused.value)
    assert "optimizer.lr: the run has 0.001, given 0.0005" in message
    assert "algorithm.clip_range: the run has 0.2, given 0.3" in message
    assert "fork" in message and "'done'" in message
    assert message.count("the run has") == 2
    assert worklog.read_text() == ""


@pytest.mark.slow
def test_another_dataset_under_the_same_path_is_refused(toy: Toy) -> None:
    toy.run("k", algorithm__steps=1)
    config = toy.config("k", algorithm__steps=1)
    write_prompts(toy.folder / "prompts.jsonl", repeats=2)
    with pytest.raises(SemanticMismatch, match=r"inputs\.dataset"):
        asyncio.run(grpo(config))


def test_what_does_not_decide_the_result_may_change(
    finished: tuple[Toy, dict[str, Any]], worklog: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    toy, result = finished
    monkeypatch.setenv("OSTINATO_CODE_VERSION", "another-commit")
    config = toy_config(toy.folder, toy.tiny_folder, run="done", **three_steps(_heldout(toy)))
    config["grader"] = {
        "path": "tests.fixtures.grading:even_share", "timeout_seconds": 5.0, "retries": 0, "concurrency": 2,
        "max_masked_fraction": 1.0,
    }  # fmt: skip
    config["checkpoints"] = {"frequency": 0.5, "keep_last": 1}
    config["model"]["publish_as"] = "another-name"
    config["engine"]["max_rows"] = 8
    config["data"]["heldout"] = None
    assert asyncio.run(grpo(GRPOConfig.model_validate(config))) == result
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: code version" in said and "another-commit" in said
    assert not events(worklog, "step", "shard")


def _heldout(toy: Toy) -> dict[str, Any]:
    return {"kind": "file", "path": str(toy.folder / "heldout.jsonl"), "limit": HELDOUT_PROMPTS}


# -- interrupted and resumed -------------------------------------------------------------------------------------


class Interrupted(Exception):
    """Ends a run in the middle of a test."""


def interrupt_at(monkeypatch: pytest.MonkeyPatch, name: str, step: int) -> None:
    """The task `name` of the loop raises at a 0-based step, once."""
    module = flows.training.shards if name == "generate_rollouts" else flows.grpo
    task, left = getattr(module, name), [step]

    async def raises_once(*args: Any, **kwargs: Any) -> Any:
        if kwargs["step"] in left:
            left.clear()
            raise Interrupted(f"{name} at step {step}")
        return await task(*args, **kwargs)

    monkeypatch.setattr(module, name, raises_once)


async def leave_without_a_word(workspace: Workspace) -> None:
    pass


@pytest.mark.slow
def test_a_run_that_fails_gives_its_lease_back_and_leaves_nothing_to_redo(
    toy: Toy, worklog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = {"frequency": None, "recovery_steps": None}
    interrupt_at(monkeypatch, "take_gradient_step", step=3)
    with pytest.raises(Interrupted):
        toy.run("failed", algorithm__steps=5, checkpoints=checkpoints)
    store = toy.chain("failed").store
    assert not is_held(store, "failed")
    config = toy.config("failed")
    engine = cast(LocalEngine, connect(config.storage.url, config.engine))
    asyncio.run(engine.close(checkpoint=False))  # waits for the upload that leaving began
    connect.cache_clear()
    worklog.write_text("")
    result = toy.run("failed", algorithm__steps=5, checkpoints=checkpoints)
    assert events(worklog, "redo") == []
    assert ("restore", 3) in events(worklog, "restore")
    assert result["policy"].split("@")[1].startswith("5#")
    assert not is_held(store, "failed")


@pytest.mark.parametrize(
    ("at", "recovery_steps", "restored", "redone", "shards_again"),
    [
        ("prepare_batch", 2, 2, [3], {0}),  # from the checkpoint after step 2; the shards of step 4 are there
        pytest.param(  # from the base model: no step is lost without a checkpoint
            "take_gradient_step", None, 0, [1, 2, 3], {0}, marks=pytest.mark.slow
        ),
        pytest.param(  # of the two shards, one never ran, and one was on its way
            "generate_rollouts", 1, 3, [], {1, 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_an_interrupted_run_resumes_and_ends_in_the_same_bytes(
    toy: Toy, worklog: Path, monkeypatch: pytest.MonkeyPatch,
    at: str, recovery_steps: int | None, restored: int, redone: list[int], shards_again: set[int],
) -> None:  # fmt: skip
    checkpoints = {"frequency": None, "recovery_steps": recovery_steps, "keep_last": 9}
    interrupt_at(monkeypatch, at, step=3)
    for module in (flows.runs.session, flows.ops.hooks):  # as who is killed does
        monkeypatch.setattr(module, "release_run", leave_without_a_word)
    with pytest.raises(Interrupted):
        toy.run("interrupted", algorithm__steps=5, checkpoints=checkpoints)
    assert list(toy.chain("interrupted").steps()) == [1, 2, 3]
    connect.cache_clear()  # what was in memory is gone, as after a crash
    worklog.write_text("")
    result = toy.run("interrupted", algorithm__steps=5, checkpoints=checkpoints)
    starts = [json.loads(line) for line in worklog.read_text().splitlines()]
    assert [line["resumed_from"] for line in starts if line["event"] == "start"] == [3]
    done = events(worklog, "step", "redo", "restore")
    # the reference of the KL term, step 0, is restored too, whenever it is first asked for
    assert [entry for entry in done if entry[0] == "redo"] == [("redo", step) for step in redone]
    assert ("restore", restored) in done
    assert [entry for entry in done if entry[0] == "step"] == [("step", 4), ("step", 5)]
    assert len([step for _, step in events(worklog, "shard") if step == 3]) in shards_again
    assert result["policy"].split("@")[1].startswith("5#")

    whole = toy.run("whole", algorithm__steps=5)
    assert whole["policy"].split("#")[1] == result["policy"].split("#")[1]
    assert toy.digests("interrupted") == toy.digests("whole")
    assert None not in toy.digests("whole") and len(set(toy.digests("whole"))) == 5
    metrics = [json.loads(path.read_text()) for path in toy.files("interrupted", "metrics", ".json")]
    assert [line["resumed"] for line in metrics] == [False, False, False, True, False]


@pytest.mark.slow
def test_a_run_of_an_adapter_publishes_a_whole_model_and_resumes_to_the_same_bytes(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"algorithm__steps": 3, "model__adapter": {"rank": 2}, "model__publish_as": "adapted"}
    whole = toy.run("adapter", **changes)
    assert len(set(toy.digests("adapter"))) == 3
    interrupt_at(monkeypatch, "take_gradient_step", step=2)
    with pytest.raises(Interrupted):
        toy.run("again", **changes)
    connect.cache_clear()
    assert toy.run("again", **changes)["policy"].split("#")[1] == whole["policy"].split("#")[1]
    assert toy.digests("again") == toy.digests("adapter")
    folder = next((toy.data / "models" / "adapted").glob("000003-*"))
    assert {"model.safetensors", "tokenizer.json", "adapter"} <= {path.name for path in folder.iterdir()}
    assert (folder / "adapter" / "adapter_config.json").is_file()
    with pytest.raises(SemanticMismatch, match=r"model\.adapter\.rank: the run has 2, given 4"):
        toy.run("adapter", **changes | {"model__adapter": {"rank": 4}})


@pytest.mark.slow
def test_another_seed_is_another_run(toy: Toy) -> None:
    toy.run("seed-0", algorithm__steps=1)
    toy.run("seed-1", algorithm__steps=1, seed=1)
    assert toy.digests("seed-0") != toy.digests("seed-1")


# -- Prefect -----------------------------------------------------------------------------------------------------


def test_prefect_has_the_flow_run_and_every_task_run(toy: Toy, prefect_server: str) -> None:
    seed = time.time_ns() % 1_000_000_007  # no other run on this server is called so
    toy.run("recorded", algorithm__steps=2, seed=seed)
    title = toy.config("recorded", seed=seed).title
    wanted = {
        "load-prompts": 1, "rollout": 4, "grade": 4, "batch": 2, "step": 2, "checkpoint": 1, "publish": 1, "report": 1,
    }  # fmt: skip
    counts, states = _task_runs(prefect_server, title, wanted)
    assert counts == wanted | {"checkpoint": counts.get("checkpoint", 0)}
    assert counts["checkpoint"] >= 1
    assert states == {"COMPLETED"}


def _task_runs(api: str, flow_run: str, wanted: dict[str, int]) -> tuple[dict[str, int], set[str]]:
    """Task runs of a finished flow run by the first part of their names, and their states. Rows lag the run: it waits
    until there are as many of each name as wanted."""
    deadline = time.monotonic() + 30
    with httpx.Client(base_url=api, trust_env=False) as client:
        while True:
            found = client.post("/flow_runs/filter", json={"flow_runs": {"name": {"any_": [flow_run]}}}).json()
            ended = [run for run in found if run["state_type"] == "COMPLETED"]
            tasks: list[dict[str, Any]] = []
            if ended:
                query = {"flow_runs": {"id": {"any_": [ended[0]["id"]]}}, "limit": 200}
                tasks = client.post("/task_runs/filter", json=query).json()
            counts = Counter(
                next((name for name in wanted if task["name"].startswith(name)), task["name"]) for task in tasks
            )
            states = {task["state_type"] for task in tasks}
            if (Counter(wanted) <= counts and states == {"COMPLETED"}) or time.monotonic() > deadline:
                break
            time.sleep(0.5)
    assert len(found) == 1, f"the server has {len(found)} runs called {flow_run}"
    return dict(counts), states
