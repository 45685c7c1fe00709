"""A verl configuration as one of ours: every key mapped, dropped with a reason, or refused; the result validated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from flows.configs.common import GRPOConfig, SFTConfig
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.gspo import GSPOConfig
from flows.configs.overrides import describe_validation, load_config
from flows.configs.ppo import PPOConfig
from flows.verl.conditions import idle
from flows.verl.convert import CONVERSIONS
from flows.verl.keys import KeyTable, Mapped, Unmapped, key_tables
from flows.verl.read import Verl, VerlError, read_config
from flows.verl.values import Near, Nothing, Paths, Refused, flow_of

CONFIGS: dict[str, type[BaseModel]] = {
    "grpo": GRPOConfig, "gspo": GSPOConfig, "ppo": PPOConfig, "sft": SFTConfig, "evaluation": EvaluationFlowConfig,
}  # fmt: skip
"""Our config of each flow that a verl config can be."""

TRAINING = {"data.train.kind": "file", "engine.kind": "local"}
UNSAID: dict[str, dict[str, Any]] = {
    "grpo": TRAINING, "gspo": TRAINING, "sft": TRAINING,
    "ppo": TRAINING | {
        "credit.returns": "advantages", "credit.whiten_advantages": True, "regularisation.kl_in": "loss",
    },
    "evaluation": {"suite.datasets.0.source.kind": "file"},
}  # fmt: skip
"""What verl does by itself, and no key of it says."""

HELDOUT = "data.heldout."


@dataclass(frozen=True)
class MappedKey:
    """A key of verl and what it became."""

    key: str
    value: Any
    paths: dict[str, Any]
    given: bool
    """Whether the config says it; else the value is verl's default."""
    difference: str = ""
    """How our value is not quite verl's."""


@dataclass
class Imported:
    """What an import made, and the fate of every key that was given."""

    kind: str
    """ppo_trainer, sft_trainer, sft_trainer_engine or evaluation."""
    flow: str
    config: dict[str, Any] = field(default_factory=dict)
    """Validated: what the config of `flow` takes."""
    mapped: list[MappedKey] = field(default_factory=list)
    unread: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> keys given that verl itself would not use."""
    dropped: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> keys given that mean nothing here, without loss."""
    off: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> keys given that are not here, at a value that asks for nothing."""
    refused: list[tuple[str, Any, str]] = field(default_factory=list)
    """(key, value, reason) of what could not be done."""
    absent: list[str] = field(default_factory=list)
    """Names in `defaults:` that are no files: verl's defaults of the table stand for them."""


def import_verl(
    path: Path,
    *,
    overrides: Sequence[str] = (),
    sets: Sequence[str] = (),
    kind: str | None = None,
    force: bool = False,
) -> Imported:
    """Reads a verl config, with `key=value` words of verl's in `overrides` and of ours in `sets`.

    Keys that are not given have verl's defaults. Raises ConfigError (VerlError): a bad file, unknown keys, keys that
    are refused (unless `force`), and a result that our config refuses.
    """
    given, absent = read_config(path, overrides)
    kind = kind or kind_of(given)
    if kind not in key_tables():
        raise VerlError(f"there is no kind {kind!r} of verl config; expected one of {', '.join(key_tables())}")
    table = key_tables()[kind]
    _check_keys(given, table, kind)
    verl = Verl({key: value for key, value in given.items() if table.find(key)}, table, kind=kind)
    made = Imported(kind, flow_of(verl), absent=absent)
    _take_mapped(verl, made)
    _take_unmapped(verl, made)
    if made.refused and not force:
        raise VerlError(describe_refusals(made.refused))
    values = UNSAID[made.flow]
    for line in made.mapped:
        values = values | line.paths
    made.config = _validated(_nested(values), sets, made)
    return made


def kind_of(given: dict[str, Any]) -> str:
    """The kind of verl config that knows most of the keys."""
    known = {kind: sum(table.find(key) is not None for key in given) for kind, table in key_tables().items()}
    best = max(known, key=lambda kind: known[kind])
    if not known[best]:
        raise VerlError(f"none of the {len(given)} keys is one of verl's; give a verl trainer or evaluation config")
    return best


def describe_refusals(refused: Sequence[tuple[str, Any, str]]) -> str:
    """One line per key."""
    lines = [f"  {key} = {value!r}: {why}" for key, value, why in refused]
    noun = "1 key" if len(lines) == 1 else f"{len(lines)} keys"
    return f"{noun} cannot be imported (take them out, or --force leaves them out):\n" + "\n".join(lines)


