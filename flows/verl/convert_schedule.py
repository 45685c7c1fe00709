"""Conversions of verl's values: the length of the run, and the schedules over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from flows.verl.read import Verl
from flows.verl.values import Approximate, Conversion, NoCounterpart, PathValues, Unused, strategy_of, workers_of

NULL = "verl needs a number here; give one, or leave the key out for verl's default"

# -- steps and epochs ------------------------------------------------------------------------------------------


def _training_rows(verl: Verl) -> int | None:
    """The number of rows that verl trains on. None if the Parquet files are not here, or if a setting filters the
    rows or replaces the dataset class."""
    if verl.kind == "ppo_trainer":
        keys_that_change_rows = (
            "data.filter_overlong_prompts", "data.custom_cls.path", "algorithm.filter_groups.enable",
        )  # fmt: skip
        if any(verl.get(key) for key in keys_that_change_rows):
            return None
    rows = 0
    for file in train_files(verl):
        if file is None:
            return None
        rows += file.rows
    limit = verl.get("data.train_max_samples")
    if limit is not None and limit > 0:
        return min(rows, limit)
    return rows


def steps_per_epoch(verl: Verl) -> int | None:
    """The number of whole batches of a pass over the rows; verl drops the rest. None if the rows are not known.

    Raises NoCounterpart for batches of no rows."""
    rows = _training_rows(verl)
    batch = verl.get("data.train_batch_size")
    # the data loader of January's PPO trainer reads this many prompts per step
    if verl.kind == "ppo_trainer" and workers_of(verl) in ("january", "january_engine"):
        batch = verl.get("data.gen_batch_size") or batch
    if rows is None or not isinstance(batch, int):
        return None
    if batch < 1:
        raise NoCounterpart(f"data.train_batch_size is {batch}; give at least 1")
    return rows // batch


def total_steps(verl: Verl) -> int | None:
    """The number of steps of the run. None if it depends on rows that are not known."""
    per_epoch, steps = steps_per_epoch(verl), verl.get("trainer.total_training_steps")
    epochs = verl.get("trainer.total_epochs")
    # without the rows, the given steps are taken as those of the run; null epochs are refused at their own key
    if per_epoch is None or epochs is None:
        return steps if isinstance(steps, int) else None
    whole_epochs = per_epoch * int(epochs)
    return whole_epochs if steps is None else min(steps, whole_epochs)


def _epochs(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        raise NoCounterpart(NULL)
    steps, per_epoch = verl.get("trainer.total_training_steps"), steps_per_epoch(verl)
    if per_epoch is None:
        if steps is not None:
            return Unused("total_training_steps decides")
        difference = "verl drops the rows of a pass that fill no batch; here they begin the next pass"
        return Approximate(PathValues({"algorithm.epochs": value}), difference)
    if per_epoch == 0:
        raise NoCounterpart("the training files have fewer rows than a batch; lower data.train_batch_size")
    if steps is not None and steps <= per_epoch * value:
        return Unused("total_training_steps ends the run first")
    # in steps, because verl drops the rows of a pass that fill no batch
    return PathValues({"algorithm.steps": per_epoch * value})


def _steps(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Unused()
    per_epoch, epochs = steps_per_epoch(verl), verl.get("trainer.total_epochs")
    if epochs is None:
        return value
    if per_epoch is None:
        return Approximate(value, f"verl also ends after {epochs} passes over rows that cannot be counted here")
    if value > per_epoch * epochs:
        return Unused(f"the run ends after total_epochs={epochs} passes of {per_epoch} batches")
    return value


def _critic_warmup(verl: Verl, key: str, value: Any) -> Any:
    """verl counts steps from 1 and trains the actor from step critic_warmup on. Our config has a share of the run."""
    if value <= 1:
        return 0.0
    steps = total_steps(verl)
    if steps is None:
        raise NoCounterpart("its fraction of the run needs trainer.total_training_steps; give it")
    if value > steps:
        raise NoCounterpart(f"the run ends after {steps} steps, so verl would never train the actor; lower it")
    return (value - 1) / steps


# -- learning rates --------------------------------------------------------------------------------------------


def _schedule(verl: Verl, key: str, value: Any) -> Any:
    group = key.rpartition(".")[0]
    if strategy_of(verl) == "megatron":
        return Unused("Megatron reads lr_decay_style")
    # warmup_style is an older name of the schedule, and comes first
    if verl.kind != "sft_trainer" and verl.get(group + ".warmup_style") is not None:
        return Unused("warmup_style decides")
    return _named_schedule(verl, key, value)


def _schedule_alias(verl: Verl, key: str, value: Any) -> Any:
    if value is None or strategy_of(verl) == "megatron":
        return Unused()
    return _named_schedule(verl, key, value)


MEGATRON_SCHEDULES = {"cosine": "cosine", "linear": "linear", "inverse-square-root": "inverse_sqrt"}


def _megatron_schedule(verl: Verl, key: str, value: Any) -> Any:
    """utils/megatron/optimizer.py, get_megatron_optimizer_param_scheduler; its warm-up begins at lr_warmup_init."""
    if value == "constant":
        return _named_schedule(verl, key, value)
    if value not in MEGATRON_SCHEDULES:
        expected = ", ".join(["constant", *MEGATRON_SCHEDULES])
        raise NoCounterpart(f"there is no schedule {value!r:.200} here; expected {expected}")
    return Approximate(MEGATRON_SCHEDULES[value], SCHEDULE_DIFFERENCE)


def _decay_steps(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Unused("the schedule ends with the run")
    steps = total_steps(verl)
    if value != steps:
        raise NoCounterpart(f"the schedule ends with the run, after {steps or 'an unknown number of'} steps")
    return Unused("it is the length of the run")


def _schedule_name(verl: Verl, key: str) -> Any:
    """verl's name of the schedule in the group of an optimizer's key."""
    group = key.rpartition(".")[0]
    if verl.kind == "sft_trainer":
        return verl.get(group + ".lr_scheduler")
    if strategy_of(verl) == "megatron":
        return verl.get(group + ".lr_decay_style")
    return verl.get(group + ".warmup_style") or verl.get(group + ".lr_scheduler_type")


SCHEDULE_DIFFERENCE = (
    "a warm-up of W steps begins at lr / W, while verl's begins at 0; the schedule reaches its end in the last step"
)


def _named_schedule(verl: Verl, key: str, value: Any) -> Any:
    if value == "constant":
        return "constant_with_warmup" if _warms_up(verl, key) else "constant"
    if value == "cosine":
        return Approximate("cosine", SCHEDULE_DIFFERENCE)
    if value == "wsd" and verl.kind == "sft_trainer":
        return Approximate("wsd", f"{SCHEDULE_DIFFERENCE}; over the last tenth of the run the rate falls linearly")
    raise NoCounterpart(f"there is no schedule {value!r:.200} here; expected constant or cosine")


def _warms_up(verl: Verl, key: str) -> bool:
    """Whether the optimizer of this key begins with a warm-up of a step or more."""
    group = key.rpartition(".")[0]
    steps, ratio = verl.get(group + ".lr_warmup_steps"), verl.get(_ratio_key(verl, group))
    if steps is not None and steps > 0:
        return True
    # null is refused at its own key
    if ratio is None or ratio <= 0:
        return False
    total = total_steps(verl)
    # verl rounds the product down
    return total is None or int(ratio * total) > 0


def _ratio_key(verl: Verl, group: str) -> str:
    """The key of the warm-up's ratio that verl reads. The SFT trainer has an older name, which counts only if it is
    given and the new one is not."""
    newer, older = group + ".lr_warmup_steps_ratio", group + ".warmup_steps_ratio"
    if verl.kind == "sft_trainer" and verl.is_given(older) and not verl.is_given(newer):
        return older
    return newer


def _warmup_steps(verl: Verl, key: str, value: Any) -> Any:
    if value is None or value <= 0:
        return Unused("lr_warmup_steps_ratio decides")
    return value


def _warmup_ratio(verl: Verl, key: str, value: Any) -> Any:
    group = key.rpartition(".")[0]
    steps = verl.get(group + ".lr_warmup_steps")
    if steps is not None and steps > 0:
        return Unused("lr_warmup_steps decides")
    ratio_key = _ratio_key(verl, group)
    if key != ratio_key:
        return Unused(f"{ratio_key.rpartition('.')[2]} decides")
    if value is None:
        raise NoCounterpart(NULL)
    if _schedule_name(verl, key) == "constant" and not _warms_up(verl, key):
        return Unused()
    total = total_steps(verl)
    if total is None or value == 0:
        return value
    # verl rounds down to whole steps, our ratio is rounded to the nearest
    optimizer = "value_model.optimizer" if key.startswith("critic.") else "optimizer"
    return PathValues({f"{optimizer}.warmup_steps": int(value * total)})


def _first_rate(verl: Verl, key: str, value: Any) -> Any:
    """Automodel's warm-up begins at this share of the highest rate."""
    if not value or not _warms_up(verl, key):
        return Unused()
    return Approximate(PathValues({}), f"verl's warm-up begins at {value} of the rate, ours at 0 or its first step")


