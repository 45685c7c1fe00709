"""Defaults that a config shares with a record of the engine, the tasks or the store. Each is spelled once, there."""

from __future__ import annotations

from typing import Any

from storage.serialization import Frozen


def default_of(record: type[Frozen], field: str) -> Any:
    """The default of a field of another record."""
    return record.model_fields[field].default
