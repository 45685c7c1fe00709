"""Where a loop of reinforcement learning gets its rollouts from: completions with a grader, or episodes with an
environment. A shard of completions is sampled in one task run and graded in another, a shard of episodes takes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from engine.protocol import SamplingParams
from engine.workspace import Workspace
from flows.configs.common import GRPOConfig
from flows.configs.environments import ENVGRPOConfig
from flows.configs.inputs import GraderConfig
from flows.training.arguments import grading_of
from flows.training.options import EpisodeLimits
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.environments.spec import agent_spec, environment_spec
from tasks.graders.base import BaseGrader
from tasks.graders.spec import GraderSpec, grader_spec
from tasks.plans import AgentPlan, EpisodePlan, Grading, PromptShard
from tasks.sampling.completions import generate_rollouts
from tasks.sampling.episodes import play_episodes
from tasks.sampling.grading import grade_rollouts


@runtime_checkable
class RolloutSource(Protocol):
    """The interface of a source of rollouts."""

    prompts_are_rows: ClassVar[bool]
    """Whether a row of the dataset is the whole prompt, so that its length is known before sampling."""
    samples_again: ClassVar[bool]
    """Whether a step in which no rollout got a grade samples its prompts once more."""

    @property
    def plan(self) -> Grading | EpisodePlan | AgentPlan:
        """The grader, the environment or the agent, with its limits."""
        ...

    def arguments(self) -> dict[str, Any]:
        """The argument of a training class that creates this source."""
        ...

    async def sample_and_grade(
        self, workspace: Workspace, policy: PolicyRef, shard: PromptShard, sampling: SamplingParams, *, step: int
    ) -> tuple[ArtifactRef, ArtifactRef]:
        """The committed rollouts of a shard, sampled from `policy`, and their grades."""
        ...


@dataclass(frozen=True)
class Completions:
    """Completions of the prompts, graded by a grader."""

    plan: Grading
    prompts_are_rows: ClassVar[bool] = True
    samples_again: ClassVar[bool] = True

    @classmethod
    def of_config(cls, config: GraderConfig) -> Completions:
        """Raises GraderSpecError if the grader cannot be created."""
        limits = config.model_dump(exclude={"path", "arguments", "workers"})
        return cls(Grading(grader=grader_spec(config.path, config.arguments, workers=config.workers), **limits))

    def arguments(self) -> dict[str, Any]:
        return {"grader": self.plan}

    async def sample_and_grade(
        self, workspace: Workspace, policy: PolicyRef, shard: PromptShard, sampling: SamplingParams, *, step: int
    ) -> tuple[ArtifactRef, ArtifactRef]:
        rollouts = await generate_rollouts(workspace, policy, shard, sampling, step=step)
        graded = await grade_rollouts(
            workspace, rollouts, self.plan, stage=policy.stage, step=step, shard=shard.index
        )
        return rollouts, graded


@dataclass(frozen=True)
class Episodes:
    """Episodes that begin with the prompts, in an environment that grades their turns as they are played, or played and
    graded by an agent."""

    plan: EpisodePlan | AgentPlan
    # the environment or the agent writes the prompt
    prompts_are_rows: ClassVar[bool] = False
    samples_again: ClassVar[bool] = False

    def arguments(self) -> dict[str, Any]:
        return {"environment_factory": self.plan}

    async def sample_and_grade(
        self, workspace: Workspace, policy: PolicyRef, shard: PromptShard, sampling: SamplingParams, *, step: int
    ) -> tuple[ArtifactRef, ArtifactRef]:
        episodes = await play_episodes(workspace, policy, shard, sampling, self.plan, step=step)
        # the table of episodes has the grades of their turns
        return episodes, episodes


def source_of(grader: BaseGrader | GraderSpec | Grading | RolloutSource) -> RolloutSource:
    """The source that a training class was given, or completions with the grader that it was given."""
    if isinstance(grader, RolloutSource):
        return grader
    return Completions(grading_of(grader))


def source_of_config(config: GRPOConfig | ENVGRPOConfig) -> RolloutSource:
    """The source that a flow's config describes. Raises GraderSpecError or EnvironmentSpecError if it cannot be
    created."""
    if isinstance(config, GRPOConfig):
        return Completions.of_config(config.grader)
    if config.agent is not None:
        limits = config.agent.model_dump(exclude={"path", "command"})
        return Episodes(AgentPlan(agent=agent_spec(config.agent.path, config.agent.command), **limits))
    environment = config.environment
    assert environment is not None  # the config has one of both
    limits = environment.model_dump(exclude={"path", "arguments"})
    return Episodes(EpisodePlan(environment=environment_spec(environment.path, environment.arguments), **limits))


def without_episode_limits(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a training class in environments that its base class has, too."""
    return {name: value for name, value in options.items() if name not in EpisodeLimits.__annotations__}
