"""Python imports this module at its start, where this folder is in PYTHONPATH. It plants noise as on a device that does
not repeat its sums: torch's SiLU multiplies each element by 1 - ulp, 1 or 1 + ulp, drawn anew at each call."""

from __future__ import annotations

import importlib.abc
import sys
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _plant(functional: Any) -> None:
    import torch

    silu = functional.silu

    @cache
    def generator() -> torch.Generator:
        """A generator of its own, so that the seeds of the program draw what they would draw without noise."""
        own = torch.Generator()
        own.seed()
        return own

    def noisy_silu(values: Any, inplace: bool = False) -> Any:
        result = silu(values, inplace)
        ulps = torch.randint(-1, 2, result.shape, generator=generator()).to(result)
        return result * (1 + torch.finfo(result.dtype).eps * ulps)

    functional.silu = noisy_silu


class _Loader(importlib.abc.Loader):
    """Loads a module with another loader, and plants the noise in it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _plant(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch.nn.functional":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
