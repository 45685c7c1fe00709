"""`ostinato verify`, `ostinato replay` and `ostinato fork`: commands on the committed chain of a run."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flows.cli.output import (
    DEFAULT_STORAGE,
    AsJson,
    Storage,
    add_rows,
    console,
    messages,
    print_findings,
    print_json,
    print_plain,
    report_errors,
    table,
    usage_error,
)
from flows.cli.runs import RunArgument, runs_app
from flows.configs.overrides import ConfigError, load_config
from flows.runs.code_version import code_version
from flows.runs.recorded_config import RecordedConfig, read_config, write_config
from flows.training.endings import check_ending
from storage.chain.fork import fork_run
from storage.chain.listing import run_chains
from storage.chain.records import Chain
from storage.errors import ObjectNotFound, StorageError
from storage.store import keys
from storage.store.objects import ObjectStore, open_store, read_json

Stage = Annotated[str, typer.Option("--stage", help="Only this stage, for example 0-grpo.")]
ModelName = Annotated[str, typer.Option("--model", help="Only this model's chain.")]
StepOption = Annotated[int, typer.Option("--step", help="Number of the step, counted from 1.", min=1)]
ForkStep = Annotated[
    int, typer.Option("--step", help="Last step that is shared, counted from 1. 0: none, from the start.", min=0)
]


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
        bool, typer.Option("--from-checkpoints", help="Redo each segment between two checkpoints from the earlier one.")
    ] = False,
    sample: Annotated[
        int | None, typer.Option("--sample", help="Redo only this many segments, drawn at random.", min=1)
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Redoes a run on a new engine and compares all digests and checkpoints; names the first tensor that differs."""
    # torch is imported only here, when the verification starts
    with report_errors(), _progress_bar(hidden=as_json) as bar:
        report = import_with_torch("engine.local.verify").verify_run(
            open_store(storage),
            run,
            stage=stage or None,
            model=model or None,
            from_checkpoints=from_checkpoints,
            sample=sample,
            on_step=_ChainProgress(bar),
        )
        # an early ending follows from the records and the measurements, too
        result = read_json(open_store(storage), keys.result_json(run)) or {}
        ending_problem = check_ending(open_store(storage), result)
    if as_json:
        print_json(report.model_dump(mode="json") | ({"ending": ending_problem} if "ending" in result else {}))
    else:
        _print_verification(report, console())
        if "ending" in result:
            print_plain(console(), ending_problem or f"early ending: {result['ending']['reason']}, as its records say")
    raise typer.Exit(1 if report.problems or ending_problem else 0)


