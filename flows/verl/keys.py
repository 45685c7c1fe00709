"""The table of verl's keys (keys.toml): the counterpart of each key in Ostinato, or why it has none."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, get_args

NULL: Final = "null"
"""Stands for null in the table, because TOML has no null."""


@dataclass(frozen=True)
class Mapped:
    """A key with a counterpart in Ostinato."""

    default: Any
    """verl's default value."""
    to: tuple[str, ...]
    """Paths in our config, or `flow`."""
    convert: str | None = None
    """Name of a conversion in flows.verl.convert. None: the value is copied."""
    when: str | None = None
    """Name of the condition in flows.verl.importer under which verl reads the key. None: always."""
    required: bool = False
    """Whether a config must give the key. Its default is only a placeholder."""
    placeholder: bool = False
    """Whether the default is only a placeholder. Then the key has an effect only if the config gives it."""
    flows: tuple[str, ...] = ()
    """The flows that use the key. Empty: all flows."""


UnmappedResult = Literal["dropped", "approximate", "refused"]
"""What becomes of a key without a counterpart: it is dropped, or if its value is not one of the defaults, reported as a
difference or refused."""


@dataclass(frozen=True)
class Unmapped:
    """A key without a counterpart."""

    result: UnmappedResult
    why: str
    when: str | None
    defaults: tuple[Any, ...]
    """verl's current default first, then the defaults of other versions and values with the same meaning."""


@dataclass(frozen=True)
class KeyTable:
    """The keys of one kind of verl file."""

    mapped: dict[str, Mapped] = field(default_factory=dict)
    unmapped: dict[str, Unmapped] = field(default_factory=dict)
    patterns: dict[str, Unmapped] = field(default_factory=dict)
    """Keys by pattern: `a.b.**` means every key under a.b, and `**.name` a key of this name anywhere."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Files that verl chooses by name, such as "model_engine=veomni", with the defaults that they change."""

    def find(self, key: str) -> Mapped | Unmapped | None:
        """Returns the entry of a key, or None if verl has no such key."""
        return self.mapped.get(key) or self.unmapped.get(key) or self._pattern(key)

    def _pattern(self, key: str) -> Unmapped | None:
        for pattern, entry in self.patterns.items():
            if pattern.endswith(".**") and (key + ".").startswith(pattern.removesuffix("**")):
                return entry
            if pattern.startswith("**.") and key.endswith(pattern.removeprefix("**")):
                return entry
        return None

    def default(self, key: str) -> Any:
        """Returns verl's current default. Raises KeyError if the key has none."""
        if key in self.mapped:
            return self.mapped[key].default
        return self.unmapped[key].defaults[0]

    def has_default(self, key: str) -> bool:
        return key in self.mapped or key in self.unmapped

    def is_group(self, key: str) -> bool:
        """Whether the key is a group of other keys."""
        return any(known.startswith(key + ".") for known in (*self.mapped, *self.unmapped, *self.patterns))

    def nearest(self, key: str) -> str | None:
        """Returns the known key that is most similar to an unknown one, or None."""
        names = [*self.mapped, *self.unmapped]
        similar = difflib.get_close_matches(key, names, n=1, cutoff=0.75)
        if similar:
            return similar[0]
        # else the most similar key with the same last part
        last_part = key.rpartition(".")[2]
        candidates = [name for name in names if name.rpartition(".")[2] == last_part]
        if not candidates:
            return None
        return difflib.get_close_matches(key, candidates, n=1, cutoff=0.0)[0]


@cache
def key_tables() -> dict[str, KeyTable]:
    """Returns the table of each supported kind of verl config, by the name of the kind."""
    body = tomllib.loads((Path(__file__).parent / "keys.toml").read_text(encoding="utf-8"))
    return {kind: _table(tables) for kind, tables in body.items()}


def _table(tables: dict[str, Any]) -> KeyTable:
    """Builds a key table from its part of keys.toml."""
    table = KeyTable(options=tables.get("options", {}))
    # keys with a counterpart
    for key, entry in tables["mapped"].items():
        fields = entry | {"default": _value(entry["default"]), "to": _as_tuple(entry["to"])}
        fields["flows"] = _as_tuple(entry.get("flows", ()))
        table.mapped[key] = Mapped(**fields)
    # keys without one, in groups with the same reason
    for group in tables["unmapped"]:
        result = next(name for name in get_args(UnmappedResult) if name in group)
        why = group[result]
        for key, entry in group["keys"].items():
            if "**" in key:
                table.patterns[key] = Unmapped(result, why, group.get("when"), _defaults(entry))
            else:
                table.unmapped[key] = Unmapped(result, why, group.get("when"), _defaults(entry))
    return table


def _defaults(entry: Any) -> tuple[Any, ...]:
    """The defaults of an unmapped key, which the table gives as a value or as {default, also}."""
    if isinstance(entry, dict) and "default" in entry:
        values = [entry["default"], *entry.get("also", ())]
    else:
        values = [entry]
    return tuple(_value(value) for value in values)


def _as_tuple(value: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(value)


def _value(value: Any) -> Any:
    return None if value == NULL else value
