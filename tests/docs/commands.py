"""Checks the `ostinato` commands that the pages show: subcommands, options, and the config files and keys they name."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from typer.main import get_command

from flows.catalogue import TRAININGS
from flows.cli.main import app
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.overrides import load_engine, parse_config
from flows.configs.recurring import RecurringConfig
from flows.configs.sweep import SweepConfig

CONFIG_OF: dict[str, type[BaseModel]] = {
    **{f"run {flow}": training.config for flow, training in TRAININGS.items()},
    "evaluate": EvaluationFlowConfig, "recurring": RecurringConfig, "sweep": SweepConfig,
}  # fmt: skip
"""Config class of each command that runs a flow."""


def check_command(arguments: list[str]) -> None:
    """Parses a command line as the CLI does, and reads its config. Raises the error that the user would see."""
    name, values = _parse(arguments)
    config, sets = values.get("config"), values.get("sets") or []
    if name in CONFIG_OF:
        parse_config(CONFIG_OF[name], Path(config), sets)
    elif name.startswith("engine ") and (config or sets):
        load_engine(Path(config) if config else None, sets)


def _parse(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The name of the subcommand and the values of its parameters."""
    command, name, context = get_command(app), "ostinato", None
    while True:
        context = command.make_context(name, arguments, parent=context)
        if not hasattr(command, "commands"):
            return context.command_path.removeprefix("ostinato "), context.params
        name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])


def unknown_words(span: str) -> list[str]:
    """The subcommands and options of a code span in the text that the CLI does not have. Values may be placeholders."""
    command: Any = get_command(app)
    unknown = []
    for word in shlex.split(span.replace("[", " ").replace("]", " "))[1:]:
        subcommands = getattr(command, "commands", {})
        options = {option for parameter in command.params for option in parameter.opts}
        if word.startswith("--") and word not in options:
            unknown.append(word)
        elif subcommands and not word.startswith("--"):
            command = subcommands.get(word)
            if command is None:
                return [*unknown, word]
    return unknown
