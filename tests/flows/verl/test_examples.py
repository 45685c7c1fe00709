"""Counts which of verl's example scripts import, exactly or approximately. It needs a checkout of verl, and is no part
of the default tests.

    OSTINATO_VERL_SOURCE=/path/to/verl python -m pytest -m slow tests/flows/verl/test_examples.py -s

A script runs in a shell whose only commands are recorders of their arguments. The keys that it gives to verl's trainer
are imported over the file of verl's own that the script names, and tables of the differences and refusals are printed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest

from flows.configs.overrides import ConfigError
from flows.verl.importer import Imported, import_verl
from flows.verl.shell import UNKNOWN, Shell, ShellError

SOURCE = os.environ.get("OSTINATO_VERL_SOURCE", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SOURCE, reason="OSTINATO_VERL_SOURCE names no copy of verl")]

LEAST = {139: 110, 109: 79}
"""How many scripts import at least, by the number of scripts: January 2026 (b178a3c), August 2026 (1dda039)."""
ENVIRONMENT = {"HOME": "/home/user", "DEVICE": "gpu", "aime24_test_path": "test.parquet", "sp_size": "4"}
"""Variables of the user. The scripts of August ask torch_npu for DEVICE; two of January's read the last two without
setting them before."""
RECORDER = '#!/bin/sh\n{ printf "%s\\0" "$@"; printf "\\1"; } >> "$RECORD"\n'
PRELUDE = (
    "command_not_found_handle() { return 0; }; sleep() { :; }; "
    'set() { builtin set "$@"; builtin set +eux; }; source "$0"'
)
SET_BY_USER = {
    "data.train_files": "train.parquet", "data.val_files": "test.parquet", "actor_rollout_ref.model.path": "model",
    "critic.model.path": "model", "trainer.n_gpus_per_node": "8", "trainer.nnodes": "1",
}  # fmt: skip
"""Values of keys that a script takes from variables of its user, which are empty here."""
CONFIG_OF_MODULE = {
    "fsdp_sft_trainer": "sft_trainer", "sft_trainer": "sft_trainer_engine", "main_ppo": "ppo_trainer",
}  # fmt: skip
GRADER = ["grader.path=tasks.graders.rules:LastNumber"]
KINDS = {"fsdp_sft_trainer": "sft_trainer", "sft_trainer": "sft_trainer_engine", "main_ppo": "ppo_trainer"}


def recorded_command(script: Path, source: Path, folder: Path) -> list[str]:
    """The arguments of the last command of a script that starts a trainer. Empty if it starts none."""
    commands = folder / "bin"
    commands.mkdir(parents=True)
    for name in ("python", "python3", "torchrun", "ray", "uv", "srun"):
        (commands / name).write_text(RECORDER)
        (commands / name).chmod(0o755)
    (commands / "tee").write_text("#!/bin/sh\nexec /bin/cat > /dev/null\n")
    (commands / "tee").chmod(0o755)
    record = folder / "record"
    record.touch()
    # the SFT scripts take the number of GPUs and a folder
    arguments = ["8", "save"] if "sft" in script.parts else []
    subprocess.run(
        ["/bin/bash", "-c", PRELUDE, script, *arguments],
        cwd=source,
        env={"PATH": str(commands), "RECORD": str(record), **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
    )
    started = [command.split("\0") for command in record.read_text().split("\1")]
    trainers = [command for command in started if any("=" in word and "." in word for word in command)]
    return trainers[-1] if trainers else []


def config_file(command: list[str], module: str, script: Path, source: Path) -> Path:
    """The config file that a command starts from: the one that it names, or verl's own for the trainer."""
    name = re.search(r"--config-name[=\n]'?([\w-]+)", "\n".join(command))
    stem = name[1] if name else CONFIG_OF_MODULE[module]
    places = [script.parent / "config", script.parent.parent / "config", source / "verl" / "trainer" / "config"]
    return next(place / f"{stem}.yaml" for place in places if (place / f"{stem}.yaml").is_file())


