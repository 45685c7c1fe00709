"""The config of the `distill` flow: that of `grpo` with a teacher, in which the grader may be left out."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from engine import import_paths
from engine.losses.distillation import DistillationSpec, ForwardKLSpec, JSDSpec
from engine.protocol import MAX_TOP, SamplingParams
from flows.configs.common import GRPOAlgorithm, GRPOConfig
from flows.configs.inputs import GraderConfig, PromptDataConfig
from flows.configs.reinforcement import BatchRules, Regularisation, changed
from storage.serialization import Coefficient, Frozen, default_of
from tasks.datasets.spec import DatasetUse, DeclaredDataset, HeldoutSplit, TrainingSource
from tasks.plans import BatchPlan

NO_REWARD = "tasks.graders.rules:no_reward"
TEACHER = "teacher"
"""Name of the teacher's chain within the run."""


DIVERGENCES: dict[str, type[DistillationSpec]] = {"forward_kl": ForwardKLSpec, "jsd": JSDSpec}
"""The losses of the divergences. The reverse KL divergence is a term of the advantages."""
Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
_SAMPLED: Literal["reverse_kl"] = "reverse_kl"
_BETA, _TOP_K = default_of(JSDSpec, "beta"), 64


class TeacherConfig(Frozen):
    """The model that the policy learns from, or several of them. They are never trained."""

    key: str | None = None
    """The teacher: a local Hugging Face folder, a registered model (`name` or `name@version`), or a model of the
    Hugging Face hub. Its tokens must be those of the trained model. None: by_value has the teachers."""
    column: str | None = Field(None, exclude_if=lambda column: column is None)
    """Column of the prompts' metadata that chooses the teacher of a prompt (the dataset's metadata_columns name it)."""
    by_value: dict[str, str] = Field({}, exclude_if=lambda teachers: not teachers)
    """Value of the column -> key of the teacher, as in `key`. Every value of the dataset must be there."""

    @model_validator(mode="after")
    def _one_or_by_column(self) -> Self:
        if (self.key is None) == (not self.by_value) or (self.column is None) != (not self.by_value):
            raise ValueError(
                f"key={self.key!r}, column={self.column!r} and by_value with {len(self.by_value)} teachers were given; "
                "give a key for one teacher, or column and by_value for several"
            )
        return self

    @property
    def teacher_keys(self) -> tuple[str, ...]:
        """The keys of the teachers, each once."""
        return (self.key,) if self.key is not None else tuple(dict.fromkeys(self.by_value.values()))


class OptionalGraderConfig(GraderConfig):
    """The grader, whose rewards are added as in GRPO. By default every reward is 0, and the teacher alone teaches."""

    path: str = Field(NO_REWARD, title="Import path", pattern=import_paths.PATTERN)
    """Import path of the grader, `package.module:name`: a BaseGrader, or a function `f(thread, **arguments)`."""


class DistillAlgorithm(GRPOAlgorithm):
    """The algorithm of distillation on the policy's own samples. `samples_*` count completions."""

    teacher_beta: Coefficient = Field(default_of(BatchPlan, "teacher_beta"), gt=0)
    """Weight of the teacher. With divergence=reverse_kl, this times the log-probability of a token under the teacher,
    minus that under the sampler, is added to the token's advantage. With the others, it is a factor of the loss."""
    divergence: Divergence = Field(_SAMPLED, exclude_if=lambda divergence: divergence == _SAMPLED)
    """What is minimised between teacher and model. reverse_kl: KL(model || teacher), estimated from the sampled tokens
    as a term of their advantages. forward_kl: KL(teacher || model), computed at each token from the teacher's most
    probable tokens. jsd: the generalised Jensen-Shannon divergence with divergence_beta, computed in the same way (GKD,
    arXiv:2306.13649)."""
    divergence_beta: float = Field(_BETA, gt=0, lt=1, exclude_if=lambda beta: beta == _BETA)
    """Weight of the teacher in the mixture of divergence=jsd. Near 0 it acts as forward_kl, near 1 as reverse_kl."""
    teacher_top_k: int = Field(_TOP_K, ge=1, le=MAX_TOP, exclude_if=lambda top: top == _TOP_K)
    """Number of the teacher's most probable tokens that forward_kl and jsd tell apart. All others are one bucket. They
    are committed with the batch, 8 bytes each."""
    completions_per_sample: int = Field(4, ge=1)
    """Completions per prompt. With a grader, rewards are compared within them."""
    kl_beta: Coefficient = 0.0
    """Coefficient of the KL term to the policy that the run starts from. With 0, no reference model is computed."""

    @model_validator(mode="after")
    def _divergence_uses_its_settings(self) -> Self:
        beta, top = changed(self, "divergence_beta"), changed(self, "teacher_top_k")
        if beta and self.divergence != "jsd":
            raise ValueError(
                f"divergence_beta={self.divergence_beta} acts only with divergence='jsd', and that is "
                f"{self.divergence!r}; set it, or leave divergence_beta out"
            )
        if top and self.divergence == _SAMPLED:
            raise ValueError(
                f"teacher_top_k={self.teacher_top_k} acts only with divergence='forward_kl' or 'jsd', and that is "
                f"{self.divergence!r}; set one of them, or leave teacher_top_k out"
            )
        return self

    @property
    def top_k(self) -> int | None:
        """Number of the teacher's most probable tokens that the loss reads. None: it reads none."""
        return None if self.divergence == _SAMPLED else self.teacher_top_k

    def divergence_loss(self, norm_constant: float | None) -> DistillationSpec | None:
        """The loss of a divergence. None for reverse_kl, whose loss is that of GRPO."""
        if self.divergence == _SAMPLED:
            return None
        settings: dict[str, Any] = {"weight": self.teacher_beta, "norm": self.loss_norm, "norm_constant": norm_constant}
        if self.divergence == "jsd":
            settings["beta"] = self.divergence_beta
        return DIVERGENCES[self.divergence](**settings)


