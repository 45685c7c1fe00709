"""`ostinato evaluate | recurring | sweep --config FILE`, and `ostinato runs compare RUN RUN…`: compares models."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console

from flows.cli.output import (
    DEFAULT_STORAGE,
    AsJson,
    ConfigFile,
    Server,
    Sets,
    Storage,
    add_rows,
    console,
    print_json,
    print_plain,
    report_errors,
    table,
    usage_error,
)
from flows.cli.runner import run_with_server
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.overrides import ConfigError, parse_config
from flows.configs.recurring import RecurringConfig
from flows.configs.sweep import SweepConfig
from storage.store.objects import open_store
from tasks.evaluation.model_comparison import Comparison, score_table

SHOWN_CHARACTERS = 160
"""Characters of a prompt, an answer or a reason that are printed."""

if TYPE_CHECKING:
    from tasks.evaluation.run_comparison import Ranked

Config = TypeVar("Config", bound=BaseModel)


def add_search_commands(app: typer.Typer, runs: typer.Typer) -> None:
    """Adds `evaluate`, `recurring`, `sweep`, and `runs compare`."""
    for command in (evaluate, recurring, sweep):
        app.command(command.__name__)(command)
    runs.command("compare")(compare)


def evaluate(config: ConfigFile, sets: Sets = None, server: Server = "") -> None:
    """Compares models on fixed prompts: every model, dataset and grader, in pairs, with confidence intervals."""

    async def call(parsed: EvaluationFlowConfig) -> dict[str, Any]:
        from flows.evaluation import evaluation

        return await evaluation(parsed)

    def print_result(result: dict[str, Any], to: Console) -> None:
        if "harness" in result:
            scores = table("scores", "model", "task", "metric", "value>", "standard error>", "questions>")
            to.print(add_rows(scores, (row.values() for row in result["harness"])))
            return
        comparison = Comparison.model_validate({name: result[name] for name in Comparison.model_fields})
        rows = score_table(comparison)
        to.print(add_rows(table("scores", *rows[0]), (row.values() for row in rows)))
        if comparison.differences:
            changes = table("changes, on the same prompts", "dataset", "grader", "from", "to", "change", "")
            for each in comparison.differences:
                add_rows(changes, [(each.dataset, each.grader, each.first, each.second, each.paired, each.verdict)])
            to.print(changes)
        print_plain(to, "answers to the first prompts:")
        for sample in result["samples"]:
            print_plain(to, _sample_line(sample))
        print_plain(to, f"table: {result['table']}")
        print_plain(to, 'its rows: see "Scores per prompt" in docs/graders.md')

    _run(EvaluationFlowConfig, config, sets, server, call, print_result, what="the evaluation")


def _sample_line(sample: dict[str, Any]) -> str:
    """One line: prompt, model, answer, grade and reason. Texts are quoted, because a model may write any character."""
    reward = "no grade" if sample["reward"] is None else f"{sample['reward']:g}"
    reason = f": {sample['reason']!r:.{SHOWN_CHARACTERS}}" if sample["reason"] else ""
    prompt, answer = f"{sample['prompt']!r:.{SHOWN_CHARACTERS}}", f"{sample['answer']!r:.{SHOWN_CHARACTERS}}"
    where = f"{sample['dataset']}/{sample['grader']}"
    return f"  {prompt}  {sample['model']}: {answer}  {where} {reward}{reason}"


def recurring(config: ConfigFile, sets: Sets = None, server: Server = "") -> None:
    """Trains a new model when there is new data, and promotes it only if it is better than the champion."""

    async def call(parsed: RecurringConfig) -> dict[str, Any]:
        from flows.recurring import recurring as flow

        return await flow(parsed)

    def print_result(result: dict[str, Any], to: Console) -> None:
        print_plain(to, f"{result['outcome']}; champion: {result['champion'] or 'none'}")

    _run(RecurringConfig, config, sets, server, call, print_result, what="the training")


def sweep(config: ConfigFile, sets: Sets = None, server: Server = "") -> None:
    """Searches over config keys, on a grid or at random: starts child runs, and compares them on a page."""

    async def call(parsed: SweepConfig) -> dict[str, Any]:
        from flows.sweep import sweep as flow

        return await flow(parsed)

    def print_result(result: dict[str, Any], to: Console) -> None:
        from tasks.evaluation.run_comparison import Ranked

        _print_ranking([Ranked.model_validate(row) for row in result["ranked"]], to)
        print_plain(to, f"comparison: {result['report']}")

    _run(SweepConfig, config, sets, server, call, print_result, what="the sweep")


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN…", help="Keys of two or more runs.")],
    out: Annotated[Path, typer.Option("--out", help="File for the page.", dir_okay=False)] = Path("comparison.html"),
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Compares runs on one page: their curves, config differences, and which is better with what confidence."""
    # imported here, because the import of matplotlib takes seconds
    from tasks.evaluation.run_comparison import collect_runs, config_differences, rank, render_comparison

    if len(set(runs)) < 2:
        raise usage_error("give two or more different runs; 'ostinato runs ls' lists them")
    with report_errors():
        store = open_store(storage)
        compared = collect_runs(store, list(dict.fromkeys(runs)))
    # the page, and its tables for the terminal
    ranked, differing = rank(compared), config_differences(compared)
    title = " · ".join(run.run for run in compared)
    out.write_text(render_comparison(title, compared, store_url=store.url))
    if as_json:
        print_json({"ranked": [row.model_dump(mode="json") for row in ranked], "config": dict(differing)})
        return
    to = console()
    _print_ranking(ranked, to)
    difference_table = table("differences between the configs", "key", *(run.run for run in compared))
    to.print(add_rows(difference_table, ([name, *values] for name, values in differing)))
    print_plain(to, f"page: {out}")


def _print_ranking(ranked: list[Ranked], to: Console) -> None:
    ranking = table("held-out reward, best first", "run", "mean>", "prompts>", "to the best, same prompts", "")
    for row in ranked:
        mean, prompts = (row.mean.mean, row.mean.n) if row.mean else (None, None)
        add_rows(ranking, [(row.run, mean, prompts, row.difference, row.verdict)])
    to.print(ranking)


def _run(
    kind: type[Config],
    file: Path,
    sets: list[str] | None,
    server: str,
    call: Callable[[Config], Coroutine[Any, Any, dict[str, Any]]],
    print_result: Callable[[dict[str, Any], Console], None],
    *,
    what: str,
) -> None:
    """Runs a flow, prints its result and ends the command.

    The flow derives its run keys from its config, so the same command resumes it. `what` names it in a message.
    """
    # a bad config is reported before Prefect is imported
    to = console()
    try:
        parsed = parse_config(kind, file, sets or [])
    except ConfigError as error:
        raise usage_error(f"{file} is not a usable config: {error}") from None
    status, result = run_with_server(lambda: call(parsed), to, what=what, log_name=file.stem, server=server)
    if status == 0:
        print_result(result, to)
    raise typer.Exit(status)
