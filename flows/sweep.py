"""A search over config keys: every trial is a child run of its own, resumable and kept, and a page compares them.

    ostinato sweep --config examples/sweep.yaml
"""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow

from engine.http.report_links import report_url
from flows.configs.common import TrainingConfig
from flows.configs.sweep import SweepConfig, TrialsFailed
from flows.display.artifacts import put_markdown, put_table
from flows.display.terminal import TerminalProgress
from flows.ops.attempts import check_attempts
from flows.ops.deployment_settings import with_deployment_settings
from flows.ops.hooks import ON_END
from flows.ops.termination import reraise_termination
from flows.runs.code_version import code_version
from flows.training.child_runs import flow_of
from storage.chain.run_record import create_or_check_run
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.objects import ObjectStore, open_store
from tasks.evaluation.run_comparison import Ranked, collect_runs, rank, render_comparison


@flow(name="sweep", flow_run_name="sweep {config.name}", **ON_END)
async def sweep(config: SweepConfig) -> dict[str, Any]:
    """Runs every trial of a search as a child run, and compares them on one page.

    Args:
        config: what is trained, and over which keys is searched.
    """
    with reraise_termination():
        return await _search(config)


async def _search(config: SweepConfig) -> dict[str, Any]:
    logger = TerminalProgress()
    check_attempts(config.name)
    training = config.training.model_copy(update={"config": with_deployment_settings(config.training.config)})
    config = config.model_copy(update={"training": training})
    children = config.children()
    gate = asyncio.Semaphore(config.parallel)
    logger.note(f"sweep {config.name}: {len(children)} runs, {config.parallel} at a time")
    answers = await asyncio.gather(
        *(_trial(training.kind, values, child, gate, logger) for values, child in children)
    )
    done = [child.run for (_, child), problem in zip(children, answers, strict=True) if problem is None]
    store = open_store(training.config.storage.url)
    result = _compare(config, store, done) if done else {"sweep": config.name, "runs": []}
    await put_table("sweep", _rows(children, answers, result), description=f"Sweep `{config.name}`")
    await put_markdown("sweep-report", _said(config.name, result))
    failed = {child.run: problem for (_, child), problem in zip(children, answers, strict=True) if problem is not None}
    if failed:
        listed = "\n".join(f"  {run}: {problem}" for run, problem in failed.items())
        raise TrialsFailed(
            f"{len(failed)} of {len(children)} runs of sweep {config.name} failed:\n{listed}\n"
            "the same sweep again tries these again"
        )
    return result


async def _trial(
    kind: str, values: dict[str, Any], child: TrainingConfig, gate: asyncio.Semaphore, logger: TerminalProgress
) -> str | None:
    """Runs one child; what it failed of, or None."""
    async with gate:
        logger.note(f"run {child.run}: {values}")
        state = await flow_of(kind)(child, return_state=True)
        return None if state.is_completed() else (state.message or state.name or "it did not complete")


def _said(name: str, result: dict[str, Any]) -> str:
    if result.get("page"):
        return f"[The runs of `{name}` compared]({result['page']}), kept at `{result['report']}`."
    return f"The runs of `{name}` are compared at `{result.get('report')}`."


def _compare(config: SweepConfig, store: ObjectStore, runs: list[str]) -> dict[str, Any]:
    """Writes the page of these runs. Its own run is named by them: a larger sweep has another page."""
    compared = collect_runs(store, runs)
    ranked = rank(compared)
    own = f"{config.name}/comparison-{digest(canonical_json(runs))[:12]}"
    create_or_check_run(store, own, semantic={"runs": runs}, other={}, code_version=code_version())
    report = write_page(store, own, render_comparison(f"Sweep {config.name}", compared, store_url=store.url))
    best = ranked[0].run if ranked and ranked[0].mean else None
    result = {
        "sweep": config.name,
        "runs": runs,
        "best": best,
        "ranked": [one.model_dump(mode="json") for one in ranked],
        "report": report,
        "page": report_url(config.training.config.engine, store, own),
    }
    store.put_if_absent(keys.result_json(own), canonical_json(result))
    return result


def write_page(store: ObjectStore, run: str, page: str) -> str:
    """Writes the page of a run; returns where it is."""
    key = keys.report(run)
    store.put(key, page.encode())
    return store.address(key)


def _rows(
    children: list[tuple[dict[str, Any], TrainingConfig]], answers: list[str | None], result: dict[str, Any]
) -> list[dict[str, Any]]:
    """A line per trial, for the table artifact."""
    ranked = {one["run"]: Ranked.model_validate(one) for one in result.get("ranked", [])}
    rows = []
    for (values, child), problem in zip(children, answers, strict=True):
        one = ranked.get(child.run)
        mean = round(one.mean.mean, 4) if one and one.mean else None
        verdict = one.verdict if one else f"failed: {problem}"
        told: dict[str, Any] = {key: str(value) for key, value in values.items()}
        rows.append(told | {"run": child.run, "held-out mean": mean, "verdict": verdict})
    return rows
