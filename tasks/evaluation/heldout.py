"""Evaluates a policy on fixed prompts, by graded completions or by episodes in an environment, as one table."""

from __future__ import annotations

import math
from functools import partial
from itertools import takewhile

import pyarrow as pa

from engine.text.rendering import Renderer
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.text.turns import Turn
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.tables import SCHEMAS, commit_table, read_rows
from tasks.committed import commit_once
from tasks.datasets.naming import row_name
from tasks.environments.episodes import Trajectory
from tasks.evaluation.validation_curve import mean_over_prompts, means_by_source, sums_by_source, validation_entry
from tasks.plans import AgentPlan, EpisodePlan, EvaluationPlan, Grading
from tasks.reports.clock import timed
from tasks.sampling.completions import generate_request, prompt_limit, render_prompts, rollout_table
from tasks.sampling.episodes import play
from tasks.sampling.grading import check_masked, grade_texts
from tasks.task_runs import durable_task

Rows = list[dict[str, object]]


@durable_task("evaluate", "evaluate-{policy.step:06d}")
async def evaluate_policy(workspace: Workspace, policy: PolicyRef, plan: EvaluationPlan) -> ArtifactRef:
    """The policy's committed `evaluation` table, with a row per completion and its grade, or per episode and the sum of
    its grades. A second call returns the table of the first one."""
    key = keys.evaluation(policy.run, policy.stage, plan.name(policy))
    return await commit_once(workspace, key, lambda: _evaluate(workspace, policy, plan, key))


async def _evaluate(workspace: Workspace, policy: PolicyRef, plan: EvaluationPlan, key: str) -> ArtifactRef:
    """Samples and grades rollouts of the prompts, and commits the grades."""
    if isinstance(plan.source, Grading):
        rows = await _graded_completions(workspace, policy, plan, plan.source)
        means = {"reward": mean_over_prompts(rows)} | _by_source(rows)
    else:
        rows = await _episodes(workspace, policy, plan, plan.source, key)
        means = {"reward": mean_over_prompts(rows)}
    # The manifest has the means, from which the curves during training are drawn.
    with timed("storage"):
        return commit_table(
            workspace.open_store(),
            key,
            pa.Table.from_pylist(rows, schema=SCHEMAS["evaluation"]),
            kind="evaluation",
            parents=(policy.uri, plan.prompts.dataset.uri),
            provenance=workspace.provenance,
            extra=validation_entry(plan.label, means),
        )


async def _graded_completions(
    workspace: Workspace, policy: PolicyRef, plan: EvaluationPlan, grading: Grading
) -> Rows:
    """The table rows of completions of the prompts, with their grades."""
    # Sample the completions.
    store = workspace.open_store()
    shard = plan.prompts
    with timed("storage"):
        rows = read_rows(store, shard.dataset, shard.rows)
    renderer = renderer_of(store, shard.base)
    limit = prompt_limit(workspace, shard.base, shard.max_prompt_tokens, plan.sampling)
    prompts = render_prompts(renderer, rows, limit, shard.truncation, partial(row_name, store, shard.dataset))
    jobs, seeds = [], []
    for row, prompt in prompts:
        for number in range(shard.completions):
            jobs.append((row, prompt, number))
            # Completion 0 leaves its number out of the seed, so that it is the same however many there are.
            seed_parts = (row["id"], number) if number else (row["id"],)
            seeds.append(workspace.seed_for("evaluation", *seed_parts))
    with timed("rollout"):
        request = generate_request(policy, [prompt for _, prompt, _ in jobs], seeds, plan.sampling)
        completions = await workspace.connect().generate(request, epoch=workspace.epoch)

    # Grade them. Too many failed grades would make the mean meaningless.
    rollouts = rollout_table(renderer, policy, jobs, seeds, completions).to_pylist()
    with timed("grade"):
        outcomes = await grade_texts(rollouts, grading, workspace)
    check_masked(outcomes, grading, where="the evaluation")
    graded: Rows = []
    for row, outcome in zip(rollouts, outcomes, strict=True):
        prompt_columns = {name: row[name] for name in ("prompt_index", "prompt_id", "text", "thread")}
        graded.append(prompt_columns | {"reward": outcome.reward, "status": outcome.status})
    return graded


def _by_source(graded: Rows) -> dict[str, float | None]:
    """Name of the measure -> mean reward, for each data source of the prompts."""
    threads = [row["thread"] for row in graded]
    rewards = [row["reward"] for row in graded]
    means = means_by_source([sums_by_source(threads, rewards)])  # type: ignore[arg-type]
    return {f"reward of {source}": mean for source, mean in means.items()}


async def _episodes(
    workspace: Workspace, policy: PolicyRef, plan: EvaluationPlan, episode_plan: EpisodePlan | AgentPlan, key: str
) -> Rows:
    """The table rows of episodes that begin with the prompts. A prompt that is too long has no episode, and no row."""
    episodes = await play(
        workspace, policy, plan.prompts, plan.sampling, episode_plan, seeds=("evaluation",), where=key
    )
    renderer = renderer_of(workspace.open_store(), plan.prompts.base)
    return [row_of_episode(renderer, episode) for episode in episodes if episode.ending != "too_long"]


def row_of_episode(renderer: Renderer, episode: Trajectory) -> dict[str, object]:
    """The table row of an episode. Its text is the conversation after the dataset's prompt."""
    # Join the segments. A later one begins with the conversation as the environment rewrote it: what it shares with the
    # segment before is not repeated.
    turns: list[Turn] = []
    grades: list[float] = []
    before: list[Turn] = []
    for segment in episode.segments:
        conversation = list(renderer.detokenize(segment.tokenized).turns)
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(before, conversation, strict=False))
        turns += conversation[len(list(pairs)) :]
        grades += segment.grades.values()
        before = conversation

    # Leave out the prompt, unless the environment began with another conversation.
    prompt = StringThread.from_json(str(episode.row["thread"]))
    if tuple(turns[: len(prompt.turns)]) == prompt.turns:
        turns = turns[len(prompt.turns) :]

    # An episode that ended without a grade is ignored: a reward of 0 would be a wrong one.
    graded = episode.status == "ok" and bool(grades)
    status = "ignored" if episode.status == "ok" and not graded else episode.status
    return {
        "prompt_index": episode.row["index"],
        "prompt_id": episode.row["id"],
        "reward": math.fsum(grades) if graded else None,
        "status": status,
        "text": "\n".join(f"{turn.role}: {turn.text_with_calls}" for turn in turns),
        "thread": episode.row["thread"],
    }
