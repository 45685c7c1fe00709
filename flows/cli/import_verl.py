"""`ostinato import verl CONFIG.yaml`: converts a config of verl into a config of Ostinato, and prints what
became of each key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from flows.cli.output import messages, print_plain, usage_error
from flows.configs.common import GRPOConfig
from flows.configs.overrides import ConfigError
from flows.verl.importer import CONFIGS, Imported, MappedKey, import_verl

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


def report(imported: Imported) -> str:
    """Returns the report: the given keys grouped by their result, and the conversions of verl's defaults."""
    return "\n".join(_lines(imported))


def as_yaml(imported: Imported, source: str) -> str:
    """Returns the config as YAML, in the order of the config class."""
    # the order of the fields of the config class
    fields = list(CONFIGS.get(imported.flow, GRPOConfig).model_fields)
    ordered = {name: imported.config[name] for name in sorted(imported.config, key=fields.index)}
    header = f"# 'ostinato {_command(imported.flow)} --config FILE': imported from verl's {imported.kind}, {source}\n"
    return header + yaml.dump(ordered, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=110)


class _Plain(yaml.SafeDumper):
    """Writes a list that occurs twice in full, instead of an anchor and an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    """Writes 1e-06 as 1.0e-06, because YAML 1.1 reads the first as a string."""
    text = repr(value)
    return dumper.represent_scalar("tag:yaml.org,2002:float", text if "." in text else text.replace("e", ".0e"))


_Plain.add_representer(float, _represent_float)


def _command(flow: str) -> str:
    return "evaluate" if flow == "evaluation" else f"run {flow}"


def _lines(imported: Imported) -> Iterator[str]:
    yield f"verl's {imported.kind} -> ostinato {_command(imported.flow)}"
    if imported.approximate:
        keys = ", ".join(line.key for line in imported.approximate)
        yield f"APPROXIMATE ({len(imported.approximate)}; the differences are below): {keys}"
    for name in imported.absent:
        yield f"defaults: there is no file {name} here; verl's own defaults are used"
    # what was converted
    given_keys = [line for line in imported.mapped if line.given]
    default_keys = [line for line in imported.mapped if not line.given]
    yield from _mapped(f"mapped ({len(given_keys)})", given_keys)
    yield from _mapped(f"not given, so verl's default is used ({len(default_keys)})", default_keys)
    # what was not
    yield from _grouped("dropped without loss", imported.dropped)
    yield from _grouped("without effect, or decided by other keys", imported.unread)
    yield from _grouped("not supported, but at a value without effect", imported.off)
    if imported.refused:
        yield f"\ncannot be imported, left out by --force ({len(imported.refused)})"
        for key, value, why in imported.refused:
            yield f"  {key} = {_short(value)}: {why}"


def _mapped(title: str, lines: list[MappedKey]) -> Iterator[str]:
    if not lines:
        return
    yield f"\n{title}"
    for line in lines:
        assignments = [f"{path} = {_short(value)}" for path, value in line.paths.items()]
        yield f"  {line.key} = {_short(line.value)} -> {', '.join(assignments) or 'no key'}"
        if line.difference:
            yield f"    approximate: {line.difference}"


def _grouped(title: str, groups: dict[str, list[str]]) -> Iterator[str]:
    if not groups:
        return
    yield f"\n{title} ({sum(map(len, groups.values()))})"
    for why, keys in groups.items():
        yield f"  {why}:"
        for key in keys:
            yield f"    {key}"


def _short(value: Any) -> str:
    text = str(value)
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = text.lower()
    return text if len(text) <= 60 else text[:57] + "…"
