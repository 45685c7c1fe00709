"""Tests of the comparison of runs, from held-out rewards written by hand, and of its page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from tasks.evaluation.run_comparison import ComparedRun, config_differences, rank, render_comparison
from tasks.evaluation.statistics import paired_difference
from tasks.reports.metrics import StepMetrics


def run(name: str, rewards: dict[str, float] | None = None, steps: int = 3, **config: Any) -> ComparedRun:
    curve = tuple(
        StepMetrics(step=n, loss=1.0 - n, grad_norm=1.0, learning_rate=0.1, reward_mean=0.1 * n) for n in range(steps)
    )
    plan = None if rewards is None else "0123456789ab"
    return ComparedRun(
        run=name, policy=f"policy:{name}/0-grpo/policy@3#aa", steps=curve, config=config, plan=plan,
        rewards=rewards or {},
    )  # fmt: skip


GOOD = dict(zip("abcdefgh", [0.9, 1.0, 0.8, 0.9, 1.0, 0.9, 0.8, 0.9], strict=True))
NEAR = {"b": 0.9, "a": 1.0, "c": 0.7, "d": 0.9, "e": 0.9, "f": 1.0, "h": 0.9, "g": 0.8}
BAD = dict(zip("abcdefgh", [0.1, 0.2, 0.1, 0.0, 0.1, 0.0, 0.2, 0.1], strict=True))


def test_runs_are_ranked_and_paired_with_the_best_by_prompt() -> None:
    ranked = rank([run("bad", BAD), run("near", NEAR), run("none"), run("good", GOOD)])
    assert [one.run for one in ranked] == ["good", "near", "bad", "none"]
    assert [one.verdict for one in ranked] == [
        "the highest mean", "within chance of the best", "lower, beyond chance", "not evaluated",
    ]  # fmt: skip
    assert ranked[0].difference is None and ranked[3].mean is None
    # the order of the prompts in a run's table means nothing
    assert ranked[1].difference == paired_difference(
        [0.9, 1.0, 0.8, 0.9, 1.0, 0.9, 0.8, 0.9], [1.0, 0.9, 0.7, 0.9, 0.9, 1.0, 0.8, 0.9]
    )


def test_runs_on_other_prompts_are_not_compared() -> None:
    ranked = rank([run("a", {"x": 1.0, "y": 1.0}), run("b", {"z": 0.5})])
    assert ranked[1].verdict == "evaluated on other prompts" and ranked[1].difference is None


def test_a_run_that_beats_the_best_on_the_prompts_of_both_is_said_to() -> None:
    shared = "pqrstuvwxy"
    first = dict.fromkeys(shared, 0.0) | dict.fromkeys("abcdefghijklmno01234", 1.0)
    ranked = rank([run("a", first), run("b", dict.fromkeys(shared, 0.6))])
    assert [one.run for one in ranked] == ["a", "b"]
    assert ranked[1].verdict == "higher on the prompts of both"  # 10 times +0.6


def test_config_differences_are_the_keys_that_differ() -> None:
    runs = [run("a", lr=0.1, seed=0, same=[1]), run("b", lr=0.2, seed=0, same=[1], new=None)]
    assert config_differences(runs) == [("lr", ["0.1", "0.2"]), ("new", ["–", "null"])]


def test_the_page_stands_alone_and_shows_every_run() -> None:
    runs = [run("good", GOOD, lr=0.1), run("<b>bad</b>", BAD, lr=0.2, steps=60), run("none", lr=0.3)]
    page = render_comparison("A comparison", runs)
    assert page == render_comparison("A comparison", runs)
    assert not re.findall(r'<script|(?:src|href)\s*=\s*"(?!#)', page)
    assert "<b>bad" not in page and "&lt;b&gt;bad&lt;/b&gt;" in page
    figures = re.findall(r"<figure>.*?(<svg.*?</svg>)", page, flags=re.S)
    assert len(figures) == 4  # reward, loss, gradient norm, learning rate
    for figure in figures:
        assert len(_curves(figure)) == 3
    assert page.count("lr=0.2") == 2  # after the run's name, in the legend and in the table
    assert "lower, beyond chance" in page and "not evaluated" in page


def _curves(svg: str) -> set[str]:
    """The colours of the curves of a figure."""
    from tasks.reports.plots import SERIES_COLOURS

    ElementTree.fromstring(svg)  # well formed
    return {colour for colour in SERIES_COLOURS if colour in svg}


@pytest.mark.parametrize("count", [1, 9, 33])
def test_curves_keep_apart(count: int) -> None:
    from tasks.reports.plots import series_style

    assert len({series_style(number) for number in range(count)}) == min(count, 32)
