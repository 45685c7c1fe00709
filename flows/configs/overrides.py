"""Reads a config, or the engine of one, from a file and from `key=value` words of a command line.

Values follow YAML 1.2 and not PyYAML's 1.1: `1e-5` is a float; `no`, `on`, `1:30` and `2026-01-02` are text. The file
and the command line follow the same rules.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from engine import import_paths
from engine.specs.engine import LocalEngineSpec
from engine.validation_messages import field_keys
from flows.configs.forms import FURTHER, merge_further
from storage.secrets import SecretInURL, refuse_secrets

Model = TypeVar("Model", bound=BaseModel)

MAX_CONFIG_BYTES = 1 << 20
"""Size of a config file, and of its values with every alias of YAML written out."""
MAX_DEPTH = 100
"""Largest depth of nested groups and lists. The code that checks and stores a config fails at about 200."""
WHOLE = "the config as a whole"
"""Name of the field of a problem that no field alone has."""
SHOWN_CHARACTERS = 200
"""Letters of a wrong value that an error shows."""
MAX_KEYS_SHOWN = 12
"""Most keys of a group that an error lists."""
NOT_A_GROUP = ("union_tag_invalid", "union_tag_not_found", "dict_type", "model_type", "model_attributes_type")
"""Pydantic's names of the errors of a value that is no group of keys, or no group of a known kind."""

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*)*")


class ConfigError(ValueError):
    """A config that cannot be used. The message says what was given, what was expected and what to do."""


