"""Reading a verl config: its file, what its `defaults:` list names, `key=value` words, `${interpolations}`.

A list of defaults is composed from the files beside the config, as Hydra does. What is not there (verl's own
ppo_trainer, say) is taken from the table of verl's defaults instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.configs.overrides import ConfigError, load_config
from flows.verl.keys import KeyTable

DEPTH = 32
"""Interpolations within interpolations; more is a circle."""


class VerlError(ConfigError):
    """A verl config that cannot be imported. The message names every key, and says what to do."""


class Verl:
    """A verl config as verl sees it: what was given, over verl's defaults, interpolated."""

    def __init__(self, given: dict[str, Any], table: KeyTable, *, kind: str) -> None:
        self.given, self.table, self.kind = given, table, kind

    def get(self, key: str) -> Any:
        """The value of a key of the table, given or verl's default. Raises VerlError."""
        return self.resolve(self._raw(key), key)

    def is_given(self, key: str) -> bool:
        """Whether the config says it itself."""
        return key in self.given

    def default(self, key: str) -> Any:
        return self.resolve(self.table.default(key), key)

    def resolve(self, value: Any, at: str, depth: int = 0) -> Any:
        """`value` of the key `at` with its interpolations put in."""
        if depth > DEPTH:
            raise VerlError(f"{at}: the interpolation {value!r} refers to itself; write a value")
        if isinstance(value, list):
            return [self.resolve(one, at, depth + 1) for one in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        parts = _parts(value, at)
        found = [self._interpolate(text, at, depth) if inside else text for inside, text in parts]
        return found[0] if len(found) == 1 else "".join(str(part) for part in found)

    def _raw(self, key: str) -> Any:
        return self.given[key] if key in self.given else self.table.default(key)

    def _interpolate(self, text: str, at: str, depth: int) -> Any:
        text = text.strip()
        resolver, colon, rest = text.partition(":")
        if not colon:
            return self._node(_absolute(text, at), at, depth)
        name, comma, fallback = rest.partition(",")
        default = self.resolve(_literal(fallback), at, depth + 1) if comma else None
        if resolver == "oc.select":
            key = _absolute(name.strip(), at)
            known = key in self.given or self.table.has_default(key) or self._subtree(key)
            return self._node(key, at, depth) if known else default
        if resolver == "oc.env":
            return os.environ.get(name.strip(), default)
        raise VerlError(f"{at}: '${{{text}}}' uses the resolver {resolver!r}, which is not read; write the value")

    def _node(self, key: str, at: str, depth: int) -> Any:
        if key in self.given or self.table.has_default(key):
            return self.resolve(self._raw(key), key, depth + 1)
        tree = self._subtree(key)
        if not tree:
            raise VerlError(f"{at}: '${{{key}}}' names a key that is neither given nor one of verl's; write the value")
        return tree

    def _subtree(self, key: str) -> dict[str, Any]:
        return {name: value for name, value in self.given.items() if name.startswith(key + ".")}


def read_config(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """(every key that is given, by its dotted name; names in `defaults:` that are no files). Raises ConfigError."""
    missing: list[str] = []
    tree = _compose(path, missing, seen=())
    words = load_config(None, [text.lstrip("+") for text in overrides])
    return flatten(_merge(tree, words)), missing


def flatten(tree: dict[str, Any], at: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; an empty group is a value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{at}.{name}" if at else name
        if isinstance(value, dict) and value:
            flat |= flatten(value, key)
        else:
            flat[key] = value
    return flat


def _compose(path: Path, missing: list[str], seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise VerlError(f"{path} names itself in its list of defaults; take it out")
    own = load_config(path)
    listed = own.pop("defaults", None)
    if listed is None:
        return own
    if not isinstance(listed, list):
        raise VerlError(f"{path}: defaults is a {type(listed).__name__}; Hydra expects a list")
    tree: dict[str, Any] = {}
    for entry in [*listed, *([] if "_self_" in listed else ["_self_"])]:
        if entry == "_self_":
            tree = _merge(tree, own)
            continue
        file, package = _named(entry, path)
        if file is None:
            continue
        if not file.is_file():
            missing.append(str(entry) if isinstance(entry, str) else ", ".join(f"{k}: {v}" for k, v in entry.items()))
            continue
        inner = _compose(file, missing, (*seen, path.resolve()))
        for name in reversed(package):
            inner = {name: inner}
        tree = _merge(tree, inner)
    return tree


def _named(entry: Any, path: Path) -> tuple[Path | None, list[str]]:
    """(the file that an entry of a defaults list names, the groups it is put under). File None: nothing is taken."""
    if isinstance(entry, str):
        return path.parent / (entry.lstrip("/") + ".yaml"), []
    if not isinstance(entry, dict) or len(entry) != 1:
        raise VerlError(f"{path}: {entry!r} in defaults is neither a name nor `group: name`")
    words, option = next(iter(entry.items()))
    words = words.removeprefix("optional ").strip()
    if option is None or words.startswith("override "):
        return None, []
    group, _, package = words.partition("@")
    package = package or group.rpartition("../")[2].replace("/", ".")
    package = "" if package in ("_global_", "_here_") else package
    return path.parent / group.lstrip("/") / f"{option}.yaml", [name for name in package.split(".") if name]


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        merged[name] = _merge(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _parts(text: str, at: str) -> list[tuple[bool, str]]:
    """The text cut into (True, inside of an interpolation) and (False, literal)."""
    parts: list[tuple[bool, str]] = []
    rest = text
    while "${" in rest:
        before, _, rest = rest.partition("${")
        if before:
            parts.append((False, before))
        depth, end = 1, 0
        for end, letter in enumerate(rest):  # noqa: B007  the position is used after the loop
            depth += (letter == "{") - (letter == "}")
            if depth == 0:
                break
        if depth:
            raise VerlError(f"{at}: {text!r} opens '${{' and does not close it")
        parts.append((True, rest[:end]))
        rest = rest[end + 1 :]
    return [*parts, (False, rest)] if rest else parts


def _absolute(name: str, at: str) -> str:
    """`.x` is beside the key, `..x` beside its group."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    return ".".join([*at.split(".")[:-dots], name[dots:]])


def _literal(text: str) -> Any:
    text = text.strip().strip("\"'")
    return text if "${" in text or not text else load_config(None, [f"x={text}"])["x"]
