"""Arguments under other names: those that older documents use, and those that the documents use for ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)

OLDER = {"policy_model": "model", "beta": "kl_beta"}
"""Names of older documents: accepted with a warning."""


def accept_aliases(older: Mapping[str, str] = OLDER, also: Mapping[str, str] | None = None) -> Callable[[Class], Class]:
    """A class whose constructor takes arguments under the names on the left too; `also` without a warning. Both names
    at once are a TypeError."""
    names = {**older, **(also or {})}

    def decorate(cls: Class) -> Class:
        made = cls.__init__  # type: ignore[misc]

        @wraps(made)
        def init(self: Any, *args: Any, **given: Any) -> None:
            for name in [name for name in given if name in names]:
                if names[name] in given:
                    raise TypeError(f"{cls.__name__}: {name} is {names[name]}, and both were given; give one of them")
                if name in older:
                    text = f"{cls.__name__}: {name} is called {names[name]} now"
                    warnings.warn(text, DeprecationWarning, stacklevel=2)
                given[names[name]] = given.pop(name)
            made(self, *args, **given)

        cls.__init__ = init  # type: ignore[misc]
        return cls

    return decorate
