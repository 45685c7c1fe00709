"""Further names of constructor arguments: older names, and names that published examples use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)

OLDER_NAMES = {"policy_model": "model", "beta": "kl_beta"}
"""Older names of arguments. They are accepted with a warning."""
PPO_ALIASES = {"lr_scheduler_policy": "lr_scheduler", "lr_scheduler_value": "value_lr_scheduler"}
"""Further names of arguments of PPO. They are accepted without a warning."""


def accept_aliases(
    older: Mapping[str, str] = OLDER_NAMES, also: Mapping[str, str] | None = None
) -> Callable[[Class], Class]:
    """A class decorator: the constructor also accepts the arguments under the names that are the keys of `older`, with
    a DeprecationWarning, and of `also`. Giving an argument under both of its names is a TypeError."""
    names = {**older, **(also or {})}

    def decorate(cls: Class) -> Class:
        constructor = cls.__init__  # type: ignore[misc]

        @wraps(constructor)
        def init(self: Any, *args: Any, **arguments: Any) -> None:
            # move each argument to its own name
            for alias in arguments.keys() & names.keys():
                name = names[alias]
                if name in arguments:
                    raise TypeError(
                        f"{cls.__name__}: {alias} is another name of {name}, and both were given; give one of them"
                    )
                if alias in older:
                    text = f"{cls.__name__}: {alias} is called {name} now"
                    warnings.warn(text, DeprecationWarning, stacklevel=2)
                arguments[name] = arguments.pop(alias)
            constructor(self, *args, **arguments)

        cls.__init__ = init  # type: ignore[misc]
        return cls

    return decorate
