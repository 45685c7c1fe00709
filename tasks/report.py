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
from storage.chain.listing import run_chains
from storage.chain.records import Chain, PolicyRef
from storage.chain.run_record import read_run
from storage.inspect.lineage import lineage_of
from storage.inspect.run_details import fork_origin, published_models
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from tasks.evaluation.validation_curve import evaluation_keys, read_validations, reward_by_prompt
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
        title=_title(store, policy),
        run=policy.run,
        steps=tuple(read_metrics(store, policy.run, policy.stage, steps=policy.step)),
        validations=tuple(read_validations(store, policy.run, policy.stage, last_step=policy.step)),
        before=_summaries(store, before),
        after=_summaries(store, after),
        samples_before=_samples(store, before, samples_shown),
        samples_after=_samples(store, after, samples_shown),
        facts={
            **facts,
            **_models(store, policy),
            **_origin(store, policy.run),
            "store": store.url,
            **({"warnings": list(run_record.warnings)} if run_record.warnings else {}),
            "code version": run_record.code_version,
            "numerics": _numerics(store, policy),
            "config": run_record.semantic,
            "machine": run_record.machine,
        },
    )


def report_of_run(store: ObjectStore, run: str, *, facts: dict[str, Any], samples_shown: int = 10) -> ReportData | None:
    """The data of the report of a run of any kind, from what the store has of it now: of the longest chain of its last
    stage, with the first and the last evaluation on held-out prompts. None for a run that has trained no policy."""
    policy = trained_policy(store, run)
    if policy is None:
        return None
    before, after = first_and_last_evaluation(store, policy)
    return collect_report(store, policy, before, after, facts=facts, samples_shown=samples_shown)


def trained_policy(store: ObjectStore, run: str) -> PolicyRef | None:
    """The last policy of the longest chain of a run's last stage. None if the run has taken no step there."""
    if not run_chains(store, run):
        return None
    policy = lineage_of(store, run).policy
    return policy if policy is not None and policy.step else None


def first_and_last_evaluation(
    store: ObjectStore, policy: PolicyRef
) -> tuple[ArtifactRef | None, ArtifactRef | None]:
    """The first and the last evaluation on the same held-out prompts up to `policy`, in its stage. The last one is None
    if there is only one, and both are if there is none."""
    first: dict[str, ArtifactRef] = {}
    last: dict[str, ArtifactRef] = {}
    for key in sorted(evaluation_keys(store, policy.run, policy.stage)):
        step, _, name = key.rpartition("/")[2].partition("-")
        ref = find_artifact(store, key)
        if ref is None or ref.kind != "evaluation" or not step.isdecimal() or int(step) > policy.step:
            continue
        earlier = first.setdefault(name, ref)
        if earlier is not ref and earlier.rows == ref.rows:
            last[name] = ref
    # one that was taken twice comes before others
    for name in (*last, *first):
        return first[name], last.get(name)
    return None, None


def _title(store: ObjectStore, policy: PolicyRef) -> str:
    """The kind of the training and the model that it began with, such as "GRPO of smollm2-135m@1"."""
    base = lineage_of(store, f"{policy.run}/{policy.stage}/{policy.model}@{policy.step}").base
    kind = keys.stage_kind(policy.stage).replace("_", " ").upper()
    return f"{kind} of {keys.short_key(base) if base else policy.model}"


def _origin(store: ObjectStore, run: str) -> dict[str, Any]:
    """Where the run was forked; empty if it is not a fork."""
    origin = fork_origin(store, run)
    return {"forked from": origin} if origin else {}


def _models(store: ObjectStore, policy: PolicyRef) -> dict[str, Any]:
    """The registered models that the run began with and that were published from its policies."""
    models = {"trained from": lineage_of(store, policy.run).base or "a model of the recipe"}
    published = [each.model for each in published_models(store, policy.run)]
    return {"models": models | ({"published": ", ".join(published)} if published else {})}


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
