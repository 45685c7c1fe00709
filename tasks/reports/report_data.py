"""What the report shows, collected from the store: nothing in it comes from memory, so it can be made again."""

from __future__ import annotations

import json
from typing import Any

from engine.text.threads import StringThread
from storage.chain.records import Chain, PolicyRef
from storage.chain.run_record import read_run
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from tasks.evaluation.validation_curve import read_validations, reward_by_prompt
from tasks.reports.html_report import ReportData
from tasks.reports.metrics import EvaluationSummary, SampleRollout, summarise_evaluation
from tasks.reports.step_metrics import read_metrics


def collect_report(
    store: ObjectStore,
    policy: PolicyRef,
    before: ArtifactRef | None,
    after: ArtifactRef | None,
    *,
    facts: dict[str, Any],
    samples_shown: int,
) -> ReportData:
    """The report of a run as it stands at `policy`."""
    info = read_run(store, policy.run)
    return ReportData(
        title=f"{keys.stage_kind(policy.stage).replace('_', ' ').upper()} of {policy.model}",
        run=policy.run,
        steps=tuple(read_metrics(store, policy.run, policy.stage, steps=policy.step)),
        validations=tuple(read_validations(store, policy.run, policy.stage, steps=policy.step)),
        before=_summaries(store, before),
        after=_summaries(store, after),
        samples_before=_samples(store, before, samples_shown),
        samples_after=_samples(store, after, samples_shown),
        facts={
            **facts,
            "store": store.url,
            "code version": info.code_version,
            "numerics": _numerics(store, policy),
            "config": info.semantic,
            "machine": info.machine,
        },
    )


def _numerics(store: ObjectStore, policy: PolicyRef) -> dict[str, Any]:
    record = Chain.of(store, policy).record(policy.step) if policy.step else None
    return record.numerics.model_dump(mode="json") if record else {}


def _summaries(store: ObjectStore, ref: ArtifactRef | None) -> tuple[EvaluationSummary, ...]:
    if ref is None:
        return ()
    rows = read_table(store, ref, ["prompt_index", "reward"]).to_pylist()
    rewards = list(reward_by_prompt(rows, "prompt_index").values())
    # an evaluation without a single grade has no mean; its table and the masked count still tell
    return (summarise_evaluation("held-out reward", rewards),) if any(r is not None for r in rewards) else ()


def _samples(store: ObjectStore, ref: ArtifactRef | None, shown: int) -> tuple[SampleRollout, ...]:
    if ref is None:
        return ()
    rows = read_table(store, ref, ["thread", "text", "reward"]).slice(0, shown).to_pylist()
    return tuple(
        SampleRollout(
            prompt=StringThread.from_json(row["thread"]).last_content(),
            completion=row["text"],
            reward=row["reward"],
            reference=_answer(row["thread"]),
        )
        for row in rows
    )


def _answer(thread: str) -> str | None:
    """The expected answer, where the dataset recorded one in the thread's metadata."""
    answer = json.loads(thread).get("metadata", {}).get("answer")
    return None if answer is None else str(answer)
