"""Reads a launch script of verl: the trainer that it starts, and the keys that it gives to it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.verl.keys import Unmapped, key_tables
from flows.verl.read import VerlError
from flows.verl.shell import UNKNOWN, UNKNOWN_MARKS, Shell, ShellError

MAX_BYTES = 200_000
"""Largest launch script."""
KINDS = {
    "main_ppo": "ppo_trainer", "sft_trainer": "sft_trainer_engine", "sft_trainer_ray": "sft_trainer_engine",
    "fsdp_sft_trainer": "sft_trainer", "main_eval": "evaluation",
}  # fmt: skip
"""The kind of config that each of verl's programs reads."""
OWN_CONFIGS: dict[str, list[str]] = {
    "ppo_trainer": [], "ppo_megatron_trainer": ["model_engine=megatron"], "sft_trainer": [],
    "sft_trainer_engine": [], "evaluation": [],
}  # fmt: skip
"""verl's own files, whose keys and defaults are in the key table, with the options that they stand for."""


@dataclass(frozen=True)
class Launch:
    """What a launch script gives to verl."""

    kind: str
    """The kind of verl config."""
    config: Path | None
    """The config file that the script names. None: one of verl's own."""
    overrides: list[str]
    """The `key=value` words of the command."""


def read_launch_script(path: Path, overrides: Sequence[str]) -> Launch:
    """Reads the last command of a script that starts one of verl's trainers. Variables that the script does not set are
    those of the environment. Nothing is run. Keys in `overrides` need no value in the script.

    Raises VerlError for a script that starts no trainer, that cannot be followed, or whose values are not known."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise VerlError(f"{path} has more than {MAX_BYTES:,} bytes; give the script that starts verl")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VerlError(f"{path} cannot be read: {error}") from None
    if UNKNOWN_MARKS & set(text):
        raise VerlError(f"{path} has characters of Unicode's private area, which no script needs; remove them")
    commands: list[list[str]] = []

    def keep(words: list[str]) -> None:
        if any(re.fullmatch(r"verl(\.\w+)+", word) for word in words):
            commands.append(words)

    try:
        Shell(text, os.environ, keep).run()
    except ShellError as error:
        raise VerlError(f"{path}, {error}") from None
    except (IndexError, RecursionError):
        raise VerlError(f"{path} cannot be followed: a bracket or a word such as 'fi' is missing") from None
    if not commands:
        raise VerlError(
            f"{path} has no command with verl.trainer.NAME; give a config of verl, or the script that starts it"
        )
    return _launch(commands[-1], path, overrides)


def _launch(words: list[str], path: Path, overrides: Sequence[str]) -> Launch:
    program = next(word for word in words if re.fullmatch(r"verl(\.\w+)+", word)).rpartition(".")[2]
    if program not in KINDS:
        raise VerlError(f"{path} starts verl's {program}, which is not imported; expected {', '.join(KINDS)}")
    kind = KINDS[program]
    keys = [word for word in words if re.match(r"\+*[\w@/]+[\w.@/-]*=", word)]
    if kind.startswith("sft"):
        keys += _torchrun_ranks(words)
    keys = [word for word in keys if not (UNKNOWN.search(word) and _is_dropped(word, kind))]
    _check_values(keys, path, overrides)
    config, options = _config(words, path)
    return Launch(kind, config, [*options, *keys])


def _is_dropped(word: str, kind: str) -> bool:
    """Whether the value of the key has no meaning here."""
    entry = key_tables()[kind].find(word.lstrip("+").partition("=")[0])
    return isinstance(entry, Unmapped) and entry.result == "dropped"


def _torchrun_ranks(words: list[str]) -> list[str]:
    """The ranks of torchrun as keys of verl."""
    names = {"nproc_per_node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}
    keys = []
    for number, word in enumerate(words):
        match = re.fullmatch(r"--(nproc[_-]per[_-]node|nnodes)(?:=(.*))?", word, re.DOTALL)
        if match:
            value = words[number + 1] if match[2] is None and number + 1 < len(words) else match[2]
            keys.append(f"{names[match[1].replace('-', '_')]}={value}")
    return keys


def _check_values(keys: list[str], path: Path, overrides: Sequence[str]) -> None:
    """Raises VerlError for values that only a command or a variable of the user knows."""
    overridden = {text.lstrip("+").partition("=")[0] for text in overrides}
    problems = []
    for text in keys:
        key, _, value = text.lstrip("+").partition("=")
        sources = UNKNOWN.findall(value)
        if sources and key not in overridden:
            problems.append(f"  {key}: {', '.join(sources)}")
    if problems:
        noun = "a value comes" if len(problems) == 1 else f"{len(problems)} values come"
        raise VerlError(
            f"{path}: {noun} from a variable that is not set, or from a command, and none is run; set the variables in "
            "the environment, or give the keys by --override:\n" + "\n".join(problems)
        )


def _config(words: list[str], path: Path) -> tuple[Path | None, list[str]]:
    """(the config file that the command names, options that it stands for)."""
    text = "\n".join(words)
    name = re.search(r"^--config-name[=\n](.+)$", text, re.MULTILINE)
    if name is None:
        return None, []
    stem = name[1].removesuffix(".yaml")
    for folder in (path.parent, path.parent / "config", path.parent.parent / "config"):
        if (folder / f"{stem}.yaml").is_file():
            return folder / f"{stem}.yaml", []
    if stem not in OWN_CONFIGS:
        raise VerlError(
            f"{path} names the config {stem!r}, and there is no {stem}.yaml in {path.parent / 'config'}; put it there"
        )
    return None, OWN_CONFIGS[stem]
