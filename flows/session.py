"""Opening a run: its key, its lease, its record; the same for every flow."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from prefect.runtime import flow_run

from engine.workspace import Workspace
from flows.config import FlowConfig
from flows.progress import TerminalProgress
from flows.version import code_version
from storage import keys
from storage.artifacts import Provenance
from storage.errors import ObjectNotFound
from storage.leases import acquire
from storage.models import canonical_json, digest
from storage.objects import open_store
from storage.runs import create_or_check_run, machine_info
from storage.worklog import log_work


@dataclass(frozen=True)
class RunSession:
    """An open run. It is the `ctx` that model builders take."""

    workspace: Workspace
    config: FlowConfig
    result: dict[str, Any] | None
    """What the run returned, when it is finished already."""

    @property
    def run(self) -> str:
        return self.workspace.run


def run_key(flow_name: str, config: FlowConfig) -> str:
    """The configured key, or one made from the flow run, which Prefect keeps over retries."""
    if config.run:
        return config.run
    return f"{flow_name}-{str(flow_run.id or os.urandom(4).hex())[:8]}"


def open_workspace(flow_name: str, config: FlowConfig) -> Workspace:
    """Where the run works. Nothing is written yet."""
    provenance = Provenance(
        code_version=code_version(), config_digest=digest(canonical_json(config.semantic())), seed=config.seed
    )
    return Workspace(
        store=config.storage.url,
        engine=config.engine,
        run=run_key(flow_name, config),
        seed=config.seed,
        provenance=provenance,
    )


def open_run(
    workspace: Workspace, config: FlowConfig, logger: TerminalProgress, *, inputs: dict[str, str]
) -> RunSession:
    """Creates the run or opens it again, and takes the lease on it. What changed since it was created, and does not
    decide the result (code, packages, machine), is noted as a warning.

    `inputs` are digests of what the config only names (datasets, the base model): they are semantic too.

    Raises:
        SemanticMismatch: the key belongs to a run with another semantic config; the differences are listed.
    """
    store = open_store(workspace.store)
    opening = create_or_check_run(
        store,
        workspace.run,
        semantic=config.semantic() | {"inputs": inputs},
        other=config.other(),
        code_version=workspace.provenance.code_version,
    )
    lease = machine_info() | {"code_version": workspace.provenance.code_version, "pid": os.getpid()}
    epoch = acquire(store, workspace.run, lease)
    log_work("open", run=workspace.run, epoch=epoch)
    workspace = workspace.model_copy(update={"epoch": epoch})
    for warning in opening.warnings:
        logger.note(f"warning: {warning}")
    return RunSession(workspace, config, _result(workspace))


def finish_run(session: RunSession, result: dict[str, Any]) -> dict[str, Any]:
    """Writes what the run returned: the same key is then done at once."""
    store = session.workspace.open_store()
    put = store.put_if_absent(keys.result_json(session.run), canonical_json(result))
    return result if put.won else (_result(session.workspace) or result)


def _result(workspace: Workspace) -> dict[str, Any] | None:
    try:
        return json.loads(workspace.open_store().get(keys.result_json(workspace.run)))  # type: ignore[no-any-return]
    except ObjectNotFound:
        return None


def default_model_name(run: str) -> str:
    """The registry name of a run's model when none is configured: the run's key as one segment."""
    return run.replace("/", "-")
