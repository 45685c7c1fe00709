"""`ostinato runs ls | show | lineage | remove-checkpoint`: what a store's runs are, and what made a model; named
checkpoints are removed here too."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from flows.cli.output import (
    DEFAULT_STORAGE,
    AsJson,
    Storage,
    console,
    facts,
    fill,
    print_json,
    refusals,
    table,
)
from storage.chain.checkpoint_names import resolve_checkpoint_name
from storage.chain.listing import is_auxiliary, list_runs
from storage.chain.retention import remove_checkpoints
from storage.inspect.lineage import Lineage, StepLineage, lineage_of, step_lineage
from storage.inspect.prompt_lineage import PromptReport, prompt_report
from storage.inspect.run_details import ChainDetails, RunDetails, describe_run
from storage.inspect.run_summary import RunSummary, seconds_since, summarize_run
from storage.store.objects import open_store

runs_app = typer.Typer(help="The runs of a store, and what made a model.", no_args_is_help=True)

RunArgument = Annotated[str, typer.Argument(help="The run's key.")]


@runs_app.command("ls")
def ls(
    storage: Storage = DEFAULT_STORAGE,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what evaluations and served models keep under run keys of their own.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Every run: what it is, where it stands, who drives it."""
    with refusals():
        store = open_store(storage)
        rows = [summarize_run(store, run) for run in list_runs(store) if everything or not is_auxiliary(run)]
    if as_json:
        print_json([row.model_dump(mode="json") for row in rows])
        return
    shown = table(
        f"runs in {store.url}",
        "run", "kind", "created", "state", "stages", "step>", "last commit", "lease>", "forked from",
    )  # fmt: skip
    console().print(fill(shown, map(_row, rows)))


def _row(row: RunSummary) -> tuple[Any, ...]:
    return (
        row.run, row.kind, _time(row.created), row.state, " ".join(row.stages), row.head_step, _ago(row.last_commit),
        row.lease_epoch, row.forked_from,
    )  # fmt: skip


