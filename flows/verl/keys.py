"""The table of verl's keys (verl_keys.toml): what each means here, or why it means nothing."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

NULL: Final = "null"
"""How the table writes null, which TOML cannot."""


@dataclass(frozen=True)
class Mapped:
    """A key that means something here."""

    default: Any
    to: tuple[str, ...]
    """Paths of our config, or `flow`."""
    convert: str | None = None
    """A function of flows.verl.convert; None: the value as it is."""
    when: str | None = None
    """A condition of flows.verl.convert without which verl does not read the key."""
    required: bool = False
    """The default stands for nothing, and there is no config without the key."""
    placeholder: bool = False
    """The default stands for nothing: the key counts only where it is given."""
    flows: tuple[str, ...] = ()
    """The flows it is mapped for; elsewhere it is not read. Empty: all."""


@dataclass(frozen=True)
class Unmapped:
    """A key that means nothing here: dropped without loss, or refused where it is not at a default."""

    refused: bool
    why: str
    when: str | None
    defaults: tuple[Any, ...]
    """verl's of today first, then those of other versions and values that ask for the same."""


@dataclass(frozen=True)
class KeyTable:
    """The keys of one kind of verl file."""

    mapped: dict[str, Mapped] = field(default_factory=dict)
    unmapped: dict[str, Unmapped] = field(default_factory=dict)
    patterns: dict[str, Unmapped] = field(default_factory=dict)
    """By `a.b.**` (everything under a.b) and `**.name` (that key anywhere)."""

    def find(self, key: str) -> Mapped | Unmapped | None:
        """What becomes of a key; None: verl has no such key."""
        return self.mapped.get(key) or self.unmapped.get(key) or self._pattern(key)

    def _pattern(self, key: str) -> Unmapped | None:
        for pattern, found in self.patterns.items():
            if pattern.endswith(".**") and (key + ".").startswith(pattern.removesuffix("**")):
                return found
            if pattern.startswith("**.") and key.endswith(pattern.removeprefix("**")):
                return found
        return None

    def default(self, key: str) -> Any:
        """verl's own value of today. Raises KeyError for a key without one."""
        if key in self.mapped:
            return self.mapped[key].default
        return self.unmapped[key].defaults[0]

    def has_default(self, key: str) -> bool:
        return key in self.mapped or key in self.unmapped

    def is_group(self, key: str) -> bool:
        """Whether keys stand under it."""
        return any(known.startswith(key + ".") for known in (*self.mapped, *self.unmapped, *self.patterns))

    def nearest(self, key: str) -> str | None:
        """The known key that was most likely meant."""
        names = [*self.mapped, *self.unmapped]
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.75)
        if near:
            return near[0]
        same = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
        return difflib.get_close_matches(key, same, n=1, cutoff=0.0)[0] if same else None


@cache
def key_tables() -> dict[str, KeyTable]:
    """Every kind of verl file that is read, by name."""
    body = tomllib.loads((Path(__file__).parent / "keys.toml").read_text(encoding="utf-8"))
    return {kind: _table(tables) for kind, tables in body.items()}


def _table(tables: dict[str, Any]) -> KeyTable:
    table = KeyTable()
    for key, entry in tables["mapped"].items():
        words = entry | {"default": _value(entry["default"]), "to": _words(entry["to"])}
        words["flows"] = _words(entry.get("flows", ()))
        table.mapped[key] = Mapped(**words)
    for group in tables["unmapped"]:
        refused = "refused" in group
        for key, entry in group["keys"].items():
            one = entry if isinstance(entry, dict) and "default" in entry else {"default": entry}
            defaults = tuple(_value(value) for value in (one["default"], *one.get("also", ())))
            home = table.patterns if "**" in key else table.unmapped
            why = group["refused" if refused else "dropped"]
            home[key] = Unmapped(refused, why, group.get("when"), () if "**" in key else defaults)
    return table


def _words(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _value(value: Any) -> Any:
    return None if value == NULL else value
