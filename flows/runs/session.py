"""Opens, closes and finishes runs, in the same way for every flow: the run's key, its lease, its record, its result."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prefect.exceptions import Pause
from prefect.runtime import flow_run
from pydantic import BaseModel

from engine.errors import EngineError
from engine.models.folder import router_loss_warning
from engine.models.hub import hub_repo_of_key
from engine.specs.engine import DeepSpeedSpec, HttpEngineSpec, LocalEngineSpec
from engine.workspace import Workspace
from flows.configs.common import FlowConfig, TrainingConfig
from flows.display.load_progress import LoadLines
from flows.display.terminal import TerminalProgress
from flows.ops.deployment_settings import with_deployment_settings
from flows.ops.run_names import current_run_key
from flows.ops.termination import check_attempts, reraise_termination
from flows.runs.code_version import code_version
from flows.runs.durations import measure_store
from flows.runs.estimate import estimate
from flows.runs.events import announce_dataset
from flows.runs.input_checks import check_inputs, check_length, check_warmup, commits_entry, hub_commits
from flows.runs.recorded_config import FLOW
from flows.training.endings import ending_of
from flows.training.watch import announce_pause
from storage.chain.fork import check_fork
from storage.chain.leases import acquire_lease, release_lease
from storage.chain.listing import committed_steps, stage_position
from storage.chain.records import PolicyRef
from storage.chain.run_record import create_or_check_run, machine_info
from storage.errors import StorageError
from storage.registry.models import registered_key
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.objects import find_store_id, read_json
from storage.worklog import log_work
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.load_order import load_order
from tasks.datasets.spec import DatasetUse, DeclaredDataset, HeldoutSplit, RegisteredDataset
from tasks.graders.running.shared_graders import tear_down_idle_graders
from tasks.load import load_prompts

log = logging.getLogger(__name__)

RELEASE_TIMEOUT = 10.0
"""Seconds that a process that ends waits for a reply of an engine server. A reply that arrives may take longer."""


@dataclass(frozen=True)
class RunSession:
    """An open run. It is the `ctx` that model builders take."""

    workspace: Workspace
    config: FlowConfig
    result: dict[str, Any] | None
    """The result of the run if it is finished already, else None."""
    datasets: Mapping[str, LoadedDataset]
    """The training datasets, in the order of `config.data.inputs`."""
    base: ArtifactRef
    """The registered model that training starts from."""

    @property
    def data(self) -> LoadedDataset:
        """The training dataset of the first stage."""
        return self.datasets["dataset"]

    @property
    def run(self) -> str:
        return self.workspace.run


def run_key(flow_name: str, config: FlowConfig) -> str:
    """Returns the configured run key, or else a key made from the flow run, which Prefect keeps over retries."""
    return config.run or current_run_key(flow_name)


def open_workspace(flow_name: str, config: FlowConfig) -> Workspace:
    """Returns the workspace of the flow run that runs here. Writes nothing yet. Raises TooManyAttempts."""
    run = run_key(flow_name, config)
    check_attempts(run)
    return workspace_of(config, run)


def workspace_of(config: FlowConfig, run: str) -> Workspace:
    """Returns the workspace of a run with this config and key."""
    provenance = Provenance(
        code_version=code_version(), config_digest=digest(canonical_json(config.semantic())), seed=config.seed
    )
    return Workspace(store=config.storage.url, engine=config.engine, run=run, seed=config.seed, provenance=provenance)


def with_hub_commits(workspace: Workspace, config: BaseModel) -> Workspace:
    """Returns the workspace with the commits of the hub's branches that the config names. Raises ConfigError."""
    return workspace.model_copy(update={"hub": hub_commits(config, workspace.open_store(), workspace.run)})


async def import_model(workspace: Workspace, key: str) -> ArtifactRef:
    """Returns the registered model of a key. A folder or a model of the hub is registered first."""
    return await workspace.connect().import_model(workspace.pinned_model(key), provenance=workspace.provenance)


