"""Held-out evaluation around a training run: the same prompts, before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.protocol import SamplingParams
from engine.workspace import Workspace
from flows.callbacks import Cadence, Callback, HeldoutEvaluation
from flows.configs.common import GRPOConfig
from flows.configs.environments import ENVGRPOConfig
from flows.configs.validation import EvaluationConfig
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from storage.store.tables import read_table
from tasks.evaluate import evaluate_policy
from tasks.evaluation.completions import EvaluationPlan
from tasks.evaluation.statistics import PairedDifference, paired_difference
from tasks.evaluation.validation_curve import reward_by_prompt
from tasks.load import load_prompts
from tasks.sampling.completions import PromptShard
from tasks.sampling.grading import Grading


def heldout_prompts(
    workspace: Workspace, config: GRPOConfig | ENVGRPOConfig, base: ArtifactRef
) -> tuple[PromptShard, SamplingParams] | None:
    """The held-out prompts of a config and how their answers are drawn; None when it has none."""
    if config.data.heldout is None:
        return None
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
    return prompts, SamplingParams.model_validate(config.sampling.model_dump() | config.evaluation.sampling)


@dataclass(frozen=True)
class Heldout:
    """The held-out prompts of a run, or none."""

    workspace: Workspace
    plan: EvaluationPlan | None

    @classmethod
    def load(cls, workspace: Workspace, config: GRPOConfig, base: ArtifactRef, grading: Grading) -> Heldout:
        drawn = heldout_prompts(workspace, config, base)
        if drawn is None:
            return cls(workspace, None)
        prompts, sampling = drawn
        return cls(workspace, EvaluationPlan(prompts=prompts, sampling=sampling, grading=grading))

    async def evaluate(self, policy: PolicyRef) -> ArtifactRef | None:
        """The evaluation of a policy; None when the run has no held-out prompts."""
        return None if self.plan is None else await evaluate_policy(self.workspace, policy, self.plan)

    def callbacks(self, config: EvaluationConfig) -> list[Callback]:
        """The evaluations on the way; those before and after are the flow's."""
        cadence = Cadence.between(config)
        return [HeldoutEvaluation(self.evaluate, cadence)] if cadence else []

    def compare(self, before: ArtifactRef | None, after: ArtifactRef | None) -> PairedDifference | None:
        """Rewards of the prompts that were graded both times, paired."""
        if before is None or after is None:
            return None
        first, second = (self._rewards(ref) for ref in (before, after))
        both = [prompt for prompt in first if first[prompt] is not None and second.get(prompt) is not None]
        if len(both) < 2:
            return None
        return paired_difference([first[p] for p in both], [second[p] for p in both])  # type: ignore[misc]

    def result(self, before: ArtifactRef | None, after: ArtifactRef | None) -> dict[str, Any]:
        difference = self.compare(before, after)
        return {"heldout": None if difference is None else difference.model_dump()}

    def _rewards(self, ref: ArtifactRef) -> dict[str, float | None]:
        return reward_by_prompt(read_table(self.workspace.open_store(), ref, ["prompt_id", "reward"]).to_pylist())