def _check_keys(given: dict[str, Any], table: KeyTable, kind: str) -> None:
    wrong = []
    for key, value in given.items():
        if table.find(key) is not None or (value in (None, {}) and table.is_group(key)):
            continue
        if table.is_group(key):
            wrong.append(f"  {key}: {value!r} was given for a group of keys")
            continue
        near = table.nearest(key)
        wrong.append(f"  {key}: unknown key" + (f"; did you mean {near!r}?" if near else ""))
    if wrong:
        noun = "1 key is" if len(wrong) == 1 else f"{len(wrong)} keys are"
        raise VerlError(f"{noun} none of verl's {kind}:\n" + "\n".join(wrong))


def _take_mapped(verl: Verl, made: Imported) -> None:
    for key, entry in verl.table.mapped.items():
        given = verl.is_given(key)
        if entry.flows and made.flow not in entry.flows:
            _note(made.unread, f"the flow {made.flow} does not read it", key, given=given)
            continue
        if not given and (entry.placeholder or entry.required):
            if entry.required:
                made.refused.append((key, None, "it is needed, and verl's default is a placeholder; give it"))
            continue
        why = idle(verl, entry.when)
        if why is not None:
            _note(made.unread, why, key, given=given)
            continue
        _convert(verl, made, key, entry, verl.get(key))


def _convert(verl: Verl, made: Imported, key: str, entry: Mapped, value: Any) -> None:
    given = verl.is_given(key)
    try:
        found = value if entry.convert is None else CONVERSIONS[entry.convert](verl, key, value)
    except Refused as refusal:
        made.refused.append((key, value, str(refusal)))
        return
    except TypeError:
        made.refused.append((key, value, f"a {type(value).__name__} is no value for it"))
        return
    if isinstance(found, Nothing):
        _note(made.unread, found.why or "it asks for nothing", key, given=given)
        return
    difference = found.difference if isinstance(found, Near) else ""
    found = found.value if isinstance(found, Near) else found
    paths = found.values if isinstance(found, Paths) else dict.fromkeys(entry.to, found)
    paths.pop("flow", None)
    if not verl.table.has_default("data.val_files") or not verl.given.get("data.val_files"):
        paths = {path: value for path, value in paths.items() if not path.startswith(HELDOUT)}
    elif "data.heldout.path" in paths:
        paths = {"data.heldout.kind": "file", **paths}
    made.mapped.append(MappedKey(key, value, paths, given, difference))


def _take_unmapped(verl: Verl, made: Imported) -> None:
    for key in verl.given:
        entry = verl.table.find(key)
        if not isinstance(entry, Unmapped):
            continue
        if not entry.refused:
            _note(made.dropped, entry.why, key)
            continue
        value = verl.get(key)
        defaults = [verl.resolve(default, key) for default in entry.defaults]
        why = idle(verl, entry.when)
        if why is not None:
            _note(made.unread, why, key)
        elif any(_same(value, default) for default in defaults):
            _note(made.off, entry.why, key)
        else:
            made.refused.append((key, value, entry.why))


def _same(value: Any, default: Any) -> bool:
    """0 and 0.0 are the same, 0 and false are not."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _note(into: dict[str, list[str]], why: str, key: str, *, given: bool = True) -> None:
    if given:
        into.setdefault(why, []).append(key)


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": 1, "c.0.d": 2} -> {"a": {"b": 1}, "c": [{"d": 2}]}"""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *groups, last = path.split(".")
        at = tree
        for group in groups:
            at = at.setdefault(group, {})
        at[last] = value
    return {name: _listed(value) for name, value in tree.items()}


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {name: _listed(one) for name, one in value.items()}
    return list(inner.values()) if inner and all(name.isdigit() for name in inner) else inner


def _validated(config: dict[str, Any], sets: Sequence[str], made: Imported) -> dict[str, Any]:
    """The config with the sets put in. Raises VerlError for what our config refuses."""
    for name, value in load_config(None, sets).items():
        config[name] = _over(config.get(name), value)
    if made.flow not in ("sft", "evaluation") and "path" not in config.get("grader", {}):
        raise VerlError(
            "custom_reward_function.path is not given, and verl then chooses the reward by each row's data_source; say "
            "which grader, for instance --set grader.path=tasks.graders.rules:LastNumber"
        )
    model = CONFIGS[made.flow]
    try:
        model.model_validate(config)
    except ValidationError as error:
        text = describe_validation(error, model).replace("set it in the file or by ", "give it by --set ")
        raise VerlError(f"the values make no {made.flow} config; {text}") from error
    return config


def _over(below: Any, above: Any) -> Any:
    """A set group replaces the keys that it names; one with a `kind` is a group of its own."""
    if not (isinstance(below, dict) and isinstance(above, dict)) or "kind" in above:
        return above
    return below | {name: _over(below.get(name), value) for name, value in above.items()}
