"""Reads a verl config: its file, the files of its `defaults:` list, `key=value` overrides and `${interpolations}`.

The files of the defaults list are searched in the config's folder, as Hydra does. For a file that does not exist there,
such as verl's own ppo_trainer, the defaults of the key table are used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.configs.overrides import ConfigError, load_config
from flows.verl.keys import KeyTable

MAX_DEPTH = 32
"""Largest depth of nested interpolations. A deeper one refers to itself."""


class VerlError(ConfigError):
    """A verl config cannot be imported. The message names every key and says what to do."""


class Verl:
    """A verl config with verl's defaults filled in and its interpolations resolved."""

    def __init__(self, given: dict[str, Any], table: KeyTable, *, kind: str) -> None:
        self.given, self.table, self.kind = given, table, kind

    def get(self, key: str) -> Any:
        """Returns the value of a key, which is given or verl's default. Raises VerlError."""
        return self.resolve(self._raw(key), key)

    def is_given(self, key: str) -> bool:
        """Whether the config gives the key."""
        return key in self.given

    def default(self, key: str) -> Any:
        """Returns verl's default of a key."""
        return self.resolve(self.table.default(key), key)

    def resolve(self, value: Any, key: str, depth: int = 0) -> Any:
        """Returns the value of a key with its interpolations resolved. Raises VerlError."""
        if depth > MAX_DEPTH:
            raise VerlError(f"{key}: the interpolation {value!r} refers to itself; write a value")
        if isinstance(value, list):
            return [self.resolve(item, key, depth + 1) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        parts = []
        for is_interpolation, text in _split_interpolations(value, key):
            parts.append(self._interpolate(text, key, depth) if is_interpolation else text)
        # a single interpolation keeps the type of its value
        if len(parts) == 1:
            return parts[0]
        return "".join(str(part) for part in parts)

    def _raw(self, key: str) -> Any:
        if key in self.given:
            return self.given[key]
        return self.table.default(key)

    def _interpolate(self, text: str, key: str, depth: int) -> Any:
        """The value of an interpolation in the value of `key`. `text` is the part within the braces."""
        text = text.strip()
        resolver, colon, rest = text.partition(":")
        if not colon:
            return self._lookup(_absolute_key(text, key), key, depth)

        # ${resolver:name,default}
        name, comma, fallback = rest.partition(",")
        default = self.resolve(_literal(fallback), key, depth + 1) if comma else None
        # oc.select has a default for a key that does not exist, unlike a plain interpolation
        if resolver == "oc.select":
            target = _absolute_key(name.strip(), key)
            is_known = target in self.given or self.table.has_default(target) or self._subtree(target)
            if is_known:
                return self._lookup(target, key, depth)
            return default
        if resolver == "oc.env":
            return os.environ.get(name.strip(), default)
        raise VerlError(f"{key}: '${{{text}}}' uses the resolver {resolver!r}, which is not supported; write the value")

    def _lookup(self, target: str, key: str, depth: int) -> Any:
        """The value or group that an interpolation in the value of `key` refers to."""
        if target in self.given or self.table.has_default(target):
            return self.resolve(self._raw(target), target, depth + 1)
        # not a value, so perhaps a group of given keys
        tree = self._subtree(target)
        if not tree:
            raise VerlError(
                f"{key}: '${{{target}}}' names a key that is neither given nor one of verl's; write the value"
            )
        return tree

    def _subtree(self, key: str) -> dict[str, Any]:
        return {name: value for name, value in self.given.items() if name.startswith(key + ".")}


def read_config(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Returns (given keys by dotted name, names in `defaults:` without a file). Raises ConfigError."""
    missing: list[str] = []
    tree = _compose(path, missing, seen=())
    overridden = load_config(None, [text.lstrip("+") for text in overrides])
    return flatten(_merge(tree, overridden)), missing


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}. An empty group counts as a value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, dict) and value:
            flat |= flatten(value, key)
        else:
            flat[key] = value
    return flat


def _compose(path: Path, missing: list[str], seen: tuple[Path, ...]) -> dict[str, Any]:
    """Merges a config with the files of its defaults list. Names without a file are added to `missing`."""
    if path.resolve() in seen:
        raise VerlError(f"{path} names itself in its list of defaults; remove it there")
    config = load_config(path)
    defaults = config.pop("defaults", None)
    if defaults is None:
        return config
    if not isinstance(defaults, list):
        raise VerlError(f"{path}: defaults is a {type(defaults).__name__}; Hydra expects a list")

    # _self_ is the position of the config's keys among the files, by default the last
    entries = defaults if "_self_" in defaults else [*defaults, "_self_"]
    tree: dict[str, Any] = {}
    for entry in entries:
        if entry == "_self_":
            tree = _merge(tree, config)
            continue
        file, package = _file_of_entry(entry, path)
        if file is None:
            continue
        if not file.is_file():
            missing.append(_entry_text(entry))
            continue
        inner = _compose(file, missing, (*seen, path.resolve()))
        for name in reversed(package):
            inner = {name: inner}
        tree = _merge(tree, inner)
    return tree


def _entry_text(entry: str | dict[str, Any]) -> str:
    if isinstance(entry, str):
        return entry
    return ", ".join(f"{group}: {option}" for group, option in entry.items())


def _file_of_entry(entry: Any, path: Path) -> tuple[Path | None, list[str]]:
    """(file of an entry of a defaults list, groups that its keys belong to). File None: the entry is ignored."""
    if isinstance(entry, str):
        return path.parent / (entry.lstrip("/") + ".yaml"), []
    if not isinstance(entry, dict) or len(entry) != 1:
        raise VerlError(f"{path}: {entry!r} in defaults is neither a name nor 'group: name'")
    name, option = next(iter(entry.items()))
    name = name.removeprefix("optional ").strip()
    if option is None or name.startswith("override "):
        return None, []
    # `group@package`: the keys belong to `package`, by default the folder of the group
    group, _, package = name.partition("@")
    package = package or group.rpartition("../")[2].replace("/", ".")
    if package in ("_global_", "_here_"):
        package = ""
    file = path.parent / group.lstrip("/") / f"{option}.yaml"
    return file, [part for part in package.split(".") if part]


def _merge(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Merges nested groups. Values of `upper` replace those of `lower`."""
    merged = dict(lower)
    for name, value in upper.items():
        replaced = merged.get(name)
        if isinstance(replaced, dict) and isinstance(value, dict):
            value = _merge(replaced, value)
        merged[name] = value
    return merged


def _split_interpolations(text: str, key: str) -> list[tuple[bool, str]]:
    """Splits a value into (True, text within an interpolation's braces) and (False, literal text)."""
    parts: list[tuple[bool, str]] = []
    rest = text
    while "${" in rest:
        before, _, rest = rest.partition("${")
        if before:
            parts.append((False, before))
        # find the brace that closes this one; interpolations may be nested
        depth, end = 1, 0
        for end, letter in enumerate(rest):  # noqa: B007  the position is used after the loop
            depth += (letter == "{") - (letter == "}")
            if depth == 0:
                break
        if depth:
            raise VerlError(f"{key}: {text!r} opens '${{' and does not close it")
        parts.append((True, rest[:end]))
        rest = rest[end + 1 :]
    if rest:
        return [*parts, (False, rest)]
    return parts


def _absolute_key(name: str, key: str) -> str:
    """Resolves a relative name in the value of `key`: `.x` is in the same group, `..x` in the group above."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    return ".".join([*key.split(".")[:-dots], name[dots:]])


def _literal(text: str) -> Any:
    text = text.strip().strip("\"'")
    if "${" in text or not text:
        return text
    return load_config(None, [f"x={text}"])["x"]
