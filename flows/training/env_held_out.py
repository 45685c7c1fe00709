"""Held-out evaluation around a training run in an environment: the same prompts, before and after."""

from __future__ import annotations

from dataclasses import dataclass

from engine.workspace import Workspace
from flows.configs.environments import ENVGRPOConfig
from flows.training.held_out import Heldout, heldout_prompts
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.evaluate import evaluate_in_environment
from tasks.evaluation.episodes import EpisodeEvaluationPlan
from tasks.sampling.episodes import EpisodePlan


@dataclass(frozen=True)
class HeldoutEpisodes(Heldout):
    """The held-out prompts of a run in an environment, or none: so many episodes of each."""

    episodes: EpisodeEvaluationPlan | None = None

    @classmethod
    def load_episodes(
        cls, workspace: Workspace, config: ENVGRPOConfig, base: ArtifactRef, plan: EpisodePlan
    ) -> HeldoutEpisodes:
        drawn = heldout_prompts(workspace, config, base)
        if drawn is None:
            return cls(workspace, None)
        prompts, sampling = drawn
        return cls(workspace, None, EpisodeEvaluationPlan(prompts=prompts, sampling=sampling, episodes=plan))

    async def evaluate(self, policy: PolicyRef) -> ArtifactRef | None:
        """The evaluation of a policy; None when the run has no held-out prompts."""
        if self.episodes is None:
            return None
        return await evaluate_in_environment(self.workspace, policy, self.episodes)
