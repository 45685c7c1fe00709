"""`ostinato runs du | delete` and `ostinato gc`: what the runs of a store take of its disk, the deletion of runs,
and of data that no manifest refers to."""

from __future__ import annotations

import re
from datetime import timedelta
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
    format_size,
    messages,
    print_json,
    print_plain,
    report_errors,
    table,
)
from storage.chain.deletion import RunDeletion, delete_runs, plan_deletion
from storage.errors import ObjectNotFound
from storage.inspect.disk_usage import StoreUsage, measure_usage
from storage.inspect.gc import GcReport, collect_garbage
from storage.store.objects import open_store

YES_TO_DELETE = "nothing was deleted; give --yes to delete"
YES_AND_FORCE_TO_DELETE = "nothing was deleted; give --yes --force to delete"

MAX_NAMES = 20
"""Number of names that are listed in each group."""
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted; delete nothing.")]
OlderThan = Annotated[str, typer.Option("--older-than", help="Smallest age by the store's clock: 24h, 3d, 90m.")]
NoActiveRuns = Annotated[
    bool,
    typer.Option(
        "--no-active-runs",
        help="No run is writing to the store. Allows an age below 13h, and deletes incomplete versions of models too.",
    ),
]


def add_disk_commands(runs_app: typer.Typer) -> None:
    """Adds `du` and `delete` to the commands of `ostinato runs`."""
    runs_app.command("du")(du)
    runs_app.command("delete")(delete)


def du(
    run: Annotated[str, typer.Argument(help="Only this run, or the runs of this sweep.")] = "",
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Shows the bytes of each run, the largest first: checkpoints, published models, rollouts, other."""
    with report_errors():
        usage = measure_usage(open_store(storage))
        if run:
            usage = _only(usage, run, storage)
    if as_json:
        print_json(usage.model_dump(mode="json") | {"total": usage.total})
        return
    columns = ("run", "total>", "checkpoints>", "models>", "rollouts>", "other>")
    rows = []
    for row in usage.runs:
        parts = (row.total, row.checkpoints, row.models, row.rollouts, row.other)
        rows.append((row.run, *map(format_size, parts)))
    console().print(add_rows(table(f"disk of the runs in {storage}", *columns), rows))
    if not run:
        further = {"datasets": usage.datasets, "imported models": usage.imported_models}
        if usage.models_of_deleted_runs:
            further["models of deleted runs"] = usage.models_of_deleted_runs
        further["other"] = usage.other
        print_plain(console(), ", ".join(f"{name} {format_size(size)}" for name, size in further.items()))
    print_plain(console(), f"total {format_size(usage.total)}")


def _only(usage: StoreUsage, run: str, storage: str) -> StoreUsage:
    """Returns the bytes of one run, or of the runs of a sweep. Raises ObjectNotFound."""
    rows = [row for row in usage.runs if row.run == run] or [row for row in usage.runs if row.run.startswith(f"{run}/")]
    if not rows:
        raise ObjectNotFound(f"no run {run!r} in {storage}; 'ostinato runs ls' lists the runs")
    return StoreUsage(runs=tuple(rows), datasets=0, imported_models=0, models_of_deleted_runs=0, other=0)


def delete(
    run: Annotated[str, typer.Argument(help="Key of the run, or the name of a sweep: then all its runs.")],
    yes: Annotated[bool, typer.Option("--yes/--dry-run", help="Delete. By default only show what would go.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Delete although published models lose their lineage. They stay.")
    ] = False,
    no_active_runs: Annotated[
        bool, typer.Option("--no-active-runs", help="No process works on the run: a killed one keeps its lease.")
    ] = False,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Deletes a run with its steps, rollouts and checkpoints. Datasets and published models stay. Nothing is deleted if
    a fork or another run needs it. A deletion that was killed is finished by the same command."""
    with report_errors():
        store = open_store(storage)
        if yes:
            deletion = delete_runs(store, run, no_active_runs=no_active_runs, force=force)
        else:
            deletion = plan_deletion(store, run, no_active_runs=no_active_runs)
    if as_json:
        print_json({"dry_run": not yes} | deletion.model_dump(mode="json"))
    else:
        _print_deletion(deletion, dry_run=not yes, force=force)


def _print_deletion(deletion: RunDeletion, *, dry_run: bool, force: bool) -> None:
    to, verb = console(), "would delete" if dry_run else "deleted"
    for run in deletion.runs:
        print_plain(to, f"{verb} run {run}")
    print_plain(to, f"{verb} {deletion.objects:,} objects, {format_size(deletion.bytes)}")
    if not dry_run:
        return
    # what --yes would say
    for reason in deletion.needed_by:
        print_plain(to, f"not possible: {reason}")
    for reason in deletion.unverifiable:
        print_plain(to, f"{'accepted' if force else 'only with --force'}: {reason}")
    if not deletion.needed_by:
        print_plain(to, YES_TO_DELETE if force or not deletion.unverifiable else YES_AND_FORCE_TO_DELETE)


def gc(
    storage: Storage = DEFAULT_STORAGE,
    dry_run: DryRun = False,
    older_than: OlderThan = "24h",
    no_active_runs: NoActiveRuns = False,
    run: Annotated[str, typer.Option("--run", help="Only the data of this run. No other run is read.")] = "",
) -> None:
    """Deletes data that nothing refers to. Runs may continue meanwhile."""
    to = console()
    # the age protects data that a running step has written and not yet committed
    try:
        with report_errors(), to.status(f"searching {storage}"):
            report = collect_garbage(
                open_store(storage), run=run or None, older_than=_age(older_than), dry_run=dry_run,
                exclusive=no_active_runs,
            )  # fmt: skip
    except ValueError as error:
        print_plain(messages(), str(error))
        raise typer.Exit(1) from error
    _print_report(report, to)


def _age(text: str) -> timedelta:
    """Parses an age like 24h, 3d or 90m. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text.strip())
    if match is None:
        raise ValueError(f"--older-than={text!r} is not an age; give a number and a unit, like 24h, 3d or 90m")
    return timedelta(**{_UNITS[match[2]]: float(match[1])})


def _print_report(report: GcReport, to: Console) -> None:
    # the sizes of what was deleted and kept
    verb = "would delete" if report.dry_run else "deleted"
    sizes = Table(box=None, pad_edge=False)
    columns: list[tuple[str, Any]] = [("", "left"), ("what", "left"), ("objects", "right"), ("size", "right")]
    for title, justify in columns:
        sizes.add_column(title, justify=justify)
    for kind, tally in report.deleted.items():
        sizes.add_row(verb, kind, f"{tally.objects:,}", format_size(tally.bytes))
    for reason, tally in report.kept.items():
        sizes.add_row("kept", reason, f"{tally.objects:,}", format_size(tally.bytes))
    to.print(sizes)

    # the names, shortened to MAX_NAMES of each group
    groups = [
        (verb, report.names),
        ("not recognised, so kept", report.unknown),
        ("not readable, so everything next to it is kept", report.unreadable),
    ]
    for title, names in groups:
        for name in names[:MAX_NAMES]:
            print_plain(to, f"  {title}: {name}")
        if len(names) > MAX_NAMES:
            print_plain(to, f"  … and {len(names) - MAX_NAMES:,} more")
    print_plain(to, f"{verb} {report.total.objects:,} objects, {format_size(report.total.bytes)}")
