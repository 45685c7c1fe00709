"""The config of the `evaluation` flow, and the evaluation suite, by which the `recurring` flow judges too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from engine.protocol import SamplingParams, SamplingTemperature
from engine.specs.engine import EngineSpec, LocalEngineSpec
from flows.configs.common import GraderConfig, GRPOConfig, StorageConfig
from flows.configs.defaults import default_of
from flows.configs.forms import FormConfig
from flows.configs.titles import model_title
from storage.errors import InvalidKey
from storage.serialization import Frozen, canonical_json, digest
from storage.store.keys import validate_name
from tasks.datasets.spec import HeldoutSource
from tasks.graders.spec import grader_spec
from tasks.sampling.completions import PromptShard, Truncation
from tasks.sampling.grading import Grading


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

    datasets: tuple[SuiteDataset, ...] = Field(min_length=1)
    """Datasets of prompts."""
    graders: tuple[SuiteGrader, ...] = Field(min_length=1)
    """Graders, each of which grades every answer."""
    sampling: SuiteSampling = SuiteSampling()
    """How completions are sampled. Temperature 0 is greedy."""
    samples_per_prompt: int = Field(1, ge=1)
    """Completions of each prompt. A prompt's reward is the mean of their rewards, and counts once in a confidence
    interval."""
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
        return self

    def cells(self) -> list[str]:
        """The names of all scores: `dataset/grader` of every pair."""
        cells = []
        for dataset in self.datasets:
            cells += [cell_name(dataset.name, grader.name) for grader in self.graders]
        return cells

    def drawn(self, dataset_sha256: str) -> str:
        """A digest of everything that decides the completions on one dataset. The graders do not."""
        fields = {"sampling", "samples_per_prompt", "seed", "max_prompt_tokens", "truncation", "prompts_per_shard"}
        body = self.model_dump(mode="json", include=fields)
        return digest(canonical_json(body | {"dataset": dataset_sha256}))[:16]


class EvaluationFlowConfig(FormConfig):
    """`ostinato evaluate`: models x datasets x graders, compared on the same prompts."""

    models: tuple[str, ...] = Field(min_length=1)
    """Models to evaluate: registered models (`name`, `name@version`, `name@champion`), local Hugging Face folders, or
    models of the Hugging Face hub (`owner/name`, `hf://owner/name@revision`)."""
    suite: Suite
    run: str = ""
    """Key of the run. Empty: derived from what is evaluated, so that a repeated evaluation returns at once."""
    engine: EngineSpec = LocalEngineSpec()
    """Engine that samples. In a deployment, the default means the deployment's engine."""
    storage: StorageConfig = StorageConfig()

    @property
    def title(self) -> str:
        """The name of the flow run."""
        return f"evaluation of {', '.join(map(model_title, self.models))}"

    @field_validator("models")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        _check_unique(value, "models")
        return value


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
