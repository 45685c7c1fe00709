"""Loads objects by import path, `package.module:name`, with the digest of their source, and objects of a Python file.

Tasks pass code by import path, never as a live object. Files are for configs of verl, which name them by path.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger("ostinato.imports")

PATTERN = r"^[A-Za-z_][\w.]*:[^\s:]+$"
"""Regular expression of an import path."""


class ImportPathError(Exception):
    """There is no object at the import path. The message begins with the path."""

    transient = False


def load_object(path: str) -> Any:
    """Return the object at "package.module:name". Raises ImportPathError, also if importing the module raises."""
    # Import the module.
    module_name, _, name = path.partition(":")
    # In another process `__main__` is another script.
    if module_name == "__main__":
        raise ImportPathError(
            f"{path!r}: given a name of the running script; expected a name that any process can import. "
            f"Move it to a module, or register it with in_process_spec."
        )
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ImportPathError(
            f"{path!r}: no module {error.name!r}; expected package.module:name, importable in the run's processes"
        ) from error
    except Exception as error:  # the boundary to a user's code
        raise ImportPathError(f"{path!r}: importing {module_name} raised {error!r}") from error

    # Walk to the object, which may be nested in a class.
    for part in name.split("."):
        if not hasattr(target, part):
            raise ImportPathError(f"{path!r}: {module_name} has no {name!r}")
        target = getattr(target, part)
    return target


def source_digest(path: str) -> str | None:
    """sha256 of the source file of the module in `path`; None for a module without one. Raises ImportPathError.

    The digest does not cover the modules that the file imports. The run records package versions and a code version.
    """
    # Find the file of the module without importing it. The running script, `__main__`, has no import spec.
    module = path.partition(":")[0]
    loaded = sys.modules.get(module)
    if loaded is not None and loaded.__spec__ is None:
        origin = getattr(loaded, "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError) as error:
            raise ImportPathError(f"{path!r}: no module {module!r} ({error})") from error
        origin = None if spec is None else spec.origin

    # Digest it.
    if origin is None or not Path(origin).is_file():
        return None
    return hashlib.sha256(Path(origin).read_bytes()).hexdigest()


def load_from_file(path: str, name: str, *, sha256: str | None, what: str) -> Callable[..., Any]:
    """Load the callable `name` of the Python file at `path`. Raises ValueError.

    `sha256` is the digest of the file when the run was declared; another digest is logged as a warning. `what` says in
    messages what the callable is.
    """
    # Read the file and compare its digest with the declared one.
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"given path={str(file)!r}, which is not a file; expected the Python file of a {what}")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if sha256 is not None and sha256 != digest:
        logger.warning(
            "the %s %s changed since the run was declared: sha256 %s then, %s now", what, file, sha256[:12], digest[:12]
        )

    # Run the file as a module of its own.
    spec = importlib.util.spec_from_file_location(f"ostinato_file_{digest[:12]}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"given path={str(file)!r}, which is not a Python file; expected a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = getattr(module, name, None)
    if not callable(target):
        raise ValueError(f"{file} has no {what} {name!r}; set name=… to the name of the {what}")
    return target  # type: ignore[no-any-return]