class _ChainProgress:
    """Shows the progress of each chain as a bar of its own."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.tasks = bar, dict[str, Any]()

    def __call__(self, chain: str, step: int, steps: int) -> None:
        if chain not in self.tasks:
            self.tasks[chain] = self.bar.add_task(chain, total=steps)
        self.bar.update(self.tasks[chain], completed=step, total=steps)


def _print_verification(report: Any, to: Console) -> None:
    columns = ("chain", "steps>", "redone>", "")
    rows: list[tuple[Any, ...]] = []
    # a dict keeps their order, and each note once
    notes: dict[str, None] = {}
    for chain in report.chains:
        outcome = "differs" if chain.problems else f"equal to the byte: {_compared(chain)}"
        rows.append((chain.chain, chain.steps, chain.redone, outcome))
        notes.update(dict.fromkeys(chain.notes))
    to.print(add_rows(table(f"run {report.run}", *columns), rows))
    for note in notes:
        print_plain(to, f"numerics: {note}")
    print_findings(report.problems, to)


def _compared(chain: Any) -> str:
    """What the redone weights of a chain were compared with."""
    compared = f"checkpoints: {chain.checkpoints}, published models: {chain.models}, step digests: {chain.digests}"
    return f"{compared}, sampled tokens: {chain.sampled_tokens}" if chain.sampled_tokens else compared


# -- replay ----------------------------------------------------------------------------------------------------


def replay(  # noqa: PLR0913 - one option of the command each
    run: RunArgument,
    step: StepOption,
    stage: Stage = "",
    model: ModelName = "",
    loss: Annotated[
        list[str] | None, typer.Option("--loss", help="Change a field of the loss: key=value. May be repeated.")
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Change the learning rate.", min=0)] = None,
    batch_of: Annotated[int | None, typer.Option("--batch-of", help="Use the batch of another step.", min=1)] = None,
    rollouts: Annotated[
        bool, typer.Option("--rollouts", help="Sample the step's completions again, instead of training on them.")
    ] = False,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Executes one committed step again, unchanged or with another loss, rate or batch. Commits nothing."""
    fields = _loss_fields(loss or [])
    if rollouts and (fields or lr is not None or batch_of is not None):
        raise usage_error("--rollouts samples the completions as they were sampled; leave --loss, --lr, --batch-of out")
    if rollouts:
        _replay_rollouts(run, step, stage, model, storage=storage, as_json=as_json)
        return
    # execute the step; no progress total, since the number of steps to the checkpoint is not known
    with report_errors(), _progress_bar(hidden=as_json) as bar:
        chain = find_chain(open_store(storage), run, stage, model)
        replaying = import_with_torch("engine.local.replay")
        what_if = replaying.WhatIf(loss=fields, lr=lr, batch_of=batch_of)
        task = bar.add_task(f"redoing up to step {step}", total=None)
        report = replaying.replay_step(chain, step, what_if, on_step=lambda _, done: bar.update(task, completed=done))
    if as_json:
        body = report.model_dump(mode="json")
        print_json(body | {"weights_equal": report.weights_equal, "metrics_equal": report.metrics_equal})
    else:
        _print_replay(report, console())
    # a replay without changes must be equal; one with changes may differ
    differs = report.weights_equal is False or not report.metrics_equal
    raise typer.Exit(1 if differs and not what_if else 0)


def _replay_rollouts(run: str, step: int, stage: str, model: str, *, storage: str, as_json: bool) -> None:
    """Samples the completions of a step again, and prints whether their tokens are equal."""
    with report_errors(), _progress_bar(hidden=as_json) as bar:
        chain = find_chain(open_store(storage), run, stage, model)
        replaying = import_with_torch("engine.local.replay_rollouts")
        task = bar.add_task(f"redoing up to step {step}", total=None)
        report = replaying.replay_rollouts(chain, step, on_step=lambda _, done: bar.update(task, completed=done))
    if as_json:
        print_json(report.model_dump(mode="json") | {"equal": report.equal})
    else:
        to = console()
        print_plain(
            to,
            f"step {report.step} of {report.chain}: {report.completions} completions, {report.tokens} tokens, "
            f"{report.cuts} cuts",
        )
        for note in report.notes:
            print_plain(to, f"numerics: {note}")
        if report.equal:
            to.print("[green]equal tokens[/green]: the completions are sampled again as they were")
        else:
            to.print(
                f"[red]NOT equal[/red]: {report.different_tokens} tokens of {report.different_completions} completions "
                "differ. Equal tokens are promised for the torch sampler with engine.deterministic=true"
            )
        print_plain(to, f"logprobs of equal tokens differ by {report.gap_mean:.2g} nats, at most {report.gap_max:.2g}")
    raise typer.Exit(0 if report.equal else 1)


def _loss_fields(pairs: list[str]) -> dict[str, Any]:
    """Parses key=value pairs in the same way as --set."""
    try:
        return load_config(None, pairs)
    except ConfigError as error:
        raise usage_error(f"--loss: {error}") from error


def find_chain(store: ObjectStore, run: str, stage: str, model: str) -> Chain:
    """The chain of the given stage and model. By default the stage is the last one, and the model its only one."""
    chains = run_chains(store, run)
    if not stage and chains:
        stage = chains[-1].stage
    matches = [chain for chain in chains if chain.stage == stage and model in ("", chain.model)]
    if len(matches) == 1:
        return matches[0]
    # no match, or several: list the chains
    known = ", ".join(f"{chain.stage}/{chain.model}" for chain in chains) or "none"
    problem = "more than one chain matches" if matches else "there is no such chain"
    raise ObjectNotFound(f"{problem} in run {run!r}, which has {known}; name one with --stage and --model")


