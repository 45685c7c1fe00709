"""Converts a verl config into a config of Ostinato: maps, drops or refuses every key, checks the conditions of several
keys, and validates the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from flows.catalogue import TRAININGS
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.overrides import describe_validation, load_config
from flows.verl.convert import CONVERSIONS, LOSS_MODES
from flows.verl.convert_loss import VALUE_LOSS_FACTOR
from flows.verl.keys import KeyTable, Mapped, Unmapped, key_tables
from flows.verl.launch import read_launch_script
from flows.verl.read import Verl, VerlError, read_config
from flows.verl.values import ACTOR, ROLLOUT, Approximate, NoCounterpart, PathValues, Unused, flow_of, strategy_of
from storage.chain.records import OptimizerSpec
from storage.serialization import default_of

CONFIGS: dict[str, type[BaseModel]] = {
    **{name: training.config for name, training in TRAININGS.items()}, "evaluation": EvaluationFlowConfig,
}  # fmt: skip
"""Config class of each flow that a verl config can become."""

TRAINING = {"data.train.kind": "file", "engine.kind": "local"}
IMPLICIT_VALUES: dict[str, dict[str, Any]] = {
    "grpo": TRAINING, "gspo": TRAINING, "sft": TRAINING,
    "ppo": TRAINING | {
        "credit.returns": "advantages", "credit.whiten_advantages": True, "regularisation.kl_in": "loss",
        "value_model.optimizer.eps": default_of(OptimizerSpec, "eps") / VALUE_LOSS_FACTOR,
    },
    "evaluation": {"answers.0.source.kind": "file", "answers.0.name": "stored"},
}  # fmt: skip
"""Values of our config that verl implies without having a key for them, by flow."""

HELDOUT = "data.heldout."


@dataclass(frozen=True)
class MappedKey:
    """A key of verl and its counterpart in our config."""

    key: str
    value: Any
    paths: dict[str, Any]
    """Value by path in our config."""
    given: bool
    """Whether the config gives the key. If not, the value is verl's default."""
    difference: str = ""
    """How our value differs from verl's. Empty: it does not."""


@dataclass
class Imported:
    """The result of an import: the config, and what happened to every given key."""

    kind: str
    """ppo_trainer, sft_trainer, sft_trainer_engine or evaluation."""
    flow: str
    config: dict[str, Any] = field(default_factory=dict)
    """The validated config of the flow."""
    mapped: list[MappedKey] = field(default_factory=list)
    unread: dict[str, list[str]] = field(default_factory=dict)
    """Given keys that have no effect in verl, by reason."""
    dropped: dict[str, list[str]] = field(default_factory=dict)
    """Given keys that are not needed in Ostinato, by reason."""
    off: dict[str, list[str]] = field(default_factory=dict)
    """Given keys that are not supported, but have a value without effect, by reason."""
    refused: list[tuple[str, Any, str]] = field(default_factory=list)
    """(key, value, reason) of the keys that cannot be imported."""
    absent: list[str] = field(default_factory=list)
    """Names in `defaults:` without a file. The key table's defaults are used for them."""

    @property
    def approximate(self) -> list[MappedKey]:
        """The keys whose value in our config is not exactly verl's."""
        return [line for line in self.mapped if line.difference]


def import_verl(
    path: Path, *, overrides: Sequence[str] = (), sets: Sequence[str] = (), kind: str | None = None, force: bool = False
) -> Imported:
    """Imports a verl config or a launch script (.sh). `overrides` are `key=value` pairs of verl, `sets` are `key=value`
    pairs of our config.

    Keys that are not given have verl's defaults. Raises ConfigError (VerlError) for a bad file, for unknown keys, for
    keys that cannot be imported (unless `force`), and for a result that our config class refuses.
    """
    # read the file and check its keys
    config_path: Path | None = path
    if path.suffix == ".sh":
        launch = read_launch_script(path, overrides)
        config_path, overrides, kind = launch.config, [*launch.overrides, *overrides], kind or launch.kind
    given_keys, absent, options = read_config(config_path, overrides)
    kind = kind or kind_of(given_keys)
    if kind not in key_tables():
        raise VerlError(f"there is no kind {kind!r} of verl config; expected one of {', '.join(key_tables())}")
    table = key_tables()[kind]
    _check_keys(given_keys, table, kind)
    known = {key: value for key, value in given_keys.items() if table.find(key)}
    verl = Verl(known, table, kind=kind, options=options)

    # sort every key by what happens to it
    imported = Imported(kind, flow_of(verl), absent=absent)
    _import_mapped(verl, imported)
    _import_unmapped(verl, imported)
    # build the config; later keys win
    values = IMPLICIT_VALUES[imported.flow]
    for line in imported.mapped:
        values = values | line.paths
    config = _nested(values)
    for name, value in load_config(None, sets).items():
        config[name] = _override(config.get(name), value)
    # everything that is missing or refused is named at once
    missing = _missing_grader(imported.flow, config)
    if (imported.refused and not force) or missing:
        problems = [describe_refusals(imported.refused)] if imported.refused and not force else []
        raise VerlError("\n".join([*problems, *missing]))
    imported.config = _validate(config, imported)
    return imported


