"""`ostinato models ls | show | card | average | promote | rollback | push | export | delete`: published models, their
champions and decisions."""

from __future__ import annotations

import json
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.protocol import ExportFormat
from flows.cli.chain import ModelName, Stage, find_chain, import_with_torch
from flows.cli.disk import YES_TO_DELETE
from flows.cli.output import (
    DEFAULT_STORAGE,
    AsJson,
    Storage,
    add_rows,
    console,
    format_size,
    print_json,
    print_plain,
    report_errors,
    table,
    usage_error,
)
from flows.cli.runs import RunArgument
from flows.configs.inputs import default_model_name
from flows.promotion.hand_decisions import account_name, by_hand, card_text, promote_by_hand, roll_back_by_hand
from storage.chain.deletion import delete_model
from storage.errors import ObjectNotFound
from storage.registry.decisions import (
    AliasEntry,
    Decision,
    alias_log,
    decisions_of,
    is_in_force,
    resolve_model,
    summarize_model,
)
from storage.registry.hub import push_model
from storage.registry.models import list_models, list_versions, registered_key, resolve_alias
from storage.store import keys
from storage.store.artifacts import find_artifact, read_manifest
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore, open_store
from storage.temporary import process_folder

models_app = typer.Typer(help="Published models: versions, champions, decisions.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Registry name of the model.")]
Version = Annotated[str, typer.Argument(metavar="NAME@VERSION", help="name@version, name@champion, or name (latest).")]
Why = Annotated[str, typer.Option("--why", help="The reason. It is stored with the decision.")]
Who = Annotated[str, typer.Option("--who", help="Name of the person who decides. Default: this account's name.")]


