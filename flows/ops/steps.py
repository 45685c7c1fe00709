"""What a worker's process does before it runs a deployed flow: the pull step of prefect.yaml."""

from __future__ import annotations

import os
from pathlib import Path


def work_in(folder: str) -> dict[str, str]:
    """Relative paths of configs begin in the folder that was deployed from, where the worker's machine has it; else
    where the worker's process begins. Prefect's own step would end the process there."""
    if Path(folder).is_dir():
        os.chdir(folder)
    return {"directory": os.getcwd()}