def check_divergence(
    algorithm: DistillAlgorithm, regularisation: Regularisation, rules: BatchRules, on_policy: float
) -> None:
    """Raises ValueError for settings of a policy loss that the divergence does not have, and for answers of the dataset
    with one that needs the sampler's log-probabilities."""
    if not 0 <= on_policy <= 1:
        raise ValueError(f"on_policy={on_policy} was given, a probability; give a number from 0 to 1")
    if algorithm.divergence == _SAMPLED:
        if on_policy < 1:
            raise ValueError(
                f"on_policy={on_policy} trains on answers of the dataset, which have no log-probabilities of a sampler "
                "to subtract; use divergence='forward_kl' or 'jsd', or leave on_policy out"
            )
        return
    no_effect = changed(
        algorithm, "clip_range", "clip_range_high", "dual_clip", "kl_beta", "kl_estimator", "advantage_estimator",
        "old_logprobs",
    )  # fmt: skip
    no_effect += changed(regularisation, *(set(Regularisation.model_fields) - {"norm_constant"}))
    no_effect += changed(rules, "overlong_buffer")
    if no_effect:
        raise ValueError(
            f"{no_effect} have no effect with divergence={algorithm.divergence!r}, whose loss has no advantages, no "
            "ratios and no further terms; leave them out, or use divergence='reverse_kl'"
        )



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


class DistillDataConfig(PromptDataConfig):
    """The prompts to train on, which may have answers, and held-out prompts for the evaluation."""

    on_policy: float = Field(1.0, ge=0, le=1, exclude_if=lambda share: share == 1)
    """Probability that a prompt's completions are sampled from the model; otherwise its one completion is the answer of
    its row. Each step draws for each of its prompts. 0: no completion is sampled. Below 1, every row of the dataset
    needs an answer, and algorithm.divergence is forward_kl or jsd."""

    @model_validator(mode="after")
    def _answers_follow_whole_prompts(self) -> Self:
        if self.on_policy < 1 and self.truncation in ("left", "right"):
            raise ValueError(
                f"truncation={self.truncation!r} cuts prompts, and with on_policy={self.on_policy} their answers would "
                "follow a cut prompt; use truncation='drop' or 'error'"
            )
        return self

    @property
    def sources(self) -> dict[str, tuple[TrainingSource, DatasetUse]]:
        return {"dataset": (self.train, "prompt" if self.on_policy == 1 else "completion")}

    @property
    def heldout_rows(self) -> DeclaredDataset | None:
        if isinstance(self.heldout, HeldoutSplit):
            return self.heldout.part(self.train, "heldout")
        return self.heldout

    @property
    def heldout_use(self) -> DatasetUse:
        return "prompt"


class DistillConfig(GRPOConfig):
    """`ostinato run distill`: a model learns from a teacher on its own completions."""

    flow: ClassVar[str] = "distill"

    teacher: TeacherConfig
    data: DistillDataConfig
    grader: OptionalGraderConfig = OptionalGraderConfig()
    algorithm: DistillAlgorithm = DistillAlgorithm()

    @property
    def teacher_keys(self) -> tuple[str, ...]:
        return self.teacher.teacher_keys

    @property
    def passes_before_gradient(self) -> int:
        if self.algorithm.divergence == _SAMPLED:
            return super().passes_before_gradient + 1
        return 2  # sampling, and the teacher

    @model_validator(mode="after")
    def _acts(self) -> Self:
        check_sampling(self.sampling)
        check_divergence(self.algorithm, self.regularisation, self.rules, self.data.on_policy)
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
