"""The help texts of all commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text
from typer.main import get_command

from flows.cli.main import app


def help_texts(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yields (place, text) of a command, its parameters and its subcommands."""
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.opts[-1]}", getattr(parameter, "help", None) or ""
    for child_name, child in getattr(command, "commands", {}).items():
        yield from help_texts(child, f"{name} {child_name}")


def test_every_help_text_is_a_sentence_and_is_printed_whole() -> None:
    texts = dict(help_texts(get_command(app), "ostinato"))
    assert {"ostinato doctor --storage", "ostinato runs lineage target", "ostinato run grpo --config"} <= texts.keys()
    unfinished = [place for place, text in texts.items() if not text.endswith((".", "…"))]
    # rich takes words in square brackets for markup and does not print them
    shortened = [place for place, text in texts.items() if Text.from_markup(text).plain != text]
    assert not unfinished
    assert not shortened
    # a terminal shows backticks as they are
    assert not [place for place, text in texts.items() if "`" in text]
