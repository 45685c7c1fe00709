"""Reads a verl config: its file, the files of its `defaults:` list, `key=value` overrides and `${interpolations}`.

The files of the defaults list are searched in the config's folder, as Hydra does. For a file that does not exist there,
such as verl's own ppo_trainer, the defaults of the key table are used.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flows.configs.overrides import MAX_CONFIG_BYTES, ConfigError, load_config
from flows.verl.keys import KeyTable

MAX_DEPTH = 32
"""Largest depth of nested interpolations, or of a package. A deeper interpolation refers to itself."""
MAX_INTERPOLATIONS = 100_000
"""Most interpolations of a config that are resolved, each as often as it is read."""
MAX_TEXT = 16 << 20
"""Most characters of all resolved texts."""
MAX_ITEMS = 1_000_000
"""Most items of all lists and groups that interpolations refer to, each as often as it is referred to."""
MAX_KEY = 300
"""Most characters of a dotted name."""
_BRACE = re.compile("[{}]")
MAX_FILES, MAX_FILE_BYTES = 100, 4 << 20
"""Most files of the defaults lists, each as often as it is read, and their bytes."""


class VerlError(ConfigError):
    """A verl config cannot be imported. The message names every key and says what to do."""


class Verl:
    """A verl config with verl's defaults filled in and its interpolations resolved."""

    def __init__(
        self, given: dict[str, Any], table: KeyTable, *, kind: str, options: dict[str, bool] | None = None
    ) -> None:
        """`options` are those of `read_config`. Raises VerlError for one without a file that the table does not
        describe."""
        self.given, self.table, self.kind = given, table, kind
        self.option_defaults: dict[str, Any] = {}
        self.interpolations = self.characters = self.items = 0  # resolved so far
        for option, has_file in (options or {}).items():
            if not has_file and option not in table.options:
                raise VerlError(f"{option}: there is no file of this option here; expected {', '.join(table.options)}")
            self.option_defaults |= table.options.get(option, {})

    def get(self, key: str) -> Any:
        """Returns the value of a key, which is given or verl's default. Raises VerlError, also for a value that is no
        number where verl's default is one."""
        value = self.resolve(self._raw(key), key)
        default = self._default(key) if self.table.has_default(key) else None
        # a text may be the range 0.5_4.0, or a size that is chosen automatically
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if is_number and not (value is None or isinstance(value, str) or _is_finite_number(value)):
            raise VerlError(f"{key}: given {value!r:.200}; expected a number, such as verl's default {default!r}")
        return value

    def is_given(self, key: str) -> bool:
        """Whether the config gives the key."""
        return key in self.given

    def default(self, key: str) -> Any:
        """Returns verl's default of a key."""
        return self.resolve(self._default(key), key)

    def _default(self, key: str) -> Any:
        if key in self.option_defaults:
            return self.option_defaults[key]
        return self.table.default(key)

    def resolve(self, value: Any, key: str, depth: int = 0) -> Any:
        """Returns the value of a key with its interpolations resolved. Raises VerlError."""
        if depth > MAX_DEPTH:
            raise VerlError(f"{key}: the interpolation {value!r:.200} refers to itself; write a value")
        if isinstance(value, list):
            if depth:
                self._count(key, items=len(value))
            return [self.resolve(item, key, depth + 1) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        parts = []
        for is_interpolation, text in _split_interpolations(value, key):
            parts.append(self._interpolate(text, key, depth) if is_interpolation else text)
        # a single interpolation keeps the type of its value
        if len(parts) == 1:
            return parts[0]
        texts = []
        for part in parts:
            texts.append(str(part))
            self._count(key, characters=len(texts[-1]))
        return "".join(texts)

    def _count(self, key: str, *, interpolations: int = 0, characters: int = 0, items: int = 0) -> None:
        """Raises VerlError for interpolations that multiply: a kilobyte of them can stand for gigabytes."""
        self.interpolations += interpolations
        self.characters += characters
        self.items += items
        if self.interpolations > MAX_INTERPOLATIONS or self.characters > MAX_TEXT or self.items > MAX_ITEMS:
            raise VerlError(
                f"{key}: the config's interpolations make more than {MAX_INTERPOLATIONS:,} values, {MAX_TEXT:,} "
                f"characters or {MAX_ITEMS:,} items of lists; write the values"
            )

    def _raw(self, key: str) -> Any:
        if key in self.given:
            return self.given[key]
        return self._default(key)

    def _interpolate(self, text: str, key: str, depth: int) -> Any:
        """The value of an interpolation in the value of `key`. `text` is the part within the braces."""
        text = text.strip()
        self._count(key, interpolations=1)
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
        raise VerlError(
            f"{key}: '${{{text[:200]}}}' uses the resolver {resolver[:200]!r}, which is not supported; write the value"
        )

    def _lookup(self, target: str, key: str, depth: int) -> Any:
        """The value or group that an interpolation in the value of `key` refers to."""
        if target in self.given or self.table.has_default(target):
            return self.resolve(self._raw(target), target, depth + 1)
        # not a value, so perhaps a group of given keys
        tree = self._subtree(target)
        self._count(key, items=len(self.given))
        if not tree:
            raise VerlError(
                f"{key}: '${{{target[:200]}}}' names a key that is neither given nor one of verl's; write the value"
            )
        return tree

    def _subtree(self, key: str) -> dict[str, Any]:
        return {name: value for name, value in self.given.items() if name.startswith(key + ".")}


class ReadConfig(NamedTuple):
    """The keys of a config file and of the overrides."""

    values: dict[str, Any]
    """Value by dotted name."""
    absent: list[str]
    """Names in `defaults:` without a file."""
    options: dict[str, bool]
    """Options of groups that the config or an override chooses, such as "model_engine=veomni", and whether there is a
    file of the option."""


def read_config(path: Path | None, overrides: Sequence[str] = ()) -> ReadConfig:
    """Reads a config with the files of its defaults list and with `key=value` overrides. None: only the overrides.
    Raises ConfigError."""
    # of several overrides of a key, Hydra takes the last
    words = [text.lstrip("+") for text in overrides]
    last_words = {text.partition("=")[0].strip(): text for text in words}
    choices = {key: text.partition("=")[2].strip(" '\"") for key, text in last_words.items() if _is_group(key)}
    settings = [_setting(text) for key, text in last_words.items() if not _is_group(key)]

    files = _Files(dict(choices))
    tree = {} if path is None else _compose(path, files, seen=())
    # an entry of a defaults list without a file is in `missing`
    needed = {group: option for group, option in files.choices.items() if group in choices or group in files.found}
    options = {f"{group}={option}": group in files.found for group, option in needed.items()}
    if "model_engine" in choices:
        tree.setdefault("model_engine", choices["model_engine"])
    return ReadConfig(flatten(_merge(tree, load_config(None, settings))), files.missing, options)


def _setting(text: str) -> str:
    """An override of Hydra as one of ours. `key=` is an empty text, and a value with Hydra's escapes is a text."""
    key, _, value = text.partition("=")
    if not value or "\\" in value:
        return f"{key}={json.dumps(value)}"
    return text


GROUPS = ("model_engine", "engine", "optim", "model")
"""Groups of verl's files that a command line chooses by name, as in `model_engine=dp`."""


def _is_group(key: str) -> bool:
    """Whether an override of this key chooses a file of a group, and does not set a value."""
    return key in GROUPS or "@" in key


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}. An empty group counts as a value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}.{name}" if prefix else name
        if len(key) > MAX_KEY:
            raise VerlError(f"the key {key[:80]!r}… has more than {MAX_KEY} characters; verl has none as long")
        if isinstance(value, dict) and value:
            flat |= flatten(value, key)
        else:
            flat[key] = value
    return flat