@runs_app.command("show")
def show(run: RunArgument, storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """One run: the config that decides it, its chains, metrics, leases, result and models."""
    with refusals():
        view = describe_run(open_store(storage), run)
    if as_json:
        print_json(view)
    else:
        _show(view, console())


def _show(view: RunDetails, to: Console) -> None:
    row = view.row
    to.print(
        facts(
            f"run {row.run}",
            {
                "state": row.state,
                "created": _time(row.created),
                "code version": view.code_version,
                "machine": " ".join(f"{name} {value}" for name, value in view.machine.items() if name != "packages"),
                "packages": " ".join(f"{name} {version}" for name, version in view.packages.items()),
                "forked from": row.forked_from,
                "last commit": _ago(row.last_commit),
            },
        )
    )
    to.print(facts("what decides it", dict(_flat(view.semantic))))
    to.print(fill(table("chains", "chain", "step>", "state", "starts from", "checkpoints"), map(_chain, view.chains)))
    for chain in view.chains:
        for rebase in chain.rebases:
            said = f"{chain.stage}/{chain.model} is rebased at {rebase}"
            to.print(said, markup=False, highlight=False, soft_wrap=True)
    for stage, metrics in view.last_metrics.items():
        to.print(facts(f"last metrics of {stage}", {k: v for k, v in metrics.items() if not isinstance(v, dict)}))
    leases = table("leases", "epoch>", "taken", "pid", "code version", "released")
    to.print(fill(leases, ((e.epoch, _time(e.created), e.pid, e.code_version, _time(e.released)) for e in view.leases)))
    to.print(fill(table("models", "model", "policy"), ((model.model, model.policy) for model in view.models)))
    if view.result:
        to.print(facts("result", dict(_flat(view.result))))


def _chain(chain: ChainDetails) -> tuple[Any, ...]:
    checkpoints = " ".join("=".join((f"{step}", *chain.names.get(step, ()))) for step in chain.checkpoints) or None
    return f"{chain.stage}/{chain.model}", chain.head, chain.state[:12], chain.starts_from, checkpoints


@runs_app.command("remove-checkpoint")
def remove_checkpoint(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN/STAGE/NAME…", help="Named checkpoints, as `runs show` lists them.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed; remove nothing.")] = False,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Removes named checkpoints and frees their space. Nothing is removed when a fork, an unfinished run, a champion or
    a rebase refers to one of them. The run can still be resumed, verified and forked at any step."""
    with refusals():
        store = open_store(storage)
        policies = list(dict.fromkeys(resolve_checkpoint_name(store, name) for name in names))
        removed = remove_checkpoints(store, policies, dry_run=dry_run)
    if as_json:
        rows = [{"checkpoint": manifest.key, "bytes": manifest.bytes} for manifest in removed]
        print_json({"dry_run": dry_run, "removed": rows})
        return
    verb = "would remove" if dry_run else "removed"
    for manifest in removed:
        text = f"{verb} {manifest.key}: {manifest.bytes / 2**20:.1f} MiB"
        console().print(text, markup=False, highlight=False, soft_wrap=True)


@runs_app.command("lineage")
def lineage(
    target: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="name[@version], run/stage/model@step, a run.")],
    prompt: Annotated[
        str, typer.Option("--prompt", help="An id or a part of the text: which steps used it, and what it touched.")
    ] = "",
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Which prompts, grades and gradient steps made a model; which checkpoints a prompt touched."""
    with refusals():
        store = open_store(storage)
        found = lineage_of(store, target)
        if prompt:
            report = prompt_report(store, found, prompt)
            if as_json:
                print_json({"lineage": found.model_dump(mode="json"), "prompt": report.model_dump(mode="json")})
            else:
                _say_prompt(report, console())
            raise typer.Exit(0 if report.uses else 1)
        steps = [step_lineage(store, record) for record in found.records(store)]
    if as_json:
        print_json(found.model_dump(mode="json") | {"steps": [step.model_dump(mode="json") for step in steps]})
    else:
        _say_lineage(found, steps, console())


def _say_lineage(found: Lineage, steps: list[StepLineage], to: Console) -> None:
    values: dict[str, Any] = {"base model": found.base, "policy": found.policy.uri if found.policy else "imported"}
    values |= {f"segment {n}": f"{s.title}, steps 1 to {s.until}" for n, s in enumerate(found.segments, 1)}
    to.print(facts(found.target, values))
    if not steps:
        return
    shown = table(
        "gradient steps, oldest first",
        "step>", "batch", "shards>", "graded>", "prompts>", "first of them", "completions>", "reward>", "lr>", "loss>",
        "gradient>",
    )  # fmt: skip
    to.print(fill(shown, map(_step, steps)))
    to.print("every uri and every prompt's id: --json", style="dim")


def _step(step: StepLineage) -> tuple[Any, ...]:
    return (
        step.step, _short(step.batch), len(step.rollouts), len(step.graded), len(step.prompts),
        " ".join(step.prompts[:3]), step.completions, step.reward_mean, step.learning_rate, step.loss, step.grad_norm,
    )  # fmt: skip


def _say_prompt(report: PromptReport, to: Console) -> None:
    if not report.uses:
        to.print(f"no step of this lineage used a prompt {report.asked!r}", markup=False, highlight=False)
        return
    columns = ("step>", "prompt", "n>", "completion", "reward>", "status", "trained")
    rows = (
        (use.step, use.prompt, use.completion, use.text, use.reward, use.status, "yes" if use.trained else "no")
        for use in report.uses
    )
    to.print(fill(table(f"prompt {' '.join(report.ids)}", *columns), rows))
    to.print(fill(table("checkpoints it touched", "checkpoint"), ((name,) for name in report.checkpoints)))
    to.print(fill(table("models it touched", "model"), ((name,) for name in report.models)))


def _short(uri: str) -> str:
    key, _, sha256 = uri.partition("#")
    return f"{key.removeprefix('runs/')}#{sha256[:8]}"


def _time(iso: str | None) -> str | None:
    return None if iso is None else iso[:19].replace("T", " ")


def _ago(iso: str | None) -> str | None:
    seconds = seconds_since(iso)
    if iso is None or seconds is None:
        return None
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{_time(iso)} ({seconds / size:.0f} {unit} ago)"
    return f"{_time(iso)} ({seconds:.0f} s ago)"


def _flat(values: dict[str, Any], at: str = "") -> list[tuple[str, Any]]:
    """Dotted names and leaves."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        where = f"{at}.{name}" if at else name
        found += _flat(value, where) if isinstance(value, dict) and value else [(where, value)]
    return found
