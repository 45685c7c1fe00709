"""The version of the code that runs. It is recorded with every artifact and never causes an error."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

from flows.ops.packaged_files import PACKAGED


def code_version() -> str:
    """Returns $OSTINATO_CODE_VERSION, else the version of the installed wheel or the commit of the checkout, else
    "unknown"."""
    deployed_version = os.environ.get("OSTINATO_CODE_VERSION")
    if deployed_version:
        return deployed_version
    # the folder of an installed wheel may be inside a repository of the user, whose commit says nothing about this code
    if PACKAGED.is_dir():
        return version("ostinato")
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        # git is not installed in this image
        return "unknown"
    return git.stdout.strip() or "unknown"