@asynccontextmanager
async def open_run(config: TrainingConfig, logger: TerminalProgress) -> AsyncIterator[RunSession]:
    """Loads the inputs, creates or reopens the run, and holds its lease within the block.

    Code, packages and machine may have changed since the run was created: that is noted as a warning.

    Raises:
        ConfigError, LoggerMissing: something that the config names is not there. Raised before anything is loaded.
        SemanticMismatch: the key belongs to a run with another semantic config, or of another dataset or base model;
            the differences are listed.
        DoesNotFit: the engine's memory or the store's disk cannot hold the run.
        ForkRefused: the run is a fork whose copy was interrupted.
    """
    with reraise_termination() as ending:
        config = with_deployment_settings(config)
        workspace = ending.workspace = open_workspace(config.flow, config)
        store = workspace.open_store()
        # calls to the store are made in threads, so that they do not stop what else this process runs
        await asyncio.to_thread(check_fork, store, workspace.run)
        resumed = await asyncio.to_thread(store.exists, keys.run_json(workspace.run))
        workspace = with_hub_commits(workspace, config)
        _check_config(workspace, config, resumed=resumed)
        config.logging.trackers()

        # the inputs: datasets and base model
        datasets = {name: _load(workspace, *source, logger) for name, source in config.data.inputs.items()}
        check_length(config, *(data.rows for data in datasets.values()))
        base = await import_model(workspace, config.model.key)
        if find_store_id(store) is None:
            logger.note(f"a new store is created at {store.url}")

        # refuse a run that does not fit before anything of it is written
        ended = await asyncio.to_thread(_past_ending, workspace, config)
        notes = []
        if ended is not None or read_result(workspace) is None:
            notes = await _check_fit(workspace, config, base, datasets, logger, resumed=resumed)

        # create the run, or check that a resumed one has the same inputs
        inputs = _input_digests(base, datasets)
        warnings = await asyncio.to_thread(_create_or_check_run, workspace, config, base, inputs)
        for name, (source, use) in config.data.inputs.items():
            source.record_version(workspace.open_store(), workspace.run, use, datasets[name])
        # from here on, this process alone acts for the run
        workspace = await asyncio.to_thread(take_lease, workspace)
        if ended is not None:
            # from here on, the run is unfinished
            await asyncio.to_thread(store.delete, keys.result_json(workspace.run))
            notes.append(f"the run ended after step {ended['step']}: {ended['reason']}. It goes on by the new rules")
        logger.logging = config.logging
        for line in (*notes, *(f"warning: {warning}" for warning in warnings)):
            logger.note(line)
        # the lease is released on every way out of the block
        try:
            session = RunSession(workspace, config, read_result(workspace), datasets, base)
            _announce_beginning(session, logger)
            yield session
        except Pause:
            announce_pause()
            raise
        finally:
            await release_run(workspace)


async def _with_imported_models(workspace: Workspace, config: TrainingConfig) -> TrainingConfig:
    """Returns the config with the registered models in place of a value model and teachers of the hub, for the
    estimate."""

    async def registered(key: str | None) -> str | None:
        if key is None or hub_repo_of_key(key) is None:
            return key
        return registered_key(await import_model(workspace, key))

    for name in ("value_model", "teacher"):
        part = getattr(config, name, None)
        if part is None:
            continue
        update: dict[str, Any] = {"key": await registered(part.key)}
        if name == "teacher":
            update["by_value"] = {value: await registered(key) for value, key in part.by_value.items()}
        config = config.model_copy(update={name: part.model_copy(update=update)})
    return config


def _create_or_check_run(
    workspace: Workspace, config: TrainingConfig, base: ArtifactRef, input_digests: dict[str, str]
) -> tuple[str, ...]:
    """Creates the run, or checks that it has the same semantic config. Returns the warnings about its base model and
    about what else changed.

    The config only names its inputs, so the digests of their contents belong to the semantic config, too."""
    store = workspace.open_store()
    warning = router_loss_warning(store, base)
    opening = create_or_check_run(
        store,
        workspace.run,
        semantic=config.semantic() | {"inputs": input_digests},
        other=config.other() | {FLOW: config.flow} | commits_entry(workspace.hub),
        code_version=workspace.provenance.code_version,
        warnings=() if warning is None else (warning,),
    )
    return opening.warnings


