"""Distillation (arXiv:2306.13649, arXiv:2306.08543): a model learns from a teacher, as a rule on its own completions.

The model samples completions, and a frozen teacher gives the log-probability of each of their tokens. Tokens that the
teacher finds more probable than the model does become more probable, the others less, which lowers the reverse KL
divergence to the teacher. So every token carries a signal, where a grader gives one number per completion, and the
model learns from the mistakes that it makes itself, where fine-tuning on the teacher's answers shows it none. Choose it
when a better model with the same tokenizer exists. With a grader, its advantages and the teacher's term add.

The term of a token is its own log-ratio alone (a discount factor of 0), clipped and corrected as GRPO's advantages are.
With divergence="forward_kl" or "jsd", the loss is that divergence at each token instead, computed from the teacher's
most probable tokens, and answers of the dataset may take the place of completions. The teacher's log-probabilities are
committed with the batch. The loop is GRPO's.

    ostinato run distill --config examples/distill.yaml
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from pydantic import JsonValue

from engine.errors import BadSpec
from engine.handles import InferenceModel, TrainingModel
from engine.text.stored_models import context_length_of, tokenizer_of
from engine.text.threads import StringThread
from flows.configs.distill import DistillAlgorithm, DistillConfig, check_divergence, check_sampling
from flows.configs.reinforcement import Regularisation
from flows.grpo import GRPO
from flows.runs.checked_flow import checked_flow
from flows.training.arguments import accept_aliases
from flows.training.options import DistillOptions, read_options
from flows.training.rollout_flow import train_on_rollouts
from flows.training.rollout_sources import RolloutSource
from storage.chain.records import PolicyRef
from storage.store.tables import read_column
from tasks.batches.teachers import of_prompt
from tasks.datasets.load import LoadedDataset
from tasks.graders.base import BaseGrader
from tasks.graders.rules import no_reward
from tasks.graders.spec import GraderSpec, grader_spec
from tasks.plans import BatchPlan, Grading


@accept_aliases()
class Distillation(GRPO):
    """Trains `model` in place on its completions of `dataset`, scored by `teacher`; its other arguments are GRPO's.

    `teacher`: a frozen model with the same tokens (`builder.spawn_inference("teacher")`), or one for each value of the
    prompts' metadata `teacher_column`. Without a grader, every reward is 0; with another divergence than reverse_kl,
    rewards are reported and not trained on. The defaults are in flows.configs.distill.DistillAlgorithm.
    """

    stage = "distill"
    length = "max_num_distill_steps"
    algorithm_type = DistillAlgorithm
    options_type = DistillOptions

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        teacher: InferenceModel | Mapping[str, InferenceModel],
        grader: BaseGrader | GraderSpec | Grading | RolloutSource | None = None,
        *,
        max_num_distill_steps: int | None = None,
        **options: Unpack[DistillOptions],
    ) -> None:
        if grader is None:
            grader = grader_spec(f"{no_reward.__module__}:{no_reward.__name__}")
        # GRPO's constructor does not know the options of the teacher
        super(GRPO, self).__init__(
            dataset, model, grader, options, max_steps=max_num_distill_steps, lr=options.get("lr")
        )
        check_sampling(model.sampling)
        assert isinstance(self.algorithm, DistillAlgorithm)
        self.on_policy = options.get("on_policy", 1.0)
        # the settings as they were given: staleness changes those of a policy loss
        chosen = read_options(Regularisation, options, options.get("regularisation"))
        check_divergence(self.algorithm, chosen, self.rules, self.on_policy)
        self.teacher_beta, self.teacher_top_k = self.algorithm.teacher_beta, self.algorithm.top_k
        self.divergence_loss = self.algorithm.divergence_loss(self.regularisation.norm_constant)
        # the teachers
        self.teacher_column = options.get("teacher_column")
        if isinstance(teacher, Mapping) != (self.teacher_column is not None):
            raise ValueError(
                f"teacher_column={self.teacher_column!r} was given with "
                f"{'a mapping of teachers' if isinstance(teacher, Mapping) else 'one teacher'}; give one teacher, or a "
                "mapping from values of the column to teachers with the column"
            )
        self.teacher = teacher
        self._teachers: dict[str, Any] = {}

    async def run(self) -> PolicyRef:
        teachers = self.teacher if isinstance(self.teacher, Mapping) else {"": self.teacher}
        for teacher in teachers.values():
            check_teacher(self.model, teacher, prompt_tokens=self.max_prompt_tokens)
        if self.teacher_column is None:
            self._teachers = {"teacher": await teachers[""].policy()}
        else:
            check_teacher_values(self.load_dataset(), self.model, teachers, self.teacher_column)
            policies = {value: await teacher.policy() for value, teacher in teachers.items()}
            self._teachers = {"teachers": policies, "teacher_column": self.teacher_column}
        return await super().run()

    def batch_plan(self, start: PolicyRef, kl_beta: float) -> BatchPlan:
        plan = super().batch_plan(start, kl_beta)
        update = {**self._teachers, "teacher_beta": self.teacher_beta}
        if self.divergence_loss is not None:
            # The loss reads no old log-probabilities. Those of its own forward pass show the gap to the sampler.
            sampled = self.on_policy == 1
            old = "forward" if plan.old_logprobs == "forward" and sampled else "sampler"
            update |= {"teacher_top_k": self.teacher_top_k, "dataset_answers": not sampled, "old_logprobs": old}
        return plan.model_copy(update=update)

    def _loss_settings(self, kl_beta: float) -> dict[str, JsonValue]:
        return super()._loss_settings(kl_beta) if self.divergence_loss is None else self.divergence_loss.model_dump()


def check_teacher_values(
    data: LoadedDataset, model: TrainingModel, teachers: Mapping[str, InferenceModel], column: str
) -> None:
    """Raises BadSpec, with the first prompt, if a prompt's value of the column has no teacher."""
    store = model.workspace.open_store()
    for thread, prompt in zip(read_column(store, data.ref, "thread"), read_column(store, data.ref, "id"), strict=True):
        of_prompt(teachers, StringThread.from_json(str(thread)).metadata, column, str(prompt))


