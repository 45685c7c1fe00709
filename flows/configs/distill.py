"""The config of the `distill` flow: that of `grpo` with a teacher, in which the grader may be left out."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from engine import import_paths
from engine.protocol import SamplingParams
from flows.configs.common import GRPOAlgorithm, GRPOConfig
from flows.configs.inputs import GraderConfig
from storage.serialization import Coefficient, Frozen, default_of
from tasks.plans import BatchPlan

NO_REWARD = "tasks.graders.rules:no_reward"
TEACHER = "teacher"
"""Name of the teacher's chain within the run."""


class TeacherConfig(Frozen):
    """The model that the policy learns from. It is never trained."""

    key: str
    """The teacher: a local Hugging Face folder, a registered model (`name` or `name@version`), or a model of the
    Hugging Face hub. Its tokens must be those of the trained model."""


class OptionalGraderConfig(GraderConfig):
    """The grader, whose rewards are added as in GRPO. By default every reward is 0, and the teacher alone teaches."""

    path: str = Field(NO_REWARD, title="Import path", pattern=import_paths.PATTERN)
    """Import path of the grader, `package.module:name`: a BaseGrader, or a function `f(thread, **arguments)`."""


class DistillAlgorithm(GRPOAlgorithm):
    """The algorithm of distillation on the policy's own samples. `samples_*` count completions."""

    teacher_beta: Coefficient = Field(default_of(BatchPlan, "teacher_beta"), gt=0)
    """Weight of the teacher: this times the log-probability of a token under the teacher, minus that under the sampler,
    is added to the token's advantage."""
    completions_per_sample: int = Field(4, ge=1)
    """Completions per prompt. With a grader, rewards are compared within them."""
    kl_beta: Coefficient = 0.0
    """Coefficient of the KL term to the policy that the run starts from. With 0, no reference model is computed."""


def check_sampling(sampling: SamplingParams) -> None:
    """Raises ValueError for sampling from a part of the vocabulary, whose log-probabilities cannot be compared with the
    teacher's."""
    defaults = SamplingParams()
    for name in ("top_p", "top_k"):
        value = getattr(sampling, name)
        if value != getattr(defaults, name):
            raise ValueError(
                f"{name}={value} draws from a part of the vocabulary, and the teacher's log-probabilities are of all "
                "of it; leave top_p and top_k out of the sampling"
            )


class DistillConfig(GRPOConfig):
    """`ostinato run distill`: a model learns from a teacher on its own completions."""

    flow: ClassVar[str] = "distill"

    teacher: TeacherConfig
    grader: OptionalGraderConfig = OptionalGraderConfig()
    algorithm: DistillAlgorithm = DistillAlgorithm()

    @property
    def teacher_key(self) -> str:
        return self.teacher.key

    @property
    def passes_before_gradient(self) -> int:
        return super().passes_before_gradient + 1

    @model_validator(mode="after")
    def _acts(self) -> Self:
        check_sampling(self.sampling)
        if self.data.heldout is not None and self.grader.path == NO_REWARD:
            raise ValueError(
                "data.heldout was given without a grader: every held-out reward would be 0; give a grader too, or "
                "leave data.heldout out"
            )
        if self.rules.dynamic_sampling:
            raise ValueError(
                "rules.dynamic_sampling leaves out prompts of equal rewards, from which the teacher teaches all the "
                "same; leave it out, or train with grpo"
            )
        return self
