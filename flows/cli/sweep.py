"""`ostinato evaluate | recurring | sweep --config FILE`, and `ostinato runs compare RUN RUN…`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console

from flows.cli.output import DEFAULT_STORAGE, AsJson, Storage, console, fill, print_json, refusals, table, usage_error
from flows.cli.runner import run_with_server
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.overrides import ConfigError, parse_config
from flows.configs.recurring import RecurringConfig
from flows.configs.sweep import SweepConfig
from storage.store.objects import open_store
from tasks.evaluation.model_comparison import Comparison, score_table

if TYPE_CHECKING:
    from tasks.evaluation.run_comparison import Ranked

Config = TypeVar("Config", bound=BaseModel)
ConfigFile = Annotated[Path, typer.Option("--config", help="YAML, TOML or JSON file.", exists=True, dir_okay=False)]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Override one key: a.b=c. May be repeated.")]
Server = Annotated[
    str, typer.Option("--server", help="Prefect API url; 'local' starts a server for this run and stops it.")
]


def add_search_commands(app: typer.Typer, runs: typer.Typer) -> None:
    """Adds `evaluate`, `recurring`, `sweep`, and `runs compare`."""
    for command in (evaluate, recurring, sweep):
        app.command(command.__name__)(command)
    runs.command("compare")(compare)


def evaluate(config: ConfigFile, sets: Sets = None, server: Server = "") -> None:
    """Compares models on fixed prompts: models x datasets x graders, in pairs, with intervals."""

    async def call(parsed: EvaluationFlowConfig) -> dict[str, Any]:
        from flows.evaluation import evaluation

        return await evaluation(parsed)

    def say(result: dict[str, Any], to: Console) -> None:
        found = Comparison.model_validate({name: result[name] for name in Comparison.model_fields})
        rows = score_table(found)
        to.print(fill(table("scores", *rows[0]), (row.values() for row in rows)))
        if found.differences:
            shown = table("changes, on the same prompts", "dataset", "grader", "from", "to", "change", "")
            changes = ((d.dataset, d.grader, d.first, d.second, d.paired, d.verdict) for d in found.differences)
            to.print(fill(shown, changes))
        to.print(f"table: {result['table']}", highlight=False, soft_wrap=True)

    _run(EvaluationFlowConfig, config, sets, server, call, say, what="the evaluation")


def recurring(config: ConfigFile, sets: Sets = None, server: Server = "") -> None:
    """Trains again when there is new data, and promotes the result only if it beats the champion."""

    async def call(parsed: RecurringConfig) -> dict[str, Any]:
        from flows.recurring import recurring as flow

        return await flow(parsed)

    def say(result: dict[str, Any], to: Console) -> None:
        said = f"{result['outcome']}; champion: {result['champion'] or 'none'}"
        to.print(said, highlight=False, soft_wrap=True, markup=False)

    _run(RecurringConfig, config, sets, server, call, say, what="it")


def sweep(config: ConfigFile, sets: Sets = None, server: Server = "") -> None:
    """A grid or a random search over config keys: child runs, and a page that compares them."""

    async def call(parsed: SweepConfig) -> dict[str, Any]:
        from flows.sweep import sweep as flow

        return await flow(parsed)

    def say(result: dict[str, Any], to: Console) -> None:
        from tasks.evaluation.run_comparison import Ranked

        _say_ranked([Ranked.model_validate(one) for one in result["ranked"]], to)
        to.print(f"comparison: {result['report']}", highlight=False, soft_wrap=True, markup=False)

    _run(SweepConfig, config, sets, server, call, say, what="the sweep")


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN…", help="Keys of two runs or more.")],
    out: Annotated[Path, typer.Option("--out", help="The page to write.", dir_okay=False)] = Path("comparison.html"),
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Compares runs on one page: curves over one another, config differences, which is better how surely."""
    from tasks.evaluation.run_comparison import (  # draws: slow to import
        collect_runs,
        config_differences,
        rank,
        render_comparison,
    )

    if len(set(runs)) < 2:
        raise usage_error("give two runs or more, each once; `ostinato runs ls` lists them")
    with refusals():
        store = open_store(storage)
        compared = collect_runs(store, list(dict.fromkeys(runs)))
    ranked, differing = rank(compared), config_differences(compared)
    out.write_text(render_comparison(" · ".join(run.run for run in compared), compared, store_url=store.url))
    if as_json:
        print_json({"ranked": [one.model_dump(mode="json") for one in ranked], "config": dict(differing)})
        return
    to = console()
    _say_ranked(ranked, to)
    shown = table("what the configs differ in", "key", *(run.run for run in compared))
    to.print(fill(shown, ([name, *values] for name, values in differing)))
    to.print(f"page: {out}", highlight=False, soft_wrap=True, markup=False)


def _say_ranked(ranked: list[Ranked], to: Console) -> None:
    shown = table("held-out reward, best first", "run", "mean>", "prompts>", "to the best, same prompts", "")
    for one in ranked:
        mean, prompts = (one.mean.mean, one.mean.n) if one.mean else (None, None)
        fill(shown, [(one.run, mean, prompts, one.difference, one.verdict)])
    to.print(shown)


def _run(
    kind: type[Config],
    file: Path,
    sets: list[str] | None,
    server: str,
    call: Callable[[Config], Coroutine[Any, Any, dict[str, Any]]],
    say: Callable[[dict[str, Any], Console], None],
    *,
    what: str,
) -> None:
    """Runs a flow whose run keys are made of what it does: the same command resumes it. Ends the command."""
    to = console()
    try:
        parsed = parse_config(kind, file, sets or [])
    except ConfigError as error:
        raise usage_error(f"{file} is not usable: {error}") from None
    status, result = run_with_server(lambda: call(parsed), to, what=what, log_name=file.stem, server=server)
    if status == 0:
        say(result, to)
    raise typer.Exit(status)