def kind_of(given: dict[str, Any]) -> str:
    """Returns the kind of verl config that has most of the keys. Raises VerlError if none has any."""
    # kinds share keys, so the number of matches decides
    counts: dict[str, int] = {}
    for kind, table in key_tables().items():
        counts[kind] = sum(table.find(key) is not None for key in given)
    best = max(counts, key=lambda kind: counts[kind])
    if not counts[best]:
        raise VerlError(f"none of the {len(given)} keys is one of verl's; give a verl trainer or evaluation config")
    return best


def describe_refusals(refused: Sequence[tuple[str, Any, str]]) -> str:
    """Describes the keys that cannot be imported, with one line per key."""
    lines = [f"  {key} = {value!r:.200}: {why}" for key, value, why in refused]
    noun = "1 key" if len(lines) == 1 else f"{len(lines)} keys"
    return f"{noun} cannot be imported (remove them, or use --force to leave them out):\n" + "\n".join(lines)


def _check_keys(given: dict[str, Any], table: KeyTable, kind: str) -> None:
    """Raises VerlError for unknown keys."""
    problems = []
    for key, value in given.items():
        if table.find(key) is not None or (value in (None, {}) and table.is_group(key)):
            continue
        if table.is_group(key):
            problems.append(f"  {key}: {value!r:.200} was given for a group of keys")
            continue
        nearest = table.nearest(key)
        suggestion = f"; did you mean {nearest!r}?" if nearest else ""
        problems.append(f"  {key}: unknown key{suggestion}")
    if problems:
        noun = "1 key is" if len(problems) == 1 else f"{len(problems)} keys are"
        raise VerlError(f"{noun} none of verl's {kind}:\n" + "\n".join(problems))


def _import_mapped(verl: Verl, imported: Imported) -> None:
    """Converts the keys that have a counterpart. Keys that are not given have verl's defaults."""
    for key, entry in verl.table.mapped.items():
        # keys of other flows
        is_given = verl.is_given(key)
        if entry.flows and imported.flow not in entry.flows:
            _note(imported.unread, f"the flow {imported.flow} does not read it", key, given=is_given)
            continue
        # keys whose default is only a placeholder, unless the config names the same folder elsewhere
        is_placeholder = entry.placeholder or (entry.required and verl.default(key) not in verl.given.values())
        if not is_given and is_placeholder:
            if entry.required:
                imported.refused.append((key, None, "it is required, and verl's default is a placeholder; give it"))
            continue
        # keys that verl does not read in this config
        why = unmet_condition(verl, entry.when)
        if why is not None:
            _note(imported.unread, why, key, given=is_given)
            continue
        _convert(verl, imported, key, entry, verl.get(key))


def _convert(verl: Verl, imported: Imported, key: str, entry: Mapped, value: Any) -> None:
    """Converts one key and records the result."""
    is_given = verl.is_given(key)
    # a conversion may find that the value has no counterpart
    try:
        result = value if entry.convert is None else CONVERSIONS[entry.convert](verl, key, value)
    except NoCounterpart as refusal:
        imported.refused.append((key, value, str(refusal)))
        return
    except TypeError:
        imported.refused.append((key, value, f"a {type(value).__name__} is not a valid value for it"))
        return
    except (ArithmeticError, OSError) as error:
        # a number of 0 that others are divided by, or a path that no file can have
        imported.refused.append((key, value, f"it cannot be converted: {error!s:.200}"))
        return
    if isinstance(result, Unused):
        _note(imported.unread, result.why or "it has no effect at this value", key, given=is_given)
        return

    # the values in our config
    # an approximate value is reported with its difference
    difference = ""
    if isinstance(result, Approximate):
        difference, result = result.difference, result.value
    paths = result.values if isinstance(result, PathValues) else dict.fromkeys(entry.to, result)
    paths.pop("flow", None)

    # held-out keys count only if there is a held-out file
    if not verl.table.has_default("data.val_files") or not verl.given.get("data.val_files"):
        paths = {path: value for path, value in paths.items() if not path.startswith(HELDOUT)}
    elif "data.heldout.path" in paths:
        paths = {"data.heldout.kind": "file", **paths}
    imported.mapped.append(MappedKey(key, value, paths, is_given, difference))


