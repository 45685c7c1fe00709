"""`ostinato runs ls | show | report | config | samples | lineage | remove-checkpoint`: shows the runs of a store, their
reports, configs and samples, and the origin of its models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flows.cli.output import (
    DEFAULT_STORAGE,
    AsJson,
    Storage,
    add_rows,
    console,
    key_value_table,
    messages,
    print_json,
    print_plain,
    report_errors,
    table,
    usage_error,
)
from flows.runs.recorded_config import read_config
from storage.chain.checkpoint_names import resolve_checkpoint_name
from storage.chain.listing import is_auxiliary
from storage.chain.retention import remove_checkpoints
from storage.errors import ObjectNotFound
from storage.inspect.lineage import ChainSegment, Lineage, StepLineage, differing_settings, lineage_of, step_lineage
from storage.inspect.prompt_lineage import PromptReport, prompt_report
from storage.inspect.run_details import ChainDetails, RunDetails, RunSummary, describe_run, seconds_since, summarize_run
from storage.inspect.step_samples import GradedSample, SampleFilter, newest_sampled_step, step_samples
from storage.serialization import flatten
from storage.store import keys
from storage.store.index import run_entries
from storage.store.objects import ObjectStore, open_store
from tasks.evaluation.validation_curve import Validation, read_validations
from tasks.reports.advice import WINDOW, advice
from tasks.reports.step_metrics import read_metrics
from tasks.reports.table_cells import sample_prompt

runs_app = typer.Typer(help="The runs of a store, and the origin of its models.", no_args_is_help=True)

READERS = 16
"""Number of runs that are read at the same time for a list."""
RunArgument = Annotated[str, typer.Argument(help="Key of the run.")]


@runs_app.command("ls")
def ls(
    prefix: Annotated[str, typer.Argument(help="Only the runs whose keys begin with this.")] = "",
    storage: Storage = DEFAULT_STORAGE,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list the runs that evaluations and served models create.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", help="Number of runs, the newest of all.", min=1)] = 100,
    as_json: AsJson = False,
) -> None:
    """Lists the newest runs: kind, state, steps and lease."""
    with report_errors():
        store = open_store(storage)
        # only the runs that are shown are read, some at a time
        entries = run_entries(store, prefix)
        runs = [run for run in entries if everything or not is_auxiliary(run)]
        newest = sorted(runs, key=lambda run: entries[run].modified)[-limit:]
        with ThreadPoolExecutor(READERS) as pool:
            rows = list(pool.map(lambda run: summarize_run(store, run), sorted(newest)))
    if len(newest) < len(runs):
        print_plain(messages(), f"{len(runs) - len(newest):,} older runs are not shown; give a prefix or --limit")
    if as_json:
        print_json([row.model_dump(mode="json") for row in rows])
        return
    columns = ("run", "kind", "created", "state", "stages", "steps>", "last commit", "lease>", "forked from")
    console().print(add_rows(table(f"runs in {store.url}", *columns), map(_run_row, rows)))


def _run_row(row: RunSummary) -> tuple[Any, ...]:
    return (
        row.run, row.kind, _time(row.created), row.state, " ".join(row.stages), row.head_step,
        _time_and_age(row.last_commit), row.lease_epoch, row.forked_from,
    )  # fmt: skip


@runs_app.command("show")
def show(run: RunArgument, storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """Shows one run: its result, evaluations, chains, metrics, advice, models, leases and semantic config."""
    with report_errors():
        store = open_store(storage)
        view = describe_run(store, run)
        evaluations = {stage: read_validations(store, run, stage) for stage in view.row.stages}
        sentences = _advice_about(store, view)
    if as_json:
        of_stages = {stage: [each.model_dump(mode="json") for each in rows] for stage, rows in evaluations.items()}
        print_json(view.model_dump(mode="json") | {"evaluations": of_stages, "advice": sentences})
    else:
        _print_run(view, evaluations, sentences, console())


def _advice_about(store: ObjectStore, view: RunDetails) -> list[str]:
    """The advice about the last steps of the run's last stage, from its first and its last metrics."""
    if not view.row.stages:
        return []
    run, stage, head = view.row.run, view.row.stages[-1], view.row.head_step
    first = read_metrics(store, run, stage, steps=min(1, head))
    return advice(next(iter(first), None), read_metrics(store, run, stage, first=max(0, head - WINDOW), steps=head))