@models_app.command("ls")
def ls(storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """Lists the models: number of versions, champion, latest version."""
    with report_errors():
        store = open_store(storage)
        rows = [_model_row(store, name) for name in list_models(store)]
    if as_json:
        print_json(rows)
        return
    columns = ("model", "versions", "champion", "since", "by", "latest")
    models = table(f"models in {store.url}", "model", "versions>", "champion", "since", "by", "latest")
    console().print(add_rows(models, ([row[column] for column in columns] for row in rows)))


def _model_row(store: ObjectStore, name: str) -> dict[str, Any]:
    summary = summarize_model(store, name)
    return summary.model_dump(mode="json") | {"since": summary.since and _time(summary.since)}


@models_app.command("show")
def show(name: Name, storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """Shows one model: its versions and all decisions about them."""
    with report_errors():
        store = open_store(storage)
        versions = _published_versions(store, name)
        log, decisions = alias_log(store, name), decisions_of(store, name)
        manifests = [read_manifest(store, keys.model_version(name, version)) for version in versions]
    champion, latest = (log[-1].version if log else None), resolve_alias(store, name)
    # the JSON document has every entry of the alias log
    if as_json:
        moves = [entry.model_dump(mode="json") for entry in log]
        decision_rows = []
        for decision in decisions:
            decision_rows.append(decision.model_dump(mode="json") | {"in_force": is_in_force(decision, log)})
        body = {"model": name, "champion": champion, "latest": latest, "versions": versions}
        print_json(body | {"moves": moves, "decisions": decision_rows})
        return

    # one table of versions, one of decisions
    to = console()
    version_table = table(f"versions of {name}", "version", "", "published", "made from")
    for version, manifest in zip(versions, manifests, strict=True):
        parent = manifest.parents[0] if manifest.parents else None
        aliases = _aliases(version, log[-1] if log else None, latest)
        add_rows(version_table, [(version, aliases, _time(manifest.created), parent)])
    to.print(version_table)
    columns = ("when", "what", "version", "over", "who", "why", "evaluation", "state")
    decision_table = table("decisions, oldest first", *columns)
    to.print(add_rows(decision_table, (_decision_row(decision, log) for decision in decisions)))


def _aliases(version: str, champion: AliasEntry | None, latest: str | None) -> str | None:
    """The aliases that refer to a version, as text, with the number of the champion's log entry."""
    aliases = []
    if champion is not None and version == champion.version:
        aliases.append(f"champion (entry {champion.number})")
    if version == latest:
        aliases.append("latest")
    return " ".join(aliases) or None


def _decision_row(decision: Decision, log: list[AliasEntry]) -> tuple[Any, ...]:
    state = ""
    if decision.moves and not is_in_force(decision, log):
        state = "overtaken"
    elif log and log[-1].decision == decision.id:
        state = "in force"
    return (
        _time(decision.created), decision.action, decision.version, decision.champion, decision.who,
        "; ".join(decision.reasons), decision.evaluation.partition("#")[0] if decision.evaluation else None, state,
    )  # fmt: skip


def _time(iso: str) -> str:
    return iso[:19].replace("T", " ")


@models_app.command("card")
def card(model: Version, storage: Storage = DEFAULT_STORAGE) -> None:
    """Prints the model card of a version: its training and its evaluation."""
    with report_errors():
        store = open_store(storage)
        print(card_text(store, *_resolve_version(store, model)), end="")


@models_app.command("average")
def average(
    run: RunArgument,
    last: Annotated[int, typer.Option("--last", help="Number of checkpoints, counted from the last one.", min=2)] = 3,
    name: Annotated[str, typer.Option("--name", help="Registry name. Default: the run's key with -mean.")] = "",
    stage: Stage = "",
    model: ModelName = "",
    storage: Storage = DEFAULT_STORAGE,
) -> None:
    """Publishes the average of the last checkpoints of a run as a model. Its parents are their policies."""
    with report_errors():
        store = open_store(storage)
        averaging = import_with_torch("engine.local.averaging")
        policies = averaging.last_checkpoints(find_chain(store, run, stage, model), last)
        model_name = keys.validate_name(name or f"{default_model_name(run)}-mean")
        ref = averaging.publish_average(store, policies, model_name, provenance=by_hand(model_name, run))
    steps = ", ".join(str(policy.step) for policy in policies)
    print_plain(console(), f"published {registered_key(ref)}, the average of the policies after steps {steps}")


@models_app.command("promote")
def promote(
    model: Version,
    why: Why = "promoted by hand",
    who: Who = "",
    evaluation: Annotated[
        str, typer.Option("--evaluation", help="The evaluation that supports it: the run key, or the uri of its table.")
    ] = "",
    storage: Storage = DEFAULT_STORAGE,
) -> None:
    """Makes a version the champion. The decision is stored with its author and reason."""
    with report_errors():
        store = open_store(storage)
        name, version = _resolve_version(store, model)
        decision = promote_by_hand(
            store, name, version, why=why, who=who or _account(), evaluation=_evaluation_uri(store, evaluation)
        )
    if decision is None:
        print_plain(console(), f"{name}@{version} is the champion already")
    else:
        _print_decision(decision)


@models_app.command("rollback")
def rollback(
    name: Name,
    why: Why = "rolled back by hand",
    who: Who = "",
    over: Annotated[
        int | None,
        typer.Option("--over", help="The champion's entry, as 'models show' prints it: a repeated command is refused."),
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
) -> None:
    """Makes the previous champion the champion again. The decision is stored like a promotion."""
    with report_errors():
        store = open_store(storage)
        decision = roll_back_by_hand(store, keys.validate_name(name), why=why, who=who or _account(), over=over)
    _print_decision(decision)


@models_app.command("push")
def push(
    model: Version,
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder, s3://bucket/prefix, hf://owner/name, …")],
    force: Annotated[bool, typer.Option("--force", help="Also write into a folder with other files.")] = False,
    storage: Storage = DEFAULT_STORAGE,
) -> None:
    """Copies a version, with its card as README.md, to any location that fsspec can write."""
    with report_errors():
        store = open_store(storage)
        name, version = _resolve_version(store, model)
        names = push_model(store, name, version, url, card=card_text(store, name, version), force=force)
    console().print(f"pushed {name}@{version} to {url}: {len(names)} files", highlight=False, soft_wrap=True)


@models_app.command("export")
def export(
    model: Version,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder; for gguf, a new file.")],
    form: Annotated[
        ExportFormat,
        typer.Option("--format", help="bfloat16, float16, float32: a Hugging Face folder. adapter: a peft folder."),
    ] = "bfloat16",
    storage: Storage = DEFAULT_STORAGE,
) -> None:
    """Writes a version in another format: its weights in another type, its adapter alone, or a GGUF file (Llama)."""
    with report_errors():
        store = open_store(storage)
        name, version = _resolve_version(store, model)
        # imported here, since torch takes seconds, and flows must be importable without it
        exporting = import_module("engine.backends.weight_files.exporting")
        with tempfile.TemporaryDirectory(prefix="export-", dir=process_folder()) as folder:
            files = materialise_files(store, keys.model_version(name, version), Path(folder))
            exporting.export_files(files, out, form, name=f"{name}@{version}")
    print_plain(console(), f"wrote {name}@{version} as {form} to {out}")


@models_app.command("delete")
def delete(
    model: Annotated[str, typer.Argument(metavar="NAME@VERSION", help="The version; an alias is not accepted.")],
    yes: Annotated[bool, typer.Option("--yes/--dry-run", help="Delete. By default only show what would go.")] = False,
    storage: Storage = DEFAULT_STORAGE,
) -> None:
    """Deletes the files of a version. The champion, and a model that a run was trained from, cannot be deleted."""
    with report_errors():
        name, _, version = model.partition("@")
        if not version:
            raise usage_error(f"{model!r} names no version; 'ostinato models show {name}' lists them")
        size = delete_model(open_store(storage), keys.validate_name(name), version, dry_run=not yes)
    print_plain(console(), f"{'deleted' if yes else 'would delete'} {model}, {format_size(size)}")
    if not yes:
        print_plain(console(), YES_TO_DELETE)


def _published_versions(store: ObjectStore, name: str) -> list[str]:
    versions = list_versions(store, name)
    if not versions:
        raise ObjectNotFound(f"no model {name!r} in {store.url}; published: {', '.join(list_models(store)) or 'none'}")
    return versions


def _resolve_version(store: ObjectStore, model: str) -> tuple[str, str]:
    """(name, version) of `name`, `name@version` or `name@alias`."""
    name, _, version = resolve_model(store, model).partition("@")
    # the version may still be an unknown alias
    versions = _published_versions(store, keys.validate_name(name))
    if version not in versions:
        raise ObjectNotFound(f"model {name!r} has no version or alias {version!r}; published: {', '.join(versions)}")
    return name, version


def _evaluation_uri(store: ObjectStore, evaluation: str) -> str | None:
    """The uri of an evaluation's table, given the key of its run or the uri. Raises ObjectNotFound."""
    if not evaluation:
        return None
    # the key of a run: its result names the table
    if keys.is_run(evaluation):
        uri = json.loads(store.get(keys.result_json(evaluation))).get("table")
        if not uri:
            raise usage_error(f"run {evaluation!r} is not an evaluation: its result has no table")
        return str(uri)
    # else the key or uri of the table itself
    ref = find_artifact(store, evaluation.partition("#")[0])
    if ref is None or evaluation not in (ref.uri, ref.key):
        raise ObjectNotFound(f"no evaluation {evaluation!r} in {store.url}; give the key of an evaluation's run")
    return ref.uri


def _account() -> str:
    if name := account_name():
        return name
    raise usage_error("this account has no name; give --who")


def _print_decision(decision: Decision) -> None:
    previous = f", after {decision.champion}" if decision.champion else ""
    source = f"decision {decision.id}, by {decision.who}"
    print_plain(console(), f"the champion of {decision.model} is {decision.version}{previous} ({source})")
