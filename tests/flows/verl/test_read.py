"""Reading verl's files: lists of defaults, overrides, interpolations."""

import time
from pathlib import Path

import pytest

from flows.configs.overrides import ConfigError
from flows.verl.keys import KeyTable, Mapped, key_tables
from flows.verl.read import Verl, VerlError, flatten, read_config


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_flatten_keeps_empty_groups_as_values() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": {}}) == {"a.b": 1, "a.c.d": None, "e": {}}


def test_a_list_of_defaults_is_composed_in_its_order(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "trainer: {total_epochs: 1, nnodes: 2}\ndata: {seed: 1}\n")
    write(tmp_path, "actor/dp.yaml", "defaults:\n  - ../optim@optim: adam\n  - _self_\nstrategy: fsdp\n")
    write(tmp_path, "optim/adam.yaml", "lr: 1e-6\nbetas: [0.9, 0.99]\n")
    main = write(
        tmp_path,
        "main.yaml",
        "defaults:\n  - base\n  - actor@actor_rollout_ref.actor: dp\n  - _self_\n  - model: nowhere\n"
        "trainer: {total_epochs: 3}\nactor_rollout_ref: {actor: {optim: {lr: 2e-6}}}\n",
    )
    values, missing, _ = read_config(main)
    assert values == {
        "trainer.total_epochs": 3, "trainer.nnodes": 2, "data.seed": 1, "actor_rollout_ref.actor.optim.lr": 2e-6,
        "actor_rollout_ref.actor.optim.betas": [0.9, 0.99], "actor_rollout_ref.actor.strategy": "fsdp",
    }  # fmt: skip
    assert missing == ["model: nowhere"]


def test_a_chosen_engine_names_the_files_and_their_headers_the_groups(tmp_path: Path) -> None:
    """verl's ppo_trainer.yaml begins with `model_engine: dp`, whose file has a header, and uses it in later entries."""
    for engine in ("dp", "megatron"):
        write(tmp_path, f"model_engine/{engine}.yaml", f"# a comment\n# @package _global_\nmodel_engine: {engine}\n")
        write(tmp_path, f"actor/{engine}_actor.yaml", f"strategy: {engine}\n")
    write(tmp_path, "rules/strict.yaml", "# @package data.rules\nlimit: 3\n")
    entries = "[model_engine: dp, 'actor@a.actor': '${model_engine}_actor', rules: strict, _self_]"
    main = write(tmp_path, "main.yaml", f"defaults: {entries}\nx: 1\n")
    values = {"model_engine": "dp", "a.actor.strategy": "dp", "data.rules.limit": 3, "x": 1}
    assert read_config(main)[0] == values
    chosen = {"model_engine": "megatron", "a.actor.strategy": "megatron"}
    assert read_config(main, ["model_engine=megatron"])[0] == values | chosen
    over = write(tmp_path, "over.yaml", "defaults: [main, {override model_engine: megatron}, _self_]\n")
    assert read_config(over)[0] == values | chosen
    bad = write(tmp_path, "bad.yaml", "defaults: ['actor@a': '${nothing}_actor']\n")
    with pytest.raises(VerlError, match="'nothing' in defaults|names 'nothing'"):
        read_config(bad)


def test_the_header_of_a_file_is_found_in_linear_time(tmp_path: Path) -> None:
    # a regular expression with nested repeats took 5.6 s for 26 blank lines
    for name, top in (("late", "\n" * 100_000 + "# a comment\n#  @package  data.x\n"), ("none", "\n" * 100_000)):
        write(tmp_path, f"rules/{name}.yaml", top + "limit: 3\n# @package late\n")
    expected = {"late": {"data.x.limit": 3}, "none": {"rules.limit": 3}}
    for name, values in expected.items():
        main = write(tmp_path, f"{name}.yaml", f"defaults: [rules: {name}]\n")
        started = time.process_time()
        assert read_config(main)[0] == values
        assert time.process_time() - started < 5


