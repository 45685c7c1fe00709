"""Launch scripts of verl: what they start, read without running them. The words are compared with those of bash."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from flows.verl.importer import import_verl
from flows.verl.read import VerlError
from flows.verl.shell import UNKNOWN, Shell, ShellError

SCRIPTS = {
    "expansions": """
        a=1; b="x y"; c='$a'
        show $a "$b" $b "$c" ${a}z "${none:-d e}" ${none:-f g} ${a:+set} ${none:+not} "${b}"'q'\\$ $((a + 2*3)) "$none"
        : ${d:=later} "${e:=$a}"; show $d $e ${d}-${e} "a\\"b" ~ k=~/x # a comment
        f=~/data; show "$f" ${#} "$@" $((7 / 2)) "$((a))"
    """,
    "arrays": """
        A=(one "two three" $HOME)
        A+=(
            four   # a comment
            k="v w"
        )
        B=("${A[@]}"); show "${A[@]}" "${B[@]}" ${A} "${C[@]}" last
        text=a; text+=b; show $text
    """,
    "conditions": """
        mode=fast; n=3
        if [ "$mode" = slow ]; then x=1; elif [[ $mode == "fast" && $n -gt 2 ]]; then x=2; else x=3; fi
        [ -z "$none" ] && y=1; [ -n "$none" ] || z=2
        if [ "$mode" = fast ] && { [ $n -eq 4 ] || [ $n -eq 3 ]; }; then w=1; fi
        if ! [ $n -ne 3 ]; then v=1; else v=2; fi
        if [ $n -lt 3 ]; then if [[ a == b ]]; then u=1; fi; fi
        show $x "$y" $z $w $v "$u"
    """,
    "cases": """
        for_all=1
        for kind in gpu npu other-1; do :; done
        kind=other-1
        case "${kind}" in
            gpu | npu) x=1 ;;
            other-*)
                x=2
                case $x in 2) y=3;; esac
                ;;
            *) x=4 ;;
        esac
        show $x $y $for_all
    """,
    "continued": """
        M=given; E=
        [ -n "$M" ] ||
            M=default
        [ -n "$E" ] &&

            E=set
        true |
            show $M "$E" piped
    """,
    "words of tests": """
        MODE=test; A=[
        if [ -z "$MODE" ]; then MODE=train; fi
        if [ "$MODE" = test ] && test "$A" = [; then x=1; fi
        show $MODE $x
    """,
    "declarations": """
        declare -a A=(a.b=1 c.d=2); declare -i N=5; export -n Z=2; local=3
        readonly -a R=(x y)
        show "${A[@]}" $N $Z $local "${R[@]}"
    """,
    "variables that end": """
        X='\\1'; N=7; M=2
        unset N; [ -z "$N" ] && gone=1
        Y=$((M*3+1)); Z=$((7/M))
        show "$gone" $Y $Z
        if [ "$M" = 2 ]; then exit 0; fi
        show never
    """,
    "other": """
        function now() { date; }
        later () {
            echo "never"
        }
        cat > /dev/null <<'EOF'
        show no
EOF
        export a=1 b=2
        echo "hello" > /dev/null 2>&1
        set -x
        show $a \\
            $b "x" >/dev/null
    """,
}


def words_of_bash(script: str, folder: Path) -> list[list[str]]:
    record = folder / "record"
    record.touch()
    prelude = 'show() { { printf "%s\\0" "$@"; printf "\\1\\n"; } >> "$RECORD"; }\n'
    environment = {"HOME": "/home/user", "RECORD": str(record), "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-c", prelude + script], env=environment, capture_output=True, check=True, timeout=30)
    return [line.split("\0")[:-1] for line in record.read_text().split("\1\n")[:-1]]


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(tmp_path: Path, name: str) -> None:
    script = SCRIPTS[name].replace("\\\\", "\\")
    commands: list[list[str]] = []
    # a variable that is not set is empty in bash, and marked here
    Shell(script, {"HOME": "/home/user", "none": "", "y": "", "u": "", "N": ""}, commands.append).run()
    shown = [words[1:] for words in commands if words[0] == "show"]
    assert shown == words_of_bash(script, tmp_path)
    assert shown


def test_what_is_read_or_rounded_otherwise_is_marked() -> None:
    commands: list[list[str]] = []
    Shell("X=1; read X; N=-7; show $X $((N/2)); V='\\1'; show $((V+1))\n", {}, commands.append).run()
    shown = [words[1:] for words in commands if words[0] == "show"]
    assert [[UNKNOWN.search(word) is not None for word in words] for words in shown] == [[True, True], [True]]


LAUNCH = """#!/bin/bash
set -x
MODEL=${MODEL:-models/m}
ACTOR=(
    actor_rollout_ref.actor.optim.lr=2e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=$((64 * 2))
)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_files="['a.parquet', 'b.parquet']" \\
    actor_rollout_ref.model.path=$MODEL "${ACTOR[@]}" +trainer.use_v1=true $@ 2>&1 | tee log
"""
GRADER = ["grader.path=tasks.graders.rules:LastNumber"]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.sh"
    path.write_text(text.replace("\\\\", "\\"), encoding="utf-8")
    return path


def test_a_launch_script_is_imported(tmp_path: Path) -> None:
    config = import_verl(write(tmp_path, LAUNCH), overrides=["data.train_batch_size=256"], sets=GRADER).config
    assert config["data"]["train"]["path"] == "a.parquet"
    assert config["data"]["train"]["further_paths"] == ["b.parquet"]
    assert (config["model"]["key"], config["optimizer"]["lr"]) == ("models/m", 2e-6)
    algorithm = config["algorithm"]
    assert (algorithm["samples_per_mini_batch"], algorithm["samples_per_batch"]) == (128, 256)


def test_a_script_that_names_megatrons_file_is_one_of_megatron(tmp_path: Path) -> None:
    text = LAUNCH.replace("main_ppo ", "main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' ")
    result = import_verl(write(tmp_path, text), sets=GRADER)
    assert "model_engine" in [line.key for line in result.approximate]
    with pytest.raises(VerlError, match="names the config 'mine', and there is no mine.yaml"):
        import_verl(write(tmp_path, text.replace("ppo_megatron_trainer.yaml", "mine")), sets=GRADER)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text("actor_rollout_ref: {rollout: {n: 4}}\n")
    named = import_verl(write(tmp_path, text.replace("ppo_megatron_trainer.yaml", "mine")), sets=GRADER)
    assert named.config["algorithm"]["completions_per_sample"] == 4


def test_the_ranks_of_torchrun_are_those_of_the_run(tmp_path: Path) -> None:
    text = (
        "torchrun --nnodes=2 --nproc_per_node 4 -m verl.trainer.sft_trainer data.train_files=a.parquet model.path=m\n"
    )
    engine = import_verl(write(tmp_path, text)).config["engine"]
    assert (engine["trainer"]["ranks"], engine["cluster"]["address"]) == (8, "auto")


def test_values_that_only_a_command_knows_are_named_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSTINATO_MODEL", raising=False)
    text = LAUNCH.replace("${MODEL:-models/m}", "$OSTINATO_MODEL").replace("2e-6", "$(cat rate)")
    # a key without a meaning here needs no value
    text = text.replace("+trainer.use_v1=true", "+trainer.use_v1=true ray_kwargs.timeline_json_file=$OSTINATO_MODEL")
    path = write(tmp_path, text)
    with pytest.raises(VerlError) as caught:
        import_verl(path, sets=GRADER)
    message = str(caught.value)
    assert "actor_rollout_ref.model.path: $OSTINATO_MODEL" in message
    assert "actor_rollout_ref.actor.optim.lr: $(cat rate)" in message
    assert "timeline" not in message
    monkeypatch.setenv("OSTINATO_MODEL", "models/other")
    config = import_verl(path, overrides=["actor_rollout_ref.actor.optim.lr=3e-6"], sets=GRADER).config
    assert (config["model"]["key"], config["optimizer"]["lr"]) == ("models/other", 3e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python3 train.py a.b=1\n", "no command with verl.trainer.NAME"),
        ("python3 -m verl.trainer.main_generation a.b=1\n", "starts verl's main_generation, which is not imported"),
        ("if [ $(date) = x ]; then a=1; fi\n", "line 1: a condition depends on '\\$\\(date\\)'"),
        ("if grep x file; then a=1; fi\n", "line 1: whether this 'if' holds depends on a command"),
        ("if [ a = b ]; then\n", "the script ends before 'elif'"),
        ("x='a\n", "a ' is not closed"),
        ("case x\n", "cannot be followed"),
        ("x=\ue000\n", "private area"),
    ],
)
def test_scripts_that_are_not_read(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(VerlError, match=words):
        import_verl(write(tmp_path, text), sets=GRADER)


@pytest.mark.parametrize(
    "line", ["x=$x$x", 'A=("${A[@]}" "${A[@]}")', "x=${x:-${x:-${x:-$x}}}$x", "y=$((9**9**9))", "echo <<E"]
)
def test_scripts_that_grow_end(line: str) -> None:
    started = time.process_time()
    try:
        Shell("x=aaaaaaaa\nA=(a b)\n" + (line + "\n") * 200, {}, lambda words: None).run()
    except ShellError as error:
        assert "expands to more than" in str(error)
    assert time.process_time() - started < 10


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    text = f"touch {touched}\nx=$(touch {touched})\n: `touch {touched}`\n" + LAUNCH
    import_verl(write(tmp_path, text), sets=GRADER)
    assert not touched.exists()
