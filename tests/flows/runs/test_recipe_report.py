"""Tests of the end of a recipe: its report with held-out results, what the commands show of it, and how its model is
called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.specs.engine import HttpEngineSpec
from engine.workspace import Workspace
from flows.callbacks import Cadence, GraderEvaluation
from flows.cli.main import app
from flows.display.terminal import TerminalProgress
from flows.grpo import GRPO
from flows.ops.state import TOKEN_FILE_ENV
from flows.parameters import Dataset, Model, dataset_kinds
from flows.recipe import InputConfig, RecipeContext, recipe_main
from flows.training.finish import say_where
from storage.store.artifacts import Provenance
from tasks.graders.base import BaseGrader


class Config(InputConfig):
    model: Model
    prompts: Dataset[dataset_kinds.Prompt]


@recipe_main
async def digits(config: Config, ctx: RecipeContext) -> str:
    model = await config.model.to_builder(ctx).spawn_train("policy", 256)
    prompts = await config.prompts.load(ctx)
    grader = BaseGrader.from_function("letters", letters, version="1")
    evaluation = GraderEvaluation(prompts, grader, Cadence(every=1.0), name="digits")
    await GRPO(
        prompts, model.max_gen_len(4), grader, max_num_grpo_steps=1, samples_per_batch=8, samples_per_mini_batch=8,
        completions_per_sample=4, lr=1e-3, checkpoint_frequency=None, callbacks=[evaluation],
    ).run()  # fmt: skip
    return await model.save("digits")


async def letters(thread: Any) -> float:
    return float(len(set(thread.last_content())) % 3)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


async def test_a_recipe_has_a_report_and_says_how_its_model_is_called(
    tmp_path: Path, tiny_folder: Path, prefect_server: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": str(digit)}) + "\n" for digit in range(4)))
    store = str(tmp_path / "store")
    config = Config.model_validate({
        "run": "mine", "model": str(tiny_folder), "prompts": str(rows), "storage": {"url": store},
        "engine": {"deterministic": True, "threads": 1},
    })  # fmt: skip
    model = await digits(config)
    # the last lines say where the model is, and how it is served and called
    *_, report_line, model_line, serve_line, call_line = capsys.readouterr().out.replace("\n ", " ").splitlines()
    assert "report: " in report_line and f"model {model}: " in model_line
    assert f"ostinato engine serve --storage file://{store}" in serve_line
    assert "curl http://127.0.0.1:8777/v1/chat/completions" in call_line and f'"model": "{model}"' in call_line

    # the page has a title, the models, and the results before and after
    shown = run("runs", "report", "mine", "--storage", store)
    page = Path(shown.replace("\n", "")).read_text()
    for text in ("<title>GRPO of tiny@", "trained from", model, "Before and after", "held-out reward"):
        assert text in page, text
    run("runs", "report", "mine", "--storage", store, "-o", "copy.html")
    assert (tmp_path / "copy.html").read_text() == page

    # the commands show the evaluations
    view = json.loads(run("runs", "show", "mine", "--storage", store, "--json"))
    (before, after) = view["evaluations"]["0-grpo"]
    for evaluation in (before, after):
        assert f'<td class="number">{evaluation["measures"]["reward"]:.3f}</td>' in page
    card = run("models", "card", model, "--storage", store)
    measure, value = next(iter(before["measures"].items()))
    line = f"| `mine/0-grpo` | digits: {measure} | {value:.4g} (step 0) | {after['measures'][measure]:.4g} (step 1) |"
    assert line in card
    # the report of a run that has not ended is made of what is there
    (tmp_path / "store" / "runs" / "mine" / "report.html").unlink()
    assert run("runs", "report", "mine", "--storage", store).strip() == "mine-report.html"
    assert "not finished" in (tmp_path / "mine-report.html").read_text()


@pytest.mark.parametrize(
    ("name", "file", "expected"),
    [("OSTINATO_ENGINE_TOKEN", "/a b/engine-token", "Bearer $(cat '/a b/engine-token')"),
     ("OSTINATO_ENGINE_TOKEN", "", "Bearer $OSTINATO_ENGINE_TOKEN"),
     ("MY_TOKEN", "/a b/engine-token", "Bearer $MY_TOKEN")],
)  # fmt: skip
def test_the_line_that_calls_a_model_names_the_file_of_the_token_of_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str, expected: str
) -> None:
    monkeypatch.setenv(name, "secret")
    monkeypatch.setenv(TOKEN_FILE_ENV, file)
    provenance = Provenance(code_version="test", config_digest="0" * 64, seed=0)
    engine = HttpEngineSpec(url="http://127.0.0.1:4201", token_env=name)
    lines: list[str] = []
    logger = TerminalProgress()
    monkeypatch.setattr(logger, "note", lines.append)
    workspace = Workspace(store=f"file://{tmp_path}", run="r", seed=0, provenance=provenance, engine=engine)
    say_where(workspace, "m@1", logger)
    assert lines[-1].startswith("to call it: curl http://127.0.0.1:4201/") and expected in lines[-1]
