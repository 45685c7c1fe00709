"""Shared output of the commands: options, tables, JSON, error messages.

Exit statuses: 0 success, 1 a finding or an error, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from engine.errors import EngineError
from flows.configs.common import StorageConfig
from storage.errors import InvalidKey, StorageError
from storage.inspect.findings import Finding

Storage = Annotated[
    str, typer.Option("--storage", help="Store of the artifacts: a folder, file:///folder or s3://bucket/prefix.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
ConfigFile = Annotated[Path, typer.Option("--config", help="YAML, TOML or JSON file.", exists=True, dir_okay=False)]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Override one key: a.b=c. May be repeated.")]
Server = Annotated[
    str, typer.Option("--server", help="Prefect API url; 'local' starts a server for this run and stops it.")
]
DEFAULT_STORAGE = StorageConfig().url
PLAIN_WIDTH = 200
"""Width of the output in columns if it is not a terminal. Names must not be cut in a pipe."""


def console() -> Console:
    """Returns the console for results, on stdout."""
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)


def messages() -> Console:
    """Returns the console for progress and errors, on stderr, so that stdout holds only the result."""
    return Console(stderr=True) if sys.stderr.isatty() else Console(stderr=True, width=PLAIN_WIDTH)


def print_plain(to: Console, text: str) -> None:
    """Prints text as it is: without markup, highlighting or line breaks by rich."""
    to.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """The error boundary of a command: errors of storage and engine become one line and an exit status."""
    try:
        yield
    except InvalidKey as error:
        # a malformed name is wrong usage, unlike a name that does not exist
        raise _print_error(error, 2) from None
    except (StorageError, EngineError) as error:
        raise _print_error(error, 1) from None


def usage_error(text: str) -> typer.Exit:
    """Prints the reason and returns the exception that ends the command with status 2. The caller raises it."""
    print_plain(messages(), text)
    return typer.Exit(2)


def print_json(body: BaseModel | list[Any] | dict[str, Any]) -> None:
    """Prints a JSON document with one field per line."""
    plain = body.model_dump(mode="json") if isinstance(body, BaseModel) else body
    print(json.dumps(plain, indent=1, ensure_ascii=False))


def table(title: str, *columns: str) -> Table:
    """Returns an empty table. A column whose name ends in > is right-aligned."""
    # long cells are folded and never cut
    new_table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False)
    for column in columns:
        justify: Any = "right" if column.endswith(">") else "left"
        new_table.add_column(column.rstrip(">"), justify=justify, overflow="fold")
    return new_table


def add_rows(to: Table, rows: Iterable[Iterable[Any]]) -> Table:
    """Adds rows and returns the table. None is shown as a dash, a float with six digits."""
    for row in rows:
        to.add_row(*(_cell(value) for value in row))
    return to


def key_value_table(title: str, values: dict[str, Any]) -> Table:
    """Returns a table with two columns: name and value."""
    return add_rows(table(title, "", ""), values.items())


def print_findings(findings: Iterable[Finding], to: Console) -> None:
    """Prints each finding with what to do about it."""
    for finding in findings:
        colour = "red" if finding.severity == "error" else "yellow"
        to.print(f"[{colour}]{finding.severity}[/] {escape(finding.key)}: {escape(finding.what)}", soft_wrap=True)
        to.print(f"  what to do: {escape(finding.what_to_do)}", soft_wrap=True)


def _cell(value: Any) -> str | Text:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, Text) else escape(str(value))


def _print_error(error: Exception, status: int) -> typer.Exit:
    to = messages()
    to.print(f"[red]{type(error).__name__}[/red]: ", end="")
    print_plain(to, str(error))
    return typer.Exit(status)


def format_size(size: float) -> str:
    """Returns a number of bytes with a unit: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
