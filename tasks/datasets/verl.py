"""Dataset classes written for verl (`data.custom_cls`), as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tasks.datasets.errors import DatasetError
from tasks.import_paths import load_from_file

ROWS = "tasks.datasets.verl:rows"
"""The `path` of a python dataset."""
MESSAGES = "raw_prompt"
"""Where verl's own class leaves the conversation beside its tokens."""


class Options(dict[str, Any]):
    """verl's `data` group as its classes read it: `config.prompt_key`, `config.get("prompt_key", …)`."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the dataset class reads config.{name}, which was not given; put it into `options`")
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
    """The items of the class `name` of the Python file at `path`, made as verl makes it: `name(data_files=files,
    tokenizer=…, config=options, processor=None)`.

    An item's conversation, at "raw_prompt" or at `prompt_key`, becomes the row's `prompt_key`; its other values that
    are plain (no tensors, which the engine makes itself) are columns. `tokenizer`: the model folder whose it is.
    """
    made = load_from_file(path, name, sha256=sha256, what="dataset class")
    config = Options({"prompt_key": prompt_key, **(options or {})})
    dataset = made(data_files=list(files), tokenizer=_tokenizer(tokenizer), config=config, processor=None)
    for index in range(len(dataset)):
        item = dataset[index]
        conversation = item.get(MESSAGES, item.get(prompt_key))
        if conversation is None:
            raise DatasetError(
                f"{path}: row {index + 1} of {name} has the keys {', '.join(item)}; expected the conversation at "
                f"{MESSAGES!r} or {prompt_key!r}"
            )
        columns = {key: value for key, value in item.items() if isinstance(value, str | int | float | dict | list)}
        columns.pop(MESSAGES, None)
        yield columns | {prompt_key: conversation if isinstance(conversation, str) else list(conversation)}


def _tokenizer(folder: str | None) -> Any:
    if folder is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