@dataclass
class _Files:
    """The files of a config so far."""

    choices: dict[str, str]
    """Options of groups that a command line or an earlier entry chose, such as {"model_engine": "dp"}."""
    missing: list[str] = field(default_factory=list)
    """Names without a file."""
    found: set[str] = field(default_factory=set)
    """Groups with a file."""
    count: int = 0
    size: int = 0
    """Bytes."""

    def add(self, path: Path) -> None:
        """Counts a file before it is read. Raises VerlError for too many or too large files."""
        self.count += 1
        self.size += path.stat().st_size if path.is_file() else 0
        if self.count > MAX_FILES or self.size > MAX_FILE_BYTES:
            raise VerlError(
                f"{path}: the lists of defaults name more than {MAX_FILES} files or {MAX_FILE_BYTES:,} bytes, each as "
                "often as it is named; name fewer"
            )


def _compose(path: Path, files: _Files, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Merges a config with the files of its defaults list, which are noted in `files`."""
    if path.resolve() in seen:
        raise VerlError(f"{path} names itself in its list of defaults; remove it there")
    files.add(path)
    config = load_config(path)
    defaults = config.pop("defaults", None)
    if defaults is None:
        return config
    if not isinstance(defaults, list):
        raise VerlError(f"{path}: defaults is a {type(defaults).__name__}; Hydra expects a list")

    # an override of a group that another entry chooses
    for entry in defaults:
        if isinstance(entry, dict) and len(entry) == 1 and _group_of_entry(entry).startswith("override "):
            group = _group_of_entry(entry).removeprefix("override ").strip()
            files.choices.setdefault(group, next(iter(entry.values())))

    # _self_ is the position of the config's keys among the files, by default the last
    entries = defaults if "_self_" in defaults else [*defaults, "_self_"]
    tree: dict[str, Any] = {}
    for entry in entries:
        if entry == "_self_":
            tree = _merge(tree, config)
            continue
        file, package = _file_of_entry(entry, path, files.choices)
        if file is None:
            continue
        if not _is_file(file):
            files.missing.append(_entry_text(entry))
            continue
        if isinstance(entry, dict):
            files.found.add(_group_of_entry(entry))
        inner = _compose(file, files, (*seen, path.resolve()))
        if len(package) > MAX_DEPTH:
            raise VerlError(f"{file}: its package has more than {MAX_DEPTH} levels; write a shorter one")
        for name in reversed(package):
            inner = {name: inner}
        tree = _merge(tree, inner)
    return tree


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _is_file(path: Path) -> bool:
    """Whether the path is a file. False for a name that no file can have, such as one of 300 letters."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _entry_text(entry: str | dict[str, Any]) -> str:
    if isinstance(entry, str):
        return entry
    return ", ".join(f"{group}: {option}" for group, option in entry.items())


def _group_of_entry(entry: dict[str, str]) -> str:
    """The group of an entry, with its package unless that is the group's own: `optim@optim` is `optim`."""
    name = next(iter(entry)).removeprefix("optional ").strip()
    group, _, package = name.partition("@")
    return group if package == group.lstrip("/").replace("/", ".") else name


def _file_of_entry(entry: Any, path: Path, choices: dict[str, str]) -> tuple[Path | None, list[str]]:
    """(file of an entry of a defaults list, groups that its keys belong to). File None: the entry is ignored. An option
    that the entry gives is added to `choices`, unless it has been chosen."""
    if isinstance(entry, str):
        return path.parent / (entry.lstrip("/") + ".yaml"), []
    if not isinstance(entry, dict) or len(entry) != 1:
        raise VerlError(f"{path}: {entry!r} in defaults is neither a name nor 'group: name'")
    name, option = _group_of_entry(entry), next(iter(entry.values()))
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
    """The package of `# @package NAME` in the comments at the top of a file. Empty if there is none."""
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        beginning = stream.read(MAX_CONFIG_BYTES).decode("utf-8", "replace")
    for line in beginning.splitlines():
        text = line.strip()
        if text and not text.startswith("#"):
            return ""
        words = text.removeprefix("#").split(maxsplit=2)
        if len(words) > 1 and words[0] == "@package":
            return words[1]
    return ""


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
    start = 0
    while (opening := text.find("${", start)) >= 0:
        if opening > start:
            parts.append((False, text[start:opening]))
        # find the brace that closes this one; interpolations may be nested
        depth, end = 1, opening + 2
        while depth and (brace := _BRACE.search(text, end)):
            depth += 1 if brace[0] == "{" else -1
            end = brace.end()
        if depth:
            raise VerlError(f"{key}: {text!r:.200} opens '${{' and does not close it")
        parts.append((True, text[opening + 2 : end - 1]))
        start = end
    if start < len(text):
        parts.append((False, text[start:]))
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
