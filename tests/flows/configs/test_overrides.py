"""Tests of configs from files and command lines: values get the type of their field, and unknown names are refused."""

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from flows.configs.overrides import ConfigError, load_config, parse_config

SCALARS = [
    ("1e-5", 1e-5), ("1E5", 1e5), ("-1.5e+3", -1500.0), ("2.", 2.0), (".5", 0.5), ("5e-06", 5e-06),
    ("-.inf", -float("inf")),
    ("0", 0), ("-3", -3), ("+3", 3), ("10_000", 10000), ("0.2", 0.2),
    ("true", True), ("False", False), ("null", None), ("~", None),
    ("no", "no"), ("on", "on"), ("1:30", "1:30"), ("2026-01-02", "2026-01-02"), ("007", "007"), ("1.2.3", "1.2.3"),
    ("1e", "1e"), ("e5", "e5"), ("-", "-"), ("1_", "1_"), ("0x1F", "0x1F"), (".", "."),
    ("smollm2-135m", "smollm2-135m"),
]  # fmt: skip


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("text", "expected"), SCALARS)
def test_scalars_are_typed_alike_in_a_file_and_on_a_command_line(tmp_path: Path, text: str, expected: Any) -> None:
    from_set = load_config(None, [f"a={text}"])["a"]
    from_file = load_config(write(tmp_path, "c.yaml", f"a: {text}\n" if text != "-" else 'a: "-"\n'))["a"]
    in_list = load_config(None, [f"a=[{text}]"])["a"][0] if text != "-" else "-"
    for value in (from_set, from_file, in_list):
        assert value == expected
        assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=[1, 2e-3, x, [true]]", [1, 2e-3, "x", [True]]),
        ("a={b: 1, c: {d: 1e-6}}", {"b": 1, "c": {"d": 1e-6}}),
        ("a='1e-5'", "1e-5"),
        ('a=""', ""),
        ('a="line\\nbreak"', "line\nbreak"),
        ("a=Question: {x} # 1", "Question: {x} # 1"),
        ("a=b=c", "b=c"),
        ("a=s3://bucket/x?y=1&z", "s3://bucket/x?y=1&z"),
        ("a=*x", "*x"),
        ("a=!!python/object:os.system", "!!python/object:os.system"),
        ("a=<<", "<<"),
        (" a = 3 ", 3),
    ],
)
def test_values_of_a_command_line(text: str, expected: Any) -> None:
    assert load_config(None, [text]) == {"a": expected}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "lr: 1e-5\nloss: {kind: grpo, clip: 0.2}\nstop: [a, b]\n"),
        ("c.yml", "base: &b {clip: 0.1, kind: grpo}\nlr: 1e-5\nloss:\n  <<: *b\n  clip: 0.2\nstop: [a, b]\n"),
        ("c.toml", 'lr = 1e-5\nstop = ["a", "b"]\n[loss]\nkind = "grpo"\nclip = 0.2\n'),
        ("C.JSON", '{"lr": 1e-5, "loss": {"kind": "grpo", "clip": 0.2}, "stop": ["a", "b"]}'),
    ],
)
def test_every_format_says_the_same(tmp_path: Path, name: str, text: str) -> None:
    config = load_config(write(tmp_path, name, text), ["loss.clip=0.3", "new.deep.key=1"])
    config.pop("base", None)
    assert config == {
        "lr": 1e-5, "loss": {"kind": "grpo", "clip": 0.3}, "stop": ["a", "b"], "new": {"deep": {"key": 1}},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["c.yaml", "c.toml", "c.json"])
def test_an_empty_file_is_an_empty_config(tmp_path: Path, name: str) -> None:
    assert load_config(write(tmp_path, name, "")) == {}


def test_a_group_left_empty_in_the_file_can_be_set(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "c.yaml", "loss:\n"), ["loss.clip=1"]) == {"loss": {"clip": 1}}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.yaml", "a: 1\nb: {x: 1}\na: 2\n", ["'a'", "twice", "lines 1 and 3"]),
        ("c.yaml", "b:\n  x: 1\n  x: 2\n", ["'x'", "twice"]),
        ("c.json", '{"b": {"x": 1, "x": 2}}', ["'x'", "twice"]),
        ("c.toml", "a = 1\na = 2\n", ["cannot be parsed", "a"]),
        ("c.yaml", "1: x\n", ["key 1", "quotes"]),
        ("c.yaml", "[a, b]: x\n", ["line 1", "expected text"]),
        ("c.yaml", "a: [1\n", ["cannot be parsed", "line 2"]),
        ("c.yaml", "a: !!python/object/apply:os.getcwd []\n", ["cannot be parsed", "python/object"]),
        ("c.yaml", "- a\n", ["list", "expected keys"]),
        ("c.json", "{", ["cannot be parsed", "line 1"]),
        ("c.ini", "a=1", [".ini", "expected .yaml"]),
        ("config", "a=1", ["no suffix"]),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, name, text))
    for word in [name, *words]:
        assert word in str(caught.value)


def test_a_missing_file_and_one_that_is_not_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "c.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["lr"], ["'lr'", "key=value"]),
        (["=3"], ["'=3'"]),
        (["a..b=3"], ["a..b"]),
        (["a.0=3"], ["a.0"]),
        (["lr="], ["lr=null"]),
        (["lr=1", "lr=2"], ["'lr'", "twice"]),
        (["a.b=1", "a={c: 2}"], ["'a'", "overlaps", "'a.b'"]),
        (["a={c: 2}", "a.b=1"], ["'a.b'", "overlaps"]),
        (["a=[1"], ["a=[1", "cannot be parsed", "quotes"]),
        (["a={x: 1, x: 2}"], ["'x'", "twice"]),
    ],
)
def test_bad_sets_are_refused(sets: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, sets)
    for word in words:
        assert word in str(caught.value)


