"""`ostinato gc`: deletes data in the store that no manifest refers to."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flows.cli.output import console, format_size, messages, print_plain, report_errors
from flows.configs.common import StorageConfig
from storage.inspect.gc import GcReport, collect_garbage
from storage.store.objects import open_store

MAX_NAMES = 20
"""Number of names that are listed in each group."""
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}

Storage = Annotated[str, typer.Option("--storage", help="The store: a folder, file:///folder, or s3://bucket/prefix.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted; delete nothing.")]
OlderThan = Annotated[str, typer.Option("--older-than", help="Smallest age by the store's clock: 24h, 3d, 90m.")]
NoActiveRuns = Annotated[
    bool,
    typer.Option(
        "--no-active-runs",
        help="No run is writing to the store. Allows an age below 13h, and deletes incomplete versions of models too.",
    ),
]


def gc(
    storage: Storage = StorageConfig().url,
    dry_run: DryRun = False,
    older_than: OlderThan = "24h",
    no_active_runs: NoActiveRuns = False,
) -> None:
    """Deletes data that nothing refers to. Runs may continue meanwhile."""
    to = console()
    # the age protects data that a running step has written and not yet committed
    try:
        with report_errors(), to.status(f"searching {storage}"):
            report = collect_garbage(
                open_store(storage), older_than=_age(older_than), dry_run=dry_run, exclusive=no_active_runs
            )
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
