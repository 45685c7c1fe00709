"""Held-out evaluation around a training run in an environment: the same prompts, before and after."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import SamplingParams
from engine.workspace import Workspace
from flows.env_config import ENVGRPOConfig
from flows.evaluation import Heldout
from storage.artifacts import ArtifactRef
from storage.chain import PolicyRef
from tasks.episode_evaluations import EpisodeEvaluationPlan
from tasks.evaluate import evaluate_in_environment
from tasks.load import load_prompts
from tasks.rollouts import PromptShard
from tasks.trajectories import EpisodePlan


@dataclass(frozen=True)
class HeldoutEpisodes(Heldout):
    """The held-out prompts of a run in an environment, or none: so many episodes of each."""

    episodes: EpisodeEvaluationPlan | None = None

    @classmethod
    def load_episodes(
        cls, workspace: Workspace, config: ENVGRPOConfig, base: ArtifactRef, plan: EpisodePlan
    ) -> HeldoutEpisodes:
        if config.data.heldout is None:
            return cls(workspace, None)
        loaded = load_prompts(workspace, config.data.heldout, "prompt")
        prompts = PromptShard(
            base=base,
            dataset=loaded.ref,
            index=0,
            rows=tuple(range(loaded.rows)),
            completions=config.evaluation.samples_per_prompt,
            max_prompt_tokens=config.data.max_prompt_tokens,
            truncation=config.data.truncation,
        )
        sampling = SamplingParams.model_validate(config.sampling.model_dump() | config.evaluation.sampling)
        return cls(workspace, None, EpisodeEvaluationPlan(prompts=prompts, sampling=sampling, episodes=plan))

    async def evaluate(self, policy: PolicyRef) -> ArtifactRef | None:
        """The evaluation of a policy; None when the run has no held-out prompts."""
        if self.episodes is None:
            return None
        return await evaluate_in_environment(self.workspace, policy, self.episodes)
