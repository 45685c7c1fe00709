"""Conversions of verl's values: data files, their columns and rows, the model."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.text.images import takes_images
from flows.verl.convert_schedule import steps_per_epoch, train_files
from flows.verl.read import Verl
from flows.verl.values import Approximate, Conversion, NoCounterpart, PathValues, Unused, local_path
from tasks.datasets.verl import IMAGE_ROWS, ROWS


def _files(verl: Verl, key: str, value: Any) -> Any:
    if value is None or value == []:
        return Unused()
    files = value if isinstance(value, list) else [value]
    first, *further = map(local_path, files)
    # the place of the dataset in our config
    if verl.kind == "evaluation":
        source = "answers.0.source"
    else:
        source = "data.heldout" if key == "data.val_files" else "data.train"
    # a custom dataset class, or the function that reads images, reads the files itself
    if verl.kind == "ppo_trainer" and (verl.get("data.custom_cls.path") or _reads_images(verl)):
        return PathValues({f"{source}.arguments.files": [first, *further]})
    # the first file is the path, the others are further paths
    paths: dict[str, Any] = {f"{source}.path": first}
    if further:
        paths[f"{source}.further_paths"] = further
    return PathValues(paths)


def _dataset_class(verl: Verl, key: str, value: Any) -> Any:
    """verl uses one class for the training and the validation dataset."""
    if value is None:
        return Unused()
    name = verl.get("data.custom_cls.name")
    if name is None:
        raise NoCounterpart("the name of the class in the file is not given; give data.custom_cls.name")
    path = Path(local_path(value))
    # the arguments of our wrapper of verl's datasets
    arguments = {"path": str(path), "name": name, "prompt_key": verl.get("data.prompt_key")}
    arguments["tokenizer"] = local_path(verl.get("actor_rollout_ref.model.path"))
    if path.is_file():
        arguments["sha256"] = sha256(path.read_bytes()).hexdigest()
    paths: dict[str, Any] = {}
    for part in ("train", "heldout"):
        paths[f"data.{part}.kind"] = "python"
        paths[f"data.{part}.path"] = ROWS
        paths |= {f"data.{part}.arguments.{argument}": text for argument, text in arguments.items()}
    return PathValues(paths)


def _dataset_class_name(verl: Verl, key: str, value: Any) -> Any:
    return Unused("data.custom_cls.path gives the file")


def _model(verl: Verl, key: str, value: Any) -> Any:
    # a name like owner/model refers to the Hugging Face hub, there and here
    return local_path(value)


def _remote_code(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        return Unused()
    difference = (
        "code of the model folder is never run: the class of transformers for this kind of model is used, and a model "
        "without one is refused when it is loaded"
    )
    return Approximate(PathValues({}), difference)


def _positions(verl: Verl, key: str, value: Any) -> Any:
    if value is None:
        return Unused()
    difference = (
        "the config of the model folder is used; the number of positions changes no rotary embedding without scaling"
    )
    return Approximate(PathValues({}), difference)


def _reasoning_effort(verl: Verl, key: str, value: Any) -> Any:
    """The template of gpt-oss: `if reasoning_effort is not defined`, it is "medium"."""
    if value is None:
        return Unused()
    if value != "medium":
        raise NoCounterpart("the chat template comes from the model folder; change it there")
    difference = "the chat template's own value is used, which is medium in the template of gpt-oss"
    return Approximate(PathValues({}), difference)


def _prompt_column(verl: Verl, key: str, value: Any) -> Any:
    return {"prompt": value}


def _metadata_columns(verl: Verl, key: str, value: Any) -> Any:
    """The columns that verl passes to a reward function. `extra_info` is optional, so every file must have it."""
    columns = [value, "reward_model"]
    if all(file and "extra_info" in file.columns for file in train_files(verl)):
        columns.append("extra_info")
    return columns


def _evaluation_metadata(verl: Verl, key: str, value: Any) -> Any:
    return [verl.get("data.data_source_key"), verl.get("data.reward_model_key")]


def _limit(verl: Verl, key: str, value: Any) -> Any:
    if value is None or value <= 0:
        return Unused()
    if verl.kind == "ppo_trainer" and not verl.get("data.shuffle"):
        return value
    return Approximate(value, "the first rows are used, while verl draws the rows at random if it shuffles")


def _shuffle(verl: Verl, key: str, value: Any) -> Any:
    if value:
        return Unused("rows are shuffled by the run's seed")
    paths: dict[str, Any] = {"data.train.order": "file"}
    # every pass of verl ends with the last whole batch, so the rows after it are never read
    batches = steps_per_epoch(verl)
    if batches:
        paths["data.train.limit"] = batches * verl.get("data.train_batch_size")
    return PathValues(paths)


def _reads_images(verl: Verl) -> bool:
    """Whether the rows' images belong to the prompts: by the model, or if that is not here, by the training files."""
    if verl.kind != "ppo_trainer" or verl.get("data.custom_cls.path"):
        return False
    model = Path(local_path(verl.get("actor_rollout_ref.model.path")))
    if (model / "config.json").is_file():
        return takes_images(model)
    return any(file and verl.get("data.image_key") in file.columns for file in train_files(verl))


