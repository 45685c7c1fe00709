"""Tests of `distill` with forward_kl and jsd, with answers of the dataset, and with several teachers: what is in the
batch, against plain transformers, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.backends.torch.tiny import build_tiny_model
from engine.errors import BadSpec, SampleTooLong
from engine.local.replay_rollouts import replay_rollouts
from engine.local.verify import verify_run
from engine.workspace import derive_seed
from flows.configs.distill import DistillConfig
from flows.distill import distill
from storage.chain.fork import fork_run
from storage.chain.listing import run_chains
from tests.fixtures.models import swap_two_tokens
from tests.fixtures.runs.flow_runs import FlowRuns

TOP = 5
PLAIN = {
    "grader__path": "tasks.graders.rules:no_reward", "algorithm__kl_beta": 0.0, "algorithm__clip_range": 0.1,
    "sampling__min_new_tokens": 0,
}  # fmt: skip
FORWARD = {"algorithm__divergence": "forward_kl", "algorithm__teacher_top_k": TOP}
ROWS = 12


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models with the student's tokenizer, of other sizes."""
    folder = tmp_path_factory.mktemp("models")
    return {name: build_tiny_model(folder / name, seed=seed, layers=2) for name, seed in (("odd", 7), ("even", 8))}


def make_runs(folder: Path, tiny_folder: Path, teacher: dict[str, Any]) -> FlowRuns:
    defaults = PLAIN | {"teacher": teacher}
    return FlowRuns(folder, tiny_folder, distill, DistillConfig, stage="0-distill", defaults=defaults)


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path, teachers: dict[str, Path]) -> FlowRuns:
    return make_runs(tmp_path, tiny_folder, {"key": str(teachers["odd"])})


def answer_of(number: int) -> str:
    return str(number % 10) * (1 + number % 3)


def answered(folder: Path) -> dict[str, Any]:
    """A dataset of twelve prompts with answers, and with `kind` in their metadata. Three steps read it once."""
    rows = []
    for number in range(ROWS):
        metadata = {"kind": "odd" if number % 2 else "even"}
        rows.append({"prompt": str(number), "completion": answer_of(number), "metadata": metadata})
    path = folder / "answered.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "file", "path": str(path)}


def distributions(folder: Path, row: pandas.Series) -> torch.Tensor:
    """(T, V): the logprobs of every token before each trained one, by plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits_SV = model(torch.tensor([row["token_ids"].tolist()])).logits[0]
    return logits_SV.log_softmax(-1)[np.flatnonzero(row["loss_mask"]) - 1]


def check_top(row: pandas.Series, teacher: Path) -> None:
    """The batch has the teacher's most probable tokens, in their order, with their logprobs."""
    logprobs_TV = distributions(teacher, row)
    ids_TK = row["teacher_top_ids"].reshape(-1, TOP)
    expected_TK, _ = logprobs_TV.topk(TOP)
    np.testing.assert_allclose(row["teacher_top_logprobs"].reshape(-1, TOP), expected_TK, atol=2e-5)
    np.testing.assert_allclose(logprobs_TV.gather(1, torch.tensor(ids_TK).long()), expected_TK, atol=2e-5)


def forward_kl(row: pandas.Series, student: Path) -> np.ndarray:
    """(T,): KL(teacher || student) over the teacher's tokens and the rest, from the committed columns."""
    ids_TK = torch.tensor(row["teacher_top_ids"].reshape(-1, TOP)).long()
    p_TK = np.exp(row["teacher_top_logprobs"].reshape(-1, TOP).astype(np.float64))
    q_TK = distributions(student, row).gather(1, ids_TK).double().exp().numpy()
    p_T, q_T = 1 - p_TK.sum(1), 1 - q_TK.sum(1)
    return (p_TK * np.log(p_TK / q_TK)).sum(1) + p_T * np.log(p_T / q_T)


def check_verified(runs: FlowRuns, run: str, *, steps: int) -> None:
    """The steps are computed again from the committed batches alone, and are equal."""
    report = verify_run(runs.store, run, model="policy")
    (chain,) = report.chains
    assert (chain.redone, report.problems) == (steps, [])


def test_the_batch_has_the_teachers_tokens_and_the_loss_is_the_divergence(
    runs: FlowRuns, tiny_folder: Path, teachers: dict[str, Path]
) -> None:
    runs.run("f", **FORWARD, algorithm__steps=2, algorithm__teacher_beta=0.5)
    first, second = runs.tables("f", "batch")
    for batch in (first, second):
        assert batch["advantages"].isna().all() and batch["old_logprobs"].isna().all()
        assert "teacher_logprobs" not in batch
        for _, row in batch.iterrows():
            check_top(row, teachers["odd"])
    divergence = np.concatenate([forward_kl(row, tiny_folder) for _, row in first.iterrows()]).mean()
    metrics = runs.metrics("f")
    assert metrics[0]["divergence"] == pytest.approx(divergence, rel=1e-4)
    assert metrics[0]["loss"] == pytest.approx(0.5 * divergence, rel=1e-4)
    assert metrics[1]["divergence"] < metrics[0]["divergence"]
    assert metrics[0]["logprob_gap"] < 1e-4  # of the step's own forward pass
    (one, two) = runs.records("f")
    assert one.request.loss == {
        "kind": "forward_kl", "weight": 0.5, "norm": "token_mean", "norm_constant": None,
    }  # fmt: skip
    assert "informative_fraction" not in one.metrics and one.weights_digest != two.weights_digest
    check_verified(runs, "f", steps=2)


