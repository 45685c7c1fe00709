"""`ostinato models ls | show | card | promote | rollback | push | delete`: published models, their champions and
decisions."""

from __future__ import annotations

import getpass
import json
from typing import Annotated, Any

import typer

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
from flows.promotion.model_card import commit_card, find_card, render_card
from flows.runs.code_version import code_version
from storage.chain.deletion import delete_model
from storage.errors import ObjectNotFound
from storage.registry.decisions import (
    AliasEntry,
    Decision,
    alias_log,
    champion_of,
    commit_decision,
    decisions_of,
    is_in_force,
    previous_champion,
    resolve_model,
)
from storage.registry.hub import push_model
from storage.registry.models import list_models, list_versions, resolve_alias
from storage.serialization import digest
from storage.store import keys
from storage.store.artifacts import Provenance, find_artifact, read_manifest
from storage.store.objects import ObjectStore, open_store

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
    row: dict[str, Any] = {
        "model": name,
        "versions": len(list_versions(store, name)),
        "champion": None,
        "since": None,
        "by": None,
        "latest": resolve_alias(store, name),
    }
    # the champion, and the decision that made it so
    champion = champion_of(store, name)
    if champion is None:
        return row
    row["champion"] = champion.version
    row["since"] = _time(champion.created) if champion.created else None
    for decision in decisions_of(store, name):
        if decision.id == champion.decision:
            row["by"] = decision.who
            break
    return row


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
        aliases = _aliases(version, champion, latest)
        add_rows(version_table, [(version, aliases, _time(manifest.created), parent)])
    to.print(version_table)
    columns = ("when", "what", "version", "over", "who", "why", "evaluation", "state")
    decision_table = table("decisions, oldest first", *columns)
    to.print(add_rows(decision_table, (_decision_row(decision, log) for decision in decisions)))


def _aliases(version: str, champion: str | None, latest: str | None) -> str | None:
    """The aliases that refer to a version, as text."""
    aliases = []
    if version == champion:
        aliases.append("champion")
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
        print(_card_text(store, *_resolve_version(store, model)), end="")


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
        champion = champion_of(store, name)
        # promoting the champion again would add an entry without a change
        if champion is not None and champion.version == version:
            console().print(f"{name}@{version} is the champion already", highlight=False)
            return
        uri = _evaluation_uri(store, evaluation)
        decision = commit_decision(
            store, name, version, "promote", over=champion, reasons=[why], who=who or _account(),
            provenance=_provenance(name, version), evaluation=uri,
        )  # fmt: skip
        commit_card(store, decision, provenance=_provenance(name, version))
    _announce(decision)
    _print_decision(decision)


@models_app.command("rollback")
def rollback(name: Name, why: Why = "rolled back by hand", who: Who = "", storage: Storage = DEFAULT_STORAGE) -> None:
    """Makes the previous champion the champion again. The decision is stored like a promotion."""
    with report_errors():
        store = open_store(storage)
        log = alias_log(store, name)
        version = previous_champion(log)
        if version is None:
            reason = f"{log[-1].version} is the first champion" if log else "there is no champion"
            raise ObjectNotFound(f"{name} has no previous champion: {reason}; promote a version instead")
        decision = commit_decision(
            store, name, version, "rollback", over=log[-1], reasons=[why], who=who or _account(),
            provenance=_provenance(name, version),
        )  # fmt: skip
    _announce(decision)
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
        names = push_model(store, name, version, url, card=_card_text(store, name, version), force=force)
    console().print(f"pushed {name}@{version} to {url}: {len(names)} files", highlight=False, soft_wrap=True)


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


def _card_text(store: ObjectStore, name: str, version: str) -> str:
    """The card of the version's last decision that has one, else a card made from the present store."""
    for decision in reversed(decisions_of(store, name)):
        if decision.version == version and (text := find_card(store, decision)) is not None:
            return text
    return render_card(store, name, version)


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


def _provenance(name: str, version: str) -> Provenance:
    return Provenance(code_version=code_version(), config_digest=digest([name, version]), seed=0)


def _account() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # a container without an entry for its user id
        raise usage_error("this account has no name; give --who") from None


def _announce(decision: Decision) -> None:
    # imported here, because the import of Prefect takes seconds, and most commands do not need it
    from flows.runs.events import announce_promotion

    announce_promotion(decision)


def _print_decision(decision: Decision) -> None:
    previous = f", after {decision.champion}" if decision.champion else ""
    source = f"decision {decision.id}, by {decision.who}"
    print_plain(console(), f"the champion of {decision.model} is {decision.version}{previous} ({source})")
