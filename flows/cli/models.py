"""`ostinato models ls | show | card | promote | rollback | push`: which version is champion, who said so, and why."""

from __future__ import annotations

import getpass
import json
from typing import Annotated, Any

import typer

from flows.cli.output import (
    DEFAULT_STORAGE,
    AsJson,
    Storage,
    console,
    fill,
    print_json,
    refusals,
    table,
    usage_error,
)
from flows.promotion.model_card import commit_card, find_card, render_card
from flows.runs.code_version import code_version
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
from storage.registry.models import list_models, list_versions, resolve_alias
from storage.registry.push import push_model
from storage.serialization import digest
from storage.store import keys
from storage.store.artifacts import Provenance, find_artifact, read_manifest
from storage.store.objects import ObjectStore, open_store

models_app = typer.Typer(help="Published models: versions, champions, decisions.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The model's registry name.")]
Version = Annotated[str, typer.Argument(metavar="NAME@VERSION", help="name@version, name@champion, or name: latest.")]
Why = Annotated[str, typer.Option("--why", help="The reason; it is kept with the decision.")]
Who = Annotated[str, typer.Option("--who", help="Who decides. Default: this account's name.")]


@models_app.command("ls")
def ls(storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """Every model: its versions, its champion, its latest."""
    with refusals():
        store = open_store(storage)
        rows = [_row(store, name) for name in list_models(store)]
    if as_json:
        print_json(rows)
        return
    shown = table(f"models in {store.url}", "model", "versions>", "champion", "since", "by", "latest")
    columns = ("model", "versions", "champion", "since", "by", "latest")
    console().print(fill(shown, ([row[column] for column in columns] for row in rows)))


def _row(store: ObjectStore, name: str) -> dict[str, Any]:
    champion = champion_of(store, name)
    made_by = next((d for d in decisions_of(store, name) if champion and d.id == champion.decision), None)
    return {
        "model": name,
        "versions": len(list_versions(store, name)),
        "champion": champion.version if champion else None,
        "since": champion.created[:19].replace("T", " ") if champion and champion.created else None,
        "by": made_by.who if made_by else None,
        "latest": resolve_alias(store, name),
    }


@models_app.command("show")
def show(name: Name, storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """One model: its versions and every decision about them, in force or not."""
    with refusals():
        store = open_store(storage)
        versions = _known_versions(store, name)
        log, decisions = alias_log(store, name), decisions_of(store, name)
        made = [read_manifest(store, keys.model_version(name, version)) for version in versions]
    champion, latest = (log[-1].version if log else None), resolve_alias(store, name)
    if as_json:
        body = {"model": name, "champion": champion, "latest": latest, "versions": versions}
        moves = [entry.model_dump(mode="json") for entry in log]
        told = [decision.model_dump(mode="json") | {"in_force": is_in_force(decision, log)} for decision in decisions]
        print_json(body | {"moves": moves, "decisions": told})
        return
    to = console()
    rows = (
        (v, _marks(v, champion, latest), m.created[:19].replace("T", " "), m.parents[0] if m.parents else None)
        for v, m in zip(versions, made, strict=True)
    )
    to.print(fill(table(f"versions of {name}", "version", "", "published", "made from"), rows))
    shown = table("decisions, oldest first", "when", "what", "version", "over", "who", "why", "evaluation", "state")
    to.print(fill(shown, (_decision(decision, log) for decision in decisions)))


def _marks(version: str, champion: str | None, latest: str | None) -> str | None:
    return " ".join(mark for mark, named in (("champion", champion), ("latest", latest)) if named == version) or None


def _decision(decision: Decision, log: list[AliasEntry]) -> tuple[Any, ...]:
    state = "in force" if log and log[-1].decision == decision.id else ""
    if decision.moves and not is_in_force(decision, log):
        state = "overtaken"
    return (
        decision.created[:19].replace("T", " "), decision.action, decision.version, decision.champion, decision.who,
        "; ".join(decision.reasons), decision.evaluation.partition("#")[0] if decision.evaluation else None, state,
    )  # fmt: skip


@models_app.command("card")
def card(model: Version, storage: Storage = DEFAULT_STORAGE) -> None:
    """The model card of a version: what made it, and how it was judged."""
    with refusals():
        store = open_store(storage)
        print(_card(store, *_resolved(store, model)), end="")


@models_app.command("promote")
def promote(
    model: Version,
    why: Why = "promoted by hand",
    who: Who = "",
    evaluation: Annotated[
        str, typer.Option("--evaluation", help="The evaluation it rests on: its run's key, or the uri of its table.")
    ] = "",
    storage: Storage = DEFAULT_STORAGE,
) -> None:
    """Makes a version the champion: the next entry of the alias's log, with who and why."""
    with refusals():
        store = open_store(storage)
        name, version = _resolved(store, model)
        champion = champion_of(store, name)
        if champion is not None and champion.version == version:
            console().print(f"{name}@{version} is the champion already", highlight=False)
            return
        uri = _evaluation(store, evaluation)
        decision = commit_decision(
            store, name, version, "promote", over=champion, reasons=[why], who=who or _account(),
            provenance=_provenance(name, version), evaluation=uri,
        )  # fmt: skip
        commit_card(store, decision, provenance=_provenance(name, version))
    _announce(decision)
    _said(decision)


@models_app.command("rollback")
def rollback(
    name: Name, why: Why = "rolled back by hand", who: Who = "", storage: Storage = DEFAULT_STORAGE
) -> None:
    """Makes the champion before the present one the champion again: the next entry of the log, nothing is undone."""
    with refusals():
        store = open_store(storage)
        log = alias_log(store, name)
        version = previous_champion(log)
        if version is None:
            there = f"{log[-1].version} is the first champion" if log else "there is no champion"
            raise ObjectNotFound(f"{name} has nobody to roll back to: {there}; promote a version instead")
        decision = commit_decision(
            store, name, version, "rollback", over=log[-1], reasons=[why], who=who or _account(),
            provenance=_provenance(name, version),
        )  # fmt: skip
    _announce(decision)
    _said(decision)


@models_app.command("push")
def push(
    model: Version,
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder, s3://bucket/prefix, hf://owner/name, …")],
    force: Annotated[bool, typer.Option("--force", help="Also into a folder that holds other files.")] = False,
    storage: Storage = DEFAULT_STORAGE,
) -> None:
    """Copies a version, with its card as README.md, to anywhere that fsspec writes."""
    with refusals():
        store = open_store(storage)
        name, version = _resolved(store, model)
        names = push_model(store, name, version, url, card=_card(store, name, version), force=force)
    console().print(f"pushed {name}@{version} to {url}: {len(names)} files", highlight=False, soft_wrap=True)


def _known_versions(store: ObjectStore, name: str) -> list[str]:
    versions = list_versions(store, name)
    if not versions:
        raise ObjectNotFound(f"no model {name!r} in {store.url}; published: {', '.join(list_models(store)) or 'none'}")
    return versions


def _resolved(store: ObjectStore, model: str) -> tuple[str, str]:
    """(name, version) of `name`, `name@version` or `name@alias`."""
    name, _, version = resolve_model(store, model).partition("@")
    versions = _known_versions(store, keys.validate_name(name))
    if version not in versions:
        raise ObjectNotFound(f"model {name!r} has no version or alias {version!r}; published: {', '.join(versions)}")
    return name, version


def _card(store: ObjectStore, name: str, version: str) -> str:
    """The card of the version's last promotion; without one, a card as the store has it now."""
    made = [decision for decision in decisions_of(store, name) if decision.version == version]
    cards = (find_card(store, decision) for decision in reversed(made))
    return next((text for text in cards if text is not None), None) or render_card(store, name, version)


def _evaluation(store: ObjectStore, given: str) -> str | None:
    """The uri of an evaluation's table. Raises ObjectNotFound."""
    if not given:
        return None
    if keys.is_run(given):
        uri = json.loads(store.get(keys.result_json(given))).get("table")
        if not uri:
            raise usage_error(f"run {given!r} is no evaluation: its result names no table")
        return str(uri)
    ref = find_artifact(store, given.partition("#")[0])
    if ref is None or given not in (ref.uri, ref.key):
        raise ObjectNotFound(f"no evaluation {given!r} in {store.url}; give the key of an evaluation's run")
    return ref.uri


def _provenance(name: str, version: str) -> Provenance:
    return Provenance(code_version=code_version(), config_digest=digest([name, version]), seed=0)


def _account() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an account for its number
        raise usage_error("this account has no name; give --who") from None


def _announce(decision: Decision) -> None:
    from flows.runs.events import announce_promotion  # Prefect costs seconds: only a move pays

    announce_promotion(decision)


def _said(decision: Decision) -> None:
    over = f", after {decision.champion}" if decision.champion else ""
    said = f"the champion of {decision.model} is {decision.version}{over} (decision {decision.id}, by {decision.who})"
    console().print(said, highlight=False, soft_wrap=True, markup=False)
