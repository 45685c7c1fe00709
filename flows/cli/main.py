"""The `ostinato` command: assembles the subcommands. `run` and `demo` are defined here."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from flows.catalogue import TRAININGS, Training
from flows.cli.chain import add_chain_commands
from flows.cli.config import print_config
from flows.cli.data import data_app
from flows.cli.demo import prepare_demo, run_demo
from flows.cli.disk import add_disk_commands, gc
from flows.cli.doctor import doctor
from flows.cli.engine import engine_app
from flows.cli.import_verl import import_app
from flows.cli.models import models_app
from flows.cli.output import DEFAULT_STORAGE, ConfigFile, Server, Sets, console, messages, print_plain
from flows.cli.page import page
from flows.cli.runner import run_flow
from flows.cli.runs import runs_app
from flows.cli.sweep import add_search_commands
from flows.cli.up import deploy_command, down, up
from flows.runs.code_version import code_version

app = typer.Typer(
    help="Post-training of language models as a durable workflow.", no_args_is_help=True, pretty_exceptions_enable=False
)
run = typer.Typer(help="Run a flow; the same command again resumes it.", no_args_is_help=True)
app.add_typer(run, name="run")
app.command("gc")(gc)
app.add_typer(engine_app, name="engine")
app.add_typer(models_app, name="models")
app.add_typer(import_app, name="import")
app.add_typer(data_app, name="data")
add_chain_commands(app)
add_search_commands(app, runs_app)
add_disk_commands(runs_app)
app.command("config")(print_config)
app.command("doctor")(doctor)
app.command("up")(up)
app.command("down")(down)
app.command("page")(page)
app.command("deploy")(deploy_command)


def _print_version(wanted: bool) -> None:
    """Prints the version of the package and, in a checkout, the commit. Ends the command."""
    if wanted:
        package, code = version("ostinato"), code_version()
        print(f"ostinato {package}" if code in (package, "unknown") else f"ostinato {package} ({code})")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the command itself."""


RunKey = Annotated[str, typer.Option("--run", help="Key of the run; the same key resumes the run.")]
New = Annotated[bool, typer.Option("--new", help="Start a new run, even if an equal one is unfinished.")]


def _add_run_command(training: Training) -> None:
    @run.command(training.name, help=training.summary)
    def command(
        config: ConfigFile, sets: Sets = None, run_key: RunKey = "", new: New = False, server: Server = ""
    ) -> None:
        raise typer.Exit(run_flow(training, config, sets or [], run_key=run_key, new=new, server=server))


for _training in TRAININGS.values():
    _add_run_command(_training)


@app.command("demo")
def demo(
    seed: Annotated[int, typer.Option(help="Seed of data order and sampling.")] = 0,
    sets: Sets = None,
    new: New = False,
    only_model: Annotated[
        bool, typer.Option("--only-model", help="Only create the folders examples and of the model.")
    ] = False,
) -> None:
    """GRPO on a real 135M chat model on this machine: evaluate, train, evaluate, report."""
    if only_model:
        raise typer.Exit(prepare_demo(console()))
    raise typer.Exit(run_demo(seed=seed, sets=sets or [], new=new))


FOLDERS = (".ostinato", DEFAULT_STORAGE, "ostinato-logs")
"""Folders that commands make in the working directory."""
WITHOUT_FOLDERS = frozenset({"config", "deploy", "engine", "import", "--help", "--version"})
"""Commands and options that need none of them."""


def note_of_folder(here: Path, words: list[str]) -> str | None:
    """What to say before a command that would begin with new folders in `here`, although a folder above has them. None:
    nothing. `words` are those of the command line."""
    if not words or WITHOUT_FOLDERS & {words[0], words[-1]} or any(word.startswith("--storage") for word in words):
        return None
    if any((here / name).is_dir() for name in FOLDERS):
        return None
    for parent in here.parents:
        present = [name for name in FOLDERS if (parent / name).is_dir()]
        if present:
            return (
                f"{here} has none of {', '.join(FOLDERS)}, so this begins with new ones; {parent} has "
                f"{', '.join(present)}: to use these, cd {parent}"
            )
    return None


def main() -> None:
    # Configs name graders and environments by import path: modules in the working directory are found, too. It is the
    # last folder of the path, so that a user's folder named tasks hides none of our packages.
    sys.path.append(os.getcwd())
    note = note_of_folder(Path.cwd(), sys.argv[1:])
    if note:
        print_plain(messages(), note)
    app()


if __name__ == "__main__":
    main()
