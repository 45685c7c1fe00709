"""Public names of a package that are imported when they are first used (PEP 562), so that it imports at once."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package.

    The names are those that its file, `__init__.py`, imports from its modules under `if TYPE_CHECKING`, which a type
    checker reads. `import *` takes the names that the module imports in this way."""
    module_of = _imported_names(package, Path(file))

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name]), name)

    names = sorted(module_of)
    return get, lambda: names, names


def _imported_names(package: str, file: Path) -> dict[str, str]:
    """The names that a file imports from modules of the package under `if TYPE_CHECKING`, with their modules."""
    module_of: dict[str, str] = {}
    for block in ast.parse(file.read_text()).body:
        imports = block.body if isinstance(block, ast.If) else []
        for statement in imports:
            if not isinstance(statement, ast.ImportFrom) or not str(statement.module).startswith(f"{package}."):
                continue
            module = str(statement.module)
            for alias in statement.names:
                if alias.name == "*":
                    module_of |= _imported_names(package, file.with_name(f"{module.rpartition('.')[2]}.py"))
                else:
                    module_of[alias.name] = module
    return module_of