def test_a_choice_without_files_is_described_by_the_table_or_refused(tmp_path: Path) -> None:
    main = write(tmp_path, "main.yaml", "x: 1\n")
    read = read_config(main, ["optim=fsdp", "model_engine=dp"])
    assert read.values == {"x": 1, "model_engine": "dp"}
    assert read.options == {"optim=fsdp": False, "model_engine=dp": False}
    table = KeyTable(mapped={"optim.lr": Mapped(1e-3, ())}, options={"optim=slow": {"optim.lr": 1e-5}})
    assert Verl({}, table, kind="sft_trainer_engine", options={"optim=slow": True}).get("optim.lr") == 1e-5
    assert Verl({}, table, kind="sft_trainer_engine").get("optim.lr") == 1e-3
    with pytest.raises(VerlError, match="optim=fast: there is no file of this option here; expected optim=slow"):
        Verl({}, table, kind="sft_trainer_engine", options={"optim=fast": False})
    assert Verl({}, table, kind="sft_trainer_engine", options={"optim=fast": True}).get("optim.lr") == 1e-3


def test_a_package_that_is_the_groups_own_is_no_other_group(tmp_path: Path) -> None:
    """verl's sft_trainer_engine.yaml begins with `optim@optim: fsdp`, and `optim=megatron` chooses another file."""
    for name, rate in (("fsdp", 1e-5), ("megatron", 1e-4)):
        write(tmp_path, f"optim/{name}.yaml", f"lr: {rate}\n")
    main = write(tmp_path, "main.yaml", "defaults: [{optim@optim: fsdp}, _self_]\n")
    assert read_config(main)[0] == {"optim.lr": 1e-5}
    read = read_config(main, ["optim=megatron"])
    assert (read.values, read.options) == ({"optim.lr": 1e-4}, {"optim=megatron": True})


def test_values_with_hydras_escapes_are_texts(tmp_path: Path) -> None:
    main = write(tmp_path, "main.yaml", "x: 1\n")
    assert read_config(main, ["a={b.\\{*\\}:{}}"]).values["a"] == "{b.\\{*\\}:{}}"


def test_the_last_word_for_a_key_counts_and_may_be_empty(tmp_path: Path) -> None:
    main = write(tmp_path, "main.yaml", "x: 1\n")
    assert read_config(main, ["a.b=1", "+a.b=2", "c="])[0] == {"x": 1, "a.b": 2, "c": ""}


def test_what_comes_after_self_goes_over_it(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "data: {seed: 1}\n")
    main = write(tmp_path, "main.yaml", "defaults:\n  - _self_\n  - base\ndata: {seed: 2}\n")
    assert read_config(main)[0] == {"data.seed": 1}


def test_words_of_verls_command_line_go_over_the_file(tmp_path: Path) -> None:
    main = write(tmp_path, "main.yaml", "data: {seed: 2}\n")
    values, _, _ = read_config(main, ["data.seed=3", "+data.x=[a, b]"])
    assert values == {"data.seed": 3, "data.x": ["a", "b"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\n", ["cannot be parsed"]),
        ("a: 1\na: 2\n", ["'a'", "twice"]),
        ("- a\n", ["list", "expected keys"]),
        ("defaults: {a: b}\n", ["defaults is a dict", "list"]),
        ("defaults: [{a: b, c: d}]\n", ["neither a name nor"]),
        ("defaults: [main]\n", ["names itself"]),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, "main.yaml", text))
    for word in ["main.yaml", *words]:
        assert word in str(caught.value)


