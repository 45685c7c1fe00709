"""The inputs of a run: its model, its datasets, and its grader."""

from __future__ import annotations

from pydantic import Field, JsonValue, field_validator

from engine import import_paths
from engine.protocol import PublishDtype
from engine.specs.adapters import FullSpec, LoraSpec
from storage.errors import InvalidKey
from storage.serialization import Frozen, default_of
from storage.store.keys import validate_name
from tasks.datasets.spec import DatasetUse, DeclaredDataset, HeldoutRows, HeldoutSplit, TrainingSource
from tasks.graders.spec import Workers
from tasks.plans import Grading, PromptShard, Truncation


class ModelConfig(Frozen):
    """The model to train."""

    key: str
    """Model to start from: a local Hugging Face folder, a registered model (`name` or `name@version`), or a model of
    the Hugging Face hub (`owner/name`, `hf://owner/name@revision`). A folder has precedence over the hub."""
    name: str = "policy"
    """Name of the model within the run."""
    publish_as: str | None = None
    """Registry name of the trained model. None: the run's key."""
    publish_dtype: PublishDtype = "base"
    """Type of the weights of the published model. Training itself keeps them in float32. base: the type of the model
    that training starts from."""
    publish_unchanged: bool = False
    """Publish the model also if no step of the run taught it anything, so that it is the model that training started
    from."""
    adapter: LoraSpec | None = None
    """LoRA adapter to train instead of all weights; several runs on one base model then share its memory. `{}` is an
    adapter of rank 16. None: all weights are trained."""

    @property
    def trainable(self) -> FullSpec | LoraSpec:
        """The part of the weights that is trained."""
        return self.adapter or FullSpec()

    @field_validator("name", "publish_as")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        try:
            return None if value is None else validate_name(value)
        except InvalidKey as error:
            raise ValueError(str(error)) from error


def default_model_name(run: str) -> str:
    """Returns the registry name of a run's model if none is configured: the run key with - in place of /."""
    return run.replace("/", "-")


class DataConfig(Frozen):
    """The dataset to train on."""

    train: TrainingSource
    """Dataset to train on."""
    heldout: HeldoutRows | None = None
    """Rows of the measurements, on which the model is never trained. None: no measurements."""

    @property
    def sources(self) -> dict[str, tuple[TrainingSource, DatasetUse]]:
        """The datasets that the config names to train on with the use of each, in the order of the stages, by the name
        that the run gives them. `train` is "dataset", the first."""
        return {"dataset": (self.train, "completion")}

    @property
    def inputs(self) -> dict[str, tuple[DeclaredDataset, DatasetUse]]:
        """The rows to train on: `sources`, without the rows that a split holds out."""
        if not isinstance(self.heldout, HeldoutSplit):
            return dict(self.sources)
        return {name: (self.heldout.part(source, "train"), use) for name, (source, use) in self.sources.items()}

    @property
    def heldout_rows(self) -> DeclaredDataset | None:
        """The held-out rows: a dataset of its own, or a part of the source with the same use. None: there are none."""
        if not isinstance(self.heldout, HeldoutSplit):
            return self.heldout
        source = next(source for source, use in self.sources.values() if use == self.heldout_use)
        return self.heldout.part(source, "heldout")

    @property
    def heldout_use(self) -> DatasetUse:
        """The use of the held-out rows: that of the training rows."""
        return self.sources["dataset"][1]


class PromptDataConfig(DataConfig):
    """The prompts to train on, and held-out prompts for the evaluation."""

    heldout: HeldoutRows | None = None
    """Prompts of the evaluation, on which the model is never trained. None: no evaluation."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt, in tokens. None: the model's context less sampling.max_new_tokens."""
    truncation: Truncation = default_of(PromptShard, "truncation")
    """What happens to a prompt longer than max_prompt_tokens. error: the run fails. left, right: the prompt is cut on
    that side. drop: the prompt is left out before batches are formed."""

    @property
    def sources(self) -> dict[str, tuple[TrainingSource, DatasetUse]]:
        return {"dataset": (self.train, "prompt")}


class GraderConfig(Frozen):
    """The grader, which rewards completions."""

    path: str = Field(title="Import path", pattern=import_paths.PATTERN)
    """Import path of the grader, `package.module:name`: a BaseGrader, or a function `f(thread, **arguments)`."""
    arguments: dict[str, JsonValue] = {}
    """Keyword arguments of the grader: of the constructor of a class, or of a function besides the thread."""
    workers: Workers = "none"
    """Where the grader runs. none: in the run's process. local: in worker processes on this machine, so that a grader
    that crashes the interpreter fails only its grade. cluster: in worker processes on every machine of a Ray
    cluster."""
    timeout_seconds: float = Field(default_of(Grading, "timeout_seconds"), gt=0)
    """Time limit of one attempt at a grade, in seconds. The time in which a judge model waits for its engine is not
    counted."""
    retries: int = Field(default_of(Grading, "retries"), ge=0)
    """Further attempts at a grade that failed. After the last one, the completion is masked: it is not trained on."""
    concurrency: int = Field(default_of(Grading, "concurrency"), ge=1)
    """Number of grades that are computed at the same time."""
    max_masked_fraction: float = Field(default_of(Grading, "max_masked_fraction"), ge=0, le=1)
    """Largest fraction of a shard's completions that may stay without a grade. The run fails above it."""
