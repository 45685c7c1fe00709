"""Which code runs: recorded with every artifact, never a reason to refuse."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def code_version() -> str:
    """The commit of the checkout this code runs from, else the version that was deployed (OSTINATO_CODE_VERSION)."""
    deployed = os.environ.get("OSTINATO_CODE_VERSION")
    if deployed:
        return deployed
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # an image without git
        return "unknown"
    return git.stdout.strip() or "unknown"
