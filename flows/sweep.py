"""The `sweep` flow: trains with several values of some config keys, and compares the results.

Every trial is a child run with its own key, so the same sweep resumes it. A page compares the trials that completed.

    ostinato sweep --config examples/sweep.yaml
"""

from __future__ import annotations

import asyncio
from typing import Any

from engine.http.report_links import report_url
from flows.catalogue import TRAININGS
from flows.configs.common import TrainingConfig
from flows.configs.sweep import SweepConfig, TrialsFailed
from flows.display.run_log import put_markdown, put_table
from flows.display.terminal import TerminalProgress
from flows.ops.deployment_settings import with_deployment_settings
from flows.ops.run_names import flow_run_title
from flows.ops.termination import check_attempts, reraise_termination
from flows.runs.checked_flow import checked_flow
from flows.runs.code_version import code_version
from flows.runs.input_checks import check_inputs
from storage.chain.run_record import create_or_check_run
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.objects import ObjectStore, open_store
from tasks.evaluation.run_comparison import Ranked, collect_runs, rank, render_comparison


@checked_flow(name="sweep", flow_run_name=flow_run_title)
async def sweep(config: SweepConfig) -> dict[str, Any]:
    """Runs every trial of a search as a child run, and compares them on one page.

    Args:
        config: the training, and the keys whose values are searched.
    """
    with reraise_termination():
        return await _run_trials(config)


async def _run_trials(config: SweepConfig) -> dict[str, Any]:
    """Runs the trials and publishes their comparison. Raises TrialsFailed at the end if a trial failed."""
    logger = TerminalProgress()
    check_attempts(config.name)
    training = config.training.model_copy(update={"config": with_deployment_settings(config.training.config)})
    # all trials use the same version of a registered dataset
    store = open_store(training.config.storage.url)
    training = training.with_full_versions(store)
    config = config.model_copy(update={"training": training})
    children = config.children()
    for _, child in children:
        check_inputs(child, store)
    # run the trials
    slots = asyncio.Semaphore(config.parallel)
    logger.note(f"sweep {config.name}: {len(children)} runs, {config.parallel} at a time")
    errors = await asyncio.gather(
        *(_run_trial(training.kind, values, child, slots, logger) for values, child in children)
    )
    # compare those that completed
    runs = [child.run for _, child in children]
    failed = {run: error for run, error in zip(runs, errors, strict=True) if error is not None}
    completed = [run for run in runs if run not in failed]
    result: dict[str, Any] = {"sweep": config.name, "runs": []}
    if completed:
        result = _compare(config, store, completed)
    await put_table("sweep", _table_rows(children, failed, result), description=f"Sweep `{config.name}`")
    await put_markdown("sweep-report", _report_link(config.name, result))
    # fail only now, so that one failed trial does not hide the results of the others
    if failed:
        listed = "\n".join(f"  {run}: {error}" for run, error in failed.items())
        raise TrialsFailed(
            f"{len(failed)} of {len(children)} runs of sweep {config.name} failed:\n{listed}\n"
            "the same sweep again tries these again"
        )
    return result


async def _run_trial(
    kind: str, values: dict[str, Any], child: TrainingConfig, slots: asyncio.Semaphore, logger: TerminalProgress
) -> str | None:
    """Runs one child run. Returns its error message, or None if it completed."""
    async with slots:
        logger.note(f"run {child.run}: {values}")
        # the title says what all child runs share, and the values tell them apart
        title = ", ".join([child.title, *(f"{key}={value}" for key, value in values.items())])
        state = await TRAININGS[kind].import_flow().with_options(flow_run_name=lambda: title)(child, return_state=True)
        if state.is_completed():
            return None
        return state.message or state.name or "it did not complete"


def _report_link(name: str, result: dict[str, Any]) -> str:
    """A Markdown sentence with the address of the comparison."""
    if result.get("page"):
        return f"[The runs of `{name}` compared]({result['page']}), kept at `{result['report']}`."
    return f"The runs of `{name}` are compared at `{result.get('report')}`."


def _compare(config: SweepConfig, store: ObjectStore, runs: list[str]) -> dict[str, Any]:
    """Ranks the runs, and writes the page that compares them. Returns the result of the sweep."""
    compared = collect_runs(store, runs)
    ranked = rank(compared)
    # the key is a digest of the compared runs, so that a larger sweep writes another page
    comparison_run = f"{config.name}/comparison-{digest(canonical_json(runs))[:12]}"
    create_or_check_run(store, comparison_run, semantic={"runs": runs}, other={}, code_version=code_version())
    page = render_comparison(f"Sweep {config.name}", compared, store_url=store.url)
    report = write_page(store, comparison_run, page)
    # a run without held-out rewards cannot be the best
    best = ranked[0].run if ranked and ranked[0].mean else None
    result = {
        "sweep": config.name,
        "runs": runs,
        "best": best,
        "ranked": [run.model_dump(mode="json") for run in ranked],
        "report": report,
        "page": report_url(config.training.config.engine, store, comparison_run),
    }
    store.put_if_absent(keys.result_json(comparison_run), canonical_json(result))
    return result


def write_page(store: ObjectStore, run: str, page: str) -> str:
    """Writes the report page of a run. Returns its address in the store."""
    key = keys.report(run)
    store.put(key, page.encode())
    return store.address(key)


def _table_rows(
    children: list[tuple[dict[str, Any], TrainingConfig]], failed: dict[str, str], result: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows of the table artifact, one per trial."""
    ranked = {row["run"]: Ranked.model_validate(row) for row in result.get("ranked", [])}
    rows = []
    for values, child in children:
        row: dict[str, Any] = {key: str(value) for key, value in values.items()}
        row |= {"run": child.run, "held-out mean": None, "verdict": f"failed: {failed.get(child.run)}"}
        if child.run in ranked:
            mean, row["verdict"] = ranked[child.run].mean, ranked[child.run].verdict
            row["held-out mean"] = round(mean.mean, 4) if mean else None
        rows.append(row)
    return rows
