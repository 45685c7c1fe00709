"""Evaluates a policy on fixed prompts: samples completions, grades them and commits one table."""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from engine.text.stored_models import renderer_of
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.tables import SCHEMAS, commit_table, read_rows
from tasks.committed import commit_once
from tasks.datasets.naming import row_name
from tasks.evaluation.validation_curve import mean_over_prompts, means_by_source, sums_by_source, validation_entry
from tasks.plans import EvaluationPlan
from tasks.reports.clock import timed
from tasks.sampling.completions import generate_request, prompt_limit, render_prompts, rollout_table
from tasks.sampling.grading import check_masked, grade_texts
from tasks.task_runs import durable_task


@durable_task("evaluate", "evaluate-{policy.step:06d}")
async def evaluate_policy(workspace: Workspace, policy: PolicyRef, plan: EvaluationPlan) -> ArtifactRef:
    """The policy's committed `evaluation` table, with a row per completion and its grade. A second call returns the
    table of the first one."""
    key = keys.evaluation(policy.run, policy.stage, plan.name(policy))
    return await commit_once(workspace, key, lambda: _evaluate(workspace, policy, plan, key))


async def _evaluate(workspace: Workspace, policy: PolicyRef, plan: EvaluationPlan, key: str) -> ArtifactRef:
    """Samples completions of the prompts, grades them and commits the grades."""
    # Sample the completions.
    store = workspace.open_store()
    shard = plan.prompts
    rows = read_rows(store, shard.dataset, shard.rows)
    renderer = renderer_of(store, shard.base)
    limit = prompt_limit(workspace, shard.base, shard.max_prompt_tokens, plan.sampling)
    prompts = render_prompts(renderer, rows, limit, shard.truncation, partial(row_name, store, shard.dataset))
    jobs, seeds = [], []
    for row, prompt in prompts:
        for number in range(shard.completions):
            jobs.append((row, prompt, number))
            # The seed of completion 0 has no number, so an evaluation with one completion has the same seeds.
            seed_parts = (row["id"], number) if number else (row["id"],)
            seeds.append(workspace.seed_for("evaluation", *seed_parts))
    with timed("rollout"):
        request = generate_request(policy, [prompt for _, prompt, _ in jobs], seeds, plan.sampling)
        completions = await workspace.connect().generate(request, epoch=workspace.epoch)

    # Grade them. Too many failed grades would make the mean meaningless.
    rollouts = rollout_table(renderer, policy, jobs, seeds, completions).to_pylist()
    with timed("grade"):
        outcomes = await grade_texts(rollouts, plan.grading, workspace)
    check_masked(outcomes, plan.grading, where="the evaluation")
    graded = []
    for row, outcome in zip(rollouts, outcomes, strict=True):
        prompt_columns = {name: row[name] for name in ("prompt_index", "prompt_id", "text", "thread")}
        graded.append(prompt_columns | {"reward": outcome.reward, "status": outcome.status})

    # Commit the table. Its manifest has the means, from which the curves during training are drawn.
    with timed("storage"):
        return commit_table(
            store,
            key,
            pa.Table.from_pylist(graded, schema=SCHEMAS["evaluation"]),
            kind="evaluation",
            parents=(policy.uri, shard.dataset.uri),
            provenance=workspace.provenance,
            extra=validation_entry(plan.label, {"reward": mean_over_prompts(graded)} | _by_source(graded)),
        )


def _by_source(graded: list[dict[str, object]]) -> dict[str, float | None]:
    """Name of the measure -> mean reward, for each data source of the prompts."""
    threads = [row["thread"] for row in graded]
    rewards = [row["reward"] for row in graded]
    means = means_by_source([sums_by_source(threads, rewards)])  # type: ignore[arg-type]
    return {f"reward of {source}": mean for source, mean in means.items()}
