"""Tests of bench/learning: intervals and tables by hand, the missing runs, and one step of the smallest task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.learning import report
from bench.learning.calculator import CalculatorFactory, products, shown_episode
from bench.learning.evaluate import episode_grade
from bench.learning.tasks import TASKS, Data, Task
from engine.text.threads import StringThread
from tasks.graders.rules import LastNumber

ROOT = Path(__file__).parents[2]
TASK = TASKS["format-sft"]
ONE_STEP = """
import json, sys
from dataclasses import replace
from pathlib import Path
from bench.learning.__main__ import train_and_measure
from bench.learning.tasks import TASKS, Data
task = TASKS["sums-grpo"]
data = Data(task.data().train[:8], task.data().heldout[:2])
task = replace(task, data=lambda: data, steps=1, every=1, samples=4, completions=2, new_tokens=3)
print(json.dumps(train_and_measure(task, "ours", 0, model_folder=Path(sys.argv[1]))))
"""


def line(side: str, seed: int, scores: list[float], *, cpu: float = 10.0, **changes: Any) -> dict[str, Any]:
    points = []
    for number, score in enumerate(scores, start=1):
        points.append({"samples": 80 * number, "sampled_tokens": 0, "cpu_seconds": cpu * number, "score": score})
    settings = TASK.settings | changes
    return {
        "task": TASK.name, "side": side, "seed": seed, "settings": settings, "heldout_rows": 112, "points": points,
    }  # fmt: skip


# -- report --------------------------------------------------------------------------------------------------------


def test_the_interval_is_students_t_over_the_seeds() -> None:
    # mean 0.5; deviations -0.1, 0, 0.1: s = 0.1, error 0.1 / sqrt(3) = 0.057735; t of 2 degrees is 4.302653
    interval = report.Interval.of([0.4, 0.5, 0.6])
    assert interval.mean == pytest.approx(0.5)
    assert interval.half == pytest.approx(0.248414, abs=1e-5)
    assert str(interval) == "0.500 (0.252 to 0.748)"
    # t of one degree of freedom is 12.706, and no score is below 0 or above 1
    assert str(report.Interval.of([0.4, 0.6])) == "0.500 (0.000 to 1.000)"


def test_one_seed_has_no_interval() -> None:
    assert str(report.Interval.of([0.25])) == "0.250"


def test_a_section_has_the_means_over_the_seeds_that_are_there() -> None:
    lines = [line("base", 0, [0.125]), line("ours", 0, [0.2, 0.4]), line("ours", 2, [0.4, 0.6], cpu=30.0)]
    text = report.section(TASK, lines)
    # means 0.3 and 0.5, s = 0.1414, error 0.1, t of one degree is 12.7062, and scores are within 0 and 1; CPU-s are 20
    # and 60
    assert "| Ostinato | 2 of 3 | 0.125 | 0.300 (0.000 to 1.000) | 0.500 (0.000 to 1.000) | 0 | 40 | 0.011 |" in text
    assert "TRL" not in text


def test_a_task_without_results_is_named_as_not_measured() -> None:
    assert "Not measured yet" in report.section(TASK, [])
    assert f"| `{TASK.name}` | `sft` | 0 of 3 | 0 of 3 |" in report.coverage_table([])
    assert "| `sums-rft` | `rft` | 0 of 3 | none |" in report.coverage_table([])


def test_results_of_other_settings_do_not_count_and_the_newest_of_a_seed_does() -> None:
    lines = [line("ours", 0, [0.9], lr=1.0), line("ours", 0, [0.1]), line("ours", 0, [0.3])]
    curve = report.curve_of(TASK, "ours", lines)
    assert curve is not None
    assert curve.column("score", 0) == [0.3]


def test_the_page_and_a_figure_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    monkeypatch.setattr(report, "PAGE", tmp_path / "results.md")
    rows = [line("base", 0, [0.1]), line("ours", 0, [0.2, 0.4]), line("trl", 0, [0.3, 0.5])]
    report.path_of("runs").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report.write()
    page = (tmp_path / "results.md").read_text()
    assert "| TRL | 1 of 3 | 0.100 | 0.300 | 0.500 | 0 | 20 | 0.006 |" in page
    assert page.count("Not measured yet") == len(TASKS) - 1
    assert (tmp_path / f"{TASK.name}.svg").read_text().lstrip().startswith("<?xml")


# -- episodes ------------------------------------------------------------------------------------------------------


class ScriptedModel:
    """Gives the answers of a script, one after the other."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    async def generate(self, thread: StringThread) -> StringThread:
        return thread.assistant(self.answers.pop(0))


CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 11}}</tool_call>'


@pytest.mark.parametrize(
    ("answers", "grade"),
    [
        ([CALL, "It is 132."], 1.0),
        ([CALL, "It is 131."], 0.0),
        (["It is 132."], 1.0),
        # the third call ends the episode without an answer
        ([CALL, CALL, CALL], 0.0),
    ],
)
async def test_an_episode_with_the_tool_is_graded_by_its_last_answer(answers: list[str], grade: float) -> None:
    thread = StringThread([("user", "What is 12 times 11?")], metadata={"answer": 132})
    environment = CalculatorFactory().create_environment(thread.metadata)
    assert await episode_grade(ScriptedModel(*answers), thread, environment) == grade  # type: ignore[arg-type]


async def test_a_shown_episode_is_one_that_the_environment_plays() -> None:
    (row,) = products(1, Random(3))
    environment = CalculatorFactory().create_environment(row["metadata"])
    state = await environment.initialize_state(StringThread([("user", row["prompt"])]))
    shown = [(message["role"], message["content"]) for message in shown_episode(row)["messages"]]
    assert [(turn.role, turn.text) for turn in state.turns] == shown[:2]
    state, _ = await environment.react_to(state.assistant(shown[2][1]))
    assert state is not None
    assert [(turn.role, turn.text) for turn in state.turns] == shown[:4]
    assert await environment.react_to(state.assistant(shown[4][1])) == (None, 1.0)


# -- runs ----------------------------------------------------------------------------------------------------------


def test_the_missing_runs_are_those_without_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.learning.__main__ import missing

    monkeypatch.setattr(report, "FOLDER", tmp_path)
    rows = [line("base", 0, [0.1]), line("ours", 1, [0.2])]
    report.path_of("runs").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = [(side, seed) for _, side, seed in missing([TASK], (0, 1))]
    assert runs == [("ours", 0), ("trl", 0), ("trl", 1)]


def test_steps_that_are_not_a_multiple_of_the_interval_are_refused() -> None:
    with pytest.raises(ValueError, match="given steps=15, every=4"):
        Task("odd", "sft", lambda: Data([], []), LastNumber, "rows", "answers", every=4)


def test_one_step_of_our_side_is_measured(tiny_folder: Path) -> None:
    """In a process of its own, because the bench removes Prefect from the tasks."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ONE_STEP, str(tiny_folder)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["task"], result["side"], result["seed"], result["heldout_rows"]) == ("sums-grpo", "ours", 0, 2)
    (point,) = result["points"]
    assert point["samples"] == 4
    # four completions of at least one and at most three tokens
    assert 4 <= point["sampled_tokens"] <= 12
    assert point["cpu_seconds"] > 0
    assert point["score"] in (0.0, 0.5, 1.0)
