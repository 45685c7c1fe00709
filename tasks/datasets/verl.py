"""Reads the rows of dataset classes that were written for verl (`data.custom_cls`)."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.import_paths import load_from_file
from tasks.datasets.errors import DatasetError

ROWS = "tasks.datasets.verl:rows"
"""The `path` of the PythonDataset that calls `rows`."""
IMAGE_ROWS = "tasks.datasets.verl:image_rows"
"""The `path` of the PythonDataset that calls `image_rows`."""
IMAGE_MARK = "<image>"
"""Stands in a text of verl's rows for the next image of the row."""
CONVERSATION_KEY = "raw_prompt"
"""The key under which an item of verl's own class holds the conversation, next to its tokens."""


class VerlDataConfig(dict[str, Any]):
    """verl's `data` config group, which its classes read as `config.prompt_key` and `config.get("prompt_key", …)`."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the dataset class reads config.{name}, which was not given; put it into 'options'")
        return self[name]


def rows(
    *,
    path: str,
    name: str,
    files: Sequence[str],
    prompt_key: str = "prompt",
    tokenizer: str | None = None,
    options: dict[str, Any] | None = None,
    sha256: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the items of the class `name` in the Python file at `path`.

    The class is called as verl calls it: `name(data_files=files, tokenizer=…, config=options, processor=None)`.
    `tokenizer` is a model folder. The conversation of an item, at "raw_prompt" or at `prompt_key`, becomes the column
    `prompt_key`. Its other plain values become columns; tensors are left out, since the engine tokenizes.
    """
    # Create the dataset.
    dataset_class = load_from_file(path, name, sha256=sha256, what="dataset class")
    config = VerlDataConfig({"prompt_key": prompt_key, **(options or {})})
    dataset = dataset_class(data_files=list(files), tokenizer=_tokenizer(tokenizer), config=config, processor=None)

    # Convert its items.
    for index in range(len(dataset)):
        item = dataset[index]
        conversation = item.get(CONVERSATION_KEY, item.get(prompt_key))
        if conversation is None:
            raise DatasetError(
                f"{path}: row {index + 1} of {name} has the keys {', '.join(item)}; expected the conversation at "
                f"{CONVERSATION_KEY!r} or {prompt_key!r}"
            )
        columns = {key: value for key, value in item.items() if isinstance(value, str | int | float | dict | list)}
        columns.pop(CONVERSATION_KEY, None)
        columns[prompt_key] = conversation if isinstance(conversation, str) else list(conversation)
        yield columns


def image_rows(
    *, files: Sequence[str], prompt_key: str = "prompt", image_key: str = "images"
) -> Iterator[dict[str, Any]]:
    """Yield the rows of Parquet files with their images in the prompts.

    The prompt is a list of messages. As in verl, each `<image>` in its texts stands for the next image of the column
    `image_key`, whose values are lists of {"bytes": …} or of paths. A row without images keeps its text.
    """
    # imported here, because only datasets with images need it
    from tasks.datasets.sources.file_formats import TableColumns, parquet_rows

    for file in files:
        for _, _, row in parquet_rows(Path(file), lambda names: TableColumns(names, set(), set())):
            images = row.pop(image_key, None) or []
            if images:
                row[prompt_key] = _with_images(row[prompt_key], images, file)
            yield row


def _with_images(messages: list[dict[str, Any]], images: list[Any], file: str) -> list[dict[str, Any]]:
    """The messages with the images in the places of their marks. Raises DatasetError for more marks than images."""
    left = iter(images)
    filled = []
    for message in messages:
        parts: list[dict[str, Any]] = []
        for number, text in enumerate(message["content"].split(IMAGE_MARK)):
            if number:
                image = next(left, None)
                if image is None:
                    raise DatasetError(f"{file}: a prompt has more {IMAGE_MARK} than its row has images, {len(images)}")
                parts.append({"type": "image", "url": _image_url(image, file)})
            if text:
                parts.append({"type": "text", "text": text})
        filled.append({"role": message["role"], "content": parts})
    return filled


def _image_url(image: Any, file: str) -> str:
    """The bytes of an image as a data: URL, or its path relative to the folder of `file`."""
    if isinstance(image, dict) and image.get("bytes"):
        kind = "png" if image["bytes"].startswith(b"\x89PNG") else "jpeg"
        return f"data:image/{kind};base64,{base64.b64encode(image['bytes']).decode()}"
    path = image.get("path") if isinstance(image, dict) else image
    if not isinstance(path, str):
        raise DatasetError(f"{file}: an image is {str(image)[:60]!r}; expected its bytes or a path")
    return str(Path(file).absolute().parent / path)


def _tokenizer(folder: str | None) -> Any:
    if folder is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
