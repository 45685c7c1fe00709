"""The config of the `evaluation` flow, and the evaluation suite, by which the `recurring` flow judges too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, field_validator, model_validator

from engine.protocol import SamplingParams, SamplingTemperature
from engine.specs.engine import EngineSpec, LocalEngineSpec
from flows.configs.common import GRPOConfig, StorageConfig, model_title
from flows.configs.forms import FormConfig
from flows.configs.inputs import GraderConfig
from flows.configs.validation import checked_run
from storage.errors import InvalidKey
from storage.serialization import Frozen, canonical_json, default_of, digest
from storage.store.keys import validate_name
from tasks.datasets.spec import HeldoutSource
from tasks.evaluation.harness import HarnessTasks
from tasks.evaluation.several_answers import AnswerScores
from tasks.graders.spec import grader_spec
from tasks.plans import Grading, PromptShard, Truncation


def checked_name(value: str) -> str:
    """The value, if it is a valid name. Raises ValueError, which a form shows at the field."""
    try:
        return validate_name(value)
    except InvalidKey as error:
        raise ValueError(str(error)) from error


class SuiteSampling(SamplingParams):
    """Sampling parameters of an evaluation: those of a training run, without its randomness."""

    max_new_tokens: int = Field(default_of(GRPOConfig, "sampling").max_new_tokens, ge=1)
    """Maximum length of a completion, in tokens. Longer completions are cut."""
    temperature: SamplingTemperature = 0.0
    """Sampling temperature. 0 is greedy."""


class SuiteDataset(Frozen):
    """A dataset of prompts to evaluate on."""

    name: str = "heldout"
    """Name of the dataset in tables and gates."""
    source: HeldoutSource
    """Dataset of the prompts."""

    _name = field_validator("name")(checked_name)


class SuiteGrader(GraderConfig):
    """A grader of every dataset of the suite."""

    name: str = "reward"
    """Name of the grader in tables and gates."""

    _name = field_validator("name")(checked_name)

    def grading(self) -> Grading:
        """Raises GraderSpecError when there is no such grader."""
        limits = self.model_dump(exclude={"path", "arguments", "workers", "name"})
        return Grading(grader=grader_spec(self.path, self.arguments, workers=self.workers), **limits)


class Suite(Frozen):
    """An evaluation suite: every dataset is graded by every grader. Equal suites give equal prompts and seeds."""

    # left out of dumps, so that the digests of suites stay the same
    kind: Literal["prompts"] = Field("prompts", exclude=True)
    datasets: tuple[SuiteDataset, ...] = ()
    """Datasets of prompts, to which the models give answers. Stored answers bring their prompts with them."""
    graders: tuple[SuiteGrader, ...] = Field(min_length=1)
    """Graders, each of which grades every answer, such as `[{path: tasks.graders:ExactMatch}]`."""
    sampling: SuiteSampling = SuiteSampling()
    """How completions are sampled. Temperature 0 is greedy."""
    samples_per_prompt: int = Field(1, ge=1)
    """Completions of each prompt. A prompt's reward is the mean of their rewards, and counts once in a confidence
    interval."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = Field((), exclude_if=lambda numbers: not numbers)
    """Numbers k for which pass@k is reported: the probability that at least one of k answers to a prompt is correct,
    estimated from all its answers. A prompt with fewer than k graded answers is left out."""
    majority_vote: bool = Field(False, exclude_if=lambda value: not value)
    """Whether the reward of the answer that most of a prompt's answers give is reported. Answers are compared as the
    grader extracts them, or else by their whole text."""
    correct_from: float = Field(1.0, exclude_if=lambda value: value == 1.0)
    """For pass@k, an answer is correct if its reward is at least this."""
    seed: int = 0
    """Seed of the sampling, the same for all models."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt, in tokens. None: the model's context less sampling.max_new_tokens."""
    truncation: Truncation = default_of(PromptShard, "truncation")
    """What happens to a prompt longer than max_prompt_tokens. error: the evaluation fails. left, right: the prompt is
    cut on that side. drop: the prompt is left out and counted."""
    prompts_per_shard: int = Field(64, ge=1)
    """Prompts per shard. A shard is sampled, graded and committed as a whole; a crash repeats at most one."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        _check_unique([dataset.name for dataset in self.datasets], "datasets")
        _check_unique([grader.name for grader in self.graders], "graders")
        if self.samples_per_prompt > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"samples_per_prompt={self.samples_per_prompt} at sampling.temperature=0 would be as many copies of "
                "one completion; give a temperature above 0, or samples_per_prompt=1"
            )
        _check_unique(list(map(str, self.pass_at)), "pass_at")
        if self.datasets and max(self.pass_at, default=0) > self.samples_per_prompt:
            raise ValueError(
                f"pass_at={list(self.pass_at)} needs as many samples per prompt as its largest number; "
                f"samples_per_prompt={self.samples_per_prompt} is given"
            )
        return self

    @property
    def scores(self) -> AnswerScores:
        """The scores of several answers, besides the mean reward."""
        return AnswerScores(pass_at=self.pass_at, majority_vote=self.majority_vote, correct_from=self.correct_from)

    def cells(self) -> list[str]:
        """The names of all scores: `dataset/grader` of every pair, and those of the scores of several answers."""
        cells = []
        for dataset in self.datasets:
            for grader in self.graders:
                names = [grader.name, *self.scores.names(grader.name)]
                cells += [cell_name(dataset.name, name) for name in names]
        return cells

    def drawn(self, dataset_sha256: str) -> str:
        """A digest of everything that decides the completions on one dataset. The graders do not."""
        fields = {"sampling", "samples_per_prompt", "seed", "max_prompt_tokens", "truncation", "prompts_per_shard"}
        body = self.model_dump(mode="json", include=fields)
        return digest(canonical_json(body | {"dataset": dataset_sha256}))[:16]


class PromptSuite(Suite):
    """An evaluation suite of models."""

    datasets: tuple[SuiteDataset, ...] = Field(min_length=1)
    """Datasets of prompts, to which the models give answers, such as `[{source: {kind: registered, key: sums}}]`."""


class HarnessSuite(HarnessTasks):
    """An evaluation suite of tasks of EleutherAI's lm-evaluation-harness. A model is read from its folder or, with an
    engine that is a server, asked by its OpenAI endpoint."""

    kind: Literal["lm_eval"] = "lm_eval"


def _default_kind(value: Any) -> Any:
    """A suite without a kind has prompts and graders."""
    return {"kind": "prompts"} | value if isinstance(value, dict) else value


class StoredAnswers(Frozen):
    """Answers that another system gave, as a table. They are graded as they are, without an engine."""

    name: str
    """Name of the system that gave the answers. It stands in the place of a model in tables."""
    dataset: str = "heldout"
    """Name of the dataset in tables. Systems and models are compared on datasets of the same name, prompt by prompt."""
    source: HeldoutSource
    """The table: prompts with their answers. Rows with the same prompt and metadata are one prompt with several
    answers."""
    column: str | None = Field(None, min_length=1)
    """Column of the answers: each a text, or a list of texts. Empty: the column of completions, or the last turn of the
    messages."""

    _names = field_validator("name", "dataset")(checked_name)


class EvaluationFlowConfig(FormConfig):
    """`ostinato evaluate`: models x datasets x graders, compared on the same prompts."""

    form_groups: ClassVar[dict[str, type[BaseModel]]] = {"suite": PromptSuite}
    """Of a key that may be one of several groups: the group that the page's form has fields for. Another one is written
    as YAML."""

    models: tuple[str, ...] = ()
    """Models to evaluate: registered models (`name`, `name@version`, `name@champion`), local Hugging Face folders, or
    models of the Hugging Face hub (`owner/name`, `hf://owner/name@revision`)."""
    answers: tuple[StoredAnswers, ...] = Field((), exclude_if=lambda answers: not answers)
    """Tables of stored answers to grade, besides the answers of the models or in their place."""
    suite: Annotated[Suite | HarnessSuite, Field(discriminator="kind"), BeforeValidator(_default_kind)]
    """How the models are evaluated. prompts: the datasets and graders of a suite of your own. lm_eval: tasks of the
    lm-evaluation-harness."""
    run: str = ""
    """Key of the run. Empty: derived from what is evaluated, so that a repeated evaluation returns at once."""
    engine: EngineSpec = LocalEngineSpec()
    """Engine that samples. In a deployment, the default means the deployment's engine."""
    storage: StorageConfig = StorageConfig()

    @field_validator("run")
    @classmethod
    def _is_run(cls, run: str) -> str:
        return checked_run(run)

    @property
    def title(self) -> str:
        """The name of the flow run."""
        systems = [model_title(model) for model in self.models] + [answers.name for answers in self.answers]
        return f"evaluation of {', '.join(dict.fromkeys(systems))}"

    @field_validator("models")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        _check_unique(value, "models")
        return value

    @model_validator(mode="after")
    def _has_answers(self) -> Self:
        if isinstance(self.suite, HarnessSuite):
            if self.answers or not self.models:
                raise ValueError("a suite of kind lm_eval evaluates models, and no stored answers; give models alone")
            return self
        if not self.models and not self.answers:
            raise ValueError("nothing to evaluate; give models, or answers that are stored already")
        if bool(self.models) != bool(self.suite.datasets):
            given, missing = ("models", "suite.datasets") if self.models else ("suite.datasets", "models")
            raise ValueError(f"{given} without {missing}; models answer the prompts of the suite's datasets: give both")
        _check_unique([cell_name(answers.dataset, answers.name) for answers in self.answers], "answers")
        return self


def cell_name(dataset: str, grader: str) -> str:
    """The name of the score of one dataset by one grader."""
    return f"{dataset}/{grader}"


def semantic(suite: Suite, **inputs: Any) -> dict[str, Any]:
    """What decides the result of an evaluation: the suite, without the sources of its datasets and the limits of its
    graders, and the digests of its inputs."""
    body = suite.model_dump(mode="json")
    body["datasets"] = [dataset.name for dataset in suite.datasets]
    for grader in body["graders"]:
        for limit in ("timeout_seconds", "retries", "concurrency", "max_masked_fraction", "workers"):
            grader.pop(limit)
    return {"evaluation": body, "inputs": inputs}


def _check_unique(names: Sequence[str], what: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} has {', '.join(twice)} more than once; give each a name of its own")
