"""`ostinato doctor`: is everything that a run needs there, and whole? A verdict each, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from engine.specs.engine import EngineSpec, HttpEngineSpec
from flows.cli.backend_checks import check_backends
from flows.cli.checks import Check, check_engine, check_prefect, check_storage, check_versions
from flows.cli.output import (
    DEFAULT_STORAGE,
    AsJson,
    console,
    facts,
    fill,
    messages,
    print_json,
    refusals,
    say_findings,
    table,
    usage_error,
)
from flows.configs.common import FlowConfig, StorageConfig
from flows.configs.overrides import ConfigError, load_config
from storage.inspect.audit import AuditReport, audit_store
from storage.store.objects import open_store

COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "fail": "red"}


class Place(FlowConfig):
    """The groups of a flow's config that say where it works."""

    model_config = FlowConfig.model_config | {"extra": "ignore"}


def doctor(
    storage: Annotated[
        str, typer.Option("--storage", help=f"Where artifacts live [default: the config's, else {DEFAULT_STORAGE}].")
    ] = "",
    engine: Annotated[str, typer.Option("--engine", help="A served engine: http://host:port.")] = "",
    config: Annotated[
        Path | None, typer.Option("--config", help="A config with its store and engine.", exists=True, dir_okay=False)
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read and check the whole store, to the last byte.")] = False,
    as_json: AsJson = False,
) -> None:
    """Versions, storage, engine and Prefect, each with a verdict and what to do; --deep audits the whole store."""
    place = _place(config, storage, engine)
    audit = None
    with refusals():
        checks = list(_checks(place))
        if deep:
            audit = _audit(place.storage.url, hidden=as_json)
    if as_json:
        body: dict[str, Any] = {"checks": [check.model_dump() for check in checks]}
        print_json(body | ({"audit": audit.model_dump(mode="json")} if audit else {}))
    else:
        _say(checks, audit, console())
    failed = any(check.verdict == "fail" for check in checks)
    raise typer.Exit(1 if failed or (audit is not None and not audit.ok) else 0)


def _place(config: Path | None, storage: str, engine: str) -> Place:
    try:
        given = load_config(config) if config else {}
        place = Place.model_validate(given)
        spec: EngineSpec = HttpEngineSpec(url=engine.rstrip("/")) if engine else place.engine
    except (ConfigError, ValidationError) as error:
        raise usage_error(str(error)) from error
    url = storage or place.storage.url
    return place.model_copy(update={"engine": spec, "storage": StorageConfig(url=url)})


def _checks(place: Place) -> Iterator[Check]:
    store = open_store(place.storage.url)
    yield from check_versions()
    yield from check_storage(store)
    yield from check_engine(place.engine, place.storage.url)
    yield from check_backends(place.engine)
    yield check_prefect()


def _audit(url: str, *, hidden: bool) -> AuditReport:
    with Progress(console=messages(), transient=True, disable=hidden) as bar:
        tasks: dict[str, Any] = {}

        def on_progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        return audit_store(open_store(url), on_progress=on_progress)


def _say(checks: list[Check], audit: AuditReport | None, to: Console) -> None:
    rows = (
        (check.area, check.name, Text(check.verdict, COLOURS[check.verdict]), check.what, check.what_to_do or None)
        for check in checks
    )
    to.print(fill(table("ostinato doctor", "area", "check", "verdict", "what", "what to do"), rows))
    if audit is None:
        return
    counted = {name: f"{count:,}" for name, count in audit.counts.items()}
    to.print(facts("the whole store", counted | {"data without a manifest (pending)": f"{len(audit.pending):,}"}))
    if audit.ok:
        to.print("[green]nothing is broken[/green]")
    say_findings(audit.problems, to)
