"""The keys of a config with their types, defaults and meanings, for `ostinato config` and for docs/configs.md.

All of it is read from the pydantic classes: the meaning of a key is the docstring of its field, or else of its group.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import to_jsonable_python

from flows.configs.forms import class_title
from flows.configs.overrides import kind_of, models_in

Group = type[BaseModel]

BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥"}
"""Attributes of a type's constraints, with the sign of each."""
MAX_BOUND = 1 << 31
"""Bounds from here on are those of number formats. They are not shown."""
TYPES: dict[Any, str] = {tuple: "list", dict: "map", JsonValue: "any value"}
"""Types that are called otherwise than in Python."""
SKIPPED = SkipJsonSchema()
"""Metadata of a field that is no key of a config."""
PAGE = """\
# Configs

Every key of the configs of all flows: its type, its default and its meaning. `ostinato config --markdown >
docs/configs.md` writes this page. In a terminal, `ostinato config grpo` prints the keys of one flow, `ostinato config
grpo optimizer` those of one group, and `ostinato config grpo rules.max_staleness` one key.

A config is a YAML, TOML or JSON file, and `--set optimizer.lr=1e-5` sets one key of it. A key that is left out has its
default. Values are written in JSON, which YAML reads as well: `null` is no value (None in the meanings), and `{}` is a
group whose keys have their defaults. The key `kind` says which of several groups is meant.

Groups that differ in few keys are written once: a later group refers by a link to an earlier one for the keys, or the
meanings, that are the same.
"""
"""The beginning of the page."""
MIN_SHARED = 3
"""Least number of equal keys for which a section refers to an earlier one. Fewer are printed again."""


@dataclass(frozen=True)
class ConfigKey:
    """A key of a config."""

    path: str
    """Its dotted path. The keys of a group in a list, or in a map, follow the name of the list."""
    group: Group
    """The group that it belongs to."""
    field: FieldInfo
    kinds: tuple[str, ...] = ()
    """The kinds of groups that have it, as `--set` chooses them: "engine.sampler.kind=vllm"."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]

    @property
    def groups(self) -> list[Group]:
        """The groups that its value may be, or that the items of its value may be. Empty for other values."""
        return models_in(self.field.annotation)

    @property
    def chooses_group(self) -> bool:
        """Whether it is the kind of a group."""
        return self.name == "kind"

    @property
    def default(self) -> str | None:
        """Its default in JSON. None: it must be given."""
        if self.field.is_required():
            return None
        value = self.field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            kind = {"kind": kind_of(type(value))} if len(self.groups) > 1 else {}
            value = kind | value.model_dump(mode="json", exclude_defaults=True)
        return json.dumps(to_jsonable_python(value), ensure_ascii=False)

    @property
    def meaning(self) -> str:
        """What it means, in one line."""
        if self.field.description:
            return _one_line(self.field.description)
        if self.chooses_group:
            return group_meaning(self.group)
        return group_meaning(self.groups[0]) if len(self.groups) == 1 else ""

    def type_text(self, name_of_group: Callable[[Group], str]) -> str:
        """Its type: `int (≥ 1) or null`."""
        return _either(_alternatives(self.field.annotation, _bounds(self.field.metadata), name_of_group))


def config_keys(group: Group, path: str = "", kinds: tuple[str, ...] = ()) -> Iterator[ConfigKey]:
    """Yields every key of a config, each before the keys below it. A path occurs once per group that has it."""
    for key in keys_of_group(group, path, kinds):
        yield key
        for inner in key.groups:
            chosen = (f"{key.path}.kind={kind_of(inner)}",) if len(key.groups) > 1 else ()
            yield from config_keys(inner, f"{key.path}.", kinds + chosen)


def keys_of_group(group: Group, path: str = "", kinds: tuple[str, ...] = ()) -> list[ConfigKey]:
    """The keys of a group without those below them. A field that a form does not have is no key."""
    fields = {name: field for name, field in group.model_fields.items() if SKIPPED not in field.metadata}
    return [ConfigKey(path + name, group, field, kinds) for name, field in fields.items()]


def group_meaning(group: Group) -> str:
    """What a group is, in one line: the docstring of its class."""
    return _one_line(inspect.getdoc(group) or "")


def configs_page(configs: Mapping[str, Group]) -> str:
    """The page of all keys in Markdown: a section per flow, and one per group. `configs` has each flow's config."""
    titles = {config: f"Flow {name}" for name, config in configs.items()}
    for config in configs.values():
        for key in config_keys(config):
            titles.setdefault(key.group, class_title(key.group.__name__))
    contents = ["| config | what the flow does |", "|---|---|"]
    contents += [f"| {_link(titles[config])} | {_escaped(group_meaning(config))} |" for config in configs.values()]
    homes: dict[tuple[str, ...], str] = {}
    flows = [_section(group, titles, "##", homes) for group in configs.values()]
    groups = [_section(group, titles, "###", homes) for group in titles if group not in configs.values()]
    return "\n".join([PAGE, *contents, "", *flows, "## Groups\n", *groups])


