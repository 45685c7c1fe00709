"""`ostinato` on a machine without torch: torch cannot be found, as on a CPU worker that never had it.

    python tests/chaos/bare_worker.py run grpo --config c.yaml --run r
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder

_find_spec = PathFinder.find_spec.__func__  # type: ignore[attr-defined]


def _find_all_but_torch(cls: type, name: str, *arguments: object, **named: object) -> ModuleSpec | None:
    return None if name.partition(".")[0] == "torch" else _find_spec(cls, name, *arguments, **named)


def main() -> None:
    PathFinder.find_spec = classmethod(_find_all_but_torch)  # type: ignore[assignment]
    from flows.cli.main import main as ostinato

    try:
        ostinato()
    finally:
        if "torch" in sys.modules:
            print("torch was imported", flush=True)


if __name__ == "__main__":
    main()