def test_keys_that_only_begin_alike_do_not_overlap() -> None:
    assert load_config(None, ["lr=1", "lr_end=2"]) == {"lr": 1, "lr_end": 2}


def test_a_set_through_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'model\.key\.x'.*'model\.key' is 'small'"):
        load_config(write(tmp_path, "c.yaml", "model: {key: small}"), ["model.key.x=1"])


class Loss(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, gt=0)


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str
    loss: Loss | None = None
    group_size: int = 4
    rollouts: int = 8

    @model_validator(mode="after")
    def _whole_groups(self) -> "Config":
        if self.rollouts % self.group_size:
            raise ValueError(f"rollouts={self.rollouts} splits a group; use a multiple of {self.group_size}")
        return self


def test_a_config_becomes_its_model() -> None:
    config = parse_config(Config, None, ["run=r1", "loss.clip_low=1e-3"])
    assert config == Config(run="r1", loss=Loss(clip_low=1e-3))


def test_every_wrong_key_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(Config, None, ["loss.clip_lo=1", "group_sise=2", "rollouts=many", "zzz=1"])
    message = str(caught.value)
    assert "5 problems in the Config config" in message
    assert "run: missing; set it in the file or by run=…" in message
    assert "loss.clip_lo: unknown key; did you mean 'clip_low'?" in message
    assert "group_sise: unknown key; did you mean 'group_size'?" in message
    assert "rollouts: " in message
    assert "(given: 'many')" in message
    assert "zzz: unknown key; leave it out" in message


def test_a_cross_check_says_its_own_words() -> None:
    with pytest.raises(ConfigError, match="the config as a whole: rollouts=9 splits a group; use a multiple of 4"):
        parse_config(Config, None, ["run=r", "rollouts=9"])


def test_a_key_of_another_group_is_not_suggested_for_itself() -> None:
    class Inner(BaseModel):
        model_config = {"extra": "forbid"}
        rate: float = 0.0

    class Outer(BaseModel):
        model_config = {"extra": "forbid"}
        inner: Inner = Inner()

    with pytest.raises(ConfigError, match=r"rate: unknown key; leave it out"):
        parse_config(Outer, None, ["rate=1"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "a: " + 5000 * "[" + 5000 * "]"),
        ("c.json", '{"a": ' + 5000 * "[" + 5000 * "]" + "}"),
        ("c.toml", "a = " + 5000 * "[" + 5000 * "]"),
        ("c.yaml", "a: " + 101 * "[" + 101 * "]"),
        ("c.json", '{"a": ' + 101 * "[" + 101 * "]" + "}"),
        ("c.toml", ".".join("a" for _ in range(500)) + " = 1"),
        ("c.yaml", "a: &a [*a]"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_config_that_is_nested_too_deeply_is_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*nested more than 100 levels deep"):
        load_config(write(tmp_path, name, text))


@pytest.mark.parametrize("text", ["a=" + 5000 * "[" + 5000 * "]", ".".join("a" for _ in range(500)) + "=1"])
def test_a_set_that_is_nested_too_deeply_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="nested more than 100 levels deep"):
        load_config(None, [text])


def test_a_hundred_levels_are_read(tmp_path: Path) -> None:
    """The top is one level, the lists are the other 99."""
    inner = load_config(write(tmp_path, "c.yaml", "a: " + 99 * "[" + 99 * "]"))["a"]
    for _ in range(98):
        (inner,) = inner
    assert inner == []


@pytest.mark.parametrize(
    ("name", "text"),
    [("c.yaml", "a: {}"), ("c.json", '{{"a": {}}}'), ("c.toml", "a = {}"), ("", "a={}"), ("", "a=[{}]")],
)
def test_an_integer_of_thousands_of_digits_is_refused(tmp_path: Path, name: str, text: str) -> None:
    text = text.format(5000 * "7")
    with pytest.raises(ConfigError, match="an integer has more than 4,300 digits"):
        load_config(write(tmp_path, name, text)) if name else load_config(None, [text])


@pytest.mark.parametrize("name", ["c.yaml", "c.json", "c.toml"])
def test_a_config_of_fifty_megabytes_is_refused_before_it_is_parsed(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.write(b"a: [")  # parsing it would fail for another reason
        file.truncate(50 * 2**20)
    with pytest.raises(ConfigError, match=rf"{name} has 52,428,800 bytes, and a config has at most 1,048,576"):
        load_config(tmp_path / name)


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    """Ten aliases of ten aliases, eight times: a few hundred bytes for 10**8 values."""
    lines = ["a0: &a0 x", *(f"a{n}: &a{n} [{', '.join(10 * [f'*a{n - 1}'])}]" for n in range(1, 9))]
    with pytest.raises(ConfigError, match=r"has at most 1,048,576; use fewer aliases"):
        load_config(write(tmp_path, "c.yaml", "\n".join(lines)))


def test_a_wrong_value_is_shown_in_part() -> None:
    class Config(BaseModel):
        steps: int

    with pytest.raises(ConfigError, match="steps: .*given: 'xxx") as refused:
        parse_config(Config, None, ["steps=" + 10_000 * "x"])
    assert len(str(refused.value)) < 500
