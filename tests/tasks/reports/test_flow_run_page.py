"""Tests of the content and the size of the page of a running flow."""

from __future__ import annotations

import base64
import io
import itertools
import math
import re

import matplotlib.image

from engine.text.threads import StringThread
from storage.chain.records import SkippedUpdate
from storage.store import keys
from storage.store.artifacts import find_artifact
from storage.store.tables import read_table
from tasks.evaluation.validation_curve import Validation
from tasks.reports.flow_run_page import CURVE_POINTS, curves_uri, run_markdown, sample_row, sample_rows, thinned
from tasks.reports.metrics import StepMetrics
from tests.fixtures.runs.toy_run import ToyRun


def rl_step(step: int, **changes: object) -> StepMetrics:
    body = {
        "step": step, "total_steps": 20, "reward_mean": 0.25 + step / 100, "reward_std": 0.1, "kl_mean": 0.003,
        "loss": -0.5, "grad_norm": 1.0, "learning_rate": 1e-5, "completion_length_mean": 31.5,
        "seconds": {"rollout": 6.0, "train": 3.0, "storage": 1.0},
    }  # fmt: skip
    return StepMetrics.model_validate(body | changes)


def picture(markdown: str) -> tuple[int, int]:
    """Height and width of the one picture of a page."""
    (uri,) = re.findall(r"!\[[^\]]*\]\(data:image/png;base64,([A-Za-z0-9+/=]+)\)", markdown)
    height, width, _ = matplotlib.image.imread(io.BytesIO(base64.b64decode(uri)), format="png").shape
    return height, width


def test_the_page_shows_curves_figures_time_and_links() -> None:
    links = {"metrics of the engine": "http://127.0.0.1:1/metrics", "report": "/data/report.html"}
    page = run_markdown("r/1", [rl_step(0), rl_step(1), rl_step(2)], links=links)
    assert "### Run `r/1`" in page
    assert "![reward, KL to the reference, completion length, loss](" in page
    assert picture(page)[1] == 1000
    assert "| reward | 0.25 | 0.27 | 0.25 | 0.27 |" in page
    assert "| rollout | 6.000 s | 60% | 6.000 s |" in page
    assert "| **together** | 10.000 s | | 10.000 s |" in page
    assert "- metrics of the engine: <http://127.0.0.1:1/metrics>" in page
    assert "- report: `/data/report.html`" in page


def test_what_is_not_sampled_has_no_reward() -> None:
    step = StepMetrics(step=0, loss=2.5, grad_norm=1.0, learning_rate=1e-5, completion_length_mean=10.0)
    page = run_markdown("r", [step], links={})
    assert "![loss, gradient norm](" in page
    assert "| loss | 2.5 | 2.5 | 2.5 | 2.5 |" in page
    assert not [part for part in ("reward", "rollout", "held-out", "time") if part in page]


def test_heldout_measurements_before_during_and_after_training() -> None:
    steps = [rl_step(step) for step in range(4)]
    points = [(0, {"reward": 0.1875}), (2, {"reward": 0.0875}), (4, {"reward": 0.25, "entropy": 0.00002})]
    validations = [Validation(name="held-out", step=step, measures=measures) for step, measures in points]
    # as the run goes on; one point is not drawn
    first = run_markdown("r", steps[:1], validations[:1], links={})
    assert "| held-out: reward | 0.188 | – | – | – |" in first and "![reward, " in first
    assert "| held-out: reward | 0.188 | 0.087 | 2 | -0.100 |" in run_markdown("r", steps, validations[:2], links={})
    last = run_markdown("r", steps, validations, links={})
    assert "| held-out: reward | 0.188 | 0.250 | 4 | +0.062 |" in last and "![held-out: reward, reward, " in last
    assert "| held-out: entropy | – | 2e-05 | 4 | – |" in last