def _print_replay(report: Any, to: Console) -> None:
    changes = {name: value for name, value in report.what_if.model_dump().items() if value not in (None, {})}

    # metrics of both executions, then the digest of the weights
    second_column = "what if>" if changes else "replayed>"
    comparison = table(f"step {report.step} of {report.chain}", "", "committed>", second_column)
    names = [*report.committed, *(name for name in report.replayed if name not in report.committed)]
    rows = [(name, report.committed.get(name), report.replayed.get(name)) for name in names]
    digest = report.committed_digest
    rows.append(("weights", digest[:12] if digest else None, report.replayed_digest[:12]))
    to.print(add_rows(comparison, rows))
    for note in report.notes:
        print_plain(to, f"numerics: {note}")

    # the conclusion
    if changes:
        changes_text = ", ".join(f"{name} {value}" for name, value in changes.items())
        print_plain(to, f"what if: {changes_text}. Nothing was committed.")
    elif report.weights_equal is None:
        equal = "equal" if report.metrics_equal else "NOT equal"
        to.print(f"the record has no digest of the weights; the metrics are {equal}")
    elif report.weights_equal and report.metrics_equal:
        to.print("[green]equal to the byte[/green]: the replay is the committed step")
    else:
        which = "weights" if not report.weights_equal else "metrics"
        tensor = f"; the first tensor that differs is {report.first_tensor}" if report.first_tensor else ""
        to.print(f"[red]NOT equal[/red]: the {which} differ from the committed ones{tensor}")


# -- fork ------------------------------------------------------------------------------------------------------


def fork(
    run: RunArgument,
    step: ForkStep,
    new: Annotated[str, typer.Option("--run", help="Key of the new run.")],
    stage: Annotated[str, typer.Option("--stage", help="Stage of the step. Default: the last one.")] = "",
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Creates a run that shares another run's history up to a step, and writes its config to NEW.yaml. The config may
    differ after that step."""
    store = open_store(storage)
    with report_errors(), messages().status(f"forking {run}"):
        info = fork_run(store, run, new, step=step, stage=stage or None, code_version=code_version())
    config, path = _write_config(store, new)
    if as_json:
        body = {"new": new, "flow": config.flow if config else None, "config": str(path) if path else None}
        print_json(info.model_dump(mode="json") | body)
        return
    print_plain(console(), f"run {new} shares {info.stage} of {run} up to step {info.step}")
    if config and path:
        _print_how_to_go_on(config, path)


def _write_config(store: ObjectStore, new: str) -> tuple[RecordedConfig | None, Path | None]:
    """Writes the config of the fork to a file. Returns what could not be read or written as None, and says why."""
    config, path = None, None
    try:
        config = read_config(store, new)
        path, is_new = write_config(config, Path())
        if not is_new:
            print_plain(messages(), f"{path} exists and is kept; 'ostinato runs config {new}' prints the config")
    except (StorageError, OSError) as error:
        print_plain(messages(), f"the config of {new} was not written: {error}")
    return config, path


def _print_how_to_go_on(config: RecordedConfig, path: Path) -> None:
    to = console()
    if config.flow is None:
        print_plain(to, f"its parameters are in {path}; it continues when its recipe is started with run: {config.run}")
        return
    if config.engine_token:
        url = config.values["engine"]["url"]
        print_plain(to, f"put the token of the engine at {url} into ${config.engine_token};")
        print_plain(to, "'ostinato up' keeps it in .ostinato/up/engine-token")
    print_plain(to, f"change in {path} what should differ after that step, and continue with:")
    print_plain(to, f"  ostinato run {config.flow} --config {path}")
    print_plain(to, "its data continues at the same epoch and position, in the order of the file's data and seed")


# -- shared functions -------------------------------------------------------------------------------------------


def import_with_torch(module: str) -> Any:
    """Imports a module that needs torch. Other commands must work without torch."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        text = "this command needs torch, which is not installed here: pip install 'ostinato[torch]'"
        raise usage_error(text) from error


def _progress_bar(*, hidden: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # outside a terminal, rich would print an empty line in place of the bar
    return Progress(*columns, console=messages(), transient=True, disable=hidden or not sys.stderr.isatty())
