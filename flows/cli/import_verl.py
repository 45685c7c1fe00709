"""`ostinato import verl CONFIG.yaml`: converts a config of verl into a config of Ostinato."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.output import messages, print_plain, usage_error
from flows.configs.overrides import ConfigError
from flows.verl.importer import import_verl
from flows.verl.report import as_yaml, report

import_app = typer.Typer(help="Import configs of other trainers.", no_args_is_help=True)


@import_app.callback()
def _group() -> None:
    """Keeps `verl` a subcommand. Without a callback, typer would make it the only command."""


@import_app.command("verl")
def verl(
    config: Annotated[Path, typer.Argument(help="verl's YAML, complete or not, or its launch script (.sh).")],
    override: Annotated[
        list[str] | None, typer.Option("--override", help="Override a key of verl: a.b=c, as on verl's command line.")
    ] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Override an imported key: a.b=c.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="File to write the YAML to. Default: stdout.")] = None,
    kind: Annotated[
        str | None,
        typer.Option("--kind", help="ppo_trainer, sft_trainer, sft_trainer_engine or evaluation. Default: detected."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Leave out the keys that cannot be imported.")] = False,
) -> None:
    """Converts a verl config and reports the result for every key; refuses keys without a counterpart."""
    # convert; every refused key is in the error message
    try:
        imported = import_verl(config, overrides=override or [], sets=sets or [], kind=kind, force=force)
    except ConfigError as error:
        raise usage_error(str(error)) from None
    # the report goes to stderr, so that stdout is a valid config
    print_plain(messages(), report(imported))
    text = as_yaml(imported, config.name)
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise usage_error(f"{out} cannot be written: {error.strerror}") from None
