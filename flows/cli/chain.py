"""`ostinato verify`, `ostinato replay`, `ostinato fork`: a chain redone, a step executed again, a history shared."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flows.cli.output import (
    DEFAULT_STORAGE,
    AsJson,
    Storage,
    console,
    fill,
    messages,
    print_json,
    refusals,
    say_findings,
    table,
    usage_error,
)
from flows.cli.runs import RunArgument, runs_app
from flows.configs.overrides import ConfigError, load_config
from flows.runs.code_version import code_version
from storage.chain.fork import fork_run
from storage.chain.listing import run_chains
from storage.chain.records import Chain
from storage.errors import ObjectNotFound
from storage.store import keys
from storage.store.objects import ObjectStore, open_store

Stage = Annotated[str, typer.Option("--stage", help="Only this stage, like 0-grpo.")]
ModelName = Annotated[str, typer.Option("--model", help="Only this model's chain.")]
StepOption = Annotated[int, typer.Option("--step", help="Counted from 1, as `runs show` counts.", min=0)]


def add_chain_commands(app: typer.Typer) -> None:
    """Adds `runs`, `verify`, `replay` and `fork`."""
    app.add_typer(runs_app, name="runs")
    for command in (verify, replay, fork):
        app.command(command.__name__)(command)


# -- verify ----------------------------------------------------------------------------------------------------


def verify(
    run: RunArgument,
    stage: Stage = "",
    model: ModelName = "",
    from_checkpoints: Annotated[
        bool, typer.Option("--from-checkpoints", help="Redo each stretch between two checkpoints from the earlier one.")
    ] = False,
    sample: Annotated[
        int | None, typer.Option("--sample", help="Redo only that many such stretches, drawn at random.", min=1)
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Redoes a run on a clean engine and compares every digest and checkpoint; names the first tensor that differs."""
    with refusals(), _bar(hidden=as_json) as bar:
        report = _torch("engine.local.verify").verify_run(
            open_store(storage),
            run,
            stage=stage or None,
            model=model or None,
            from_checkpoints=from_checkpoints,
            sample=sample,
            on_step=_Tracker(bar),
        )
    if as_json:
        print_json(report)
    else:
        _say_verified(report, console())
    raise typer.Exit(1 if report.problems else 0)


class _Tracker:
    """One bar per chain."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.tasks = bar, dict[str, Any]()

    def __call__(self, chain: str, step: int, steps: int) -> None:
        if chain not in self.tasks:
            self.tasks[chain] = self.bar.add_task(chain, total=steps)
        self.bar.update(self.tasks[chain], completed=step, total=steps)


def _say_verified(report: Any, to: Console) -> None:
    shown = table(f"run {report.run}", "chain", "steps>", "redone>", "digests compared>", "checkpoints compared>", "")
    rows = (
        (c.chain, c.steps, c.redone, c.digests, c.checkpoints, "differs" if c.problems else "equal to the byte")
        for c in report.chains
    )
    to.print(fill(shown, rows))
    for note in dict.fromkeys(note for chain in report.chains for note in chain.notes):
        to.print(f"numerics: {note}", markup=False, highlight=False, soft_wrap=True)
    say_findings(report.problems, to)


# -- replay ----------------------------------------------------------------------------------------------------


def replay(  # noqa: PLR0913 - one option of the command each
    run: RunArgument,
    step: StepOption,
    stage: Stage = "",
    model: ModelName = "",
    loss: Annotated[
        list[str] | None, typer.Option("--loss", help="Another field of the loss, key=value. May be repeated.")
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Another learning rate.", min=0)] = None,
    batch_of: Annotated[int | None, typer.Option("--batch-of", help="The batch of another step.", min=1)] = None,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Executes one committed step again, as it was or with something else in its place. Commits nothing."""
    fields = _fields(loss or [])
    with refusals(), _bar(hidden=as_json) as bar:
        chain = _one_chain(open_store(storage), run, stage, model)
        engine = _torch("engine.local.replay")
        what_if = engine.WhatIf(loss=fields, lr=lr, batch_of=batch_of)
        task = bar.add_task(f"redoing up to step {step}", total=None)
        report = engine.replay_step(chain, step, what_if, on_step=lambda _, done: bar.update(task, completed=done))
    if as_json:
        body = report.model_dump(mode="json")
        print_json(body | {"weights_equal": report.weights_equal, "metrics_equal": report.metrics_equal})
    else:
        _say_replayed(report, console())
    differs = report.weights_equal is False or not report.metrics_equal
    raise typer.Exit(1 if differs and not what_if else 0)


