"""Checks of the arguments of a training class, made when the class is created and not in the middle of its run."""

from __future__ import annotations

from numbers import Real
from typing import overload


@overload
def whole_number(name: str, value: float) -> int: ...


@overload
def whole_number(name: str, value: float | None) -> int | None: ...


def whole_number(name: str, value: float | None) -> int | None:
    """The value as an int. 2.0 and integers of numpy are accepted, and None stays None. Raises ValueError for anything
    but a whole number above 0."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or value != value // 1 or value < 1:
        raise ValueError(f"{name}={value!r}; give a whole number, 1 or more")
    return int(value)


def check_one_length(length: str, steps: int | None, epochs: int | None) -> None:
    """Raises ValueError when both a number of steps, by the argument `length`, and a number of epochs are given."""
    if steps is not None and epochs is not None:
        raise ValueError(f"both {length}={steps} and epochs={epochs} were given; give one of them")