def _check_config(workspace: Workspace, config: TrainingConfig, *, resumed: bool) -> None:
    """Raises ConfigError if something that the config names is not there, and DatasetError if the held-out data is a
    registered dataset of another use."""
    if not resumed:
        check_warmup(config)
    check_inputs(config, workspace.open_store(), workspace.hub)
    _heldout_source(workspace, config)


def _heldout_source(workspace: Workspace, config: TrainingConfig) -> DeclaredDataset | None:
    """The held-out data in the version that the run uses. None: it has none. Raises DatasetError."""
    source, use = config.data.heldout_rows, config.data.heldout_use
    if source is None:
        return None
    return source.resolved(workspace.open_store(), use, run=workspace.run, commits=workspace.hub)


def _load(workspace: Workspace, source: DeclaredDataset, use: DatasetUse, logger: TerminalProgress) -> LoadedDataset:
    """Loads a dataset and its order, announces it if it is new, and notes the version of a registered one."""
    title = source.title
    data = load_prompts(workspace, source, use, LoadLines(title, logger.note))
    # refuse a curriculum over rows without numbers before a model is loaded
    load_order(workspace.open_store(), data, seed=workspace.seed)
    announce_dataset(data, source, use)
    if isinstance(source, RegisteredDataset):
        name, version = keys.dataset_of(data.ref.key)
        logger.note(f"dataset {name}@{version}: {data.rows:,} rows")
    return data


async def _check_fit(
    workspace: Workspace,
    config: TrainingConfig,
    base: ArtifactRef,
    datasets: Mapping[str, LoadedDataset],
    logger: TerminalProgress,
    *,
    resumed: bool,
) -> list[str]:
    """Estimates what is left of the run. Returns the estimate as a line of text. Raises DoesNotFit."""
    heldout = _load_heldout(workspace, config, logger)
    store, info = workspace.open_store(), await workspace.connect().info()
    committed = tuple((await asyncio.to_thread(committed_steps, store, workspace.run)).values())
    config = await _with_imported_models(workspace, config)
    stage_data, speed = tuple(datasets.values()), await asyncio.to_thread(measure_store, store)
    expected = estimate(store, config, base, stage_data, info, heldout=heldout, speed=speed, committed=committed)
    expected.check(info, resumed=resumed)
    return [expected.text(info)]


def _load_heldout(workspace: Workspace, config: TrainingConfig, logger: TerminalProgress) -> LoadedDataset | None:
    """Loads the rows that the run evaluates on. None: it has none."""
    source = _heldout_source(workspace, config)
    if source is None:
        return None
    store, use = workspace.open_store(), config.data.heldout_use
    on_progress = LoadLines(source.title, logger.note)
    data = load_dataset(store, source, use=use, provenance=workspace.provenance, on_progress=on_progress)
    if isinstance(config.data.heldout, HeldoutSplit):
        logger.note(f"held out: {data.rows:,} rows of {source.title} (split: {config.data.heldout.split:g})")
    return data


def _input_digests(base: ArtifactRef, datasets: Mapping[str, LoadedDataset]) -> dict[str, str]:
    return {name: dataset.ref.sha256 for name, dataset in datasets.items()} | {"model": base.sha256}


def take_lease(workspace: Workspace) -> Workspace:
    """Takes the run's lease and returns the workspace with the new epoch. Holders of earlier epochs are fenced."""
    holder = machine_info() | {"code_version": workspace.provenance.code_version, "pid": os.getpid()}
    if flow_run.id:
        # hooks run in other processes, and recognise the lease by it
        holder["flow_run"] = str(flow_run.id)
    epoch = acquire_lease(workspace.open_store(), workspace.run, holder)
    log_work("open", run=workspace.run, epoch=epoch)
    return workspace.model_copy(update={"epoch": epoch})


