"""The interface of an engine. Implemented in this process (`LocalEngine`) and over HTTP (`EngineClient`).

An engine works on token ids, not on text. A call that depends on weights names a `PolicyRef`, and the engine loads or
rebuilds that policy. `epoch` is the fencing epoch of the caller's lease: the engine raises `Fenced` when it is lower
than the newest epoch of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from engine.errors import BadSpec
from engine.models.images import Images, check_images
from engine.models.samples import FloatArray, LossMask, TokenArray, as_loss_mask, as_token_ids
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import CommitRecord, Numerics, PolicyRef, Root, StepOldLogprobs, StepRequest
from storage.serialization import MAX_TEMPERATURE, MIN_TEMPERATURE, Frozen, Temperature
from storage.store.artifacts import ArtifactRef, Provenance

TokenIds = list[int]
StopReason = Literal["eos", "stop", "length", "interrupted"]
"""Why a completion has no further token. interrupted: it has not ended (see GenerateRequest.interruptible)."""
MAX_TENSOR_PARALLEL = 1 << 16

OnToken = Callable[[int, int, float], None]
"""Called for each sampled token with (index of the prompt in the call, token id, logprob in nats). It runs in the
thread that samples, so it must be quick. An error that it raises ends the call."""


def _validate_temperature(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"{temperature} is too small; give at least {MIN_TEMPERATURE}, or 0 for greedy decoding")
    return temperature


SamplingTemperature = Annotated[
    float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False), AfterValidator(_validate_temperature)
]
"""0 for greedy decoding, or the temperature to sample at."""
StopTokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


def _validate_stop_string(text: str) -> str:
    if not text:
        raise ValueError("an empty stop string would end every completion; give text")
    if "\N{REPLACEMENT CHARACTER}" in text:
        raise ValueError("it holds U+FFFD, which stands for bytes that are no character; give the text without it")
    return text


StopString = Annotated[str, Field(max_length=1000), AfterValidator(_validate_stop_string)]
StopStringTuple = Annotated[
    tuple[StopString, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
"""A single string is one stop string."""
MOST_STOP_STRINGS = 16


class SamplingParams(Frozen):
    """Sampling parameters of completions. The sampler returns logprobs under the distribution that they define."""

    temperature: SamplingTemperature = 1.0
    """Sampling temperature. 0 decodes greedily and returns logprobs at temperature 1."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: sample from the smallest set of most probable tokens whose total probability reaches this."""
    top_k: int = Field(0, ge=0, lt=1 << 31)
    """Sample from the k most probable tokens. 0: from all tokens."""
    max_new_tokens: int = Field(128, ge=1, lt=1 << 31)
    """Maximum length of a completion, in tokens. Longer completions are cut."""
    min_new_tokens: int = Field(0, ge=0, lt=1 << 31)
    """Minimum length of a completion, in tokens: the end-of-sequence tokens are masked before it. For each of these
    tokens the sampler's logprob exceeds the trainer's by -ln(1 - p(end)), which matters with old_logprobs="sampler"."""
    stop_token_ids: tuple[StopTokenId, ...] = ()
    """Token ids that end a completion, in addition to the model's end-of-sequence ids."""
    stop: StopStringTuple = Field((), max_length=MOST_STOP_STRINGS, exclude_if=lambda strings: not strings)
    """Strings that end a completion. The token that completes the first of them is the last token of the completion.
    Only text after the first min_new_tokens tokens counts. Empty: completions end at no string."""
    json_schema: str | None = Field(None, max_length=100_000, exclude_if=lambda schema: schema is None)
    """JSON schema that completions fit, as text. Each token is sampled from those that can continue a JSON value of the
    schema, or end it where it is complete; all others get probability 0 before top_k and top_p. The logprobs are those
    of this masked distribution, not the model's own. A completion that max_new_tokens cuts is not complete. None: no
    constraint."""
    ignore_eos: bool = Field(False, exclude_if=lambda ignored: not ignored)
    """Do not stop at the model's end-of-sequence ids, so that all completions have the same length. For benchmarks."""

    @model_validator(mode="after")
    def _schema_ends_the_completion(self) -> Self:
        if self.json_schema is None:
            return self
        if self.min_new_tokens or self.ignore_eos:
            raise ValueError(
                f"a completion that fits json_schema ends where its JSON is complete, and min_new_tokens="
                f"{self.min_new_tokens} and ignore_eos={self.ignore_eos} were given; leave them out"
            )
        try:
            schema = json.loads(self.json_schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json_schema is no JSON: {error}; give a JSON schema as text") from error
        if not isinstance(schema, dict):
            raise ValueError(f"json_schema is {self.json_schema:.40}; give a JSON object")
        return self


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Asks for one completion per prompt: `prompts[i]` is continued with the random numbers of `seeds[i]`.

    Raises BadSpec when the numbers of prompts, seeds, sampled tokens and images differ, and for `interrupt_after` of a
    call that is not interruptible. The engine checks the token ids."""

    policy: PolicyRef
    prompts: list[TokenIds]
    seeds: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tensor_parallel: int | None = None
    """Number of devices that share one copy of the model while it samples. None: the setting of the engine's config."""
    images: list[Images] | None = None
    """The images of each prompt. None: no prompt has images."""
    sampled: list[TokenIds] | None = None
    """The tokens of each completion that earlier calls have sampled. They follow the prompt, and the lengths, the stop
    strings and the JSON schema of `sampling` count from the first of them. None: all completions begin."""
    interruptible: bool = False
    """Whether the call ends at a token when the weights of a later policy of its chain are staged for its sampler, or
    after `interrupt_after`. Completions that have not ended then have the stop reason "interrupted"."""
    interrupt_after: float | None = None
    """Seconds of sampling after which an interruptible call ends. None: no such limit."""
    steps_ahead: int = 0
    """Number of steps that are trained before the one that the completions are for. Of the waiting calls of a run,
    those with the fewest are sampled first, and of these, those whose completions have begun."""

    @property
    def order(self) -> tuple[int, bool]:
        """The place among the waiting calls of a run: smaller ones go first."""
        return self.steps_ahead, self.sampled is None

    def __post_init__(self) -> None:
        # The number of prompts, seeds and images must be equal. Their seeds must fit into int64 for the wire.
        prompts = len(self.prompts)
        if len(self.seeds) != prompts:
            raise BadSpec(f"{prompts} prompts were given with {len(self.seeds)} seeds; give one seed per prompt")
        for seed in self.seeds:
            if not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63:
                raise BadSpec(f"the seed {seed!r:.40} was given; give a signed integer of 64 bits")
        if self.tensor_parallel is not None and not 1 <= self.tensor_parallel <= MAX_TENSOR_PARALLEL:
            raise BadSpec(f"tensor_parallel={self.tensor_parallel} devices; give 1 to {MAX_TENSOR_PARALLEL}, or None")
        if self.sampled is not None and len(self.sampled) != prompts:
            raise BadSpec(
                f"{prompts} prompts were given with the sampled tokens of {len(self.sampled)} completions; give a list "
                "per prompt, which may be empty"
            )
        if self.interrupt_after is not None and not (self.interruptible and self.interrupt_after > 0):
            raise BadSpec(
                f"interrupt_after={self.interrupt_after} was given with interruptible={self.interruptible}; give "
                "seconds above 0 and interruptible=True, or leave it out"
            )
        if not 0 <= self.steps_ahead < 1 << 31:
            raise BadSpec(f"steps_ahead={self.steps_ahead} was given; give a number of steps from 0")
        if self.images is None:
            return
        if len(self.images) != prompts:
            raise BadSpec(f"{prompts} prompts were given with images of {len(self.images)}; give a tuple per prompt")
        for prompt, images in zip(self.prompts, self.images, strict=True):
            check_images(images, len(prompt))


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled tokens of one prompt. They include the end-of-sequence token if one was sampled, and none of
    `GenerateRequest.sampled`."""

    token_ids: TokenIds
    logprobs: list[float]
    """Logprob of each token in nats, under the distribution that it was sampled from."""
    stop_reason: StopReason


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """A sequence of L tokens whose trained tokens are scored.

    Lists become arrays. `loss_mask` may be given as weights: tokens of a weight above 0 are trained. Raises BadSpec for
    a sequence without tokens, for what `as_token_ids` and `as_loss_mask` reject, and for images outside the
    sequence."""

    token_ids: TokenArray
    loss_mask: LossMask
    group: str = ""
    """Sequences of one group start with the same prompt, which the engine computes once."""
    images: Images = ()

    def __post_init__(self) -> None:
        # The class is frozen, so its fields are set this way.
        token_ids = as_token_ids(self.token_ids, "a sequence")
        if len(token_ids) == 0:
            raise BadSpec("a sequence has no tokens; give at least one, or leave the sequence out")
        object.__setattr__(self, "token_ids", token_ids)
        object.__setattr__(self, "loss_mask", as_loss_mask(self.loss_mask, len(token_ids), "a sequence"))
        if self.images:
            check_images(self.images, len(token_ids))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenSequence):
            return NotImplemented
        same_ids = np.array_equal(self.token_ids, other.token_ids)
        same_mask = np.array_equal(self.loss_mask, other.loss_mask)
        return same_ids and same_mask and (self.group, self.images) == (other.group, other.images)

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def teacher_top_ids(self) -> None:
        """None: only the trained tokens are scored."""
        return None


@dataclass(frozen=True, slots=True)
class LogprobsRequest:
    """Asks for the logprobs (or the values) of the trained tokens of each sequence under a policy.

    Raises BadSpec for a number out of bounds."""

    policy: PolicyRef
    sequences: list[TokenSequence]
    temperature: float = 1.0
    """The logits are divided by this number, as in StepRequest.temperature."""
    max_tokens: int | None = None
    """Maximum packed tokens of one forward pass. None: the engine's `max_tokens_per_forward`."""

    def __post_init__(self) -> None:
        _check_scoring(self.temperature, self.max_tokens)

    @property
    def images(self) -> list[Images]:
        """The images of each sequence."""
        return [sequence.images for sequence in self.sequences]


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """Some rows of a committed table of rollouts, or of a batch. Raises BadSpec for another kind of table."""

    table: ArtifactRef
    rows: npt.NDArray[np.bool_]
    """Which rows of the table are meant."""

    def __post_init__(self) -> None:
        if self.table.kind not in GROUP_COLUMNS:
            kinds = " or ".join(GROUP_COLUMNS)
            raise BadSpec(f"{self.table.key} is a table of kind {self.table.kind!r}; give {kinds}")


GROUP_COLUMNS = {"rollouts": "prompt_id", "batch": "group"}
"""The column with the group of a row (`TokenSequence.group`), by the kind of table that can be scored."""


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """Asks for the logprobs (or the values) of the trained tokens of committed rows under a policy. The engine reads
    the rows. Raises BadSpec for a number out of bounds."""

    policy: PolicyRef
    tables: list[TableRows]
    temperature: float = 1.0
    """The logits are divided by this number, as in StepRequest.temperature."""
    max_tokens: int | None = None
    """Maximum packed tokens of one forward pass. None: the engine's `max_tokens_per_forward`."""

    def __post_init__(self) -> None:
        _check_scoring(self.temperature, self.max_tokens)


MAX_TOP = 1024
"""Largest number of tokens per position whose logprobs a call returns and a batch has."""


@dataclass(frozen=True, slots=True)
class TopRowsRequest(RowsRequest):
    """Asks for the most probable tokens of a policy before each trained token of committed rows. Raises BadSpec for a
    number out of bounds."""

    top: int = field(kw_only=True)
    """Number of tokens per position."""

    def __post_init__(self) -> None:
        # super() without arguments does not work in a class with slots
        RowsRequest.__post_init__(self)
        if not 1 <= self.top <= MAX_TOP:
            raise BadSpec(f"the {self.top} most probable tokens were asked for; give 1 to {MAX_TOP}")


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """The K most probable tokens before each of T trained tokens, the most probable one first."""

    token_ids_TK: npt.NDArray[np.int32]
    logprobs_TK: FloatArray
    """Their logprobs in nats."""


def _check_scoring(temperature: float, max_tokens: int | None) -> None:
    """Raises BadSpec for a number out of bounds."""
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise BadSpec(
            f"logprobs at temperature {temperature} were asked for; give {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g} (1 "
            "for tokens that were decoded greedily)"
        )
    if max_tokens is not None and not 1 <= max_tokens < 1 << 31:
        raise BadSpec(f"max_tokens={max_tokens} tokens per forward; give 1 to {(1 << 31) - 1}, or None")


class MeasureRequest(Frozen):
    """Asks for a loss of a committed batch under a policy, without a gradient."""

    policy: PolicyRef
    batch: ArtifactRef
    loss: dict[str, JsonValue]
    """A loss (engine.losses.spec) as JSON, as in StepRequest.loss."""
    old_logprobs: StepOldLogprobs = "trainer"
    """Where the old logprobs are, as in StepRequest.old_logprobs."""
    temperature: Temperature = 1.0
    """The logits are divided by this number, as in StepRequest.temperature."""
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    """Maximum packed tokens of one forward pass. None: the engine's `max_tokens_per_forward`."""


class Measurement(Frozen):
    """A loss of a batch. A unit is a pair, or for other losses a row of the batch. Units are in the order of the batch.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")  # a loss may overflow

    metrics: dict[str, float]
    """The metrics of a step on the batch as one minibatch, such as loss and tokens, except grad_norm."""
    losses: tuple[float, ...]
    """Loss of each unit: of a pair, or the sum over a row's trained tokens, before it is normalised."""
    tokens: tuple[int, ...]
    """Trained tokens of each unit."""
    margins: tuple[float, ...] | None = None
    """Margin of each pair (engine.losses.base.PairLoss). None if the loss is not one of pairs."""


class PolicySpec(Frozen):
    """Names a new chain (run, stage, model) and the root that it starts from."""

    run: str
    stage: str
    model: str
    root: Root


class ActorCount(Frozen):
    """Numbers of Ray actors of one kind that an engine runs."""

    wanted: int = 0
    alive: int = 0
    restarts: int = 0
    """Restarts of these actors since the engine started."""
    leaving: int = 0
    """Actors that finish their work and end. They are not among the wanted."""


class SamplerScale(Frozen):
    """The result of a change of the number of samplers. It takes effect while the engine works on."""

    before: int
    """vLLM replicas of each model before the change."""
    replicas: ActorCount
    """All replicas now. Those that are wanted and not alive start, or wait for machines."""


class ClusterInfo(Frozen):
    """The Ray cluster that an engine is connected to, and the engine's actors on it."""

    nodes: int
    gpus: float
    free_gpus: float
    ranks: ActorCount = ActorCount()
    replicas: ActorCount = ActorCount()


class EngineInfo(Frozen):
    """The numerics, the memory, the speed and the devices of an engine."""

    numerics: Numerics
    """Backend, precision, layout and library versions. They are stored in every commit record."""
    store_id: str
    """Identity of the store that the engine works on (storage.store.objects.store_id). A caller that uses a different
    store would not see the engine's commits."""
    memory_bytes: int
    """Bytes that the engine may fill with weights, optimizer moments and gradients."""
    memory_used_bytes: int
    disk_free_bytes: int | None = None
    """Free disk space of the store. None when the store cannot tell, as with S3."""
    operations_per_second: float
    """Measured speed of a large matrix product in the compute precision: 2 operations per multiply-add."""
    devices: int = 1
    """Number of GPUs that train, or that sample if more do. Without GPUs, each machine counts as one."""
    cluster: ClusterInfo | None = None
    """None while the engine is not connected to Ray."""
    spec: LocalEngineSpec = LocalEngineSpec()
    """The engine's config, with the device, the precision and the number of ranks that it uses in place of "auto"."""


PublishDtype = Literal["base", "float32", "bfloat16", "float16"]
"""Type of the weights of a published model. base: that of the model that the training started from."""

ExportFormat = Literal["bfloat16", "float16", "float32", "adapter", "gguf"]
"""Format in which a published model is written to a folder: all weights in one of these types, the adapter alone, or a
GGUF file."""


class Engine(Protocol):
    """The calls of an engine.

    They raise `TransientEngineError` and `PermanentEngineError` (engine.errors), and the errors of storage."""

    async def import_model(self, source: str, *, provenance: Provenance) -> ArtifactRef:
        """Returns a registered model by its key, or publishes a local folder or a model of the hub in the registry.
        Idempotent."""
        ...

    async def create_policy(self, spec: PolicySpec) -> PolicyRef:
        """Commits the root of a chain and returns policy 0. Idempotent."""
        ...

    async def generate(self, request: GenerateRequest, *, epoch: int = 0) -> list[Completion]:
        """Returns the completions, in the order of the prompts."""
        ...

    async def logprobs(self, request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]:
        """Returns, for each sequence, the logprob in nats of each trained token, computed by the trainer.

        Raises BadSpec for a policy with a scalar head (engine.specs.adapters)."""
        ...

    async def values(self, request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]:
        """Returns, for each sequence, the output of the scalar head at the position before each trained token.

        The trainer computes it, and `temperature` has no effect. Raises BadSpec for a policy with a language head."""
        ...

    async def logprobs_of_rows(self, request: RowsRequest, *, epoch: int = 0) -> FloatArray:
        """Returns the `logprobs` of the sequences that the rows hold, one row after the other: (T,) for T trained
        tokens. No token passes through the caller.

        Raises BadSpec if a table has another number of rows than the request says, and the errors of `logprobs`."""
        ...

    async def top_logprobs_of_rows(self, request: TopRowsRequest, *, epoch: int = 0) -> TopLogprobs:
        """Returns the `top` most probable tokens before each trained token of the rows, as `logprobs_of_rows` returns
        the logprobs of the trained tokens: (T, top) ids and logprobs.

        Raises BadSpec if the model has fewer tokens, and the errors of `logprobs_of_rows`."""
        ...

    async def values_of_rows(self, request: RowsRequest, *, epoch: int = 0) -> FloatArray:
        """Returns the `values` of the sequences that the rows hold, as `logprobs_of_rows` returns logprobs."""
        ...

    async def measure(self, request: MeasureRequest, *, epoch: int = 0) -> Measurement:
        """Computes a loss of a committed batch, and its metrics, under a policy. Nothing changes.

        Raises BadSpec for a loss that does not fit the policy's head, and for a batch that lacks what the loss needs.
        """
        ...

    async def take_gradient_step(self, request: StepRequest, *, epoch: int = 0) -> CommitRecord:
        """Takes the step exactly once. Returns its commit record, which this call or an earlier one committed."""
        ...

    async def stage_policy(self, policy: PolicyRef, *, epoch: int = 0) -> None:
        """Takes a copy of the policy's weights for the samplers, so that `generate` for it does not need the trainer
        after its chain has moved on. Idempotent.

        It does nothing if the samplers share the trainer's weights."""
        ...

    async def begin_checkpoint(
        self, policy: PolicyRef, *, provenance: Provenance, name: str | None = None, epoch: int = 0
    ) -> None:
        """Writes a checkpoint locally and uploads it in the background, so that the next step need not wait.

        `save_checkpoint` waits for the upload. Idempotent."""
        ...

    async def save_checkpoint(
        self, policy: PolicyRef, *, provenance: Provenance, name: str | None = None, epoch: int = 0
    ) -> ArtifactRef:
        """Stores the weights and the optimizer of a policy as safetensors and returns the checkpoint. Idempotent."""
        ...

    async def export_model(
        self,
        policy: PolicyRef,
        model_name: str,
        *,
        provenance: Provenance,
        dtype: PublishDtype = "base",
        epoch: int = 0,
    ) -> ArtifactRef:
        """Publishes the policy as a plain Hugging Face folder in the registry, with weights of this type. Idempotent.
        """
        ...

    async def release(self, run: str, *, epoch: int = 0) -> None:
        """Tells the engine that the caller is done with the run for now: its weights are evicted first.

        It does nothing when no weights are loaded, or when a newer epoch of the run is in use."""
        ...

    async def info(self) -> EngineInfo: ...

    async def close(self) -> None: ...
