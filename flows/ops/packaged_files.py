"""The files outside the Python packages that an installation needs: prefect.yaml and the folder examples.

A checkout has them in its root. A wheel carries them in `flows/packaged` (see pyproject.toml).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PACKAGED = Path(__file__).resolve().parents[1] / "packaged"
"""Where a wheel puts the files. A checkout has no such folder."""


def packaged_file(name: str) -> Path:
    """Returns the path of a file or folder that comes with this installation: prefect.yaml or examples."""
    root = PACKAGED if PACKAGED.is_dir() else PACKAGED.parents[1]
    return root / name


def write_examples(folder: Path) -> int:
    """Copies the files of examples into `folder`/examples; returns their number. A file that exists stays as it is."""
    source = packaged_file("examples")
    written = 0
    for path in sorted(source.rglob("*")):
        target = folder / "examples" / path.relative_to(source)
        if not path.is_file() or "__pycache__" in path.parts or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        # written under another name first, so that no example is half-written
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            shutil.copyfile(path, temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        written += 1
    return written
