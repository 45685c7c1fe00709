"""Configs of the `evaluation` flow, and the fixed suite that `recurring` judges by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from engine.protocol import SamplingParams
from engine.specs.engine import EngineSpec, LocalEngineSpec
from flows.configs.common import DatasetSource, GraderConfig, GRPOConfig, StorageConfig
from flows.configs.defaults import default_of
from flows.configs.titles import model_title
from storage.errors import InvalidKey
from storage.serialization import Frozen, canonical_json, digest
from storage.store.keys import validate_name
from tasks.graders.spec import grader_spec
from tasks.sampling.completions import PromptShard, Truncation
from tasks.sampling.grading import Grading


def checked_name(value: str) -> str:
    """A name, or a ValueError that a form can show."""
    try:
        return validate_name(value)
    except InvalidKey as error:
        raise ValueError(str(error)) from error


GREEDY = default_of(GRPOConfig, "sampling").model_copy(update={"temperature": 0.0})
"""The sampling of a training run, without its randomness."""


class SuiteDataset(Frozen):
    """Prompts to evaluate on."""

    name: str = "heldout"
    """What tables and gates call it."""
    source: DatasetSource
    """Where the prompts come from."""

    _name = field_validator("name")(checked_name)


class SuiteGrader(GraderConfig):
    """Who grades every dataset of the suite."""

    name: str = "reward"
    """What tables and gates call it."""

    _name = field_validator("name")(checked_name)

    def grading(self) -> Grading:
        """Raises GraderSpecError when there is no such grader."""
        patience = self.model_dump(exclude={"path", "arguments", "workers", "name"})
        return Grading(grader=grader_spec(self.path, self.arguments, workers=self.workers), **patience)


class Suite(Frozen):
    """What models are judged by: every dataset, graded by every grader. Equal suites give equal prompts and seeds."""

    datasets: tuple[SuiteDataset, ...] = Field(min_length=1)
    """What is asked."""
    graders: tuple[SuiteGrader, ...] = Field(min_length=1)
    """Who grades every answer."""
    sampling: SamplingParams = GREEDY
    """How completions are drawn; temperature 0 is greedy."""
    samples_per_prompt: int = Field(1, ge=1)
    """Completions of each prompt. A prompt's reward is their mean; a prompt counts once in every interval."""
    seed: int = 0
    """Decides the draws; all models draw with the same."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt. None: what the model's context leaves beside sampling.max_new_tokens."""
    truncation: Truncation = default_of(PromptShard, "truncation")
    """What happens to a longer prompt: error, left, right (cut there), or drop (counted)."""
    prompts_per_shard: int = Field(64, ge=1)
    """Prompts that are sampled, graded and committed together; a crash costs at most one such shard."""

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
        """`dataset/grader` of everything that gets a score."""
        return [cell_name(dataset.name, grader.name) for dataset in self.datasets for grader in self.graders]

    def drawn(self, dataset_sha256: str) -> str:
        """A digest of what decides the completions on one dataset, whoever grades them."""
        fields = {"sampling", "samples_per_prompt", "seed", "max_prompt_tokens", "truncation", "prompts_per_shard"}
        body = self.model_dump(mode="json", include=fields)
        return digest(canonical_json(body | {"dataset": dataset_sha256}))[:16]


class EvaluationFlowConfig(Frozen):
    """`ostinato evaluate`: models x datasets x graders, compared on the same prompts."""

    models: tuple[str, ...] = Field(min_length=1)
    """Registered models (`name`, `name@version`, `name@champion`) or local Hugging Face folders."""
    suite: Suite
    run: str = ""
    """The run's key. Empty: made from what is evaluated, so that the same evaluation again is done at once."""
    engine: EngineSpec = LocalEngineSpec()
    """Who computes. As it is by default, a deployed flow uses the deployment's engine."""
    storage: StorageConfig = StorageConfig()

    @property
    def title(self) -> str:
        """The flow run's name."""
        return f"evaluation of {', '.join(map(model_title, self.models))}"

    @field_validator("models")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        _check_unique(value, "models")
        return value


def cell_name(dataset: str, grader: str) -> str:
    """What one dataset, graded by one grader, is called."""
    return f"{dataset}/{grader}"


def semantic(suite: Suite, **inputs: Any) -> dict[str, Any]:
    """What decides an evaluation's result: the suite without names of places and patience, and its inputs' digests."""
    body = suite.model_dump(mode="json")
    body["datasets"] = [dataset.name for dataset in suite.datasets]
    for grader in body["graders"]:
        for patience in ("timeout_seconds", "retries", "concurrency", "max_masked_fraction", "workers"):
            grader.pop(patience)
    return {"evaluation": body, "inputs": inputs}


def _check_unique(names: Sequence[str], what: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} has {', '.join(twice)} more than once; give each a name of its own")
