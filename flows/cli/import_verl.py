"""`ostinato import verl CONFIG.yaml`: another trainer's configuration as one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.output import messages, usage_error
from flows.configs.overrides import ConfigError
from flows.verl.importer import import_verl
from flows.verl.report import as_yaml, report

import_app = typer.Typer(help="Configurations of other trainers as ours.", no_args_is_help=True)


@import_app.callback()
def _group() -> None:
    """Keeps `verl` a command of its own."""


@import_app.command("verl")
def verl(
    config: Annotated[Path, typer.Argument(help="verl's YAML, full or only what differs from verl's defaults.")],
    override: Annotated[
        list[str] | None, typer.Option("--override", help="A key of verl's: a.b=c, as on verl's command line.")
    ] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="A key of ours: a.b=c, after the import.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Where to write our YAML; else stdout.")] = None,
    kind: Annotated[
        str | None,
        typer.Option("--kind", help="ppo_trainer, sft_trainer, sft_trainer_engine or evaluation; else by its keys."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Leave out what cannot be imported.")] = False,
) -> None:
    """Maps every key of a verl config to ours and says what became of each; refuses what has no counterpart."""
    try:
        made = import_verl(config, overrides=override or [], sets=sets or [], kind=kind, force=force)
    except ConfigError as error:
        raise usage_error(str(error)) from None
    messages().print(report(made), markup=False, highlight=False, soft_wrap=True)
    text = as_yaml(made, config.name)
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise usage_error(f"{out} cannot be written: {error.strerror}") from None