def load_config(path: Path | None, sets: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping of the file (.yaml, .yml, .toml or .json; None: empty), changed by each `a.b=value` of `sets`.

    Raises ConfigError: no such file, wrong suffix, bad syntax, too large or nested too deeply, a key given twice, a set
    that goes through a value, an address with a password.
    """
    config = {} if path is None else _read_file(path)
    seen: list[str] = []
    for text in sets:
        key, value = _parse_set(text)
        # a key may be set once, directly or within a group
        for other in seen:
            if key == other or key.startswith(other + ".") or other.startswith(key + "."):
                again = "twice" if key == other else f"together with {other!r}, which overlaps it"
                raise ConfigError(f"{key!r} is set {again}; set it once")
        seen.append(key)
        _put(config, key, value)
    _check_config(config, "the config" if path is None else str(path))
    return config


def _check_config(config: dict[str, Any], name: str) -> None:
    """Raises ConfigError for a config that is too large or too deep, or holds an address with a password."""
    _check_extent(config, name)
    try:
        refuse_secrets(config)
    except SecretInURL as error:
        raise ConfigError(str(error)) from error


def load_yaml(text: str) -> dict[str, Any]:
    """The mapping of a YAML text, as if it were a file. Raises ConfigError."""
    config = _parse(text, _parse_yaml, "the text")
    _check_config(config, "the text")
    return config


def parse_config(model: type[Model], path: Path | None = None, sets: Sequence[str] = ()) -> Model:
    """The config of the file and the sets as a `model`. Raises ConfigError that lists every wrong key."""
    config = load_config(path, sets)
    try:
        return model.model_validate(config)
    except ValidationError as error:
        raise ConfigError(describe_validation(error, model, config)) from error


SET_KEY = "set it in the file or by {}=…"
"""What to do about a missing key of a config file."""


def describe_validation(
    error: ValidationError, model: type[BaseModel], config: Any = None, *, remedy: str = SET_KEY
) -> str:
    """A heading, and one line per wrong key (see `validation_lines`)."""
    lines = validation_lines(error, model, config, remedy=remedy)
    noun = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return f"{noun} in the {model.__name__} config:\n" + "\n".join(f"  {line}" for line in lines)


def validation_lines(error: ValidationError, model: Any, config: Any = None, *, remedy: str = SET_KEY) -> list[str]:
    """One line per wrong key: its dotted name, what was given and what is expected; for an unknown key, the nearest
    known one of its group.

    `config` is what was validated as a `model`, a class or a union of classes. Without it, a name within one of several
    kinds contains the kind. `remedy` says how a missing key, {}, is given.
    """
    problems = validation_problems(error, model, config, remedy=remedy)
    # the parts of a union may say the same
    return list(dict.fromkeys(f"{where}: {message}" for where, message in problems))


def validation_problems(
    error: ValidationError, model: Any, config: Any = None, *, remedy: str = SET_KEY
) -> list[tuple[str, str]]:
    """(dotted name or WHOLE, message) of each wrong key. The arguments are those of `validation_lines`."""
    wrong = []
    config = merge_further(config)
    problems = error.errors(include_url=False)
    for problem in problems:
        if problem["type"] == "too_short" and any(_is_within(other, problem) for other in problems):
            continue  # pydantic does not count the items that are wrong
        path = field_keys(problem, config)
        where = ".".join(path) or WHOLE
        message = problem["msg"].removeprefix("Value error, ")
        if path and path[-1] == FURTHER:
            message = f"expected settings by name (given: {problem['input']!r:.{SHOWN_CHARACTERS}})"
        elif problem["type"] == "extra_forbidden":
            message = f"unknown key{_hint_for_unknown(path[-1], *_group_at(model, path[:-1], config))}"
        elif problem["type"] == "missing":
            message = f"missing; {remedy.format(where)}"
        elif problem["type"] in NOT_A_GROUP:
            message = _describe_kind(problem, model, config)
        elif problem["type"] == "string_pattern_mismatch" and problem["ctx"]["pattern"] == import_paths.PATTERN:
            message = f"given {problem['input']!r:.{SHOWN_CHARACTERS}}; expected an import path, package.module:name"
        elif not isinstance(problem["input"], dict):
            message += f" (given: {problem['input']!r:.{SHOWN_CHARACTERS}})"
        wrong.append((where, message))
    return wrong


def _is_within(inner: ErrorDetails, outer: ErrorDetails) -> bool:
    """Whether one problem is in a part of the value that has the other."""
    depth = len(outer["loc"])
    return len(inner["loc"]) > depth and inner["loc"][:depth] == outer["loc"]


def _describe_kind(problem: ErrorDetails, model: Any, config: Any) -> str:
    """What a group of several kinds was given as its kind, and the kinds that there are."""
    value = problem["input"]
    choices = problem.get("ctx", {}).get("expected_tags") or _choices(problem, model, config)
    choices = choices.replace("'", "")
    if isinstance(value, dict) and "kind" in value:
        return f"given kind={value['kind']!r:.{SHOWN_CHARACTERS}}; give one of {choices}"
    shown = "no kind" if isinstance(value, dict) else f"{value!r:.{SHOWN_CHARACTERS}}"
    if choices:
        return f"given {shown}; expected a group of keys, with kind: one of {choices}"
    known = _keys_of(_of_kind(*_group_at(model, field_keys(problem, config), config)))
    keys = f" ({', '.join(known)})" if 0 < len(known) <= MAX_KEYS_SHOWN else ""
    return f"given {shown}; expected a group of keys{keys}"


def _choices(problem: ErrorDetails, model: Any, config: Any) -> str:
    """The kinds of a group. Pydantic names them only for a wrong kind, so one is tried. Empty for a group of one
    kind."""
    path = field_keys(problem, config)
    if not path or not isinstance(config, dict):
        return ""
    trial = copy.deepcopy(config)
    target = trial
    for part in path[:-1]:
        target = target[int(part) if isinstance(target, list) else part]
    target[int(path[-1]) if isinstance(target, list) else path[-1]] = {"kind": ""}
    try:
        TypeAdapter(model).validate_python(trial)
    except ValidationError as error:
        for other in error.errors(include_url=False):
            if other["type"] == "union_tag_invalid" and field_keys(other, trial) == path:
                return str(other["ctx"]["expected_tags"])
    return ""


def _read_file(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        suffix = f"the suffix {path.suffix!r}" if path.suffix else "no suffix"
        raise ConfigError(f"{path} has {suffix}; expected .yaml, .yml, .toml or .json")
    return _parse(text, parse, str(path))


def _parse(text: str, parse: Callable[[str], Any], name: str) -> dict[str, Any]:
    """The mapping of a text in a format. Raises ConfigError."""
    try:
        config = parse(text)
    except _UNPARSEABLE as error:
        raise ConfigError(f"{name} cannot be parsed: {_why_unparseable(error)}") from error
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise ConfigError(f"{name} holds a {type(config).__name__} at the top; expected keys with values, 'key: value'")
    return config


def _read_text(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} is no regular file; give the path of a config file")
        with path.open("rb") as file:
            # at most one byte too many, since the file may grow meanwhile
            data = file.read(MAX_CONFIG_BYTES + 1)
            size = max(len(data), path.stat().st_size)
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give the path of a config file") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"{path} has {size:,} bytes, and a config has at most {MAX_CONFIG_BYTES:,}; keep data in files of its own, "
            "and name those files in the config"
        )
    return text


def _check_extent(config: dict[str, Any], name: str) -> None:
    """Raises ConfigError for a config that later code cannot process: it has too many levels, or aliases that multiply
    its values."""
    try:
        size, _ = _extent(config, {}, depth=0)
    except _TooDeep as error:
        raise ConfigError(f"{name}: {error}") from error
    if size > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"{name}: its values have {size:,} characters when its YAML aliases are written out, and a config has at "
            f"most {MAX_CONFIG_BYTES:,}; use fewer aliases of aliases"
        )


def _extent(value: Any, known: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """(characters, levels) of a value. An alias is the same object again: it is measured once and counted each time."""
    if not isinstance(value, dict | list):
        return len(value) if isinstance(value, str) else 1, 0
    # an alias that was measured before
    size, levels = known.get(id(value), (0, 0))
    if depth + max(levels, 1) > MAX_DEPTH:
        raise _TooDeep
    if not levels:
        inner = value if isinstance(value, list) else value.values()
        extents = [_extent(item, known, depth + 1) for item in inner]
        names = 0 if isinstance(value, list) else sum(len(str(name)) for name in value)
        size = 1 + names + sum(item_size for item_size, _ in extents)
        levels = 1 + max((item_levels for _, item_levels in extents), default=0)
        known[id(value)] = size, levels
    return size, levels


def _parse_set(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not _KEY.fullmatch(key):
        raise ConfigError(f"{text!r} does not set a key; expected key=value or group.key=value, such as lr=1e-5")
    if not value:
        raise ConfigError(f"{text!r} gives no value; write {key}=null for none, or {key}='\"\"' for an empty text")
    try:
        if value[0] not in "[{'\"":
            # Not parsed as a document: `prompt=Question: {x} # 1` is text, not a mapping with a comment.
            return key, _scalar(value)
        return key, _parse_yaml(value)
    except _UNPARSEABLE as error:
        raise ConfigError(
            f"the value of {text!r:.{SHOWN_CHARACTERS}} cannot be parsed: {_why_unparseable(error)}; "
            "lists are [a, b], groups are {a: 1}, and a text that starts so goes in quotes"
        ) from error


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *groups, last = key.split(".")
    target = config
    for depth, group in enumerate(groups):
        inner = target.setdefault(group, {})
        # a group that is null in the file is filled
        if inner is None:
            inner = target[group] = {}
        if not isinstance(inner, dict):
            name = ".".join(groups[: depth + 1])
            raise ConfigError(
                f"{key!r} cannot be set: {name!r} is {inner!r}, not a group of keys; set {name}=… as a whole"
            )
        target = inner
    target[last] = value


class _DuplicateKey(Exception):
    """A mapping has a key twice, or a key that is not text."""


class _TooDeep(Exception):
    """Groups and lists are nested more deeply than MAX_DEPTH."""

    def __str__(self) -> str:
        return f"its groups and lists are nested more than {MAX_DEPTH} levels deep; write it flatter"


# ValueError: JSON and TOML syntax, and integers of more digits than Python reads. RecursionError: nested too deeply.
_UNPARSEABLE = (yaml.YAMLError, _DuplicateKey, ValueError, RecursionError)


def _why_unparseable(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return str(_TooDeep())
    # Python's message would tell the reader to change a setting of the interpreter
    if "integer string conversion" in str(error):
        digits = sys.get_int_max_str_digits()
        return f"an integer has more than {digits:,} digits; write a shorter one, or put it in quotes"
    return str(error)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars, in which keys must be text and may not be repeated."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        pairs = []
        # PyYAML would keep the last of two equal keys
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise _DuplicateKey(f"the key in line {line} is a list or group; expected text")
            if key_node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise _DuplicateKey(f"the key {key_node.value} in line {line} is not text; put it in quotes")
            pairs.append((key_node.value, line))
        _refuse_duplicates(pairs, where="line")
        return super().construct_mapping(node, deep)


def _refuse_duplicates(pairs: Iterable[tuple[str, Any]], where: str = "") -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            lines = f" (lines {mapping[key]} and {value})" if where else ""
            raise _DuplicateKey(f"the key {key!r} stands twice in one group{lines}; keep one")
        mapping[key] = value
    return mapping


def _parse_yaml(text: str) -> Any:
    # yaml.load is safe here, because _Loader is a SafeLoader
    return yaml.load(text, _Loader)


def _parse_json(text: str) -> Any:
    if not text.strip():
        return None
    return json.loads(text, object_pairs_hook=_refuse_duplicates)


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _parse_yaml, ".yml": _parse_yaml, ".toml": tomllib.loads, ".json": _parse_json,
}  # fmt: skip


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value.replace("_", ""))


# "007" stays text: it is a name more often than a number, and a field of type int still takes it.
RULES = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(([0-9][0-9_]*\.[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(inf|Inf|INF))"
        r"|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
)
"""(type, pattern, first characters) of the unquoted values that are not texts."""
for _name, _pattern, _first in RULES:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def _scalar(text: str) -> Any:
    loader = _Loader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))
        if tag == "tag:yaml.org,2002:merge":
            return text
        return loader.construct_object(yaml.ScalarNode(tag, text))
    finally:
        loader.dispose()


def _group_at(model: Any, path: Sequence[str], config: Any) -> tuple[list[type[BaseModel]], Any]:
    """The models of the group at `path`, one per kind, and the value that `config` has there."""
    groups = models_in(model)
    for part in path:
        # the items of a list have the type of the field
        if not part.isdecimal():
            groups = _of_kind(groups, config)
            fields = [group.model_fields[part] for group in groups if part in group.model_fields]
            groups = [inner for field in fields for inner in models_in(field.annotation)]
        config = _value_at(config, part)
    return groups, config


def _value_at(config: Any, part: str) -> Any:
    """The value of a key of a group, or of an index of a list; None if there is none."""
    if isinstance(config, dict):
        return config.get(part)
    return config[int(part)] if isinstance(config, list | tuple) and part.isdecimal() else None


def _of_kind(groups: list[type[BaseModel]], config: Any) -> list[type[BaseModel]]:
    """The groups of the kind that `config` gives, or all of them if it gives no known kind."""
    kind = _value_at(config, "kind")
    return [group for group in groups if kind_of(group) is not None and kind_of(group) == kind] or groups


def kind_of(group: type[BaseModel]) -> Any:
    """The kind of a group; None if it has none."""
    return group.model_fields["kind"].default if "kind" in group.model_fields else None


def _keys_of(groups: list[type[BaseModel]]) -> list[str]:
    return list(dict.fromkeys(name for group in groups for name in group.model_fields))


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a value of a type may be or contain."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    models = []
    for part in getattr(annotation, "__args__", ()):
        models += models_in(part)
    return models


def _hint_for_unknown(key: str, groups: list[type[BaseModel]], config: Any) -> str:
    """What to write instead of an unknown key of a group: only keys that are valid in it, or other kinds of it that
    have the key. `groups` and `config` are those of `_group_at`."""
    kind = _value_at(config, "kind")
    kinds = [str(kind_of(group)) for group in groups if key in group.model_fields]
    if kind and kinds:
        return f" of kind {kind}; leave it out, or use a kind that has it: {', '.join(kinds)}"
    known = [name for name in _keys_of(_of_kind(groups, config)) if name != key]
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    if not known or len(known) > MAX_KEYS_SHOWN:
        return "; leave it out, or see the keys that 'ostinato config' prints"
    return f"; leave it out, or use one of {', '.join(known)}"


def load_engine(path: Path | None, sets: Sequence[str] = ()) -> tuple[LocalEngineSpec, dict[str, Any]]:
    """The engine, and the whole file after the changes of `sets`. A set names a key of the engine:
    `trainer.zero_stage=3`.

    Raises ConfigError.
    """
    is_run_config = _is_run_config(load_config(path))
    prefix = "engine." if is_run_config else ""
    body = load_config(path, [prefix + text for text in sets])
    keys = body.get("engine", {}) if is_run_config else body
    if isinstance(keys, dict) and keys.get("kind") == "http":
        raise ConfigError(
            f"{path} names an engine elsewhere (engine.kind='http'), and this command is about the engine itself; give "
            "the file that 'ostinato engine serve' is started with"
        )
    try:
        return LocalEngineSpec.model_validate(keys), body
    except ValidationError as error:
        raise ConfigError(describe_validation(error, LocalEngineSpec, keys)) from error


def _is_run_config(body: Mapping[str, Any]) -> bool:
    """Whether the file is the config of a run, and not of an engine."""
    return "engine" in body or "model" in body
