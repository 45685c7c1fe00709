"""Reads the rows of dataset classes that were written for verl (`data.custom_cls`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tasks.datasets.errors import DatasetError
from tasks.import_paths import load_from_file

ROWS = "tasks.datasets.verl:rows"
"""The `path` of the PythonDataset that calls `rows`."""
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


def _tokenizer(folder: str | None) -> Any:
    if folder is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
