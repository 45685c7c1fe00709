"""Tests of the examples in README.md and docs/: each Python program runs as it stands, configs are valid, and the
commands and their options exist."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli.main import app
from tests.docs.commands import check_command, unknown_words
from tests.docs.markdown import ROOT, Block, all_blocks, inline_commands, ostinato_arguments

LANGUAGES = {"python", "yaml", "toml", "bash", "text"}
KUBERNETES = {"docs/scaling.md": "spec:"}
"""Pages with YAML that is not a config of ours, and a line that such a block has."""
READS_STORE = ("runs show", "runs lineage", "models ls", "verify", "fork")
"""Commands that are run in a block that makes a run."""
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))

OpenPage = Callable[[str], Path]


def uses_file_of_page(arguments: list[str], page: str) -> bool:
    """Whether the command runs or imports a config that the page shows."""
    shown = {block.file_name for block in all_blocks("yaml") if block.page == page}
    return arguments[0] in ("run", "evaluate", "import") and not shown.isdisjoint(arguments)


def is_runnable(block: Block) -> bool:
    """Whether the block starts with something that this machine can run: a program or a config of its page."""
    arguments = [ostinato_arguments(command) for command in block.commands]
    runs_config = any(words and uses_file_of_page(words, block.page) for words in arguments)
    return runs_config or any(re.match(r"python \w+\.py", command) for command in block.commands)


def reads_imported_config(arguments: list[str], block: Block) -> bool:
    """Whether the command runs a config that `import` writes in the block. It may need the GPUs of the other system."""
    return "--config" in arguments and f"--out {config_of(arguments)}" in block.text


def reads_forked_config(arguments: list[str], block: Block) -> bool:
    """Whether the command runs a config that `fork` writes in the block."""
    return "--config" in arguments and f"--run {config_of(arguments).removesuffix('.yaml')}" in block.text


def config_of(arguments: list[str]) -> str:
    return arguments[arguments.index("--config") + 1]


@pytest.fixture(autouse=True)
def reports_without_charts(charts_not_drawn: None) -> None:
    """A run writes its report without drawing the charts."""


def test_every_block_has_a_language_and_every_program_a_name() -> None:
    blocks = all_blocks()
    assert [str(block) for block in blocks if block.language not in LANGUAGES] == []
    assert [str(block) for block in all_blocks("python") if not block.file_name] == []
    names = [(block.page, block.file_name) for block in blocks if block.file_name]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("block", all_blocks("python"), ids=str)
def test_a_program_runs(block: Block, open_page: OpenPage, prefect_server: str) -> None:
    folder = open_page(block.page)
    runpy.run_path(str(folder / str(block.file_name)), run_name="__main__")


@pytest.mark.parametrize("block", all_blocks("yaml", "toml"), ids=str)
def test_a_config_is_named_by_a_command(block: Block) -> None:
    if block.page in KUBERNETES and KUBERNETES[block.page] in block.text:
        yaml.safe_load(block.text)
        return
    commands = [command for other in all_blocks("bash") if other.page == block.page for command in other.commands]
    commands += [command for page, command in inline_commands() if page == block.page]
    assert any(block.file_name in command.split() for command in commands)


@pytest.mark.parametrize("block", all_blocks("bash"), ids=str)
def test_the_commands_of_a_shell_block_exist(block: Block, open_page: OpenPage) -> None:
    folder = open_page(block.page)
    for command in block.commands:
        arguments = ostinato_arguments(command)
        if arguments is not None:
            if not reads_imported_config(arguments, block) and not reads_forked_config(arguments, block):
                check_command(arguments)
        elif program := re.match(r"python (\w+\.py)", command):
            assert (folder / program[1]).is_file()
        elif target := re.match(r"make ([\w-]+)", command):
            assert target[1] in TARGETS


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in all_blocks("bash") if is_runnable(block)], ids=str)
def test_a_shell_block_runs(block: Block, open_page: OpenPage, prefect_server: str) -> None:
    open_page(block.page)
    for command in block.commands:
        arguments = ostinato_arguments(command)
        if program := re.match(r"python (\w+\.py)", command):
            runpy.run_path(program[1], run_name="__main__")
        elif arguments is not None and (
            uses_file_of_page(arguments, block.page)
            or reads_forked_config(arguments, block)
            or " ".join(arguments).startswith(READS_STORE)
        ):
            run_ostinato(arguments, prefect_server)
        elif arguments is not None and reads_imported_config(arguments, block):
            check_command(arguments)


def run_ostinato(arguments: list[str], server: str) -> None:
    further = ["--server", server] if arguments[0] in ("run", "evaluate") else []
    result = CliRunner().invoke(app, arguments + further)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("page", "command"), inline_commands())
def test_a_command_in_the_text_exists(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert unknown_words(command) == []
    # with a config of this repository, it is a whole command
    if "--config examples/" in command:
        check_command(ostinato_arguments(command) or [])
