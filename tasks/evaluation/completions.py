"""Plain code behind the evaluate task: fixed prompts, sampled by one policy, graded, committed."""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from engine.protocol import SamplingParams
from engine.text.stored_models import renderer_of
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.serialization import Frozen, canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact
from storage.store.tables import SCHEMAS, commit_table, read_rows
from tasks.datasets.naming import row_name
from tasks.evaluation.validation_curve import mean_reward, means_by_source, measured, sums_by_source
from tasks.reports.clock import timed
from tasks.sampling.completions import PromptShard, generate_request, prompt_limit, render_prompts, rollout_table
from tasks.sampling.grading import Grading, check_masked, grade_texts


class EvaluationPlan(Frozen):
    """Which prompts, drawn how, graded by whom. Equal plans of one policy are one artifact."""

    prompts: PromptShard
    sampling: SamplingParams
    grading: Grading
    label: str = "held-out"
    """What a person calls it; decides nothing."""

    def name(self, policy: PolicyRef) -> str:
        # where the grader runs decides nothing either
        body = self.model_dump(mode="json", exclude={"label": True, "grading": {"grader": {"workers"}}})
        return f"{policy.step:06d}-{digest(canonical_json(body))[:12]}"


async def evaluate(workspace: Workspace, policy: PolicyRef, plan: EvaluationPlan) -> ArtifactRef:
    """The committed `evaluation` table of a policy: a row per completion, with its grade."""
    store = workspace.open_store()
    key = keys.evaluation(policy.run, policy.stage, plan.name(policy))
    found = find_artifact(store, key)
    if found is not None:
        return found
    shard = plan.prompts
    rows = read_rows(store, shard.dataset, shard.rows)
    renderer, limit = renderer_of(store, shard.base), prompt_limit(workspace, shard, plan.sampling)
    prompts = render_prompts(renderer, rows, limit, shard.truncation, partial(row_name, store, shard.dataset))
    jobs = [(row, prompt, number) for row, prompt in prompts for number in range(shard.completions)]
    seeds = [workspace.seed_for("evaluation", row["id"], *([number] if number else [])) for row, _, number in jobs]
    with timed("rollout"):
        request = generate_request(policy, [prompt for _, prompt, _ in jobs], seeds, plan.sampling)
        completions = await workspace.connect().generate(request, epoch=workspace.epoch)
    rollouts = rollout_table(renderer, policy, jobs, seeds, completions).to_pylist()
    with timed("grade"):
        outcomes = await grade_texts(rollouts, plan.grading, workspace)
    check_masked(outcomes, plan.grading, where=key)
    columns = ("prompt_index", "prompt_id", "text", "thread")
    graded = [
        {name: row[name] for name in columns} | {"reward": outcome.reward, "status": outcome.status}
        for row, outcome in zip(rollouts, outcomes, strict=True)
    ]
    with timed("storage"):
        return commit_table(
            store,
            key,
            pa.Table.from_pylist(graded, schema=SCHEMAS["evaluation"]),
            kind="evaluation",
            parents=(policy.uri, shard.dataset.uri),
            provenance=workspace.provenance,
            extra=measured(plan.label, {"reward": mean_reward(graded)} | _by_source(graded)),
        )


def _by_source(graded: list[dict[str, object]]) -> dict[str, float | None]:
    sums = sums_by_source([row["thread"] for row in graded], [row["reward"] for row in graded])  # type: ignore[misc]
    return {f"reward of {source}": mean for source, mean in means_by_source([sums]).items()}