def _import_unmapped(verl: Verl, imported: Imported) -> None:
    """Records the given keys without a counterpart: dropped, without effect, approximate, or refused."""
    for key in verl.given:
        entry = verl.table.find(key)
        if not isinstance(entry, Unmapped):
            continue
        if entry.result == "dropped":
            _note(imported.dropped, entry.why, key)
            continue
        value = verl.get(key)
        defaults = [verl.resolve(default, key) for default in entry.defaults]
        why = unmet_condition(verl, entry.when)
        if why is not None:
            _note(imported.unread, why, key)
        elif any(_is_same(value, default) for default in defaults):
            _note(imported.off, entry.why, key)
        elif entry.result == "approximate":
            imported.mapped.append(MappedKey(key, value, {}, True, entry.why))
        else:
            imported.refused.append((key, value, entry.why))


def _is_same(value: Any, default: Any) -> bool:
    """Compares values. 0 and 0.0 are the same, 0 and false are not."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _note(into: dict[str, list[str]], why: str, key: str, *, given: bool = True) -> None:
    if given:
        into.setdefault(why, []).append(key)


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": 1, "c.0.d": 2} -> {"a": {"b": 1}, "c": [{"d": 2}]}"""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *groups, last = path.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = value
    return {name: _numbers_to_lists(value) for name, value in tree.items()}


def _numbers_to_lists(value: Any) -> Any:
    """Turns dicts whose keys are all numbers into lists."""
    if not isinstance(value, dict):
        return value
    entries = {name: _numbers_to_lists(entry) for name, entry in value.items()}
    has_only_numbers = bool(entries) and all(name.isdigit() for name in entries)
    if has_only_numbers:
        return list(entries.values())
    return entries


SUITE = (
    "an evaluation of ours has a suite: its graders, and for models also its datasets of prompts; with stored answers, "
    "a grader is enough: --set suite.graders='[{path: tasks.graders.rules:LastNumber}]'"
)


def _missing_grader(flow: str, config: dict[str, Any]) -> list[str]:
    """What to give instead of the reward that verl chooses by each row's data_source. Empty: there is a grader."""
    function = "custom_reward_function.path is not given, and verl then chooses the reward by each row's data_source; "
    if flow == "evaluation" and not config.get("suite"):
        return [f"{function}{SUITE}"]
    if flow not in ("sft", "evaluation") and "path" not in config.get("grader", {}):
        return [f"{function}give a grader, for instance --set grader.path=tasks.graders.rules:LastNumber"]
    return []


def _validate(config: dict[str, Any], imported: Imported) -> dict[str, Any]:
    """Returns the config. Raises VerlError if our config class refuses it."""
    model = CONFIGS[imported.flow]
    try:
        model.model_validate(config)
    except ValidationError as error:
        # the hint must fit this command, which has no config file to edit
        text = describe_validation(error, model, config).replace("set it in the file or by ", "give it by --set ")
        raise VerlError(f"the values are not a valid {imported.flow} config; {text}") from error
    return config


def _override(value: Any, new_value: Any) -> Any:
    """Replaces the keys of a group that the new group names. A new group with a `kind` replaces the whole group."""
    if not (isinstance(value, dict) and isinstance(new_value, dict)) or "kind" in new_value:
        return new_value
    return value | {name: _override(value.get(name), entry) for name, entry in new_value.items()}


@dataclass(frozen=True)
class Condition:
    """A condition on a verl config. `otherwise` says why the key has no effect if the condition does not hold."""

    holds: Callable[[Verl], bool]
    otherwise: str


def _model_of(verl: Verl) -> str:
    return "actor_rollout_ref.model." if verl.kind == "ppo_trainer" else "model."


def _on(*keys: str) -> Callable[[Verl], bool]:
    """A condition that holds if any of the keys has a true value."""
    return lambda verl: any(bool(verl.get(key)) for key in keys)


def _loss_mode(verl: Verl) -> str:
    return str(verl.get(ACTOR + "policy_loss.loss_mode"))