TABLE = KeyTable(
    mapped={
        "data.length": Mapped(512, ()), "rollout.length": Mapped("${oc.select:data.length,7}", ()),
        "rollout.name": Mapped("${.kind}/${rollout.length}", ()), "rollout.kind": Mapped("vllm", ()),
        "save.load": Mapped("${.what}", ()), "save.what": Mapped(["model"], ()),
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({}, "rollout.length", 512),
        ({"data.length": 9}, "rollout.length", 9),
        ({"rollout.length": "${oc.select:no.such,7}"}, "rollout.length", 7),
        ({"rollout.length": "${oc.select:no.such}"}, "rollout.length", None),
        ({"rollout.length": "${oc.select:no.such,${oc.select:none,${data.length}}}"}, "rollout.length", 512),
        ({}, "rollout.name", "vllm/512"),
        ({}, "save.load", ["model"]),
        ({"save.what": ["a", "${rollout.kind}"]}, "save.load", ["a", "vllm"]),
        ({"rollout.kind": "${..data.length}"}, "rollout.kind", 512),
        ({"rollout.kind": "${oc.env:OSTINATO_NO_SUCH,5}"}, "rollout.kind", 5),
    ],
)
def test_interpolations_are_put_in(given: dict[str, object], key: str, value: object) -> None:
    assert Verl(given, TABLE, kind="ppo_trainer").get(key) == value


def test_an_environment_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_TEST_NAME", "x")
    verl = Verl({"rollout.kind": "a-${oc.env:OSTINATO_TEST_NAME}"}, TABLE, kind="ppo_trainer")
    assert verl.get("rollout.kind") == "a-x"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("${no.such}", ["rollout.kind", "no.such", "neither given"]),
        ("${rollout.kind}", ["rollout.kind", "refers to itself"]),
        ("${data.length", ["rollout.kind", "does not close"]),
        ("${eval:1+1}", ["rollout.kind", "'eval'"]),
    ],
)
def test_interpolations_of_nothing_are_refused_by_key(value: str, words: list[str]) -> None:
    with pytest.raises(VerlError) as caught:
        Verl({"rollout.kind": value}, TABLE, kind="ppo_trainer").get("rollout.kind")
    for word in words:
        assert word in str(caught.value)


def verl_of(tmp_path: Path, text: str) -> Verl:
    main = write(tmp_path, "main.yaml", text)
    return Verl(read_config(main)[0], key_tables()["ppo_trainer"], kind="ppo_trainer")


def test_interpolations_that_multiply_are_refused(tmp_path: Path) -> None:
    # 1 kB that stands for 3**30 values
    lines = [f"k{index}: ${{k{index + 1}}}${{k{index + 1}}}${{k{index + 1}}}\n" for index in range(30)]
    started = time.process_time()
    with pytest.raises(VerlError, match=r"interpolations make more than 100,000 values, .*; write the values"):
        verl_of(tmp_path, "".join(lines) + "k30: x\n").get("k0")
    # and one whose texts are long
    with pytest.raises(VerlError, match="interpolations make more than"):
        verl_of(tmp_path, f"a: {'x' * 500_000}\nb: {'${a}' * 100}\n").get("b")
    # and lists and groups
    group = "".join(f"\n  k{index}: 1" for index in range(5_000))
    references = ", ".join(["'${a}'"] * 1_000)
    for target in (f"[{'1, ' * 20_000}]", group):
        with pytest.raises(VerlError, match="or 1,000,000 items of lists; write the values"):
            verl_of(tmp_path, f"a: {target}\nb: [{references}]\n").get("b")
    assert time.process_time() - started < 10


def test_files_that_multiply_are_refused(tmp_path: Path) -> None:
    for index in range(20):
        write(tmp_path, f"f{index}.yaml", f"defaults: [f{index + 1}, f{index + 1}, f{index + 1}]\n")
    write(tmp_path, "f20.yaml", "x: 1\n")
    with pytest.raises(VerlError, match="lists of defaults name more than 100 files or 4,194,304 bytes"):
        read_config(tmp_path / "f0.yaml")


def test_names_that_multiply_are_refused(tmp_path: Path) -> None:
    main = write(tmp_path, "main.yaml", f"{'k' * 900}: {{a: 1, b: 2}}\n")
    with pytest.raises(VerlError, match="has more than 300 characters"):
        read_config(main)
    write(tmp_path, "deep/x.yaml", "a: 1\n")
    main = write(tmp_path, "main.yaml", f"defaults: [{{'deep@{'a.' * 140}b': x}}]\n")
    with pytest.raises(VerlError, match="its package has more than 32 levels"):
        read_config(main)
