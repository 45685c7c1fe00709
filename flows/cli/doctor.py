"""`ostinato doctor`: checks versions, storage, engine and Prefect, and says what to do about problems."""

from __future__ import annotations

import sys
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
    add_rows,
    console,
    key_value_table,
    messages,
    print_findings,
    print_json,
    report_errors,
    table,
    usage_error,
)
from flows.configs.common import FlowConfig, StorageConfig
from flows.configs.overrides import ConfigError, load_config
from storage.inspect.audit import AuditReport, audit_store
from storage.store.objects import open_store

COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "fail": "red"}


class DoctorConfig(FlowConfig):
    """The groups of a flow's config that the checks use: store and engine. Others are ignored."""

    model_config = FlowConfig.model_config | {"extra": "ignore"}


def doctor(
    storage: Annotated[
        str, typer.Option("--storage", help=f"Store of the artifacts. Default: the config's, else {DEFAULT_STORAGE}.")
    ] = "",
    engine: Annotated[str, typer.Option("--engine", help="A served engine: http://host:port.")] = "",
    config: Annotated[
        Path | None, typer.Option("--config", help="A config with a store and an engine.", exists=True, dir_okay=False)
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read and check every byte of the store.")] = False,
    as_json: AsJson = False,
) -> None:
    """Checks versions, storage, engine and Prefect, and says what to do about problems; --deep audits the store."""
    settings = _read_settings(config, storage, engine)
    audit = None
    with report_errors():
        checks = list(_run_checks(settings))
        if deep:
            audit = _audit(settings.storage.url, hidden=as_json)
    # print the results in one of two forms
    if as_json:
        body: dict[str, Any] = {"checks": [check.model_dump() for check in checks]}
        if audit is not None:
            body["audit"] = audit.model_dump(mode="json")
        print_json(body)
    else:
        _print_checks(checks, console())
        if audit is not None:
            _print_audit(audit, console())
    # warnings do not change the exit status
    failed = any(check.verdict == "fail" for check in checks)
    raise typer.Exit(1 if failed or (audit is not None and not audit.ok) else 0)


def _read_settings(config: Path | None, storage: str, engine: str) -> DoctorConfig:
    """The config of the file, with the store and engine of the options in place of its own."""
    try:
        settings = DoctorConfig.model_validate(load_config(config) if config else {})
        spec: EngineSpec = HttpEngineSpec(url=engine.rstrip("/")) if engine else settings.engine
    except (ConfigError, ValidationError) as error:
        raise usage_error(str(error)) from error
    url = storage or settings.storage.url
    return settings.model_copy(update={"engine": spec, "storage": StorageConfig(url=url)})


def _run_checks(settings: DoctorConfig) -> Iterator[Check]:
    store = open_store(settings.storage.url)
    yield from check_versions()
    yield from check_storage(store)
    yield from check_engine(settings.engine, settings.storage.url)
    yield from check_backends(settings.engine)
    yield check_prefect()


def _audit(url: str, *, hidden: bool) -> AuditReport:
    # outside a terminal, rich would print an empty line in place of the bar
    with Progress(console=messages(), transient=True, disable=hidden or not sys.stderr.isatty()) as bar:
        tasks: dict[str, Any] = {}

        def on_progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        return audit_store(open_store(url), on_progress=on_progress)


def _print_checks(checks: list[Check], to: Console) -> None:
    check_table = table("ostinato doctor", "area", "check", "verdict", "what", "what to do")
    for check in checks:
        verdict = Text(check.verdict, COLOURS[check.verdict])
        add_rows(check_table, [(check.area, check.name, verdict, check.what, check.what_to_do or None)])
    to.print(check_table)


def _print_audit(audit: AuditReport, to: Console) -> None:
    counts = {name: f"{count:,}" for name, count in audit.counts.items()}
    counts["data without a manifest (pending)"] = f"{len(audit.pending):,}"
    to.print(key_value_table("the whole store", counts))
    if audit.ok:
        to.print("[green]no problem was found[/green]")
    print_findings(audit.problems, to)
