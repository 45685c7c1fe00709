"""`ostinato gc`: what nothing names any more, shown and deleted."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flows.configs.common import StorageConfig
from storage.errors import StorageError
from storage.inspect.gc import GcReport, ObjectTotals, collect_garbage
from storage.store.objects import open_store

SHOWN = 20
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}

Storage = Annotated[str, typer.Option("--storage", help="The store: a folder, file:///folder, or s3://bucket/prefix.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would go; delete nothing.")]
OlderThan = Annotated[str, typer.Option("--older-than", help="By the store's clock: 24h, 3d, 90m.")]
NobodyWrites = Annotated[
    bool,
    typer.Option(
        "--i-know-nobody-is-writing", help="Allow an age below 13h, and take incomplete versions of models too."
    ),
]


def gc(
    storage: Storage = StorageConfig().url,
    dry_run: DryRun = False,
    older_than: OlderThan = "24h",
    nobody_writes: NobodyWrites = False,
) -> None:
    """Delete data that nothing names any more. Runs may go on meanwhile."""
    console = Console()
    try:
        with console.status(f"looking through {storage}"):
            report = collect_garbage(
                open_store(storage), older_than=_age(older_than), dry_run=dry_run, exclusive=nobody_writes
            )
    except (StorageError, ValueError) as error:
        console.print(f"[red]{type(error).__name__}[/red]: ", end="")
        console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from error
    _show(report, console)


def _age(text: str) -> timedelta:
    """24h, 3d, 90m. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text.strip())
    if match is None:
        raise ValueError(f"--older-than={text!r} is no age; give a number and a unit, like 24h, 3d or 90m")
    return timedelta(**{_UNITS[match[2]]: float(match[1])})


def _show(report: GcReport, console: Console) -> None:
    verb = "would delete" if report.dry_run else "deleted"
    table = Table(box=None, pad_edge=False)
    for title, justify in (("", "left"), ("what", "left"), ("objects", "right"), ("size", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for what, tally in report.deleted.items():
        table.add_row(verb, what, f"{tally.objects:,}", _size(tally))
    for why, tally in report.kept.items():
        table.add_row("kept", why, f"{tally.objects:,}", _size(tally))
    console.print(table)
    for title, found in ((verb, report.names), ("not understood, so kept", report.unknown),
                         ("cannot be read, so all beside it is kept", report.unreadable)):  # fmt: skip
        for name in found[:SHOWN]:
            console.print(f"  {title}: {name}", markup=False, highlight=False, soft_wrap=True)
        if len(found) > SHOWN:
            console.print(f"  … and {len(found) - SHOWN:,} more", highlight=False)
    console.print(f"{verb} {report.total.objects:,} objects, {_size(report.total)}", highlight=False)


def _size(tally: ObjectTotals) -> str:
    size = float(tally.bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