def test_a_model_that_is_its_own_teacher_has_no_divergence(
    prefect_server: str, tmp_path: Path, tiny_folder: Path
) -> None:
    own = make_runs(tmp_path, tiny_folder, {"key": str(tiny_folder)})
    own.run("j", algorithm__divergence="jsd", algorithm__divergence_beta=0.2, algorithm__steps=1)
    assert own.metrics("j")[0]["divergence"] == pytest.approx(0, abs=1e-6)
    assert own.metrics("j")[0]["grad_norm"] == pytest.approx(0, abs=1e-4)
    assert own.records("j")[0].request.loss["beta"] == 0.2


def is_taken(row: int, step: int, on_policy: float) -> bool:
    """Whether a step takes the answer of a row, in a run with seed 0."""
    return derive_seed(0, "on_policy", step, row) / 2**63 >= on_policy


def test_answers_of_the_dataset_take_the_place_of_completions_by_chance(
    runs: FlowRuns, tiny_folder: Path, teachers: dict[str, Path]
) -> None:
    mixed = {**FORWARD, "data__train": answered(runs.folder), "data__on_policy": 0.5, "algorithm__steps": 3}
    runs.run("m", **mixed)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    taken = sampled = 0
    batches = runs.tables("m", "batch")
    for step, batch in enumerate(batches):
        assert batch["sampler_logprobs"].isna().all()
        shards = [pandas.read_parquet(path) for path in runs.files("m", f"steps/{step:06d}/rollouts")]
        rollouts = pandas.concat(shards)
        assert len(rollouts["prompt_index"].unique()) == 4  # 16 samples of groups of 4
        for row, group in rollouts.groupby("prompt_index"):
            if not is_taken(int(row), step, 0.5):
                assert len(group) == 4 and group["seed"].notna().all()
                sampled += 1
                continue
            taken += 1
            (answer,) = group["text"]
            assert answer == answer_of(int(row))
            assert group["seed"].isna().all() and not np.concatenate(list(group["logprobs"])).any()
            (ids,), (mask,) = group["token_ids"], group["loss_mask"]
            trained = tokenizer.decode(ids[mask])
            assert trained.startswith(answer) and not mask[: len(mask) - mask.sum()].any()
            assert ids[mask][-1] == tokenizer.eos_token_id
        for _, row in batch.iterrows():
            check_top(row, teachers["odd"])
    assert taken >= 2 and sampled >= 2
    metrics = runs.metrics("m")
    assert sum(line["completions"] for line in metrics) == 4 * sampled
    assert len(pandas.concat(batches)) == 4 * sampled + taken
    # a second run, and a fork, decide the same
    runs.run("again", **mixed)
    assert runs.digests("again") == runs.digests("m")
    fork_run(runs.store, "m", "fork", stage="0-distill", step=2, code_version="test")
    runs.run("fork", **mixed)
    assert runs.digests("fork")[-1] == runs.digests("m")[-1]
    # only what was sampled can be sampled again
    report = replay_rollouts(runs.chain("m"), 1)
    assert report.equal and report.completions == metrics[0]["completions"]
    check_verified(runs, "m", steps=3)


def test_answers_that_are_too_long_are_refused(runs: FlowRuns) -> None:
    data = {**FORWARD, "data__train": answered(runs.folder), "data__on_policy": 0.0}
    with pytest.raises(SampleTooLong, match="tokens, at most 1 are allowed .max_prompt_tokens"):
        runs.run("prompt", **data, data__max_prompt_tokens=1)


