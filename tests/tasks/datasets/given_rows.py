"""Datasets in code, as a user writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def sums(highest: int) -> Iterator[dict[str, Any]]:
    for number in range(1, highest + 1):
        yield {"question": f"{number} + {number}", "metadata": {"answer": 2 * number}}


class Pairs:
    """As a torch.utils.data.Dataset: a length, and items by number."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": f"{index}?", "chosen": "yes", "rejected": "no"}


def broken() -> Iterator[dict[str, Any]]:
    yield {"prompt": "one"}
    raise RuntimeError("the database is away")


def mixed() -> list[Any]:
    return [{"prompt": "one"}, "two", {"prompt": ""}, {"prompt": "four"}]


def nested() -> Iterator[dict[str, Any]]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    for column in ("metadata", "prompt"):
        yield {"prompt": "one", column: {"a": value}}


nothing = 7