def _lowest_absolute_rate(verl: Verl, key: str, value: Any) -> Any:
    """Megatron and VeOmni have the rate itself, our config its share of the highest rate."""
    if _schedule_name(verl, key) == "constant":
        return Unused("a constant rate has no minimum")
    return value / verl.get(key.rpartition(".")[0] + ".lr")


def _lowest_rate(verl: Verl, key: str, value: Any) -> Any:
    if strategy_of(verl) in ("megatron", "veomni"):
        return Unused("the trainer reads the key of the lowest rate itself")
    if _schedule_name(verl, key) == "constant":
        return Unused("a constant rate has no minimum")
    return 0.0 if value is None else value


SCHEDULE_CONVERSIONS: dict[str, Conversion] = {
    "critic_warmup": _critic_warmup, "decay_steps": _decay_steps, "epochs": _epochs, "first_rate": _first_rate,
    "lowest_absolute_rate": _lowest_absolute_rate, "lowest_rate": _lowest_rate,
    "megatron_schedule": _megatron_schedule, "schedule": _schedule, "schedule_alias": _schedule_alias,
    "steps": _steps, "warmup_ratio": _warmup_ratio, "warmup_steps": _warmup_steps,
}  # fmt: skip


# -- the rows of the training files ---------------------------------------------------------------------------


class TrainFile(NamedTuple):
    """What a Parquet file says about its rows."""

    rows: int
    columns: list[str]


def train_files(verl: Verl) -> list[TrainFile | None]:
    """Returns an entry for each file of data.train_files. None: it is not here, or it is not Parquet."""
    files = verl.get("data.train_files")
    return [_read(file) for file in (files if isinstance(files, list) else [files])]


def _read(file: Any) -> TrainFile | None:
    path = Path(str(file)).expanduser()
    if path.suffix != ".parquet" or not path.is_file():
        return None
    # imported here, because only configs whose files are on this machine need it
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
        return TrainFile(int(metadata.num_rows), list(metadata.schema.to_arrow_schema().names))
    except (OSError, pa.ArrowException):
        # the run reports what is wrong with the file
        return None