CONDITIONS: dict[str, Condition] = {
    "adaptive_kl": Condition(
        lambda verl: bool(verl.get("algorithm.use_kl_in_reward")) and verl.get("algorithm.kl_ctrl.type") == "adaptive",
        "the KL controller is fixed",
    ),
    "agent": Condition(
        lambda verl: verl.get(ROLLOUT + "agent.default_agent_loop") != "single_turn_agent", "no agent loop is used"
    ),
    "async": Condition(lambda verl: verl.get("trainer.v1.trainer_mode") != "sync", "the trainer mode is sync"),
    "automodel": Condition(lambda verl: strategy_of(verl) == "automodel", "the trainer is not Automodel"),
    "bypass": Condition(_on("algorithm.rollout_correction.bypass_mode"), "bypass_mode is false"),
    "clip_cov": Condition(lambda verl: _loss_mode(verl) == "clip_cov", "the loss is not clip_cov"),
    "clipped": Condition(lambda verl: _loss_mode(verl) == "vanilla", "this loss has no second clip"),
    "cpu_offload": Condition(_on("model.fsdp_config.cpu_offload"), "cpu_offload is false"),
    "critic": Condition(lambda verl: flow_of(verl) == "ppo", "there is no critic: adv_estimator is not gae"),
    "critic_lora": Condition(lambda verl: (verl.get("critic.model.lora_rank") or 0) > 0, "the critic's lora_rank is 0"),
    "distillation": Condition(_on("distillation.enabled"), "distillation is off"),
    "filter_groups": Condition(_on("algorithm.filter_groups.enable"), "filter_groups is off"),
    "importance": Condition(
        lambda verl: (
            verl.get("algorithm.rollout_correction.rollout_is") == "token"
            and not verl.get("algorithm.rollout_correction.bypass_mode")
        ),
        "rollout_is is null, or bypass_mode is true, which needs no weights",
    ),
    "kl_cov": Condition(lambda verl: _loss_mode(verl) == "kl_cov", "the loss is not kl_cov"),
    "kl_in_reward": Condition(_on("algorithm.use_kl_in_reward"), "use_kl_in_reward is false"),
    "kl_loss": Condition(_on(ACTOR + "use_kl_loss"), "use_kl_loss is false"),
    "lora": Condition(lambda verl: (verl.get(_model_of(verl) + "lora_rank") or 0) > 0, "lora_rank is 0"),
    "megatron": Condition(lambda verl: strategy_of(verl) == "megatron", "the trainer is not Megatron"),
    "megatron_lora": Condition(
        lambda verl: strategy_of(verl) == "megatron" and (verl.get("actor_rollout_ref.model.lora.rank") or 0) > 0,
        "the strategy is not megatron, or lora.rank is 0",
    ),
    "mtp_rollout": Condition(
        lambda verl: bool(
            verl.get(_model_of(verl) + "mtp.enable") and verl.get(_model_of(verl) + "mtp.enable_rollout")
        ),
        "multi-token-prediction heads do not sample: mtp.enable or mtp.enable_rollout is false",
    ),
    "multi_turn": Condition(_on(ROLLOUT + "multi_turn.enable"), "multi_turn is off"),
    "multiturn": Condition(_on("data.multiturn.enable"), "multiturn is off"),
    "other_loss": Condition(
        lambda verl: _loss_mode(verl) not in (*LOSS_MODES, "gspo"),
        "this loss is not used",
    ),
    "pf_ppo": Condition(_on("algorithm.use_pf_ppo"), "use_pf_ppo is false"),
    "resume_path": Condition(
        lambda verl: verl.get("trainer.resume_mode") == "resume_path", "resume_mode is not resume_path"
    ),
    "reward_model": Condition(
        _on("reward_model.enable", "reward.reward_model.enable"), "there is no reward model: enable is false"
    ),
    "sapo": Condition(lambda verl: _loss_mode(verl) == "sapo", "the loss is not sapo"),
    "validation": Condition(_on("data.val_files"), "there are no val_files"),
    "veomni": Condition(lambda verl: strategy_of(verl) == "veomni", "the trainer is not VeOmni"),
    "vllm": Condition(lambda verl: verl.get(ROLLOUT + "name") not in ("hf",), "the sampler is not vLLM"),
}


def unmet_condition(verl: Verl, when: str | None) -> str | None:
    """Returns why a key with this condition has no effect, or None if the condition holds."""
    if when is None:
        return None
    try:
        holds = CONDITIONS[when].holds(verl)
    except TypeError as error:
        raise VerlError(
            f"a key that decides whether others are read has a value of the wrong type ({error}); they are read unless "
            f"{CONDITIONS[when].otherwise}"
        ) from error
    return None if holds else CONDITIONS[when].otherwise
