"""Damaged and hostile configs, ours and verl's, for the fuzz campaign. A case is a JSON object {file name: text}, of
which the first file is read. The text "fifo" makes a pipe, and "link:TARGET" a symbolic link."""

from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path
from typing import Any

import yaml

from flows.catalogue import DPOConfig
from flows.configs.common import GRPOConfig, SFTConfig
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.overrides import ConfigError, parse_config
from flows.configs.ppo import GSPOConfig, PPOConfig
from flows.configs.recurring import RecurringConfig
from flows.configs.sweep import SweepConfig
from flows.verl.importer import import_verl
from tests.fuzz.inputs import Input

ROOT = Path(__file__).resolve().parents[2]
MODELS = (GRPOConfig, SFTConfig, EvaluationFlowConfig, GSPOConfig, PPOConfig, DPOConfig, RecurringConfig, SweepConfig)
SCALARS: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1.5, 1e308, -1e-320, float("inf"), float("nan"), 2**63, 2**200, "", "x", "a" * 3000,
    "1e999", "0x10",
    "../../x", "/dev/zero", "\0", "\u202e", "s3://KEY:SECRET@bucket/x", "http://user:pw@127.0.0.1:9/", "[::1]evil",
    "file:///etc/passwd", "${a}", "${a.b}", "${", "${oc.env:HOME}", "${oc.env:NOT_SET,${oc.env:NOT_SET,1}}",
    "${oc.select:a,b}", "${eval:1+1}", "${.x}", "${..x}", "${...........x}", "${data.train_files}", [], {}, [[]], [{}],
    {"kind": "x"}, {"kind": None}, [None], "hf://a/b", "openai://x@http://u:p@h", "module:thing", "os:system", "a@b@c",
)  # fmt: skip
DEFAULTS = ("_self_", "main", "other", "../main", "/etc/passwd", "optional x: y", {"x": "other"}, {"a@b.c.d": "other"},
            {"x": None}, {"override x": "y"}, {"model_engine": "dp"}, {"a@_global_": "other"}, 5, None, [],
            {"a": "${a}"},
            {"a": "${model_engine}_x"}, "fifo", "link", {"x": ["other", "other"]})  # fmt: skip


@functools.cache
def _seeds(kind: str) -> list[Any]:
    folder = ROOT / ("tests/data/verl" if kind == "verl config" else "examples")
    return [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))]


def case(kind: str, seed: int, number: int) -> bytes:
    draw = random.Random(f"{seed}/{kind}/{number}")
    value = draw.choice(_seeds(kind))
    if kind == "verl config" and draw.random() < 0.4:
        value = value | {"defaults": [draw.choice(DEFAULTS) for _ in range(draw.randint(1, 5))]}
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        value = _changed(value, draw)
    suffix = draw.choice((".yaml", ".yaml", ".yml", ".json", ".toml"))
    text = _written(value, suffix, draw)
    for _ in range(draw.choice((0, 0, 1, 2))):
        text = _changed_text(text, draw)
    other = _written(_changed(draw.choice(_seeds(kind)), draw), ".yaml", draw)
    if draw.random() < 0.3:
        other = json.dumps(
            {"defaults": [draw.choice(DEFAULTS) for _ in range(3)], "a": "${b}" * draw.choice((1, 9, 99))}
        )
    files = {"main" + suffix: text, "other.yaml": other}
    if draw.random() < 0.1:
        files |= {
            "fifo.yaml": "fifo",
            "link.yaml": f"link:{draw.choice(('/dev/zero', 'main.yaml', 'link.yaml', '/etc'))}",
        }
        if draw.random() < 0.1:
            files["main" + suffix] = draw.choice(("fifo", "link:/dev/zero"))
    return json.dumps(files).encode()


def _changed(value: Any, draw: random.Random) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.93:
        key = draw.choice(list(value))
        action = draw.random()
        if action < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if action < 0.2:
            return value | {
                draw.choice(("x", key + "x", "", "a.b", "kind", "__class__", "a" * 300)): draw.choice(SCALARS)
            }
        if action < 0.25:
            return value | {f"k{index}": f"${{k{index + 1}}}${{k{index + 1}}}${{k{index + 1}}}" for index in range(40)}
        if action < 0.28:
            items = draw.choice(([1] * draw.choice((9, 5_000, 100_000)), {f"k{index}": 1 for index in range(200)}))
            return value | {"items": items, key: ["${items}"] * draw.choice((3, 100, 2_000))}
        return value | {key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        index = draw.randrange(len(value))
        return [*value[:index], _changed(value[index], draw), *value[index + 1 :]]
    if draw.random() < 0.05:
        for _ in range(draw.choice((5, 90, 150))):
            value = draw.choice(([value], {"a": value}))
        return value
    return draw.choice(SCALARS)


def _written(value: Any, suffix: str, draw: random.Random) -> str:
    if suffix == ".json":
        return json.dumps(value)
    if suffix == ".toml":
        lines: list[str] = []
        _write_toml(value, "", lines)
        return "\n".join(lines)
    try:
        text = yaml.safe_dump(value, allow_unicode=draw.random() < 0.5)
    except (yaml.YAMLError, ValueError):
        return json.dumps(value)
    if draw.random() < 0.1:
        bomb = "".join(
            f"b{index + 1}: &b{index + 1} [{', '.join([f'*b{index}'] * 9)}]\n" for index in range(draw.choice((3, 9)))
        )
        text = f"b0: &b0 [x, x, x, x]\n{bomb}{text}"
    return text


def _write_toml(value: Any, prefix: str, lines: list[str]) -> None:
    items = value.items() if isinstance(value, dict) else [("x", value)]
    for name, item in items:
        key = f"{prefix}{json.dumps(str(name))}"
        if isinstance(item, dict) and item and len(prefix) < 300:
            _write_toml(item, key + ".", lines)
        elif item is not None:
            lines.append(f"{key} = {json.dumps(item)}")


def _changed_text(text: str, draw: random.Random) -> str:
    if not text:
        return text
    place = draw.randrange(len(text))
    piece = draw.choice(
        ("\n", "\t", ": ", "- ", "&a ", "*a ", "<<: *a\n", "!!python/object:os.system ", "!!binary x", "{", "[", "]",
        "'", '"',
         "#", "|", ">", "---\n", "...\n", "%YAML 1.1\n", "\ufeff", "\0", "\x85", "${", "}", "a: &a [*a]\n", "? ",
         "!!set ",
         "x" * 500, "[" * 300, "{a: " * 300, "9" * 5000, "1_0", "0o7", ".inf", "2026-01-01", text[:200])
    )  # fmt: skip
    if draw.random() < 0.3:
        return text[:place] + text[place + draw.randint(1, 30) :]
    return text[:place] + piece + text[place:]


def _write(data: bytes, folder: Path) -> Path:
    files = json.loads(data)
    for name, text in files.items():
        if text == "fifo":
            os.mkfifo(folder / name)
        elif text.startswith("link:"):
            (folder / name).symlink_to(text.removeprefix("link:"))
        else:
            (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    return folder / next(iter(files))


def use_config(data: bytes, folder: Path) -> None:
    parse_config(MODELS[len(data) % len(MODELS)], _write(data, folder))


def use_verl(data: bytes, folder: Path) -> None:
    imported = import_verl(_write(data, folder), force=len(data) % 2 == 0)
    len(json.dumps(imported.config, default=str))


INPUTS = {
    "config": Input(functools.partial(case, "config"), use_config, (ConfigError,)),
    "verl config": Input(functools.partial(case, "verl config"), use_verl, (ConfigError,)),
}
