"""Tests of `distill`: the teacher's log-probabilities in the batch, the advantages that follow, and what is refused."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
import pandas
import pytest
from pydantic import ValidationError

from engine.backends.torch.tiny import build_tiny_model
from engine.errors import BadSpec
from flows.configs.distill import DistillConfig
from flows.distill import distill
from tests.fixtures.engines import hugging_face_logprobs
from tests.fixtures.models import swap_two_tokens
from tests.fixtures.runs.flow_runs import GRADED, FlowRuns

ALONE = {"grader__path": "tasks.graders.rules:no_reward", "algorithm__kl_beta": 0.0}


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokenizer, half as many layers and so another size than the student."""
    return build_tiny_model(tmp_path_factory.mktemp("models") / "teacher", seed=7, layers=2)


def distill_runs(folder: Path, tiny_folder: Path, teacher: Path) -> FlowRuns:
    defaults = ALONE | {"teacher": {"key": str(teacher)}}
    return FlowRuns(folder, tiny_folder, distill, DistillConfig, stage="0-distill", defaults=defaults)


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path, teacher_folder: Path) -> FlowRuns:
    return distill_runs(tmp_path, tiny_folder, teacher_folder)


def teacher_terms(batch: pandas.DataFrame, teacher: Path) -> list[np.ndarray]:
    """For each row: the teacher's logprobs of the trained tokens by plain transformers, minus the sampler's."""
    terms = []
    for _, row in batch.iterrows():
        logprobs_S = np.array(hugging_face_logprobs(teacher, row["token_ids"].tolist()))
        theirs_T = logprobs_S[row["loss_mask"][1:]]
        np.testing.assert_allclose(row["teacher_logprobs"], theirs_T, atol=2e-5)
        terms.append(theirs_T - row["sampler_logprobs"])
    return terms


def test_the_advantage_of_a_token_is_its_log_ratio_to_the_teacher(runs: FlowRuns, teacher_folder: Path) -> None:
    runs.run("d", algorithm__steps=2, algorithm__teacher_beta=0.5)
    batches = runs.tables("d", "batch")
    assert len(batches) == 2
    for batch, metrics in zip(batches, runs.metrics("d"), strict=True):
        terms = teacher_terms(batch, teacher_folder)
        for advantages_T, term_T in zip(batch["advantages"], terms, strict=True):
            np.testing.assert_allclose(advantages_T, 0.5 * term_T, atol=2e-5)
        assert metrics["teacher_kl"] == pytest.approx(-np.concatenate(terms).mean(), abs=2e-5)
    assert len(set(runs.digests("d"))) == 2


def test_the_advantages_of_a_grader_are_added(runs: FlowRuns, teacher_folder: Path) -> None:
    runs.run("d", algorithm__steps=1, **GRADED)
    (batch,) = runs.tables("d", "batch")
    terms = teacher_terms(batch, teacher_folder)
    batch["term"] = terms
    for _, group in batch.groupby("group"):
        rewards = group["reward"].to_numpy()
        spread = rewards.std()
        by_reward = (rewards - rewards.mean()) / spread if spread else np.zeros(len(rewards))
        for (_, row), advantage in zip(group.iterrows(), by_reward, strict=True):
            np.testing.assert_allclose(row["advantages"], advantage + row["term"], atol=1e-3)


def test_a_model_that_is_its_own_teacher_learns_nothing(
    prefect_server: str, tmp_path: Path, tiny_folder: Path
) -> None:
    own = distill_runs(tmp_path, tiny_folder, tiny_folder)
    # with min_new_tokens, the sampler draws from a part of the vocabulary
    own.run("d", algorithm__steps=1, sampling__min_new_tokens=0)
    assert own.metrics("d")[0]["teacher_kl"] == pytest.approx(0, abs=1e-5)
    assert own.metrics("d")[0]["grad_norm"] == pytest.approx(0, abs=1e-4)


@pytest.mark.slow
def test_the_student_comes_near_to_the_teacher(runs: FlowRuns) -> None:
    sizes = {"samples_per_batch": 64, "samples_per_mini_batch": 64, "steps": 60}
    runs.run("d", **{f"algorithm__{name}": value for name, value in sizes.items()}, optimizer__lr=3e-3)
    distances = [line["teacher_kl"] for line in runs.metrics("d")]
    assert statistics.mean(distances[-5:]) < 0.5 * distances[0]


def test_a_teacher_with_other_tokens_or_a_short_context_is_refused(
    runs: FlowRuns, tmp_path: Path, teacher_folder: Path
) -> None:
    other = build_tiny_model(tmp_path / "other", seed=1)
    token_id = swap_two_tokens(other)
    with pytest.raises(BadSpec, match=f"token {token_id} is .* give a teacher with the same tokenizer"):
        runs.run("other", teacher__key=str(other))

    short = build_tiny_model(tmp_path / "short", seed=1)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 5}))
    with pytest.raises(BadSpec, match="reads 5 tokens, and a prompt with its completion may have 7"):
        runs.run("short", teacher__key=str(short))


def test_what_has_no_effect_is_refused(runs: FlowRuns) -> None:
    with pytest.raises(ValidationError, match="without a grader: every held-out reward would be 0"):
        runs.config("d", data__heldout={"kind": "file", "path": str(runs.folder / "prompts.jsonl")})
    with pytest.raises(ValidationError, match="leaves out prompts of equal rewards"):
        runs.config("d", rules={"dynamic_sampling": True})
    with pytest.raises(ValidationError, match="teacher_beta"):
        runs.config("d", algorithm__teacher_beta=0)
    with pytest.raises(ValidationError, match="top_p=0.9 .* leave top_p and top_k out of the sampling"):
        runs.config("d", sampling__top_p=0.9)