def check_teacher(model: TrainingModel, teacher: InferenceModel, *, prompt_tokens: int | None) -> None:
    """Raises BadSpec, with the first id that differs, if the tokens of the teacher are not those of the model; also if
    its context is shorter than the longest completion with its prompt."""
    store = model.workspace.open_store()
    student_tokens, teacher_tokens = (tokenizer_of(store, base).token_bytes for base in (model.base, teacher.base))
    for token_id, (ours, theirs) in enumerate(zip(student_tokens, teacher_tokens, strict=False)):
        if ours != theirs:
            raise BadSpec(
                f"the teacher {teacher.base.key} has other tokens than {model.base.key}: token {token_id} is "
                f"{theirs!r} there and {ours!r} here; give a teacher with the same tokenizer"
            )
    if len(teacher_tokens) < len(student_tokens):
        raise BadSpec(
            f"the teacher {teacher.base.key} has {len(teacher_tokens)} tokens, and {model.base.key} has "
            f"{len(student_tokens)}; give a teacher with the same tokenizer"
        )
    context = context_length_of(store, teacher.base)
    longest = (prompt_tokens or 1) + model.sampling.max_new_tokens
    if context is not None and longest > context:
        raise BadSpec(
            f"the teacher {teacher.base.key} reads {context} tokens, and a prompt with its completion may have "
            f"{longest}; lower sampling.max_new_tokens and data.max_prompt_tokens, or give a teacher with a longer "
            "context"
        )


@checked_flow()
async def distill(config: DistillConfig) -> dict[str, Any]:
    """Trains a model on its own completions with a teacher, evaluates it before and after on held-out prompts,
    publishes it and reports.

    Args:
        config: what to train, on which prompts, by which teacher.
    """
    return await train_on_rollouts(config, Distillation)
