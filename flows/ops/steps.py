"""The pull step of prefect.yaml: prepares the process of a worker before it runs a deployed flow."""

from __future__ import annotations

import os
from pathlib import Path


def work_in(folder: str) -> dict[str, str]:
    """Changes to the folder that was deployed from, so that relative paths in configs start there.

    If this machine does not have the folder, the working directory stays as it is. Prefect's own step would fail.
    """
    if Path(folder).is_dir():
        os.chdir(folder)
    return {"directory": os.getcwd()}
