"""Evaluates a policy in an environment: plays episodes of fixed prompts and commits one table."""

from __future__ import annotations

import math

import pyarrow as pa

from engine.protocol import SamplingParams
from engine.text.rendering import Renderer
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.text.turns import Turn
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.serialization import Frozen, canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact
from storage.store.tables import SCHEMAS, commit_table
from tasks.environments.episodes import Episode
from tasks.evaluation.validation_curve import mean_over_prompts, validation_entry
from tasks.reports.clock import timed
from tasks.sampling.completions import PromptShard
from tasks.sampling.episodes import EpisodePlan, play

NO_EFFECT_ON_RESULT = {"reaction_seconds", "concurrency", "max_masked_fraction"}
"""Fields of an EpisodePlan that are not part of the evaluation's key."""


class EpisodeEvaluationPlan(Frozen):
    """Prompts, sampling and environment of an evaluation. Equal plans of one policy give one artifact."""

    prompts: PromptShard
    sampling: SamplingParams
    episodes: EpisodePlan

    def name(self, policy: PolicyRef) -> str:
        body = self.model_dump(mode="json", exclude={"episodes": NO_EFFECT_ON_RESULT})
        return f"{policy.step:06d}-{digest(canonical_json(body))[:12]}"


async def evaluate_episodes(workspace: Workspace, policy: PolicyRef, plan: EpisodeEvaluationPlan) -> ArtifactRef:
    """Returns the committed `evaluation` table of a policy, and makes it first if there is none. It has a row per
    episode, whose reward is the sum of its grades."""
    store = workspace.open_store()
    key = keys.evaluation(policy.run, policy.stage, plan.name(policy))
    committed = find_artifact(store, key)
    if committed is not None:
        return committed

    # Play the episodes. A prompt that is too long has no episode, and no row.
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