def _section(group: Group, titles: Mapping[Group, str], level: str, homes: dict[tuple[str, ...], str]) -> str:
    """The section of a flow or a group: its meaning, its class and the table of its keys.

    `homes` has the title of the section in which a row, or a key's meaning, was printed first. It is updated.
    """
    title = titles[group]
    rows = [_cells(key, titles) for key in keys_of_group(group)]
    shared: dict[str, list[str]] = {}
    for row in rows:
        shared.setdefault(homes.setdefault(row, title), []).append(row[0])
    table = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        home = homes[row]
        if home == title or len(shared[home]) < MIN_SHARED:
            *cells, meaning = row
            first = homes.setdefault((row[0], meaning), title)
            if first != title:
                meaning = min(meaning, f"As in {_link(first)}.", key=len)
            table.append(f"| {' | '.join([*cells, meaning])} |")
    others = [
        f"As in {_link(home)}: {', '.join(names)}.\n"
        for home, names in shared.items()
        if home != title and len(names) >= MIN_SHARED
    ]
    about = f"{_escaped(group_meaning(group))} Class: `{group.__module__}.{group.__qualname__}`."
    return "\n".join([f"{level} {title}", "", about, "", *table, "", *others])


def _cells(key: ConfigKey, titles: Mapping[Group, str]) -> tuple[str, ...]:
    """The cells of a key's row: name, type, default and meaning."""
    default = "required" if key.default is None else f"`{key.default}`"
    # the meaning of a kind is that of the section
    last = ("", "") if key.chooses_group else (default, _escaped(key.meaning))
    return (f"`{key.name}`", key.type_text(lambda inner: _link(titles[inner])), *last)


def _link(title: str) -> str:
    return f"[{title}](#{title.lower().replace(' ', '-')})"


def _escaped(text: str) -> str:
    """Text for a cell of a table. What Markdown would read as markup is escaped, but for code spans."""
    return re.sub(r"(`[^`]*`)|([|*<])", lambda match: match[1] or f"\\{match[2]}", text)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _either(texts: list[str]) -> str:
    """a, b or c."""
    *first, last = dict.fromkeys(texts)
    return f"{', '.join(first)} or {last}" if first else last


def _alternatives(annotation: Any, bounds: str, name_of_group: Callable[[Group], str]) -> list[str]:
    """The types that a value may have. `bounds` are those of its numbers, or of its number of items."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _alternatives(parts[0], bounds or _bounds(parts[1:]), name_of_group)
    if origin in (Union, UnionType):
        return [text for part in parts for text in _alternatives(part, bounds, name_of_group)]
    if origin is Literal:
        return [json.dumps(value) for value in parts]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [name_of_group(annotation)]
    if annotation in (None, type(None)):
        return ["null"]
    if origin is None:
        name = TYPES.get(annotation, annotation.__name__)
        return [name + bounds if annotation in (int, float, str) else name]
    inner = [_either(_alternatives(part, "", name_of_group)) for part in parts if part is not ...]
    return [f"{TYPES.get(origin, origin.__name__)} of {' to '.join(inner)}{bounds}"]


def _bounds(metadata: Iterable[Any]) -> str:
    """The constraints of a number or of a length: ` (≥ 0, ≤ 1)`. Empty if there are none."""
    constraints: list[Any] = []
    for item in metadata:
        constraints += item.metadata if isinstance(item, FieldInfo) else [item]
    texts = []
    for item in constraints:
        bounds = {sign: getattr(item, name, None) for name, sign in BOUNDS.items()}
        texts += [f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None and bound < MAX_BOUND]
    return f" ({', '.join(texts)})" if texts else ""
