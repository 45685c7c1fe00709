"""What every command about the chain prints, and how it ends: 0 fine, 1 a finding or a refusal, 2 wrong usage."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
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
    str, typer.Option("--storage", help="Where artifacts live: a folder, file:///folder, s3://bucket/prefix.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for machines.")]
DEFAULT_STORAGE = StorageConfig().url
PLAIN_WIDTH = 200
"""Columns where there is no terminal to ask: a pipe must not cut names."""


def console() -> Console:
    """For people, on stdout."""
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)


def messages() -> Console:
    """Progress and refusals, on stderr: stdout is what was asked for."""
    return Console(stderr=True) if sys.stderr.isatty() else Console(stderr=True, width=PLAIN_WIDTH)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """The boundary of every command: what storage or the engine refuses is one line and an exit status."""
    try:
        yield
    except InvalidKey as error:
        raise _ended(error, 2) from None
    except (StorageError, EngineError) as error:
        raise _ended(error, 1) from None


def usage_error(text: str) -> typer.Exit:
    """Ends the command with the reason: raise it."""
    messages().print(text, markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(2)


def print_json(body: BaseModel | list[Any] | dict[str, Any]) -> None:
    """The document, one line per field."""
    plain = body.model_dump(mode="json") if isinstance(body, BaseModel) else body
    print(json.dumps(plain, indent=1, ensure_ascii=False))


def table(title: str, *columns: str) -> Table:
    """An empty table; a column whose name ends in > is aligned to the right."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return made


def fill(into: Table, rows: Iterable[Iterable[Any]]) -> Table:
    """The table with the rows added; None is a dash, a number is short."""
    for row in rows:
        into.add_row(*(_cell(value) for value in row))
    return into


def facts(title: str, values: dict[str, Any]) -> Table:
    """Two columns: name and value."""
    return fill(table(title, "", ""), values.items())


def say_findings(problems: Iterable[Finding], to: Console) -> None:
    """Each finding with what to do."""
    for problem in problems:
        colour = "red" if problem.severity == "error" else "yellow"
        to.print(f"[{colour}]{problem.severity}[/] {escape(problem.key)}: {escape(problem.what)}", soft_wrap=True)
        to.print(f"  what to do: {escape(problem.what_to_do)}", soft_wrap=True)


def _cell(value: Any) -> str | Text:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, Text) else escape(str(value))


def _ended(error: Exception, status: int) -> typer.Exit:
    said = messages()
    said.print(f"[red]{type(error).__name__}[/red]: ", end="")
    said.print(str(error), markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(status)
