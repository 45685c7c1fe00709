"""`ostinato config TRAINING [KEY]`: the keys of a config with their types, defaults and meanings."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from flows.catalogue import TRAININGS
from flows.cli.output import console, print_plain, usage_error
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.keys import ConfigKey, Group, config_keys, configs_page
from flows.configs.overrides import kind_of
from flows.configs.recurring import RecurringConfig
from flows.configs.sweep import SweepConfig

CONFIGS: dict[str, Group] = {
    **{name: training.config for name, training in TRAININGS.items()},
    "evaluation": EvaluationFlowConfig, "recurring": RecurringConfig, "sweep": SweepConfig,
}  # fmt: skip
"""The config of each flow that a config file is for."""
_FLOW_OF = {config: name for name, config in CONFIGS.items()}
MAX_NEAREST = 5
"""Most keys that are named instead of an unknown one."""


def print_config(
    training: Annotated[str, typer.Argument(help="Name of the flow: grpo, sft, evaluation, recurring, …")] = "",
    key: Annotated[
        str, typer.Argument(help="Only this key, such as rules.max_staleness, and the keys below it.")
    ] = "",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the keys of all flows in Markdown, the page docs/configs.md.")
    ] = False,
) -> None:
    """Prints the keys of a training's config, with type, default and meaning of each."""
    if markdown and training:
        raise usage_error(f"--markdown prints the keys of all flows, and {training!r} was given; leave it out")
    if markdown:
        print(configs_page(CONFIGS), end="")
        return
    if training not in CONFIGS:
        problem = f"no flow is named {training!r}" if training else "no flow is given"
        near = difflib.get_close_matches(training, CONFIGS) or CONFIGS
        raise usage_error(f"{problem}; give one of {', '.join(near)}")
    keys = list(config_keys(CONFIGS[training]))
    # an index of a list is no part of a path
    path = ".".join(part for part in key.split(".") if not part.isdecimal())
    chosen = [each for each in keys if not path or f"{each.path}.".startswith(f"{path}.")]
    if not chosen:
        near = nearest_paths(path, [each.path for each in keys])
        hint = f"the nearest: {', '.join(near)}" if near else f"'ostinato config {training}' prints all keys"
        raise usage_error(f"the config of {training} has no key {key!r}; {hint}")
    # the config of another flow within that of recurring or sweep is printed only if it is asked for
    inner = [f"{each.path}." for each in chosen if _is_flow(each) and not f"{path}.".startswith(f"{each.path}.")]
    to = console()
    for each in chosen:
        if not each.path.startswith(tuple(inner)):
            _print_key(each, to)


def nearest_paths(path: str, known: Sequence[str]) -> list[str]:
    """The known paths that resemble an unknown one, in their last part or as a whole."""
    by_name: dict[str, list[str]] = {}
    for other in dict.fromkeys(known):
        by_name.setdefault(other.rpartition(".")[2], []).append(other)
    names = difflib.get_close_matches(path.rpartition(".")[2], by_name, n=1)
    alike = [other for name in names for other in by_name[name]]
    alike += difflib.get_close_matches(path, list(dict.fromkeys(known)))
    return list(dict.fromkeys(alike))[:MAX_NEAREST]


def _print_key(key: ConfigKey, to: Console) -> None:
    """Prints one key in a line, and its meaning below it."""
    end = "  (required)" if key.default is None else f" = {key.default}"
    if key.chooses_group:
        end = ""
    elif key.kinds:
        end += f"  [{', '.join(key.kinds)}]"
    line = Text.assemble((key.path, "bold"), f": {key.type_text(_group_name)}{end}")
    to.print(line, highlight=False, soft_wrap=True)
    if key.meaning:
        meaning = key.meaning.replace("`", "")
        print_plain(to, textwrap.fill(meaning, to.width, initial_indent=4 * " ", subsequent_indent=4 * " "))


def _group_name(group: Group) -> str:
    """What the type of a key says of a group."""
    flow = _FLOW_OF.get(group)
    if flow:
        return f"config of {flow}"
    kind = kind_of(group)
    return f'{{kind: "{kind}"}}' if kind else "group"


def _is_flow(key: ConfigKey) -> bool:
    """Whether the value of a key is the config of a flow."""
    return not _FLOW_OF.keys().isdisjoint(key.groups)
