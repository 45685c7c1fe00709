"""Objects by import path, `package.module:name`: how code crosses a task, with the digest of its source."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

PATTERN = r"^[A-Za-z_][\w.]*:[^\s:]+$"


class ImportPathError(Exception):
    """There is nothing at the path. The message begins with it."""

    transient = False


def load_object(path: str) -> Any:
    """The object at "package.module:name". Importing runs the module's code; what it raises is named as its fault."""
    module_name, _, name = path.partition(":")
    if module_name == "__main__":
        raise ImportPathError(
            f"{path!r}: given a name of the running script; expected one that any process can import. "
            f"Move it to a module, or register it with in_process_spec."
        )
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ImportPathError(
            f"{path!r}: no module {error.name!r}; expected package.module:name, importable where the run runs"
        ) from error
    except Exception as error:
        raise ImportPathError(f"{path!r}: importing {module_name} raised {error!r}") from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise ImportPathError(f"{path!r}: {module_name} has no {name!r}")
        target = getattr(target, part)
    return target


def source_digest(path: str) -> str | None:
    """sha256 of the source file of the module in `path`; None for a module without one. Raises ImportPathError.

    Only that file: what it imports is recorded with the run's package versions and code version.
    """
    module = path.partition(":")[0]
    loaded = sys.modules.get(module)
    if loaded is not None and loaded.__spec__ is None:  # the script that runs, as `__main__`
        origin = getattr(loaded, "__file__", None)
    else:
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError) as error:
            raise ImportPathError(f"{path!r}: no module {module!r} ({error})") from error
        origin = None if found is None else found.origin
    if origin is None or not Path(origin).is_file():
        return None
    return hashlib.sha256(Path(origin).read_bytes()).hexdigest()
