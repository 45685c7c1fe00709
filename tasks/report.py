"""Writes the report of a run as one HTML page in the store, and a link to it in Prefect."""

from __future__ import annotations

import json
from typing import Any

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from engine.http.report_links import report_url
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.records import Chain, PolicyRef
from storage.chain.run_record import read_run
from storage.inspect.run_details import fork_origin
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from tasks.evaluation.validation_curve import read_validations, reward_by_prompt
from tasks.reports.html_report import ReportData, render_report
from tasks.reports.metrics import EvaluationSummary, SampleRollout, summarise_evaluation
from tasks.reports.step_metrics import read_metrics
from tasks.task_runs import durable_task


def collect_report(
    store: ObjectStore,
    policy: PolicyRef,
    before: ArtifactRef | None,
    after: ArtifactRef | None,
    *,
    facts: dict[str, Any],
    samples_shown: int,
) -> ReportData:
    """The data of the report of a run up to `policy`.

    Args:
        before: the evaluation of the first policy, or None.
        after: the evaluation of `policy`, or None.
        facts: what the report lists in addition to the config, the machine and the versions.
        samples_shown: number of prompts of each evaluation that are shown with their completions.
    """
    run_record = read_run(store, policy.run)
    # Read only the steps and validations up to `policy`, so that a report of an earlier policy is the same later.
    return ReportData(
        title=f"{keys.stage_kind(policy.stage).replace('_', ' ').upper()} of {policy.model}",
        run=policy.run,
        steps=tuple(read_metrics(store, policy.run, policy.stage, steps=policy.step)),
        validations=tuple(read_validations(store, policy.run, policy.stage, last_step=policy.step)),
        before=_summaries(store, before),
        after=_summaries(store, after),
        samples_before=_samples(store, before, samples_shown),
        samples_after=_samples(store, after, samples_shown),
        facts={
            **facts,
            **_origin(store, policy.run),
            "store": store.url,
            **({"warnings": list(run_record.warnings)} if run_record.warnings else {}),
            "code version": run_record.code_version,
            "numerics": _numerics(store, policy),
            "config": run_record.semantic,
            "machine": run_record.machine,
        },
    )


def _origin(store: ObjectStore, run: str) -> dict[str, Any]:
    """Where the run was forked; empty if it is not a fork."""
    origin = fork_origin(store, run)
    return {"forked from": origin} if origin else {}


def _numerics(store: ObjectStore, policy: PolicyRef) -> dict[str, Any]:
    record = Chain.of(store, policy).record(policy.step) if policy.step else None
    return record.numerics.model_dump(mode="json") if record else {}


def _summaries(store: ObjectStore, ref: ArtifactRef | None) -> tuple[EvaluationSummary, ...]:
    if ref is None:
        return ()
    rows = read_table(store, ref, ["prompt_index", "reward"]).to_pylist()
    rewards = list(reward_by_prompt(rows, "prompt_index").values())
    # If every grade failed there is no mean. The page still shows the completions and the count of masked grades.
    if all(reward is None for reward in rewards):
        return ()
    return (summarise_evaluation("held-out reward", rewards),)


def _samples(store: ObjectStore, ref: ArtifactRef | None, count: int) -> tuple[SampleRollout, ...]:
    """The first `count` rows of an evaluation."""
    if ref is None:
        return ()
    samples = []
    for row in read_table(store, ref, ["thread", "text", "reward"]).slice(0, count).to_pylist():
        prompt = StringThread.from_json(row["thread"]).last_content()
        answer = _answer(row["thread"])
        samples.append(SampleRollout(prompt=prompt, completion=row["text"], reward=row["reward"], reference=answer))
    return tuple(samples)


def _answer(thread: str) -> str | None:
    """The expected answer, if the thread's metadata has one."""
    answer = json.loads(thread).get("metadata", {}).get("answer")
    return None if answer is None else str(answer)


@durable_task("report", "report")
def write_report(
    workspace: Workspace,
    policy: PolicyRef,
    before: ArtifactRef | None,
    after: ArtifactRef | None,
    facts: dict[str, Any],
    samples_shown: int = 10,
) -> str:
    """Writes the run's report and returns its location: a path for a local store, otherwise a URL."""
    store = workspace.open_store()
    data = collect_report(store, policy, before, after, facts=facts, samples_shown=samples_shown)
    key = keys.report(workspace.run)
    store.put(key, render_report(data).encode())
    location = store.address(key)

    # The run is complete without a link in Prefect, so an error of the engine or of Prefect does not fail it.
    try:
        link = report_url(workspace.engine, store, workspace.run)
        markdown = f"Run `{workspace.run}`: the report is at `{location}`."
        if link:
            markdown = f"[The report of run `{workspace.run}`]({link}), kept at `{location}`."
        create_markdown_artifact(key="report", markdown=markdown, description="The HTML report of the run")
    except httpx.HTTPError as error:
        get_run_logger().warning("no link in Prefect to the report at %s: %s", location, error)
    return location