def test_a_loss_that_is_not_finite_is_a_gap() -> None:
    page = run_markdown("r", [rl_step(0, loss=math.nan), rl_step(1)], links={})
    assert "| loss | -0.5 | -0.5 | -0.5 | -0.5 |" in page
    assert "nan" not in page.partition("base64")[0]
    assert picture(page)


def test_the_picture_of_a_long_run_is_as_large_as_that_of_a_short_one() -> None:
    long = run_markdown("r", [rl_step(step) for step in range(5000)], links={})
    short = run_markdown("r", [rl_step(step) for step in range(10)], links={})
    assert picture(long) == picture(short)
    assert len(long) < 200_000


def test_equal_steps_give_equal_pictures() -> None:
    assert curves_uri([rl_step(0), rl_step(1)]) == curves_uri([rl_step(0), rl_step(1)])


def test_thinned_keeps_both_ends() -> None:
    steps = [rl_step(step) for step in range(2 * CURVE_POINTS + 17)]
    steps_left = [step.step for step in thinned(steps, 100)]
    assert len(steps_left) == 100
    assert steps_left[0] == 0 and steps_left[-1] == steps[-1].step
    gaps = {late - early for early, late in itertools.pairwise(steps_left)}
    assert max(gaps) - min(gaps) <= 1
    assert thinned(steps[:7], 100) == steps[:7]


def test_samples_are_the_committed_rollouts_with_their_grades(toy_run: ToyRun) -> None:
    rollouts, graded = (
        find_artifact(toy_run.store, keys.step_artifact("toy", "0-grpo", 3, kind, 1)) for kind in ("rollouts", "graded")
    )
    assert rollouts is not None and graded is not None
    rows = sample_rows(toy_run.store, rollouts, graded, count=3)
    texts = read_table(toy_run.store, rollouts, ["text"])["text"].to_pylist()
    rewards = read_table(toy_run.store, graded, ["reward"])["reward"].to_pylist()
    assert len(texts) == 8  # two prompts of four completions
    assert [row["grade"] for row in rows] == [round(rewards[at], 4) for at in (0, 2, 5)]
    for row, at in zip(rows, (0, 2, 5), strict=True):
        assert row["completion"] == re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", texts[at])
    assert len(sample_rows(toy_run.store, rollouts, graded)) == 8


def test_a_sample_shows_the_text_of_its_prompt_cut_short() -> None:
    question = "What is 4+5? " + "x" * 300
    thread = StringThread().system("Answer with a number.").user(question)
    drawn = {"thread": thread.to_json(), "text": "nine", "stop_reasons": ["stop"]}
    row = sample_row(drawn, {"status": "failed", "reward": None, "reason": "no number"})
    assert list(row) == ["grade", "prompt", "completion", "stopped by"]
    assert row == {
        "prompt": "What is 4+5? " + "x" * 187 + " \N{HORIZONTAL ELLIPSIS} (113 more characters)",
        "completion": "nine",
        "grade": "failed: no number",
        "stopped by": "stop",
    }


def test_the_page_says_why_updates_were_skipped() -> None:
    reasons = tuple(str(SkippedUpdate(update=number, grad_norm="inf", row=3)) for number in (1, 2))
    page = run_markdown("r/1", [rl_step(0), rl_step(1, skipped_updates=2, skipped_reasons=reasons)], links={})
    assert "- step 2: update 1 had a gradient of norm inf, and row 3 is not finite (rows count from 0)" in page
    assert "skipped updates" not in run_markdown("r/1", [rl_step(0)], links={})
    assert "skipped_reasons" not in rl_step(0).model_dump()


def test_who_worked_when_is_a_picture_of_a_run_whose_lanes_can_overlap() -> None:
    lanes = {"train": [(0.0, 2.0)], "rollout": [(1.0, 3.0)], "grade": []}
    title = "![trainer, samplers and graders over time](data:image/png;base64,"
    assert title in run_markdown("grpo-1", [rl_step(0, lanes=lanes), rl_step(1, lanes=lanes)], links={})
    assert title not in run_markdown("grpo-1", [rl_step(0), rl_step(1)], links={})
