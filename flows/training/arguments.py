"""Arguments of the training classes that are counted: checked when the class is made, not in the middle of its run."""

from __future__ import annotations

from numbers import Real
from typing import overload


@overload
def whole_number(name: str, value: float) -> int: ...


@overload
def whole_number(name: str, value: float | None) -> int | None: ...


def whole_number(name: str, value: float | None) -> int | None:
    """The value as an int; 2.0 and numpy's integers are taken. None stays None. Raises ValueError for all but
    1, 2, 3, …"""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or value != value // 1 or value < 1:
        raise ValueError(f"{name}={value!r}; give a whole number, 1 or more")
    return int(value)
