"""Objects by import path, `package.module:name`: how code crosses a task, with the digest of its source. And objects
of a file, as verl names them."""

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


def load_from_file(path: str, name: str, *, sha256: str | None, what: str) -> Callable[..., Any]:
    """`name`, something to call, of the Python file at `path`. `sha256` is the file's digest when the run was declared:
    another one is warned about. `what` it is stands in the messages. Raises ValueError."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"given path={str(file)!r}, which is no file; expected the Python file of a {what}")
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if sha256 is not None and sha256 != found:
        logger.warning(
            "the %s %s changed since the run was declared: sha256 %s then, %s now", what, file, sha256[:12], found[:12]
        )
    spec = importlib.util.spec_from_file_location(f"ostinato_file_{found[:12]}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"given path={str(file)!r}, which is no Python file; expected one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = getattr(module, name, None)
    if not callable(target):
        raise ValueError(f"{file} has no {what} {name!r}; give its name as name=…")
    return target  # type: ignore[no-any-return]