def test_a_run_on_the_dataset_alone_samples_nothing(runs: FlowRuns) -> None:
    runs.run("off", **FORWARD, data__train=answered(runs.folder), data__on_policy=0.0, algorithm__steps=3)
    for batch, line in zip(runs.tables("off", "batch"), runs.metrics("off"), strict=True):
        assert len(batch) == len(batch["group"].unique()) == 4
        assert (line["completion_tokens"], line["completions"]) == (0, 4)
    assert len(set(runs.digests("off"))) == 3
    with pytest.raises(BadSpec, match="sampled no completions"):
        replay_rollouts(runs.chain("off"), 1)
    # a dataset without answers
    with pytest.raises(Exception, match="completion"):
        runs.run("bare", **FORWARD, data__on_policy=0.0)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_each_prompt_has_the_teacher_of_its_column(
    prefect_server: str, tmp_path: Path, tiny_folder: Path, teachers: dict[str, Path], divergence: str
) -> None:
    by_value = {name: str(folder) for name, folder in teachers.items()}
    runs = make_runs(tmp_path, tiny_folder, {"column": "kind", "by_value": by_value})
    changes = FORWARD if divergence == "forward_kl" else {}
    runs.run("t", **changes, data__train=answered(tmp_path), algorithm__steps=2, algorithm__prompts_per_shard=3)
    counted: Counter[str] = Counter()
    for step, batch in enumerate(runs.tables("t", "batch")):
        shards = [pandas.read_parquet(path) for path in runs.files("t", f"steps/{step:06d}/rollouts")]
        kind_of = {}
        for _, row in pandas.concat(shards).iterrows():
            kind_of[row["prompt_id"]] = "odd" if row["prompt_index"] % 2 else "even"
        for _, row in batch.iterrows():
            kind = kind_of[row["group"]]
            counted[kind] += 1
            if divergence == "forward_kl":
                check_top(row, teachers[kind])
                continue
            target_T = torch.tensor(row["token_ids"][row["loss_mask"]]).long().unsqueeze(1)
            expected_T = distributions(teachers[kind], row).gather(1, target_T)[:, 0]
            np.testing.assert_allclose(row["teacher_logprobs"], expected_T, atol=2e-5)
    assert min(counted["odd"], counted["even"]) >= 4
    assert {chain.model for chain in run_chains(runs.store, "t")} == {"policy", "teacher-0", "teacher-1"}


def test_teachers_that_do_not_fit_are_refused_before_a_model_loads(
    prefect_server: str, tmp_path: Path, tiny_folder: Path, teachers: dict[str, Path]
) -> None:
    other = build_tiny_model(tmp_path / "other", seed=1)
    swap_two_tokens(other)
    runs = make_runs(tmp_path, tiny_folder, {"column": "kind", "by_value": {}})
    data = {"data__train": answered(tmp_path)}
    mismatched = {"column": "kind", "by_value": {"odd": str(teachers["odd"]), "even": str(other)}}
    with pytest.raises(BadSpec, match="give a teacher with the same tokenizer"):
        runs.run("other", teacher=mismatched, **data)
    missing = {"column": "kind", "by_value": {"odd": str(teachers["odd"])}}
    with pytest.raises(BadSpec, match="kind='even' in its metadata, and teacher.by_value has teachers for 'odd'"):
        runs.run("missing", teacher=missing, **data)
    absent = {"column": "kind", "by_value": {"odd": str(teachers["odd"]), "even": str(tmp_path / "nowhere")}}
    with pytest.raises(Exception, match="teacher.by_value.even"):
        runs.run("absent", teacher=absent, **data)
    for wrong in ({}, {"key": "a", "column": "kind"}, {"by_value": {"odd": "a"}}, {"column": "kind"}):
        with pytest.raises(ValidationError, match="give a key for one teacher, or column and by_value for several"):
            runs.config("wrong", teacher=wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__divergence_beta": 0.3}, "divergence_beta=0.3 acts only with divergence='jsd'"),
        (FORWARD | {"algorithm__divergence_beta": 0.3}, "and that is 'forward_kl'"),
        ({"algorithm__teacher_top_k": 3}, "teacher_top_k=3 acts only with divergence='forward_kl' or 'jsd'"),
        ({"data__on_policy": 0.5}, "use divergence='forward_kl' or 'jsd', or leave on_policy out"),
        (FORWARD | {"algorithm__clip_range": 0.2}, r"\['clip_range'\] have no effect with divergence='forward_kl'"),
        (FORWARD | {"algorithm__kl_beta": 0.1}, r"\['kl_beta'\] have no effect"),
        (FORWARD | {"regularisation": {"entropy_coef": 0.1}}, r"\['entropy_coef'\] have no effect"),
        (FORWARD | {"algorithm__teacher_top_k": 1025}, "teacher_top_k"),
        ({"algorithm__divergence": "jsd", "algorithm__divergence_beta": 1.0}, "divergence_beta"),
        (FORWARD | {"data__on_policy": 1.5}, "on_policy"),
        (FORWARD | {"data__on_policy": 0.5, "data__truncation": "left"}, "their answers would follow a cut prompt"),
    ],
)
def test_what_has_no_effect_is_refused(runs: FlowRuns, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        runs.config("d", **changes)


def test_defaults_leave_the_config_of_earlier_runs_as_it_was(runs: FlowRuns) -> None:
    body = runs.config("d").semantic()
    assert not {"divergence", "divergence_beta", "teacher_top_k"} & body["algorithm"].keys()
    assert "on_policy" not in body["data"]
    assert runs.config("d").model_dump(mode="json")["teacher"].keys() == {"key"}
