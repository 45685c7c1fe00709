"""Conversions of verl's values into ours: files, their columns and rows."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Any

from flows.verl.read import Verl
from flows.verl.values import Conversion, Near, Nothing, Paths, Refused, local_path
from tasks.datasets.verl import ROWS


def _files(verl: Verl, key: str, value: Any) -> Any:
    if value is None or value == []:
        return Nothing()
    first, *further = map(local_path, value if isinstance(value, list) else [value])
    if verl.kind == "evaluation":
        source = "suite.datasets.0.source"
    else:
        source = "data.heldout" if key == "data.val_files" else "data.train"
    if verl.kind == "ppo_trainer" and verl.get("data.custom_cls.path"):
        return Paths({f"{source}.arguments.files": [first, *further]})
    return Paths({f"{source}.path": first} | ({f"{source}.further_paths": further} if further else {}))


def _dataset_class(verl: Verl, key: str, value: Any) -> Any:
    """verl makes both its datasets by one class."""
    if value is None:
        return Nothing()
    name = verl.get("data.custom_cls.name")
    if name is None:
        raise Refused("which class of the file it is, is not given; give data.custom_cls.name")
    path = Path(local_path(value))
    arguments = {"path": str(path), "name": name, "prompt_key": verl.get("data.prompt_key")}
    arguments |= {"tokenizer": local_path(verl.get("actor_rollout_ref.model.path"))}
    arguments |= {"sha256": sha256(path.read_bytes()).hexdigest()} if path.is_file() else {}
    values = {"kind": "python", "path": ROWS, **{f"arguments.{name}": value for name, value in arguments.items()}}
    return Paths({f"data.{part}.{name}": value for part in ("train", "heldout") for name, value in values.items()})


def _dataset_class_name(verl: Verl, key: str, value: Any) -> Any:
    return Nothing("data.custom_cls.path says of which file")


def _model(verl: Verl, key: str, value: Any) -> Any:
    path = local_path(value)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not Path(path).is_dir():
        return Near(path, "no folder here has this name: download the model, and give its folder by --set model.key=…")
    return path


def _prompt_column(verl: Verl, key: str, value: Any) -> Any:
    return {"prompt": value}


def _metadata_columns(verl: Verl, key: str, value: Any) -> Any:
    """What verl hands to a reward function; `extra_info` only where each file has it, since verl can do without."""
    columns = [value, "reward_model"]
    files = verl.get("data.train_files")
    paths = [Path(str(file)).expanduser() for file in (files if isinstance(files, list) else [files])]
    return [*columns, "extra_info"] if all("extra_info" in _parquet_columns(path) for path in paths) else columns


def _parquet_columns(path: Path) -> list[str]:
    if path.suffix != ".parquet" or not path.is_file():
        return []
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(path).names)
    except (OSError, pa.ArrowInvalid):  # the run will say what is wrong with the file
        return []


def _evaluation_metadata(verl: Verl, key: str, value: Any) -> Any:
    return [verl.get("data.data_source_key"), verl.get("data.reward_model_key")]


def _limit(verl: Verl, key: str, value: Any) -> Any:
    if value is None or value < 0:
        return Nothing()
    return Near(value, "the first so many rows, where verl draws them when it shuffles") if value else Nothing()


def _truncation(verl: Verl, key: str, value: Any) -> Any:
    if value not in ("error", "left", "right"):
        raise Refused(f"a prompt is not cut in the {value}; expected error, left, right, or filter_overlong_prompts")
    return Nothing("filter_overlong_prompts drops them") if verl.get("data.filter_overlong_prompts") else value


def _drop_overlong(verl: Verl, key: str, value: Any) -> Any:
    return "drop" if value else Nothing()


def _unless_multiturn(verl: Verl, key: str, value: Any) -> Any:
    return Nothing("multiturn.messages_key says it") if verl.get("data.multiturn.enable") else value


def _multiturn(verl: Verl, key: str, value: Any) -> Any:
    return verl.get("data.multiturn.messages_key") if value else Nothing()


DATA_CONVERSIONS: dict[str, Conversion] = {
    "dataset_class": _dataset_class, "dataset_class_name": _dataset_class_name, "drop_overlong": _drop_overlong,
    "evaluation_metadata": _evaluation_metadata, "files": _files, "limit": _limit,
    "metadata_columns": _metadata_columns, "model": _model, "multiturn": _multiturn, "prompt_column": _prompt_column,
    "truncation": _truncation, "unless_multiturn": _unless_multiturn,
}  # fmt: skip
