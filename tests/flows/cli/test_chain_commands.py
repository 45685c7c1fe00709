"""Tests of the commands for chains: their output and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flows.cli.main import app
from flows.configs.common import GRPOConfig, StorageConfig
from flows.configs.overrides import load_config, parse_config
from storage.chain.records import Chain
from storage.chain.run_record import create_or_check_run
from storage.store import keys
from storage.store.artifacts import find_artifact, read_manifest
from storage.store.tables import commit_table, read_table
from tasks.evaluation.validation_curve import validation_entry
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import write_metrics
from tests.fixtures.engines import PROVENANCE
from tests.fixtures.runs.toy_run import ToyRun


@pytest.fixture
def toy(toy_run: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    # 'fork' writes a file into the working directory
    monkeypatch.chdir(tmp_path)
    return toy_run.copied(tmp_path / "copy")


def ostinato(run: ToyRun, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--storage", str(run.folder)])


def answer(run: ToyRun, *words: str, status: int = 0) -> Any:
    """The JSON document that a command prints."""
    result = ostinato(run, *words, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def test_ls_shows_runs_and_forks(toy: ToyRun) -> None:
    assert ostinato(toy, "fork", "toy", "--step", "2", "--run", "nightly/1").exit_code == 0
    rows = {row["run"]: row for row in answer(toy, "runs", "ls")}
    assert set(rows) == {"toy", "nightly/1"}
    run, new = rows["toy"], rows["nightly/1"]
    assert (run["state"], run["kind"], run["head_step"], run["lease_epoch"]) == ("finished", "grpo", 4, 1)
    assert (new["state"], new["created"], new["head_step"], new["lease_epoch"]) == ("fork", None, 2, 0)
    assert (run["forked_from"], new["forked_from"]) == (None, "toy/0-grpo@2")
    shown = ostinato(toy, "runs", "ls")
    assert "nightly/1" in shown.stdout
    assert "toy/0-grpo@2" in shown.stdout


def test_ls_leaves_out_what_was_not_started(toy: ToyRun) -> None:
    assert ostinato(toy, "fork", "toy", "--step", "2", "--run", "evaluation/ab12").exit_code == 0
    assert [row["run"] for row in answer(toy, "runs", "ls")] == ["toy"]
    assert [row["run"] for row in answer(toy, "runs", "ls", "--all")] == ["evaluation/ab12", "toy"]


def test_show_tells_the_run(toy: ToyRun) -> None:
    view = answer(toy, "runs", "show", "toy")
    assert view["semantic"]["grader"]["path"] == "tests.fixtures.grading:even_share"
    (chain,) = view["chains"]
    assert (chain["stage"], chain["head"], chain["checkpoints"]) == ("0-grpo", 4, [2, 4])
    assert view["last_metrics"]["0-grpo"]["step"] == 4
    assert view["chains"][0]["trainer"] == "torch"
    assert [lease["epoch"] for lease in view["leases"]] == [1]
    assert view["models"] == [{"model": view["result"]["model"], "policy": toy.chain.policy(4).uri}]
    shown = ostinato(toy, "runs", "show", "toy").stdout
    assert "tests.fixtures.grading:even_share" in shown
    assert view["result"]["model"] in shown


def test_show_has_evaluations_and_advice(toy: ToyRun) -> None:
    assert answer(toy, "runs", "show", "toy")["advice"] == []  # four steps are too few for advice
    policy = toy.chain.policy(4)
    for step in range(5, 10):  # as if five further steps had been made, all with equal rewards
        record = toy.chain.record(step - 1)
        assert record is not None
        request = record.request.model_copy(update={"parent": record.policy})
        toy.chain.commit(record.model_copy(update={"request": request, "state": request.next_state()}))
        metrics = StepMetrics(step=step - 1, loss=0.0, grad_norm=0.0, learning_rate=0.0, equal_groups=1.0)
        write_metrics(toy.store, policy, metrics)
    store, key = toy.store, "runs/toy/stages/0-grpo/evaluations/000000-held-out"
    table = read_table(store, read_manifest(store, "runs/toy/stages/0-grpo/steps/000001/graded/00000").ref)
    entry = validation_entry("held-out", {"reward": 0.25})
    commit_table(store, key, table, kind="graded", parents=(), provenance=PROVENANCE, extra=entry)
    view = answer(toy, "runs", "show", "toy")
    (sentence,) = view["advice"]
    assert sentence.startswith("in 100% of the groups, all completions had the same reward")
    assert view["evaluations"] == {"0-grpo": [{"name": "held-out", "step": 0, "measures": {"reward": 0.25}}]}
    shown = ostinato(toy, "runs", "show", "toy").stdout
    assert f"advice: {sentence}" in shown and "evaluations of 0-grpo" in shown


def test_a_named_checkpoint_is_shown_and_removed(toy: ToyRun) -> None:
    key = keys.checkpoint("toy", "0-grpo", "policy", 2)
    toy.store.put_if_absent(keys.checkpoint_name(key), b'{"name":"good"}')
    (chain,) = answer(toy, "runs", "show", "toy")["chains"]
    assert (chain["checkpoints"], chain["names"]) == ([2, 4], {"2": ["good"]})
    assert "2=good 4" in ostinato(toy, "runs", "show", "toy").stdout
    size = find_artifact(toy.store, key).bytes  # type: ignore[union-attr]
    remove = ("runs", "remove-checkpoint", "toy/0-grpo/good")
    would = ostinato(toy, *remove, "--dry-run")
    assert (would.exit_code, would.stdout) == (0, f"would remove {key}: {size / 2**20:.1f} MiB\n")
    assert find_artifact(toy.store, key) is not None
    assert answer(toy, *remove) == {"dry_run": False, "removed": [{"checkpoint": key, "bytes": size}]}
    (chain,) = answer(toy, "runs", "show", "toy")["chains"]
    assert (chain["checkpoints"], chain["names"]) == ([4], {})
    again = ostinato(toy, *remove)
    assert again.exit_code == 1
    assert "NoSuchCheckpoint: there is no checkpoint 'toy/0-grpo/good'" in again.stderr


def test_a_checkpoint_in_use_is_not_removed(toy: ToyRun) -> None:
    key = keys.checkpoint("toy", "0-grpo", "policy", 2)
    toy.store.put_if_absent(keys.checkpoint_name(key), b'{"name":"good"}')
    assert ostinato(toy, "fork", "toy", "--step", "2", "--run", "new").exit_code == 0
    refused = ostinato(toy, "runs", "remove-checkpoint", "toy/good")
    assert refused.exit_code == 1
    assert "run 'new' was forked there" in refused.stderr
    assert find_artifact(toy.store, key) is not None


def test_nothing_of_the_environment_is_shown(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hush-4f1c9b"
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "OSTINATO_ENGINE_TOKEN"):
        monkeypatch.setenv(name, secret)
    for words in (["runs", "ls"], ["runs", "show", "toy"], ["runs", "lineage", "toy"], ["verify", "toy"]):
        for form in ([], ["--json"]):
            assert secret not in ostinato(toy, *words, *form).output


def test_the_samples_of_a_step(toy: ToyRun) -> None:
    samples = answer(toy, "runs", "samples", "toy", "--stage", "0-grpo", "--step", "2")
    folder = "runs/toy/stages/0-grpo/steps/000001"
    graded, rollouts = (
        read_table(toy.store, read_manifest(toy.store, f"{folder}/{kind}/00000").ref).to_pylist()
        for kind in ("graded", "rollouts")
    )
    assert len(samples) == 16
    assert (samples[0]["prompt"], samples[0]["reward"], samples[0]["status"], samples[0]["text"]) == (
        graded[0]["prompt_id"], graded[0]["reward"], "ok", rollouts[0]["text"],
    )  # fmt: skip
    assert samples[0]["thread"] == rollouts[0]["thread"]
    missing = ostinato(toy, "runs", "samples", "toy", "--step", "9")
    assert missing.exit_code == 1 and "step 9 of toy/0-grpo has no graded completions" in missing.output


def test_the_newest_samples_by_their_rewards(toy: ToyRun) -> None:
    newest = answer(toy, "runs", "samples", "toy")
    assert newest == answer(toy, "runs", "samples", "toy", "--step", "4")
    rewards = sorted(sample["reward"] for sample in newest)
    assert [sample["reward"] for sample in answer(toy, "runs", "samples", "toy", "--worst", "3")] == rewards[:3]
    assert [sample["reward"] for sample in answer(toy, "runs", "samples", "toy", "--best", "3")] == rewards[:-4:-1]
    shown = ostinato(toy, "runs", "samples", "toy", "--worst", "3").output
    assert "samples of toy/0-grpo step 4" in shown
    assert "\x1b" not in shown and "\x07" not in shown  # a tiny model samples such characters
    unknown = ostinato(toy, "runs", "samples", "toy", "--stage", "7-sft")
    assert unknown.exit_code == 1 and "the run 'toy' has no graded samples in stage '7-sft'" in unknown.output
    assert ostinato(toy, "runs", "samples", "toy", "--worst", "3", "--best", "3").exit_code == 2


def test_lineage_of_a_model(toy: ToyRun) -> None:
    lineage = answer(toy, "runs", "lineage", "toy")
    assert lineage["base"].startswith("tiny@")
    assert [step["step"] for step in lineage["steps"]] == [1, 2, 3, 4]
    assert [step["completions"] for step in lineage["steps"]] == [16, 16, 16, 16]
    # ten prompts in an epoch: the first two steps cannot meet one twice
    assert len({*lineage["steps"][0]["prompts"], *lineage["steps"][1]["prompts"]}) == 8
    prompt = lineage["steps"][3]["prompts"][0]
    touched = answer(toy, "runs", "lineage", "toy", "--prompt", prompt)["prompt"]
    assert touched["ids"] == [prompt]
    assert "toy/0-grpo/policy@4" in touched["checkpoints"]
    assert ostinato(toy, "runs", "lineage", "toy").exit_code == 0
    assert "toy/0-grpo/policy@4" in ostinato(toy, "runs", "lineage", "toy", "--prompt", prompt).stdout
    result = ostinato(toy, "runs", "lineage", "toy", "--prompt", "no such text")
    assert result.exit_code == 1
    assert "no step of this lineage used" in result.stdout


def test_verify_says_what_is_equal_and_what_differs(toy: ToyRun) -> None:
    fine = ostinato(toy, "verify", "toy")
    assert fine.exit_code == 0, fine.output
    for words in ("equal to the byte", "checkpoints: 2", "published models: 1", "step digests: 4"):
        assert words in " ".join(fine.stdout.split())
    key = keys.chain_record("toy", "0-grpo", "policy", 3)
    body = json.loads(toy.store.get(key)) | {"weights_digest": "0" * 64, "tensor_digests": []}
    toy.store.put(key, json.dumps(body).encode())
    broken = ostinato(toy, "verify", "toy", "--stage", "0-grpo", "--model", "policy")
    assert broken.exit_code == 1
    assert f"error {key}: step 3 differs" in broken.stdout
    assert "what to do:" in broken.stdout
    (problem,) = answer(toy, "verify", "toy", status=1)["chains"][0]["problems"]
    assert problem["key"] == key


def test_replay_says_equal_aloud(toy: ToyRun) -> None:
    shown = ostinato(toy, "replay", "toy", "--step", "2")
    assert shown.exit_code == 0, shown.output
    assert "equal to the byte" in shown.stdout
    body = answer(toy, "replay", "toy", "--step", "2", "--lr", "0.5", "--loss", "kl_beta=0.5")
    assert body["what_if"] == {"loss": {"kl_beta": 0.5}, "lr": 0.5, "batch_of": None}
    assert body["weights_equal"] is False
    what_if = ostinato(toy, "replay", "toy", "--step", "2", "--lr", "0.5")
    assert what_if.exit_code == 0
    assert "Nothing was committed" in what_if.stdout
    assert Chain(toy.store, "toy", "0-grpo", "policy").head().step == 4


def test_config_prints_a_file_of_the_run(toy: ToyRun) -> None:
    printed = ostinato(toy, "runs", "config", "toy")
    assert printed.exit_code == 0, printed.output
    Path("toy.yaml").write_text(printed.stdout)
    recorded = parse_config(GRPOConfig, Path("toy.yaml"))
    # the copy of the store keeps the address that the run was started with
    assert recorded.model_copy(update={"storage": StorageConfig(**toy.config["storage"])}) == GRPOConfig.model_validate(
        toy.config
    )
    assert answer(toy, "runs", "config", "toy")["algorithm"]["steps"] == 4


def test_fork_says_how_to_go_on(toy: ToyRun) -> None:
    result = ostinato(toy, "fork", "toy", "--step", "3", "--run", "new")
    assert result.exit_code == 0, result.output
    assert "ostinato run grpo --config new.yaml" in result.stdout
    config = parse_config(GRPOConfig, Path("new.yaml"))
    assert config == GRPOConfig.model_validate(toy.config | {"run": "new", "storage": {"url": toy.store.url}})
    again = answer(toy, "fork", "toy", "--step", "3", "--run", "new")
    assert (again["new"], again["flow"], again["config"]) == ("new", "grpo", "new.yaml")
    assert Chain(toy.store, "new", "0-grpo", "policy").head().step == 3


def test_a_fork_of_a_recipe_says_how_to_go_on(toy: ToyRun) -> None:
    toy.store.delete(keys.run_json("toy"))
    semantic = {"seed": 2, "config": {"seed": 2, "steps": 7}}
    create_or_check_run(toy.store, "toy", semantic=semantic, other={}, code_version="test")
    result = ostinato(toy, "fork", "toy", "--step", "3", "--run", "new")
    assert result.exit_code == 0, result.output
    assert "its parameters are in new.yaml; it continues when its recipe is started with run: new" in result.stdout
    assert load_config(Path("new.yaml")) == {"run": "new", "seed": 2, "steps": 7, "storage": {"url": toy.store.url}}


def test_a_fork_without_a_config_is_made(toy: ToyRun) -> None:
    toy.store.delete(keys.run_json("toy"))
    result = ostinato(toy, "fork", "toy", "--step", "3", "--run", "new")
    assert (result.exit_code, list(Path().glob("*.yaml"))) == (0, [])
    assert "the config of new was not written: run 'new' has no config" in result.stderr
    assert Chain(toy.store, "new", "0-grpo", "policy").head().step == 3


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["runs", "show", "none"], 1, "no run 'none'"),
        (["runs", "show", "../x"], 2, "not a name"),
        (["runs", "lineage", "none"], 1, "neither a registered model nor a run"),
        (["verify", "none"], 1, "if the run is in another store, give it with --storage"),
        (["verify", "toy", "--sample", "0"], 2, "--sample"),
        (["replay", "toy", "--step", "9"], 1, "no step 9; it has steps 1 to 4"),
        (["replay", "toy", "--step", "1", "--model", "value"], 1, "no such chain"),
        (["replay", "toy", "--step", "1", "--loss", "kl_beta"], 2, "kl_beta"),
        (["replay", "toy", "--step", "1", "--loss", "kl_bata=1"], 1, "kl_bata"),
        (["replay", "toy", "--step", "0"], 2, "--step"),
        (["runs", "config", "none"], 1, "run 'none' has no config"),
        (["fork", "toy", "--step", "1", "--run", "toy"], 1, "into itself"),
        (["fork", "toy", "--step", "9", "--run", "new"], 1, "no step 9"),
        (["fork", "toy", "--step", "1"], 2, "--run"),
    ],
)
def test_refusals_are_one_message_and_a_status(toy_run: ToyRun, words: list[str], status: int, says: str) -> None:
    result = ostinato(toy_run, *words)
    assert result.exit_code == status, result.output
    assert says in result.output
    assert not result.output.startswith("\n")
    assert "Traceback" not in result.output
