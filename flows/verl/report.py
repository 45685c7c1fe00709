"""What an import says of each key, as text, and the config it made, as YAML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from flows.configs.common import GRPOConfig
from flows.verl.importer import CONFIGS, Imported, MappedKey


def report(made: Imported) -> str:
    """Every key that was given, under what became of it; and what verl's defaults of other keys became."""
    return "\n".join(_lines(made))


def as_yaml(made: Imported, source: str) -> str:
    """The config in the order of its documentation."""
    fields = list(CONFIGS.get(made.flow, GRPOConfig).model_fields)
    ordered = {name: made.config[name] for name in sorted(made.config, key=fields.index)}
    head = f"# `ostinato {_command(made.flow)} --config FILE`: imported from verl's {made.kind}, {source}\n"
    return head + yaml.dump(ordered, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=110)


class _Plain(yaml.SafeDumper):
    """Writes a list that stands twice twice, instead of an anchor."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    """1e-06 as 1.0e-06: YAML 1.1 takes the first for text."""
    text = repr(value)
    return dumper.represent_scalar("tag:yaml.org,2002:float", text if "." in text else text.replace("e", ".0e"))


_Plain.add_representer(float, _represent_float)


def _command(flow: str) -> str:
    return "evaluate" if flow == "evaluation" else f"run {flow}"


def _lines(made: Imported) -> Iterator[str]:
    yield f"verl's {made.kind} -> ostinato {_command(made.flow)}"
    for name in made.absent:
        yield f"defaults: {name} is no file here; verl's own defaults stand for it"
    given = [line for line in made.mapped if line.given]
    filled = [line for line in made.mapped if not line.given]
    yield from _mapped(f"mapped ({len(given)})", given)
    yield from _mapped(f"not given, so verl's default ({len(filled)})", filled)
    yield from _grouped("dropped, without loss", made.dropped)
    yield from _grouped("decided by other keys, or asking for nothing", made.unread)
    yield from _grouped("not here, at a value that asks for nothing", made.off)
    if made.refused:
        yield f"\ncould not, left out by --force ({len(made.refused)})"
        for key, value, why in made.refused:
            yield f"  {key} = {_short(value)}: {why}"


def _mapped(title: str, lines: list[MappedKey]) -> Iterator[str]:
    if not lines:
        return
    yield f"\n{title}"
    for line in lines:
        became = ", ".join(f"{path} = {_short(value)}" for path, value in line.paths.items()) or "no key"
        yield f"  {line.key} = {_short(line.value)} -> {became}"
        if line.difference:
            yield f"    not quite: {line.difference}"


def _grouped(title: str, groups: dict[str, list[str]]) -> Iterator[str]:
    if not groups:
        return
    yield f"\n{title} ({sum(map(len, groups.values()))})"
    for why, keys in groups.items():
        yield f"  {why}:"
        for key in keys:
            yield f"    {key}"


def _short(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