def _print_run(
    view: RunDetails, evaluations: Mapping[str, Sequence[Validation]], sentences: Sequence[str], to: Console
) -> None:
    # what the run is
    row = view.row
    machine = [f"{name} {value}" for name, value in view.machine.items() if name != "packages"]
    packages = [f"{name} {version}" for name, version in view.packages.items()]
    overview = {
        "state": row.state,
        "created": _time(row.created),
        **({"warnings": "\n".join(view.warnings)} if view.warnings else {}),
        "code version": view.code_version,
        "machine": " ".join(machine),
        "packages": " ".join(packages),
        "forked from": row.forked_from,
        "last commit": _time_and_age(row.last_commit),
    }
    to.print(key_value_table(f"run {row.run}", overview))
    if view.result:
        to.print(key_value_table("result", flatten(view.result)))
    for stage, validations in evaluations.items():
        if validations:
            measures = sorted({name for each in validations for name in each.measures})
            cells = ((each.name, each.step, *map(each.measures.get, measures)) for each in validations)
            columns = ("evaluation", "after steps>", *(f"{name}>" for name in measures))
            to.print(add_rows(table(f"evaluations of {stage}", *columns), cells))

    # its chains and metrics
    chains = table("chains", "chain", "steps>", "state", "trainer", "starts from", "checkpoints")
    to.print(add_rows(chains, map(_chain_row, view.chains)))
    for chain in view.chains:
        for rebase in chain.rebases:
            print_plain(to, f"{chain.stage}/{chain.model} is rebased at {rebase}")
    for stage, metrics in view.last_metrics.items():
        # a metric that is not measured in this kind of training is left out; of the groups, only the mixture is shown
        shown = {name: value for name, value in metrics.items() if value is not None and not isinstance(value, dict)}
        if metrics.get("by_part"):
            shown |= flatten({"by_part": metrics["by_part"]})
        to.print(key_value_table(f"last metrics of {stage}", shown))
    for sentence in sentences:
        print_plain(to, f"advice: {sentence}")

    # its models, leases and config
    to.print(add_rows(table("models", "model", "policy"), ((model.model, model.policy) for model in view.models)))
    leases = table("leases", "epoch>", "taken", "pid", "code version", "released")
    for lease in view.leases:
        add_rows(leases, [(lease.epoch, _time(lease.created), lease.pid, lease.code_version, _time(lease.released))])
    to.print(leases)
    to.print(key_value_table("semantic config", flatten(view.semantic)))


def _chain_row(chain: ChainDetails) -> tuple[Any, ...]:
    # a named checkpoint is shown as step=name; a name without a stored checkpoint stands in parentheses
    checkpoints = []
    for step in sorted({*chain.checkpoints, *chain.names}):
        text = "=".join((f"{step}", *chain.names.get(step, ())))
        checkpoints.append(text if step in chain.checkpoints else f"({text})")
    name = f"{chain.stage}/{chain.model}"
    return name, chain.head, chain.state[:12], chain.trainer, chain.starts_from, " ".join(checkpoints) or None


@runs_app.command("report")
def report(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: only say where the report is.")
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
) -> None:
    """Says where the report of a finished run is. The report of any other run is written now, into a file here."""
    with report_errors():
        store = open_store(storage)
        describe_run(store, run)  # an unknown run is refused
        is_stored = store.exists(keys.report(run))
        if is_stored and output is None:
            print_plain(console(), store.address(keys.report(run)))
            return
        # imported here, since matplotlib and Prefect take seconds
        from tasks.report import report_of_run
        from tasks.reports.html_report import render_report

        data = None if is_stored else report_of_run(store, run, facts={"state": "not finished"})
        if data is None and not is_stored:
            raise ObjectNotFound(f"run {run!r} has taken no step, so there is nothing to report yet")
        page = store.get(keys.report(run)) if data is None else render_report(data).encode()
    path = output or Path(f"{run.replace('/', '-')}-report.html")
    path.write_bytes(page)
    print_plain(console(), str(path))


