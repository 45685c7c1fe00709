"""Opening a run: its key, its lease, its record; the same for every flow."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prefect.exceptions import Pause
from prefect.runtime import flow_run

from engine.errors import EngineError
from engine.specs.engine import HttpEngineSpec
from engine.workspace import Workspace
from flows.configs.common import DatasetSource, FlowConfig, TrainingConfig
from flows.display.terminal import TerminalProgress
from flows.ops.attempts import check_attempts
from flows.ops.deployment_settings import with_deployment_settings
from flows.ops.run_keys import current_run_key
from flows.ops.termination import reraise_termination
from flows.runs.code_version import code_version
from flows.runs.estimate import estimate
from flows.runs.events import announce_dataset
from flows.training.watch import say_left
from storage.chain.fork import check_fork
from storage.chain.leases import acquire_lease, release_lease
from storage.chain.run_record import create_or_check_run, machine_info
from storage.errors import StorageError
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.identity import find_store_id
from storage.store.objects import read_json
from storage.worklog import log_work
from tasks.datasets.load import LoadedDataset
from tasks.datasets.spec import DatasetUse
from tasks.graders.running.shared_graders import tear_down_idle_graders
from tasks.load import load_prompts

log = logging.getLogger(__name__)

RELEASE_TIMEOUT = 10.0
"""How long a worker that ends waits for a sign of life of an engine server. An engine that is at it may take longer."""


@dataclass(frozen=True)
class RunSession:
    """An open run. It is the `ctx` that model builders take."""

    workspace: Workspace
    config: FlowConfig
    result: dict[str, Any] | None
    """What the run returned, when it is finished already."""
    data: LoadedDataset
    """What the run trains on."""
    base: ArtifactRef
    """The registered model that it starts from."""
    further: Mapping[str, LoadedDataset] = field(default_factory=dict)
    """What it trains on besides `data`, by name."""

    @property
    def run(self) -> str:
        return self.workspace.run


def run_key(flow_name: str, config: FlowConfig) -> str:
    """The configured key, or one made from the flow run, which Prefect keeps over retries."""
    return config.run or current_run_key(flow_name)


def open_workspace(flow_name: str, config: FlowConfig) -> Workspace:
    """The workspace of the flow run that runs here. Nothing is written yet. Raises TooManyAttempts."""
    run = run_key(flow_name, config)
    check_attempts(run)
    return workspace_of(config, run)


def workspace_of(config: FlowConfig, run: str) -> Workspace:
    """Where a run under that key works."""
    provenance = Provenance(
        code_version=code_version(), config_digest=digest(canonical_json(config.semantic())), seed=config.seed
    )
    return Workspace(
        store=config.storage.url, engine=config.engine, run=run, seed=config.seed, provenance=provenance
    )


@asynccontextmanager
async def open_run(
    flow_name: str,
    config: TrainingConfig,
    logger: TerminalProgress,
    *,
    use: DatasetUse,
    further: Mapping[str, tuple[DatasetSource, DatasetUse]] | None = None,
) -> AsyncIterator[RunSession]:
    """Loads what the config names, creates the run or opens it again, and holds the lease on it for the block. What
    changed since it was created, and does not decide the result (code, packages, machine), is noted as a warning.
    `further`: by name, what a flow trains on besides `config.data.train`.

    Raises:
        SemanticMismatch: the key belongs to a run with another semantic config, or of another dataset or base model;
            the differences are listed.
        DoesNotFit: the engine's memory or the store's disk cannot hold it.
        ForkRefused: the run is a fork whose copy was interrupted.
    """
    with reraise_termination():
        config = with_deployment_settings(config)
        workspace = open_workspace(flow_name, config)
        check_fork(workspace.open_store(), workspace.run)
        data = _load(workspace, config.data.train, use)
        more = {name: _load(workspace, *source) for name, source in (further or {}).items()}
        base = await workspace.connect().import_model(config.model.key, provenance=workspace.provenance)
        if find_store_id(workspace.open_store()) is None:
            logger.note(f"a new store begins at {workspace.open_store().url}")
        info = await workspace.connect().info()
        expected = estimate(workspace.open_store(), config, base, data, info, more)
        expected.check(info, resumed=workspace.open_store().exists(keys.run_json(workspace.run)))
        opening = create_or_check_run(
            workspace.open_store(),
            workspace.run,
            # the config only names its inputs: what they hold is semantic too
            semantic=config.semantic() | {"inputs": _inputs(data, more) | {"model": base.sha256}},
            other=config.other(),
            code_version=workspace.provenance.code_version,
        )
        workspace = take_lease(workspace)
        logger.logging = config.logging
        logger.note(expected.text(info))
        for warning in opening.warnings:
            logger.note(f"warning: {warning}")
        try:
            session = RunSession(workspace, config, read_result(workspace), data, base, more)
            if session.result is not None:
                logger.note(f"run {session.run} is finished already; its result is returned as it was")
            yield session
        except Pause:
            say_left()
            raise
        finally:
            await release_run(workspace)


def _load(workspace: Workspace, source: DatasetSource, use: DatasetUse) -> LoadedDataset:
    data = load_prompts(workspace, source, use)
    announce_dataset(data, source, use)
    return data


def _inputs(data: LoadedDataset, further: Mapping[str, LoadedDataset]) -> dict[str, str]:
    """Digests of what the run trains on."""
    return {"dataset": data.ref.sha256} | {name: one.ref.sha256 for name, one in further.items()}


def take_lease(workspace: Workspace) -> Workspace:
    """The workspace with a new fencing epoch of its run: whoever acted for the run before is fenced."""
    holder = machine_info() | {"code_version": workspace.provenance.code_version, "pid": os.getpid()}
    if flow_run.id:
        holder["flow_run"] = str(flow_run.id)  # its hooks, in other processes, know by it whose lease it is
    epoch = acquire_lease(workspace.open_store(), workspace.run, holder)
    log_work("open", run=workspace.run, epoch=epoch)
    return workspace.model_copy(update={"epoch": epoch})


async def release_run(workspace: Workspace) -> None:
    """Gives the run back, however its flow ended: the engine checkpoints what moved past its last checkpoint and may
    send its weights away, and the lease says that nobody acts any more. What fails here harms nothing: the next holder
    takes a higher epoch, and an engine forgets whom it does not hear from."""
    await tear_down_idle_graders()
    await release_engine(workspace)
    try:
        release_lease(workspace.open_store(), workspace.run, workspace.epoch)
    except StorageError as error:
        log.warning("run %s was left with its lease: %s", workspace.run, error)


async def release_engine(workspace: Workspace) -> None:
    """The run's weights may leave the engine's memory first. What fails here is logged."""
    try:
        await _hasty(workspace).connect().release(workspace.run, epoch=workspace.epoch)
    except (EngineError, StorageError) as error:
        log.warning("the engine was not told that run %s was left: %s", workspace.run, error)


def _hasty(workspace: Workspace) -> Workspace:
    """The workspace without the patience of a run: an engine that is away must not keep a process from ending."""
    spec = workspace.engine
    if not isinstance(spec, HttpEngineSpec):
        return workspace
    hasty = {
        "patience_seconds": min(spec.patience_seconds, RELEASE_TIMEOUT),
        "timeout_seconds": min(spec.timeout_seconds, RELEASE_TIMEOUT),
    }
    return workspace.model_copy(update={"engine": spec.model_copy(update=hasty)})


def finish_run(session: RunSession, result: dict[str, Any]) -> dict[str, Any]:
    """Writes what the run returned: the same key is then done at once."""
    return write_result(session.workspace, result)


def write_result(workspace: Workspace, result: dict[str, Any]) -> dict[str, Any]:
    """The run's result: this one, or the one that stands already."""
    put = workspace.open_store().put_if_absent(keys.result_json(workspace.run), canonical_json(result))
    return result if put.won else (read_result(workspace) or result)


def read_result(workspace: Workspace) -> dict[str, Any] | None:
    """What the run returned, or None when it is not finished. Raises CorruptArtifact."""
    return read_json(workspace.open_store(), keys.result_json(workspace.run))


def default_model_name(run: str) -> str:
    """The registry name of a run's model when none is configured: the run's key as one segment."""
    return run.replace("/", "-")