def import_script(script: Path, source: Path, folder: Path) -> Imported:
    """Imports the config of a script. Raises ConfigError with the reason if it cannot be imported."""
    command = recorded_command(script, source, folder)
    module = next((word.rpartition(".")[2] for word in command if word.startswith("verl.")), "main_ppo")
    words = []
    for word in command:
        match = re.match(r"(\+*)([\w.@/-]+)=(.*)", word, re.DOTALL)
        if match and not word.startswith("--"):
            words.append(f"{match[2]}={match[3] or SET_BY_USER.get(match[2], '')}")
    if not words:
        raise ConfigError("it starts no trainer")
    if module not in KINDS:
        raise ConfigError(f"verl.{module} is no trainer")
    # torchrun gives the ranks of an SFT script, and a reward that verl chooses by the data is named here
    sets = GRADER
    if "sft" in module:
        words, sets = [*words, "trainer.n_gpus_per_node=8"], []
    elif any(re.match(r"(reward\.)?custom_reward_function\.path=.|reward_model\.enable=[tT]", word) for word in words):
        sets = []
    path = config_file(command, module, script, source)
    return import_verl(path, overrides=words, sets=sets, kind=KINDS[module])


def print_counts(title: str, lines: Iterable[str]) -> None:
    print(f"\n{title}")
    for line, count in Counter(lines).most_common():
        print(f"{count:4}  {line}")


def test_most_of_verls_example_scripts_import(tmp_path: Path) -> None:
    source = Path(SOURCE).absolute()
    scripts = sorted(source.glob("examples/**/*.sh"))
    imported: dict[str, Imported] = {}
    refused: dict[str, str] = {}
    for number, script in enumerate(scripts):
        name = str(script.relative_to(source))
        try:
            imported[name] = import_script(script, source, tmp_path / str(number))
        except ConfigError as error:
            refused[name] = str(error)
    for name, why in refused.items():
        print(f"{name}\n    {why}")
    reasons = chain.from_iterable(why.splitlines() for why in refused.values())
    print_counts("refused", (line.strip() for line in reasons if not line.endswith(":")))
    differences = (f"{line.key}: {line.difference}" for result in imported.values() for line in result.approximate)
    print_counts("approximate", differences)
    exact = [name for name, result in imported.items() if not result.approximate]
    counts = f"{len(exact)} exactly, {len(imported) - len(exact)} approximately, {len(refused)} not"
    print(f"{len(scripts)} scripts, {len(imported)} import: {counts}")
    assert len(imported) >= LEAST.get(len(scripts), 0)


def pattern_of(word: str) -> str:
    """A regular expression of a word, in which a value from a command may be any text."""
    texts = UNKNOWN.split(word)[::2]
    return "(?s)" + ".*".join(map(re.escape, texts))


def test_launch_scripts_are_read_as_bash_runs_them(tmp_path: Path) -> None:
    """A script whose condition depends on a command is refused, and a value from a command agrees with any."""
    source = Path(SOURCE).absolute()
    different, refused = [], []
    scripts = sorted(source.glob("examples/**/*.sh"))
    for number, script in enumerate(scripts):
        run = [word for word in recorded_command(script, source, tmp_path / str(number)) if "=" in word]
        commands: list[list[str]] = []
        try:
            Shell(script.read_text(), ENVIRONMENT, commands.append).run()
        except ShellError as error:
            refused.append(f"{script.relative_to(source)}, {error}")
            continue
        trainers = [words for words in commands if any(re.fullmatch(r"verl(\.\w+)+", word) for word in words)]
        read = [word for word in (trainers or [[]])[-1] if "=" in word]
        patterns = [pattern_of(word) for word in read]
        # bash ends some scripts before their command, because a variable of the user is missing
        if run and trainers and (len(run) != len(read) or not all(map(re.fullmatch, patterns, run))):
            different.append(str(script.relative_to(source)))
    print("\n".join(refused))
    assert different == []
    assert len(refused) <= len(scripts) // 50


def test_a_script_alone_means_what_it_means_over_verls_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key table's defaults are those of verl's files, for each trainer."""
    source = Path(SOURCE).absolute()
    monkeypatch.chdir(source)
    for name, value in {**ENVIRONMENT, "PWD": str(source)}.items():
        monkeypatch.setenv(name, value)
    version = {139: "trainer.use_legacy_worker_impl=auto", 109: "trainer.use_v1=true"}
    scripts = sorted(source.glob("examples/**/*.sh"))
    different, compared = [], 0
    for number, script in enumerate(scripts):
        try:
            over_file = import_script(script, source, tmp_path / str(number))
            words = [version[len(scripts)]] if over_file.kind == "ppo_trainer" else []
            alone = import_verl(script, overrides=words, sets=GRADER if words else [])
        except ConfigError:
            continue
        compared += 1
        for result in (over_file, alone):
            # the folder of verl's file is a placeholder, and so is a grader that takes the place of the script's
            result.config.pop("storage", None)
            result.config.pop("grader", None)
        if over_file.config != alone.config:
            different.append(str(script.relative_to(source)))
    print(f"{compared} scripts compared")
    assert different == []
