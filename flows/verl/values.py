"""The possible results of converting a value of verl, the flow that a verl config stands for, and its workers.

The workers split a mini-batch. Those of January 2026 reduce the loss of each micro-batch alone, so that the size of the
micro-batches changes the loss. The engine workers, which January had as an option and August 2026 has alone, reduce it
over the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flows.verl.read import Verl, VerlError

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."

Workers = Literal["january", "january_engine", "august"]
IMPLEMENTATION = "trainer.use_legacy_worker_impl"
NEW_TRAINER = "trainer.use_v1"


class NoCounterpart(Exception):
    """The value of verl has no counterpart in Ostinato. The message says why."""


@dataclass(frozen=True)
class Unused:
    """The key has no effect in this config. `why` names the key that decides instead. Empty: its value disables it."""

    why: str = ""


@dataclass(frozen=True)
class Approximate:
    """Our value is close to verl's, but not the same. `difference` says how they differ."""

    value: Any
    difference: str


@dataclass(frozen=True)
class PathValues:
    """A value for each path of our config, for a key that has several."""

    values: dict[str, Any]


Conversion = Callable[[Verl, str, Any], Any]
"""Takes the verl config, the key and its value; returns our value or one of the classes above."""


def flow_of(verl: Verl) -> str:
    """Returns the flow that corresponds to the verl config."""
    if verl.kind.startswith("sft"):
        return "sft"
    if verl.kind == "evaluation":
        return "evaluation"
    if verl.get("algorithm.adv_estimator") == "gae":
        return "ppo"
    return "gspo" if verl.get(ACTOR + "policy_loss.loss_mode") == "gspo" else "grpo"


def local_path(path: Any) -> str:
    """Returns a path on this machine, or a URL. Raises NoCounterpart for other values, and for HDFS."""
    if not isinstance(path, str):
        raise NoCounterpart(f"expected a path, not {type(path).__name__}")
    if path.startswith("hdfs:"):
        raise NoCounterpart("HDFS is not supported; copy the data to a folder or to an object store")
    if path.startswith("~"):
        return str(Path(path).expanduser())
    return path


def times(value: Any, factor: Any) -> int:
    """Returns the product. Raises TypeError for values that are not integers. (Python also multiplies strings.)"""
    for number in (value, factor):
        if not isinstance(number, int):
            raise TypeError(f"{number!r} is not an integer")
    return int(value * factor)


class MicroBatches(NamedTuple):
    """The micro-batches of one update."""

    size: int | None
    """Completions per micro-batch. None: it depends on their lengths."""
    number: int | None
    """Number of micro-batches, over all ranks. None: it depends on the completions' lengths."""
    ranks: int
    """Ranks that have micro-batches of their own."""
    completions: int
    """Completions of the update, over all ranks."""
    is_megatron: bool


def strategy_of(verl: Verl) -> str:
    """The trainer of a config: fsdp, fsdp2, megatron, veomni, or another name."""
    if verl.kind == "sft_trainer":
        return str(verl.get("model.strategy"))
    if verl.kind == "sft_trainer_engine":
        return str(verl.get("engine.strategy"))
    engine = verl.get("model_engine")
    return str(verl.get(ACTOR + "strategy") if engine == "dp" else engine)


SEQUENCE_RANKS = {"megatron": "context_parallel_size", "veomni": "ulysses_parallel_size", "automodel": "cp_size"}
"""Names of the number of ranks that share a sequence, by trainer."""


def ranks_of_a_sequence(verl: Verl, group: str) -> int:
    """The number of ranks that share each sequence. `group` is that of the role's keys, with the dot at the end."""
    strategy = strategy_of(verl)
    key = group + SEQUENCE_RANKS.get(strategy, "ulysses_sequence_parallel_size")
    # a role of the PPO trainer has a group for each trainer that is not FSDP
    if verl.kind == "ppo_trainer" and strategy in SEQUENCE_RANKS:
        key = f"{group}{strategy}.{SEQUENCE_RANKS[strategy]}"
    # the critic's keys of other trainers are known by pattern, without a default
    return int(verl.get(key) if verl.table.has_default(key) else verl.given.get(key, 1))


def workers_of(verl: Verl) -> Workers | None:
    """The workers that run the config. None: the config does not say which version of verl it is for."""
    if any(key == NEW_TRAINER or key.startswith("trainer.v1.") for key in verl.given):
        return "august"
    if not verl.is_given(IMPLEMENTATION):
        return None
    return "january_engine" if verl.get(IMPLEMENTATION) == "disable" else "january"


def micro_batches(verl: Verl, group: str) -> MicroBatches:
    """The micro-batches of the actor or the critic. `group` is that of its keys, with the dot at the end."""
    megatron = strategy_of(verl) == "megatron"
    ranks = _data_parallel_ranks(verl, group, megatron)
    completions = verl.get(group + "ppo_mini_batch_size") * verl.get(ROLLOUT + "n")
    size = verl.get(group + "ppo_micro_batch_size_per_gpu")
    if size is None:
        # the older key counts the completions of the micro-batches of all ranks
        total = verl.get(group + "ppo_micro_batch_size")
        size = None if total is None else max(1, total // ranks)
    if verl.get(group + "use_dynamic_bsz") or not isinstance(size, int) or size < 1:
        return MicroBatches(None, None, ranks, completions, megatron)
    per_rank = max(1, completions // ranks)
    return MicroBatches(min(size, per_rank), ranks * -(-per_rank // size), ranks, completions, megatron)


def _data_parallel_ranks(verl: Verl, group: str, megatron: bool) -> int:
    """The ranks that have micro-batches of their own."""
    shared = ranks_of_a_sequence(verl, group)
    if megatron:
        for layout in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            shared *= verl.given.get(f"{group}megatron.{layout}") or 1
    gpus, nodes = verl.get("trainer.n_gpus_per_node"), verl.get("trainer.nnodes")
    if not isinstance(gpus, int) or not isinstance(nodes, int):
        raise VerlError(f"trainer.nnodes={nodes!r:.100} and n_gpus_per_node={gpus!r:.100}: expected whole numbers")
    return max(1, gpus * nodes // shared)
