"""Public names of a package that are imported when they are first used (PEP 562), so that it imports at once."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package.

    The names are those that its file, `__init__.py`, imports under `if TYPE_CHECKING`, which a type checker reads."""
    module_of: dict[str, str] = {}
    for block in ast.parse(Path(file).read_text()).body:
        if isinstance(block, ast.If):
            imports = [statement for statement in block.body if isinstance(statement, ast.ImportFrom)]
            module_of |= {alias.name: str(statement.module) for statement in imports for alias in statement.names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name]), name)

    names = sorted(module_of)
    return get, lambda: names, names