def _fields(pairs: list[str]) -> dict[str, Any]:
    """key=value of each, read as in --set."""
    try:
        return load_config(None, pairs)
    except ConfigError as error:
        raise usage_error(f"--loss: {error}") from error


def _one_chain(store: ObjectStore, run: str, stage: str, model: str) -> Chain:
    """The chain that is meant: by name, else the only one of the last stage."""
    chains = run_chains(store, run)
    last = stage or (chains[-1].stage if chains else "")
    found = [chain for chain in chains if chain.stage == last and model in ("", chain.model)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{chain.stage}/{chain.model}" for chain in chains) or "none"
    count = "more than one chain is meant" if found else "there is no such chain"
    raise ObjectNotFound(f"{count} in run {run!r}, which has {known}; name one with --stage and --model")


def _say_replayed(report: Any, to: Console) -> None:
    changed = {k: v for k, v in report.what_if.model_dump().items() if v not in (None, {})}
    shown = table(f"step {report.step} of {report.chain}", "", "committed>", "what if>" if changed else "replayed>")
    names = [*report.committed, *(name for name in report.replayed if name not in report.committed)]
    rows = [(name, report.committed.get(name), report.replayed.get(name)) for name in names]
    digest = report.committed_digest
    rows.append(("weights", digest[:12] if digest else None, report.replayed_digest[:12]))
    to.print(fill(shown, rows))
    for note in report.notes:
        to.print(f"numerics: {note}", markup=False, highlight=False, soft_wrap=True)
    if changed:
        told = ", ".join(f"{name} {value}" for name, value in changed.items())
        to.print(f"what if: {told}. Nothing was committed.", markup=False, highlight=False, soft_wrap=True)
    elif report.weights_equal is None:
        equal = "equal" if report.metrics_equal else "NOT equal"
        to.print(f"the record keeps no digest of the weights; the metrics are {equal}")
    elif report.weights_equal and report.metrics_equal:
        to.print("[green]equal to the byte[/green]: the replay is the committed step")
    else:
        which = "weights" if not report.weights_equal else "metrics"
        tensor = f"; the first tensor that differs is {report.first_tensor}" if report.first_tensor else ""
        to.print(f"[red]NOT equal[/red]: the {which} differ from the committed ones{tensor}")


# -- fork ------------------------------------------------------------------------------------------------------


def fork(
    run: RunArgument,
    step: StepOption,
    new: Annotated[str, typer.Option("--run", help="Key of the new run.")],
    stage: Annotated[str, typer.Option("--stage", help="The stage the step is of; the last one if not given.")] = "",
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """A new run that shares history up to and including a step; its config may differ from there on."""
    with refusals(), messages().status(f"forking {run}"):
        info = fork_run(open_store(storage), run, new, step=step, stage=stage or None, code_version=code_version())
    if as_json:
        print_json(info.model_dump(mode="json") | {"new": new})
        return
    to = console()
    to.print(f"run {new} shares {info.stage} of {run} up to step {info.step}", markup=False, highlight=False)
    kind = keys.stage_kind(info.stage)
    to.print(f"go on with: ostinato run {kind} --config FILE --run {new}", markup=False, highlight=False)
    to.print("its data cursor goes on at the same epoch and row of the order that FILE's data and seed give")


# -- what they share -------------------------------------------------------------------------------------------


def _torch(module: str) -> Any:
    """A module of the embedded engine, by name: the command line must be importable without torch."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        said = "this command computes, and torch is not installed here: pip install 'ostinato[torch]'"
        raise usage_error(said) from error


def _bar(*, hidden: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=messages(), transient=True, disable=hidden)
