"""Evaluates a policy in an environment: plays episodes of fixed prompts and commits one table."""

from __future__ import annotations

import math

import pyarrow as pa

from engine.text.rendering import Renderer
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.text.turns import Turn
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.tables import SCHEMAS, commit_table
from tasks.committed import commit_once
from tasks.environments.episodes import Episode
from tasks.evaluation.validation_curve import mean_over_prompts, validation_entry
from tasks.plans import EpisodeEvaluationPlan
from tasks.reports.clock import timed
from tasks.sampling.episodes import play
from tasks.task_runs import durable_task


@durable_task("evaluate", "evaluate-{policy.step:06d}")
async def evaluate_in_environment(
    workspace: Workspace, policy: PolicyRef, plan: EpisodeEvaluationPlan
) -> ArtifactRef:
    """The policy's committed `evaluation` table, with a row per episode, whose reward is the sum of its grades. A
    second call returns the table of the first one."""
    key = keys.evaluation(policy.run, policy.stage, plan.name(policy))
    return await commit_once(workspace, key, lambda: _evaluate(workspace, policy, plan, key))


async def _evaluate(
    workspace: Workspace, policy: PolicyRef, plan: EpisodeEvaluationPlan, key: str
) -> ArtifactRef:
    """Plays episodes of the prompts and commits their rewards."""
    # Play the episodes. A prompt that is too long has no episode, and no row.
    store = workspace.open_store()
    shard = plan.prompts
    episodes = await play(workspace, policy, shard, plan.sampling, plan.episodes, seeds=("evaluation",), where=key)
    renderer = renderer_of(store, shard.base)
    rows = [_row(renderer, episode) for episode in episodes if episode.ending != "too_long"]
    with timed("storage"):
        return commit_table(
            store,
            key,
            pa.Table.from_pylist(rows, schema=SCHEMAS["evaluation"]),
            kind="evaluation",
            parents=(policy.uri, shard.dataset.uri),
            provenance=workspace.provenance,
            extra=validation_entry("held-out", {"reward": mean_over_prompts(rows)}),
        )


def _row(renderer: Renderer, episode: Episode) -> dict[str, object]:
    """The table row of an episode. Its text is the conversation after the dataset's prompt."""
    # Join the segments.
    turns: list[Turn] = []
    grades: list[float] = []
    for segment in episode.segments:
        turns += renderer.detokenize(segment.tokenized).turns
        grades += segment.grades.values()

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
        "text": "\n".join(f"{turn.role}: {turn.text}" for turn in turns),
        "thread": episode.row["thread"],
    }
