"""Counts which of verl's example scripts import. It needs a copy of verl, and is no part of the default tests.

    OSTINATO_VERL_SOURCE=/path/to/verl python -m pytest -m slow tests/flows/verl/test_examples.py -s

A script runs in a shell whose only commands are recorders of their arguments. The keys that it gives to verl's trainer
are imported, and a table of the refusals is printed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from flows.configs.overrides import ConfigError
from flows.verl.importer import import_verl

SOURCE = os.environ.get("OSTINATO_VERL_SOURCE", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SOURCE, reason="OSTINATO_VERL_SOURCE names no copy of verl")]

SCRIPTS, LEAST = 139, 95
"""The number of scripts in January 2026 (b178a3c), and how many of them import at least."""
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
KINDS = {"fsdp_sft_trainer": "sft_trainer", "sft_trainer": "sft_trainer_engine", "main_ppo": "ppo_trainer"}


def recorded_command(script: Path, source: Path, folder: Path) -> list[str]:
    """The arguments of the last command of a script that starts a trainer. Empty if it starts none."""
    commands = folder / "bin"
    commands.mkdir(parents=True)
    for name in ("python", "python3", "torchrun", "ray", "uv"):
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
        env={"PATH": str(commands), "HOME": "/home/user", "RECORD": str(record)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
    )
    started = [command.split("\0") for command in record.read_text().split("\1")]
    trainers = [command for command in started if any("=" in word and "." in word for word in command)]
    return trainers[-1] if trainers else []


def config_file(command: list[str], script: Path, source: Path, folder: Path) -> Path:
    """The config file of the example that a command names, or an empty one for verl's own."""
    text = "\n".join(command)
    name = re.search(r"--config-name[=\n]'?([\w-]+)", text)
    if name is not None:
        for place in (script.parent / "config", script.parent.parent / "config"):
            if (place / f"{name[1]}.yaml").is_file():
                return place / f"{name[1]}.yaml"
    empty = folder / "empty.yaml"
    empty.touch()
    return empty


def import_script(script: Path, source: Path, folder: Path) -> str:
    """Imports the config of a script. Returns why it was refused, or an empty text."""
    command = recorded_command(script, source, folder)
    module = next((word.rpartition(".")[2] for word in command if word.startswith("verl.")), "main_ppo")
    words = []
    for word in command:
        match = re.match(r"(\+*)([\w.@/-]+)=(.*)", word, re.DOTALL)
        if match and not word.startswith("--"):
            words.append(f"{match[2]}={match[3] or SET_BY_USER.get(match[2], '')}")
    if not words:
        return "it starts no trainer"
    if module not in KINDS:
        return f"verl.{module} is no trainer"
    # torchrun gives the ranks of an SFT script, and a reward that verl chooses by the data is named here
    sets = ["grader.path=tasks.graders.rules:LastNumber"]
    if "sft" in module:
        words, sets = [*words, "trainer.n_gpus_per_node=8"], []
    elif any(re.match(r"(reward\.)?custom_reward_function\.path=.|reward_model\.enable=[tT]", word) for word in words):
        sets = []
    path = config_file(command, script, source, folder)
    try:
        import_verl(path, overrides=words, sets=sets, kind=KINDS[module])
    except ConfigError as error:
        return str(error)
    return ""


def test_most_of_verls_example_scripts_import(tmp_path: Path) -> None:
    source = Path(SOURCE).absolute()
    scripts = sorted(source.glob("examples/**/*.sh"))
    refused: dict[str, str] = {}
    for number, script in enumerate(scripts):
        why = import_script(script, source, tmp_path / str(number))
        if why:
            refused[str(script.relative_to(source))] = why
    for name, why in refused.items():
        print(f"{name}\n    {why}")
    reasons = Counter(
        line.strip() for why in refused.values() for line in why.splitlines() if not line.endswith(":")
    )
    for line, count in reasons.most_common():
        print(f"{count:4}  {line}")
    print(f"{len(scripts)} scripts, {len(scripts) - len(refused)} import, {len(refused)} do not")
    # of another version, only the table is of interest
    if len(scripts) == SCRIPTS:
        assert len(scripts) - len(refused) >= LEAST
