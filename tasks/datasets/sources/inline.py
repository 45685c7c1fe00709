"""Datasets of this process: threads, and preference pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal

from engine.text.threads import StringThread
from tasks.datasets.convert import RowLocation, check_rating
from tasks.datasets.errors import BadRow, DatasetError
from tasks.datasets.load import DatasetUse, ReadDataset, ReadPosition, SkippedRows
from tasks.datasets.preferences import checked_pair
from tasks.datasets.stored import StoredItem, stored_item


class _Inline(ReadDataset):
    location_fields: ClassVar = frozenset({"threads", "pairs"})
    store_name: ClassVar = "inline"
    title: ClassVar = "inline"


class InlineDataset(_Inline):
    """Threads of this process."""

    kind: Literal["inline"] = "inline"
    threads: tuple[StringThread, ...]

    @classmethod
    def of(cls, threads: Iterable[StringThread]) -> InlineDataset:
        return cls(threads=tuple(threads))

    def items(self, use: DatasetUse, skipped: SkippedRows, position: ReadPosition) -> Iterator[StoredItem]:
        if use == "preference":
            raise no_pairs(self)
        for row, thread in enumerate(self.threads, start=1):
            expected_end = "a user or tool turn" if use == "prompt" else "an assistant turn"
            expected = f"{use}s, which end with {expected_end}"
            if not thread.turns:
                raise BadRow("threads", row, None, given="an empty thread", expected=expected)
            # Prompts must not end with the assistant's turn; all other uses must.
            last_role = thread.turns[-1].role
            if (last_role == "assistant") != (use != "prompt"):
                given = f"a thread that ends with the {last_role} turn"
                raise BadRow("threads", row, None, given=given, expected=expected)
            if use == "rating":
                check_rating(thread.metadata, RowLocation("threads", row))
            yield stored_item(thread)


class InlinePairs(_Inline):
    """Preference pairs of this process: (preferred, dispreferred)."""

    kind: Literal["inline_pairs"] = "inline_pairs"
    pairs: tuple[tuple[StringThread, StringThread], ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[StringThread, StringThread]]) -> InlinePairs:
        return cls(pairs=tuple(pairs))

    def items(self, use: DatasetUse, skipped: SkippedRows, position: ReadPosition) -> Iterator[StoredItem]:
        if use != "preference":
            raise DatasetError(f"given pairs, for a dataset of {use}s; expected {use}s")
        for row, (chosen, rejected) in enumerate(self.pairs, start=1):
            yield stored_item(checked_pair(chosen, rejected, RowLocation("pairs", row)))


def no_pairs(spec: ReadDataset) -> DatasetError:
    """The error for a dataset without pairs that is used for preferences."""
    return DatasetError(
        f"given {spec.store_name!r}, which has none, for a dataset of preferences; expected preferences"
    )