async def release_run(workspace: Workspace, *, used_engine: bool = True) -> None:
    """Releases graders, engine and lease of a run whose flow has ended for any reason.

    The engine checkpoints steps after its last checkpoint, and may then unload the weights. Errors are logged and not
    raised, because they do no harm: the next holder of the lease takes a higher epoch, and an engine drops runs that
    send no calls.
    """
    await tear_down_idle_graders()
    if used_engine:
        await release_engine(workspace)
    try:
        release_lease(workspace.open_store(), workspace.run, workspace.epoch)
    except StorageError as error:
        log.warning("the lease of run %s was not released: %s", workspace.run, error)


async def release_engine(workspace: Workspace) -> None:
    """Tells the engine that it may unload the run's weights. Errors are logged and not raised."""
    try:
        await _with_short_timeout(workspace).connect().release(workspace.run, epoch=workspace.epoch)
    except (EngineError, StorageError) as error:
        log.warning("the engine was not told that run %s has ended: %s", workspace.run, error)


def _with_short_timeout(workspace: Workspace) -> Workspace:
    """The workspace with short timeouts, so that an unreachable engine does not keep a process from ending."""
    spec = workspace.engine
    if not isinstance(spec, HttpEngineSpec):
        return workspace
    timeouts = {
        "patience_seconds": min(spec.patience_seconds, RELEASE_TIMEOUT),
        "timeout_seconds": min(spec.timeout_seconds, RELEASE_TIMEOUT),
    }
    return workspace.model_copy(update={"engine": spec.model_copy(update=timeouts)})


def finish_run(session: RunSession, result: dict[str, Any]) -> dict[str, Any]:
    """Writes the result of the run. Another run with the same key then returns this result without training."""
    return write_result(session.workspace, result)


def write_result(workspace: Workspace, result: dict[str, Any]) -> dict[str, Any]:
    """Writes the result unless the run has one already; returns the result that is stored. That of a run that ended by
    a rule after fewer steps is replaced: a process may write it although another one continues the run."""
    store, key = workspace.open_store(), keys.result_json(workspace.run)
    put = store.put_if_absent(key, canonical_json(result))
    if put.won:
        return result
    stored = read_result(workspace)
    if stored is not None and "ending" in stored and "policy" in result and _position(result) > _position(stored):
        store.delete(key)
        return write_result(workspace, result)
    return stored or result


def _position(result: dict[str, Any]) -> tuple[int, int]:
    """The number of the stage and the step of a result's policy. The steps of each stage count from 0."""
    policy = PolicyRef.from_uri(result["policy"])
    return stage_position(policy.stage), policy.step


def _past_ending(workspace: Workspace, config: TrainingConfig) -> dict[str, Any] | None:
    """The early ending in the result of a run, if the rules of the config let the run go on. Else None."""
    result = read_result(workspace)
    if result is None or "ending" not in result:
        return None
    rules = [*config.stages.values()][-1].rules
    ending = ending_of(workspace.open_store(), PolicyRef.from_uri(result["policy"]), rules)
    return dict(result["ending"]) if ending is None else None


def read_result(workspace: Workspace) -> dict[str, Any] | None:
    """Returns the run's result, or None if the run is not finished. Raises CorruptArtifact."""
    return read_json(workspace.open_store(), keys.result_json(workspace.run))


def _announce_beginning(session: RunSession, logger: TerminalProgress) -> None:
    if session.result is not None:
        announce_stored_result(session.workspace, logger)
    else:
        announce_ranks(session.workspace, logger)


def announce_stored_result(workspace: Workspace, logger: TerminalProgress) -> None:
    """Says that the run is not executed, because it is finished."""
    logger.note(
        f"run {workspace.run} is finished already; its recorded result is returned; another run key trains again"
    )


def announce_ranks(workspace: Workspace, logger: TerminalProgress) -> None:
    """Says that the trainer has processes of its own, whose start takes part of the time of the first step."""
    trainer = workspace.engine.trainer if isinstance(workspace.engine, LocalEngineSpec) else None
    if isinstance(trainer, DeepSpeedSpec):
        ranks = "a rank per GPU, or one" if trainer.ranks == "auto" else f"{trainer.ranks} ranks"
        logger.note(f"training with DeepSpeed, ZeRO {trainer.zero_stage}: starting {ranks} …")
