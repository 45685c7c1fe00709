"""The evaluation of a run on held-out prompts: the same prompts before, during and after training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.protocol import SamplingParams
from engine.workspace import Workspace
from flows.callbacks import Cadence, Callback, HeldoutEvaluation
from flows.configs.common import GRPOConfig
from flows.configs.environments import ENVGRPOConfig
from flows.configs.rejection import RFTConfig
from flows.training.rollout_sources import RolloutSource
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from storage.store.tables import read_table
from tasks.evaluation.heldout import evaluate_policy
from tasks.evaluation.statistics import PairedDifference, paired_difference
from tasks.evaluation.validation_curve import reward_by_prompt
from tasks.load import load_prompts
from tasks.plans import EvaluationPlan, PromptShard

EvaluatedConfig = GRPOConfig | ENVGRPOConfig | RFTConfig
"""A config with held-out prompts and the group evaluation."""


@dataclass(frozen=True)
class HeldoutEvaluator:
    """Evaluates policies on the held-out prompts of a run."""

    workspace: Workspace
    source: RolloutSource
    """Samples and grades the answers to the prompts."""
    prompts: PromptShard | None
    """None: the run has no held-out prompts."""
    sampling: SamplingParams
    _tables: dict[str, ArtifactRef] = field(default_factory=dict, compare=False, repr=False)
    """The evaluations of this process, by the URI of the policy."""

    @classmethod
    def of_config(
        cls, workspace: Workspace, config: EvaluatedConfig, base: ArtifactRef, source: RolloutSource
    ) -> HeldoutEvaluator:
        """Evaluates on the prompts that the config names, if it names some."""
        sampling = SamplingParams.model_validate(config.sampling.model_dump() | config.evaluation.sampling)
        return cls(workspace, source, _prompts(workspace, config, base), sampling)

    async def evaluate(self, policy: PolicyRef) -> ArtifactRef | None:
        """The committed evaluation of a policy; None when the run has no held-out prompts."""
        if self.prompts is None:
            return None
        # evaluate each policy once, so that Prefect shows one task run for it
        table = self._tables.get(policy.uri)
        if table is None:
            plan = EvaluationPlan(prompts=self.prompts, sampling=self.sampling, source=self.source.plan)
            table = await evaluate_policy(self.workspace, policy, plan)
            self._tables[policy.uri] = table
        return table

    def callbacks(self, cadence: Cadence) -> list[Callback]:
        """The callback that evaluates the policy at this cadence. Empty when the run has no held-out prompts."""
        if self.prompts is None:
            return []
        return [HeldoutEvaluation(self.evaluate, cadence, prompts=len(self.prompts.rows))]

    def compare(self, before: ArtifactRef | None, after: ArtifactRef | None) -> PairedDifference | None:
        """The paired difference of the rewards of the prompts that were graded both times; None for fewer than two."""
        if before is None or after is None:
            return None
        rewards_before, rewards_after = self._rewards(before), self._rewards(after)
        pairs = []
        for prompt, first in rewards_before.items():
            second = rewards_after.get(prompt)
            if first is not None and second is not None:
                pairs.append((first, second))
        if len(pairs) < 2:
            return None
        return paired_difference([first for first, _ in pairs], [second for _, second in pairs])

    def result(self, before: ArtifactRef | None, after: ArtifactRef | None) -> dict[str, Any]:
        """The part of a run's result that compares two evaluations."""
        difference = self.compare(before, after)
        return {"heldout": None if difference is None else difference.model_dump()}

    def _rewards(self, ref: ArtifactRef) -> dict[str, float | None]:
        """The reward of each prompt; None where it could not be graded."""
        return reward_by_prompt(read_table(self.workspace.open_store(), ref, ["prompt_id", "reward"]).to_pylist())


def _prompts(workspace: Workspace, config: EvaluatedConfig, base: ArtifactRef) -> PromptShard | None:
    """The held-out prompts of a config; None when it has none."""
    if config.data.heldout_rows is None:
        return None
    loaded = load_prompts(workspace, config.data.heldout_rows, "prompt")
    return PromptShard(
        base=base,
        dataset=loaded.ref,
        index=0,
        rows=tuple(range(loaded.rows)),
        completions=config.evaluation.samples_per_prompt,
        max_prompt_tokens=config.data.max_prompt_tokens,
        truncation=config.data.truncation,
    )