def _images(verl: Verl, key: str, value: Any) -> Any:
    """verl puts the images of this column into the prompts of a model that takes images."""
    if not _reads_images(verl):
        return Unused("the model takes text only, or neither it nor a file with images is here")
    paths: dict[str, Any] = {}
    for part in ("train", "heldout"):
        paths[f"data.{part}.kind"] = "python"
        paths[f"data.{part}.path"] = IMAGE_ROWS
        paths[f"data.{part}.arguments.prompt_key"] = verl.get("data.prompt_key")
        paths[f"data.{part}.arguments.image_key"] = value
    return PathValues(paths)


def _turns_alone(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        return Unused()
    difference = "a conversation is rendered once, as a whole; verl joins the tokens of its turns, rendered one by one"
    return Approximate(PathValues({}), difference)


def _videos(verl: Verl, key: str, value: Any) -> Any:
    if any(file and value in file.columns for file in train_files(verl)):
        raise NoCounterpart("the training files have this column, and videos are not supported; remove it there")
    return Unused("no training file here has this column")


def _nested_column(verl: Verl, key: str, value: Any) -> Any:
    """A field within the objects of a column, by the names that lead to it."""
    if not value:
        return Unused()
    column = verl.get(key.replace("_dict_keys", "_key"))
    return ".".join([column, *value])


def _truncation(verl: Verl, key: str, value: Any) -> Any:
    if value not in ("error", "left", "right"):
        expected = "error, left, right, or filter_overlong_prompts"
        raise NoCounterpart(f"truncation {value!r:.200} is not supported for prompts; expected {expected}")
    if verl.get("data.filter_overlong_prompts"):
        return Unused("filter_overlong_prompts drops them")
    return value


def _drop_overlong(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        return Unused()
    return "drop"


def _unless_multiturn(verl: Verl, key: str, value: Any) -> Any:
    if verl.get("data.multiturn.enable"):
        return Unused("multiturn.messages_key decides")
    return value


def _multiturn(verl: Verl, key: str, value: Any) -> Any:
    if not value:
        # utils/dataset/sft_dataset.py: the template's prompt, then the answer and tokenizer.eos_token
        difference = (
            "verl's answer ends with the tokenizer's end-of-sequence token, ours with the chat template's end of turn"
        )
        return Approximate(PathValues({}), difference)
    return verl.get("data.multiturn.messages_key")


DATA_CONVERSIONS: dict[str, Conversion] = {
    "dataset_class": _dataset_class, "dataset_class_name": _dataset_class_name, "drop_overlong": _drop_overlong,
    "evaluation_metadata": _evaluation_metadata, "files": _files, "images": _images, "limit": _limit,
    "metadata_columns": _metadata_columns, "model": _model, "multiturn": _multiturn,
    "nested_column": _nested_column, "positions": _positions, "prompt_column": _prompt_column,
    "reasoning_effort": _reasoning_effort, "remote_code": _remote_code, "shuffle": _shuffle,
    "truncation": _truncation, "turns_alone": _turns_alone, "unless_multiturn": _unless_multiturn,
    "videos": _videos,
}  # fmt: skip
