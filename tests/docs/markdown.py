"""Reads the code blocks of the Markdown pages: README.md and docs/*.md.

A block whose first line is a comment that begins with a file name (`# my_recipe.py`) is a file of its page. The
reader of a page has all files of the page in one folder, together with `examples/` and the model of the demo.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FILE_NAME = re.compile(r"# ([\w./-]+\.(?:py|yaml|toml|json))\b")


@dataclass(frozen=True)
class Block:
    """One fenced code block."""

    page: str
    """Path of the page, relative to the repository."""
    line: int
    """Number of the first line of the code, counted from 1."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """The name of the file that the block shows, if it shows one."""
        match = FILE_NAME.match(self.text)
        return match[1] if match else None

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, one per line; lines that end with a backslash are joined."""
        joined = self.text.replace("\\\n", " ")
        lines = (line.strip() for line in joined.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks_of(path: Path) -> Iterator[Block]:
    for token in MarkdownIt().parse(path.read_text()):
        if token.type == "fence":
            assert token.map is not None
            yield Block(str(path.relative_to(ROOT)), token.map[0] + 2, token.info.strip(), token.content)
        assert token.type != "code_block", f"{path}: an indented code block at line {token.map}; use a fence"


def all_blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in these languages; of all languages if none is given."""
    blocks = [block for path in PAGES for block in blocks_of(path)]
    return [block for block in blocks if not languages or block.language in languages]


def inline_commands() -> list[tuple[str, str]]:
    """(page, command) of every code span in the text that begins with `ostinato` and a subcommand."""
    commands = []
    for path in PAGES:
        for token in MarkdownIt("commonmark", {}).enable("table").parse(path.read_text()):
            for child in token.children or ():
                if child.type == "code_inline" and child.content.startswith("ostinato "):
                    commands.append((str(path.relative_to(ROOT)), child.content))
    return commands


def ostinato_arguments(command: str) -> list[str] | None:
    """The arguments of a command line that runs `ostinato`, also as the last part of another command; else None."""
    words = shlex.split(command.replace("$HOME/", ""), comments=True)
    if "ostinato" not in words:
        return None
    arguments = words[words.index("ostinato") + 1 :]
    # without a pipe or a redirection
    for mark in (">", "|", "&", "&&", ";"):
        if mark in arguments:
            arguments = arguments[: arguments.index(mark)]
    return arguments
