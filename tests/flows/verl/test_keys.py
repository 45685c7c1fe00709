"""Tests that the table of verl's keys is complete and agrees with verl's own files."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from flows.configs.overrides import load_config
from flows.verl.convert import CONVERSIONS
from flows.verl.importer import CONDITIONS
from flows.verl.keys import Mapped, Unmapped, key_tables
from tests.flows.verl.test_examples import LEAST

KEYS = Path(__file__).parents[2] / "data" / "verl" / "keys"

LISTS = {
    "ppo_trainer": "ppo_trainer", "ppo_trainer_2026_01": "ppo_trainer", "page_ppo_trainer": "ppo_trainer",
    "dapo": "ppo_trainer", "ppo_trainer_megatron": "ppo_trainer", "examples": "ppo_trainer",
    "sft_trainer_engine_options": "sft_trainer_engine",
    "sft_trainer": "sft_trainer", "page_sft_trainer": "sft_trainer", "sft_trainer_engine": "sft_trainer_engine",
    "evaluation": "evaluation", "page_evaluation": "evaluation",
}  # fmt: skip
NEWEST = ("ppo_trainer", "sft_trainer", "sft_trainer_engine", "evaluation")


def keys_of(name: str) -> dict[str, Any]:
    return load_config(KEYS / f"{name}.yaml")


@pytest.mark.parametrize(("name", "kind"), LISTS.items())
def test_every_key_of_verl_is_mapped_dropped_or_refused(name: str, kind: str) -> None:
    table = key_tables()[kind]
    assert [key for key in keys_of(name) if key not in table.mapped and key not in table.unmapped] == []


@pytest.mark.parametrize("kind", NEWEST)
def test_the_defaults_are_verls(kind: str) -> None:
    table = key_tables()[kind]
    wrong = {key: table.default(key) for key, value in keys_of(kind).items() if table.default(key) != value}
    assert wrong == {}


@pytest.mark.parametrize("kind", NEWEST)
def test_the_table_has_no_key_that_verl_has_not(kind: str) -> None:
    lists = [name for name, of in LISTS.items() if of == kind]
    known = set(chain.from_iterable(keys_of(name) for name in lists))
    table = key_tables()[kind]
    assert {*table.mapped, *table.unmapped} - known == set()


@pytest.mark.parametrize("kind", NEWEST)
def test_every_entry_can_be_carried_out(kind: str) -> None:
    table = key_tables()[kind]
    for key, entry in table.mapped.items():
        assert entry.convert is None or entry.convert in CONVERSIONS, key
        assert entry.to or entry.convert, key
    for entry in (*table.mapped.values(), *table.unmapped.values(), *table.patterns.values()):
        assert entry.when is None or entry.when in CONDITIONS
    assert all(entry.why for entry in table.unmapped.values())


def test_every_conversion_and_condition_is_used() -> None:
    entries: list[Any] = []
    for table in key_tables().values():
        entries += [*table.mapped.values(), *table.unmapped.values(), *table.patterns.values()]
    assert {entry.convert for entry in entries if isinstance(entry, Mapped)} >= set(CONVERSIONS)
    assert {entry.when for entry in entries} >= set(CONDITIONS)


def test_keys_of_other_trainers_and_class_names_are_known_by_pattern() -> None:
    table = key_tables()["ppo_trainer"]
    for key in ("actor.megatron.tensor_model_parallel_size", "actor.optim._target_", "actor.veomni.fsdp_size"):
        entry = table.find(f"actor_rollout_ref.{key}")
        assert isinstance(entry, Unmapped)
        assert entry.result == "dropped"
    # settings of Megatron's transformer may change numbers, unless they are known not to
    settings = (("moe_aux_loss_coeff", "approximate"), ("gelu_fusion", "refused"), ("apply_rope_fusion", "dropped"))
    for name, result in settings:
        entry = table.find(f"actor_rollout_ref.actor.megatron.override_transformer_config.{name}")
        assert isinstance(entry, Unmapped)
        assert entry.result == result
    assert table.find("actor_rollout_ref.actor.megatronic") is None


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("data.train_file", "data.train_files"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("algorithm.total_epochs", "trainer.total_epochs"),
    ],
)
def test_the_key_that_was_meant_is_found(key: str, meant: str) -> None:
    assert key_tables()["ppo_trainer"].nearest(key) == meant


def test_the_numbers_of_the_document_are_those_of_the_table_and_of_the_count() -> None:
    text = " ".join((Path(__file__).parents[3] / "docs" / "verl.md").read_text(encoding="utf-8").split())
    keys = sum(len({*table.mapped, *table.unmapped}) for table in key_tables().values())
    assert f"lists all keys, about {round(keys, -2):,}, and" in text
    january, august = LEAST[139], LEAST[109]
    assert f"Of the 139 example scripts of verl at `b178a3c` (January 2026), {january} import" in text
    assert f"of the 109 at `1dda039` (August 2026), {august}." in text
