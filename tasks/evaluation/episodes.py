"""Plain code behind the evaluation of a policy in an environment: an episode per fixed prompt, committed."""

from __future__ import annotations

import math

import pyarrow as pa

from engine.protocol import SamplingParams
from engine.text.rendering import Renderer
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.serialization import Frozen, canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact
from storage.store.tables import SCHEMAS, commit_table
from tasks.environments.episodes import Episode
from tasks.evaluation.validation_curve import mean_reward, measured
from tasks.reports.clock import timed
from tasks.sampling.completions import PromptShard
from tasks.sampling.episodes import EpisodePlan, play

PATIENCE = {"reaction_seconds", "concurrency", "max_masked_fraction"}


class EpisodeEvaluationPlan(Frozen):
    """Which prompts, drawn how, in which environment. Equal plans of one policy are one artifact."""

    prompts: PromptShard
    sampling: SamplingParams
    episodes: EpisodePlan

    def name(self, policy: PolicyRef) -> str:
        body = self.model_dump(mode="json", exclude={"episodes": PATIENCE})
        return f"{policy.step:06d}-{digest(canonical_json(body))[:12]}"


async def evaluate_episodes(workspace: Workspace, policy: PolicyRef, plan: EpisodeEvaluationPlan) -> ArtifactRef:
    """The committed `evaluation` table of a policy: a row per episode, whose grades together are its reward."""
    store = workspace.open_store()
    key = keys.evaluation(policy.run, policy.stage, plan.name(policy))
    found = find_artifact(store, key)
    if found is not None:
        return found
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
            extra=measured("held-out", {"reward": mean_reward(rows)}),
        )


def _row(renderer: Renderer, episode: Episode) -> dict[str, object]:
    """What was said after the dataset's prompt is the text, turn by turn."""
    prompt = StringThread.from_json(str(episode.row["thread"]))
    said = [turn for part in episode.segments for turn in renderer.detokenize(part.tokenized).turns]
    if tuple(said[: len(prompt.turns)]) == prompt.turns:
        said = said[len(prompt.turns) :]
    grades = [grade for part in episode.segments for grade in part.grades.values()]
    graded = episode.status == "ok" and bool(grades)
    return {
        "prompt_index": episode.row["index"],
        "prompt_id": episode.row["id"],
        "reward": math.fsum(grades) if graded else None,
        "status": episode.status if graded or episode.status != "ok" else "ignored",
        "text": "\n".join(f"{turn.role}: {turn.text}" for turn in said),
        "thread": episode.row["thread"],
    }