@runs_app.command("config")
def config(run: RunArgument, storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """Prints the config that a run was started with, as a YAML file for 'ostinato run'. Defaults are left out."""
    with report_errors():
        recorded = read_config(open_store(storage), run)
    if as_json:
        print_json(recorded.values)
    else:
        print(recorded.text, end="")


@runs_app.command("remove-checkpoint")
def remove_checkpoint(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN/STAGE/NAME…", help="Named checkpoints, as 'runs show' lists them.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed; remove nothing.")] = False,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Removes named checkpoints and frees their space. Nothing is removed if a fork, an unfinished run, a champion or a
    rebase refers to one of them. The run can still be resumed, verified and forked at any step."""
    with report_errors():
        store = open_store(storage)
        # resolve all names before anything is removed; two names may be the same checkpoint
        policies = list(dict.fromkeys(resolve_checkpoint_name(store, name) for name in names))
        removed = remove_checkpoints(store, policies, dry_run=dry_run)
    if as_json:
        rows = [{"checkpoint": manifest.key, "bytes": manifest.bytes} for manifest in removed]
        print_json({"dry_run": dry_run, "removed": rows})
        return
    verb = "would remove" if dry_run else "removed"
    for manifest in removed:
        print_plain(console(), f"{verb} {manifest.key}: {manifest.bytes / 2**20:.1f} MiB")
    if len(removed) < len(policies):
        print_plain(console(), f"{verb} {len(policies) - len(removed)} names of checkpoints that are not stored")


@runs_app.command("samples")
def samples(
    run: RunArgument,
    stage: Annotated[str, typer.Option("--stage", help="Stage of the run, such as 0-grpo. Default: the last.")] = "",
    step: Annotated[
        int | None, typer.Option("--step", help="Number of the step, from 1. Default: the newest with samples.", min=1)
    ] = None,
    worst: Annotated[
        int | None, typer.Option("--worst", help="Only so many, those of the lowest rewards.", min=1)
    ] = None,
    best: Annotated[
        int | None, typer.Option("--best", help="Only so many, those of the highest rewards.", min=1)
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Shows the prompts and completions of a step with their grades and reasons, also of a step that could not be
    finished."""
    if worst and best:
        raise usage_error("--worst and --best were given; give one of them")
    with report_errors():
        store = open_store(storage)
        if not stage or step is None:
            newest_stage, newest_step = newest_sampled_step(store, run, stage)
            stage, step = newest_stage, step or newest_step
        rows = list(step_samples(store, run, stage, step))
    if worst or best:
        # a sample without a reward is neither
        chosen = SampleFilter(min_reward=-math.inf, order="highest reward" if best else "lowest reward")
        rows = chosen.apply(rows)[: worst or best]
    if as_json:
        print_json([row.model_dump(mode="json") for row in rows])
        return
    title = f"samples of {run}/{stage} step {step}"
    columns = ("prompt id", "n>", "grade>", "reason", "prompt", "completion")
    console().print(add_rows(table(title, *columns), map(_sample_cells, rows)))


def _sample_cells(row: GradedSample) -> tuple[Any, ...]:
    """The cells of a sample. Texts of a model are shown without characters that control a terminal."""
    from tasks.reports.html_report import text_for_page  # which imports matplotlib

    texts = (row.reason or "", sample_prompt(row), row.text or "")
    grade = row.status if row.reward is None else row.reward
    return (row.prompt, row.completion, grade, *(text_for_page(text) for text in texts))


@runs_app.command("lineage")
def lineage(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN", help="name, name@version, name@champion, run/stage/model@step, or a run."
        ),
    ],
    prompt: Annotated[
        str, typer.Option("--prompt", help="Id or part of the text of a prompt: shows the steps that used it.")
    ] = "",
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Shows the prompts, grades and gradient steps that led to a model, or the checkpoints that a prompt influenced."""
    with report_errors():
        store = open_store(storage)
        history = lineage_of(store, target)
        # with --prompt, only the uses of that prompt are shown
        if prompt:
            report = prompt_report(store, history, prompt)
            if as_json:
                print_json({"lineage": history.model_dump(mode="json"), "prompt": report.model_dump(mode="json")})
            else:
                _print_prompt(report, console())
            raise typer.Exit(0 if report.uses else 1)
        steps = [step_lineage(store, record) for record in history.records(store)]
    if as_json:
        print_json(history.model_dump(mode="json") | {"steps": [step.model_dump(mode="json") for step in steps]})
    else:
        _print_lineage(history, steps, console())


def _print_lineage(history: Lineage, steps: list[StepLineage], to: Console) -> None:
    to.print(key_value_table(history.target, history.facts()))
    for segment in history.segments:
        if segment.forked:
            to.print(_fork_table(segment))
    # an imported model has no steps
    if not steps:
        return
    step_table = table(
        "gradient steps, oldest first",
        "step>", "batch", "shards>", "graded>", "prompts>", "first of them", "completions>", "reward>", "lr>", "loss>",
        "gradient>",
    )  # fmt: skip
    to.print(add_rows(step_table, map(_step_row, steps)))
    to.print("--json also prints every uri and the id of every prompt", style="dim")


def _fork_table(segment: ChainSegment) -> Table:
    """Which run took which steps of a fork, and the settings in which these runs differ."""
    parts = segment.forked
    by_run = table(f"{segment.title} is a fork", "", *(part.title for part in parts))
    rows = [("learning rate", [part.rate_text for part in parts]), *differing_settings(parts)]
    return add_rows(by_run, ((name, *values) for name, values in rows))


def _step_row(step: StepLineage) -> tuple[Any, ...]:
    return (
        step.step, step.batch.rpartition("#")[2][:12], len(step.rollouts), len(step.graded), len(step.prompts),
        " ".join(step.prompts[:3]), step.completions, step.reward_mean, step.learning_rate, step.loss, step.grad_norm,
    )  # fmt: skip


def _print_prompt(report: PromptReport, to: Console) -> None:
    if not report.uses:
        to.print(f"no step of this lineage used a prompt {report.asked!r}", markup=False, highlight=False)
        return
    columns = ("step>", "prompt", "n>", "completion", "reward>", "status", "trained")
    rows = []
    for use in report.uses:
        trained = "yes" if use.trained else "no"
        rows.append((use.step, use.prompt, use.completion, use.text, use.reward, use.status, trained))
    to.print(add_rows(table(f"prompt {' '.join(report.ids)}", *columns), rows))
    to.print(add_rows(table("checkpoints it influenced", "checkpoint"), ((name,) for name in report.checkpoints)))
    to.print(add_rows(table("models it influenced", "model"), ((name,) for name in report.models)))


def _time(iso: str | None) -> str | None:
    return None if iso is None else iso[:19].replace("T", " ")


def _time_and_age(iso: str | None) -> str | None:
    seconds = seconds_since(iso)
    if iso is None or seconds is None:
        return None
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{_time(iso)} ({seconds / size:.0f} {unit} ago)"
    return f"{_time(iso)} ({seconds:.0f} s ago)"
