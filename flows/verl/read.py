"""Reads a verl config: its file, the files of its `defaults:` list, `key=value` overrides and `${interpolations}`.

The files of the defaults list are searched in the config's folder, as Hydra does. For a file that does not exist there,
such as verl's own ppo_trainer, the defaults of the key table are used.
"""

from __future__ import annotations

import os
import re
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
    # of several overrides of a key, Hydra takes the last
    words = [text.lstrip("+") for text in overrides]
    last_words = {text.partition("=")[0].strip(): text for text in words}
    choices = {key: text.partition("=")[2].strip(" '\"") for key, text in last_words.items() if _is_group(key)}
    # `key=` is an empty text
    settings = [text + '""' * text.endswith("=") for key, text in last_words.items() if not _is_group(key)]

    missing: list[str] = []
    tree = _compose(path, missing, seen=(), choices=dict(choices))
    # without verl's files, the table describes only its default options; model_engine is a key of its own
    for group, option in choices.items():
        if group == "model_engine":
            tree.setdefault(group, option)
        elif group not in tree and option not in DESCRIBED_OPTIONS:
            expected = ", ".join(DESCRIBED_OPTIONS)
            raise VerlError(f"{group}={option}: there is no file of this option here; expected one of {expected}")
    return flatten(_merge(tree, load_config(None, settings))), missing


GROUPS = ("model_engine", "engine", "optim")
"""Groups of verl's files that a command line chooses by name, as in `model_engine=dp`."""
DESCRIBED_OPTIONS = ("fsdp", "dp", "dp_actor", "dp_critic", "dp_ref")
"""Options of groups whose keys the table has."""


def _is_group(key: str) -> bool:
    """Whether an override of this key chooses a file of a group, and does not set a value."""
    return key in GROUPS or "@" in key


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


def _compose(path: Path, missing: list[str], seen: tuple[Path, ...], choices: dict[str, str]) -> dict[str, Any]:
    """Merges a config with the files of its defaults list. Names without a file are added to `missing`. `choices` are
    options of groups that a command line or an earlier entry chose, such as {"model_engine": "dp"}."""
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
        file, package = _file_of_entry(entry, path, choices)
        if file is None:
            continue
        if not file.is_file():
            missing.append(_entry_text(entry))
            continue
        inner = _compose(file, missing, (*seen, path.resolve()), choices)
        for name in reversed(package):
            inner = {name: inner}
        tree = _merge(tree, inner)
    return tree


def _entry_text(entry: str | dict[str, Any]) -> str:
    if isinstance(entry, str):
        return entry
    return ", ".join(f"{group}: {option}" for group, option in entry.items())


def _file_of_entry(entry: Any, path: Path, choices: dict[str, str]) -> tuple[Path | None, list[str]]:
    """(file of an entry of a defaults list, groups that its keys belong to). File None: the entry is ignored. An option
    that the entry gives is added to `choices`, unless it has been chosen."""
    if isinstance(entry, str):
        return path.parent / (entry.lstrip("/") + ".yaml"), []
    if not isinstance(entry, dict) or len(entry) != 1:
        raise VerlError(f"{path}: {entry!r} in defaults is neither a name nor 'group: name'")
    name, option = next(iter(entry.items()))
    name = name.removeprefix("optional ").strip()
    if option is None or name.startswith("override "):
        return None, []
    # an option may name the option of another group: ${model_engine}_actor
    option = choices.get(name) or _with_choices(str(option), choices, path)
    if "@" not in name and "../" not in name:
        choices[name] = option
    # `group@package`: the keys belong to `package`, by default that of the file's header or the folder of the group
    group, _, package = name.partition("@")
    file = path.parent / group.lstrip("/") / f"{option}.yaml"
    package = package or _package_header(file) or group.rpartition("../")[2].replace("/", ".")
    if package in ("_global_", "_here_"):
        package = ""
    return file, [part for part in package.split(".") if part]


def _with_choices(option: str, choices: dict[str, str], path: Path) -> str:
    """The option with the options of other groups filled in. Raises VerlError for a group without one."""
    parts = []
    for is_interpolation, text in _split_interpolations(option, "defaults"):
        if is_interpolation and text.strip() not in choices:
            raise VerlError(f"{path}: {option!r} in defaults names {text.strip()!r}, which no earlier entry chooses")
        parts.append(choices[text.strip()] if is_interpolation else text)
    return "".join(parts)


def _package_header(file: Path) -> str:
    """The package in a file's first comment, `# @package NAME`. Empty if there is none."""
    if not file.is_file():
        return ""
    match = re.match(r"(?:\s*(?:#.*)?\n)*?\s*#\s*@package\s+(\S+)", file.read_text(encoding="utf-8"))
    return match[1] if match else ""


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
