"""`ostinato doctor`: checks versions, storage, engine and Prefect, and says what to do about problems."""

from __future__ import annotations

import contextlib
import os
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
from flows.cli.checks import Check, check_engine, check_prefect, check_storage, check_versions, http_status
from flows.cli.output import (
    DEFAULT_STORAGE,
    AsJson,
    add_rows,
    console,
    key_value_table,
    messages,
    print_findings,
    print_json,
    print_plain,
    report_errors,
    table,
    usage_error,
)
from flows.configs.common import FlowConfig, StorageConfig
from flows.configs.overrides import ConfigError, load_config
from flows.ops.local_server import environment_variables
from flows.ops.services import client_settings
from flows.ops.state import HOME, UpError, UpState, load_state, status
from storage.inspect.audit import AuditReport, audit_store
from storage.inspect.index import rebuild_index
from storage.store.objects import open_store

COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "fail": "red"}


class DoctorConfig(FlowConfig):
    """The groups of a flow's config that the checks use: store and engine. Others are ignored."""

    model_config = FlowConfig.model_config | {"extra": "ignore"}


def doctor(
    storage: Annotated[
        str,
        typer.Option(
            "--storage", help=f"Store of the artifacts. Default: that of 'ostinato up' here, else {DEFAULT_STORAGE}."
        ),
    ] = "",
    engine: Annotated[str, typer.Option("--engine", help="A served engine: http://host:port.")] = "",
    config: Annotated[
        Path | None, typer.Option("--config", help="A config with a store and an engine.", exists=True, dir_okay=False)
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read and check every byte of the store.")] = False,
    run: Annotated[str, typer.Option("--run", help="With --deep: check only this run of the store.")] = "",
    as_json: AsJson = False,
) -> None:
    """Checks versions, storage, engine and Prefect, and says what to do about problems; --deep audits the store and
    rebuilds its index. Where 'ostinato up' runs in this folder, these are its services."""
    try:
        up = _running_up()
    except UpError as error:
        raise usage_error(str(error)) from None
    # the options name another store and engine than those of 'ostinato up'
    used_up = None if storage or engine or config else up
    settings = _settings_of_up(used_up) if used_up else _read_settings(config, storage, engine)
    if run and not deep:
        raise usage_error("--run chooses what --deep checks; give both")
    audit = None
    with report_errors(), _environment_of_up(used_up):
        checks = [*check_up(up), *_run_checks(settings)]
        if deep:
            audit = _audit(settings.storage.url, run or None, hidden=as_json)
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


def check_up(state: UpState | None) -> Iterator[Check]:
    """Checks the processes that 'ostinato up' started in this folder, and whether they answer."""
    if state is None:
        what = "nothing is running in this folder"
        yield Check(area="up", name="services", verdict="note", what=what, what_to_do="start with 'ostinato up'")
        return
    addresses = {
        "server": (f"Prefect UI {state.url}", f"{state.api_url}/health"),
        "engine": (state.engine_url, f"{state.engine_url}/health"),
        "worker": (f"work pool {state.options.pool}", state.worker_health_url),
        "s3": (state.s3_url, ""),
    }
    services = status(state)
    supervised = services["supervisor"]["alive"] if "supervisor" in services else False
    for name, service in services.items():
        # the supervisor has no address, and the S3 server is checked as the store
        address, health_url = addresses.get(name, ("", ""))
        what = ", ".join(filter(None, (address, f"pid {service['pid']}", f"restarts: {service['restarts']}")))
        problem = "has ended" if not service["alive"] else ""
        if not problem and health_url and (answer := http_status(health_url)) != 200:
            problem = f"does not answer: {answer}"
        if problem:
            remedy = "run 'ostinato up' again; the runs continue"
            if supervised:
                remedy = f"it is restarted by itself; its log: {HOME / name}.log"
            yield Check(area="up", name=name, verdict="fail", what=f"{what}: {problem}", what_to_do=remedy)
        else:
            yield Check(area="up", name=name, verdict="ok", what=what)
    if not state.ready:
        what = "'ostinato up' has not finished starting"
        yield Check(area="up", name="start", verdict="note", what=what, what_to_do="wait, and run this again")


def _running_up() -> UpState | None:
    """The state of 'ostinato up' in this folder, or None if none of its processes is alive. Raises UpError."""
    state = load_state(HOME.absolute())
    if state is None or not any(service["alive"] for service in status(state).values()):
        return None
    return state


def _settings_of_up(state: UpState) -> DoctorConfig:
    return DoctorConfig(storage=StorageConfig(url=state.options.storage), engine=HttpEngineSpec(url=state.engine_url))


@contextlib.contextmanager
def _environment_of_up(state: UpState | None) -> Iterator[None]:
    """Sets the tokens and urls of the services within the block. A Prefect server of the environment stays."""
    settings = client_settings(state) if state else {}
    if os.environ.get("PREFECT_API_URL"):
        settings.pop("PREFECT_API_URL", None)
    with environment_variables(**settings):
        yield


def _run_checks(settings: DoctorConfig) -> Iterator[Check]:
    store = open_store(settings.storage.url)
    yield from check_versions()
    yield from check_storage(store)
    yield from check_engine(settings.engine, settings.storage.url)
    yield from check_backends(settings.engine)
    yield check_prefect()


def _audit(url: str, run: str | None, *, hidden: bool) -> AuditReport:
    store = open_store(url)
    if run is None:
        added = rebuild_index(store)
        if added:
            print_plain(messages(), f"the index of {url} lacked {added:,} entries, which were added")
    # outside a terminal, rich would print an empty line in place of the bar
    with Progress(console=messages(), transient=True, disable=hidden or not sys.stderr.isatty()) as bar:
        tasks: dict[str, Any] = {}

        def on_progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total)

        return audit_store(store, run=run, on_progress=on_progress)


def _print_checks(checks: list[Check], to: Console) -> None:
    check_table = table("ostinato doctor", "area", "check", "verdict", "what", "what to do")
    for check in checks:
        verdict = Text(check.verdict, COLOURS[check.verdict])
        add_rows(check_table, [(check.area, check.name, verdict, check.what, check.what_to_do or None)])
    to.print(check_table)


def _print_audit(audit: AuditReport, to: Console) -> None:
    counts = {name: f"{count:,}" for name, count in audit.counts.items()}
    counts["data without a manifest (pending)"] = f"{len(audit.pending):,}"
    to.print(key_value_table("what was checked", counts))
    if audit.ok:
        to.print("[green]no problem was found[/green]")
    print_findings(audit.problems, to)
