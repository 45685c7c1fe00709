"""What every engine answers, whoever reaches it how: in this process, over HTTP, or as the test backend.

It speaks token ids. A call that depends on weights names the `PolicyRef` it means; the engine brings itself there.
`epoch` is the fencing epoch of the caller's lease: a lower one than the engine has seen for the run is `Fenced`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, Field

from engine.errors import BadSpec
from engine.models.images import Images, check_images
from storage.chain.records import CommitRecord, Numerics, PolicyRef, Root, StepRequest
from storage.number_types import MAX_TEMPERATURE, MIN_TEMPERATURE
from storage.serialization import Frozen
from storage.store.artifacts import ArtifactRef, Provenance

TokenIds = list[int]
StopReason = Literal["eos", "stop", "length"]
MAX_TENSOR_PARALLEL = 1 << 16

OnToken = Callable[[int, int, float], None]
"""Hears of a token as it is drawn: (index of the prompt in the call, token id, its logprob in nats). It runs in the
compute thread, so it must be quick; what it raises ends the call."""


def _greedy_or_drawn(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"{temperature} is too small; give at least {MIN_TEMPERATURE}, or 0 for greedy decoding")
    return temperature


SamplingTemperature = Annotated[
    float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False), AfterValidator(_greedy_or_drawn)
]
"""0 for greedy decoding, or a temperature to draw at."""
StopTokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class SamplingParams(Frozen):
    """How completions are drawn. The logprobs returned are those of this very distribution."""

    temperature: SamplingTemperature = 1.0
    """0 is greedy; the logprobs are then those at temperature 1."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = Field(0, ge=0, lt=1 << 31)
    """Keep the k most probable tokens; 0 keeps all."""
    max_new_tokens: int = Field(128, ge=1, lt=1 << 31)
    """A completion is cut after so many tokens."""
    min_new_tokens: int = Field(0, ge=0, lt=1 << 31)
    """No end-of-sequence before this many tokens. The sampler's logprobs are then those without it, which the trainer's
    are not: a gap of -ln(1 - p(end)) per held-back token, to mind with old_logprobs="sampler"."""
    stop_token_ids: tuple[StopTokenId, ...] = ()
    """Tokens that end a completion besides the model's own end-of-sequence ids."""
    ignore_eos: bool = Field(False, exclude_if=lambda ignored: not ignored)
    """Go on past the model's own end-of-sequence ids, which are drawn like any other token: completions of one length,
    for benchmarks."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion per entry: `prompts[i]` is continued with the random stream `seeds[i]`. Raises BadSpec where
    prompts, seeds and images do not fit together. Which token ids exist, the engine knows."""

    policy: PolicyRef
    prompts: list[TokenIds]
    seeds: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tensor_parallel: int | None = None
    """Devices that should share one copy of the model while it samples; None: as the engine's config says."""
    images: list[Images] | None = None
    """Those of each prompt; None: no prompt has any."""

    def __post_init__(self) -> None:
        prompts = len(self.prompts)
        if len(self.seeds) != prompts:
            raise BadSpec(f"{prompts} prompts were given with {len(self.seeds)} seeds; give one seed per prompt")
        for seed in self.seeds:
            if not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63:
                raise BadSpec(f"the seed {seed!r:.40} was given; give an integer of 64 bits, which has a sign")
        if self.tensor_parallel is not None and not 1 <= self.tensor_parallel <= MAX_TENSOR_PARALLEL:
            raise BadSpec(f"tensor_parallel={self.tensor_parallel} devices; give 1 to {MAX_TENSOR_PARALLEL}, or None")
        if self.images is None:
            return
        if len(self.images) != prompts:
            raise BadSpec(f"{prompts} prompts were given with images of {len(self.images)}; give a tuple per prompt")
        for prompt, images in zip(self.prompts, self.images, strict=True):
            check_images(images, len(prompt))


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens (the end-of-sequence token included, when one was sampled)."""

    token_ids: TokenIds
    logprobs: list[float]
    """Nats per token, under the distribution that was sampled from."""
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A sequence whose trained tokens (weight > 0) are scored. Both lists have length L. Raises BadSpec for a sequence
    without tokens, for weights that `check_weights` refuses, and for images outside the sequence."""

    token_ids: TokenIds
    weights: list[float]
    group: str = ""
    """Sequences of one group share a prompt; the engine computes it once."""
    images: Images = ()

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise BadSpec("a sequence has no tokens; give at least one, or leave the sequence out")
        check_weights(self.token_ids, self.weights, "a sequence")
        if self.images:
            check_images(self.images, len(self.token_ids))


def check_weights(token_ids: Sequence[int], weights: Sequence[float], name: str) -> None:
    """Raises BadSpec unless there is one finite weight of at least 0 per token, and 0 for the first. `name` says what
    has the tokens."""
    if len(weights) != len(token_ids):
        raise BadSpec(f"{name} has {len(token_ids)} tokens and {len(weights)} weights; give one weight per token")
    if not weights:
        return
    if not all(map(isfinite, weights)) or min(weights) < 0:
        wrong = next(weight for weight in weights if not isfinite(weight) or weight < 0)
        raise BadSpec(f"{name} has a token of weight {wrong}; give finite weights of at least 0")
    if weights[0] > 0:
        raise BadSpec(f"the first token of {name} has a weight above 0, but nothing predicts it; give it weight 0")


@dataclass(frozen=True, slots=True)
class LogprobsRequest:
    """The sequences whose trained tokens a policy scores. Raises BadSpec for a number out of bounds."""

    policy: PolicyRef
    sequences: list[TokenSequence]
    temperature: float = 1.0
    """Logits are divided by it, as StepRequest.temperature says."""
    max_tokens: int | None = None
    """Packed tokens of one forward pass, at most. None: as the engine is configured."""

    def __post_init__(self) -> None:
        if not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise BadSpec(
                f"logprobs at temperature {self.temperature} were asked for; give {MIN_TEMPERATURE} to "
                f"{MAX_TEMPERATURE:g} (1 for tokens that were drawn greedily)"
            )
        if self.max_tokens is not None and not 1 <= self.max_tokens < 1 << 31:
            raise BadSpec(f"max_tokens={self.max_tokens} tokens per forward; give 1 to {(1 << 31) - 1}, or None")

    @property
    def images(self) -> list[Images]:
        """Those of each sequence."""
        return [sequence.images for sequence in self.sequences]


class PolicySpec(Frozen):
    """A new chain: where it lives and what it starts from."""

    run: str
    stage: str
    model: str
    root: Root


class ActorCount(Frozen):
    """Processes of one kind that an engine runs on Ray."""

    wanted: int = 0
    alive: int = 0
    restarts: int = 0
    """Starts after the first, since the engine began."""


class ClusterInfo(Frozen):
    """The Ray cluster that an engine is connected to, and its own actors there."""

    nodes: int
    gpus: float
    free_gpus: float
    ranks: ActorCount = ActorCount()
    replicas: ActorCount = ActorCount()


class EngineInfo(Frozen):
    """What the engine is and what it has room for."""

    numerics: Numerics
    """Enters every record."""
    store_id: str
    """Which store it works on: see storage.store.identity.store_id. A caller on another store would never see its
    commits."""
    memory_bytes: int
    """What the engine may fill with weights, moments and gradients."""
    memory_used_bytes: int
    disk_free_bytes: int | None = None
    """Where the artifacts go; None when the store does not tell (S3)."""
    operations_per_second: float
    """Measured multiply-adds of one large matrix product in the compute precision, times two."""
    devices: int = 1
    """GPUs that it trains on, or samples on where these are more. A CPU counts as one per machine."""
    cluster: ClusterInfo | None = None
    """None while the engine is not connected to Ray."""


class Engine(Protocol):
    """Errors: `TransientEngineError` and `PermanentEngineError` (engine.errors), and storage's own."""

    async def import_model(self, source: str, *, provenance: Provenance) -> ArtifactRef:
        """A registered model by key, or a local folder brought into the registry. Idempotent."""
        ...

    async def create_policy(self, spec: PolicySpec) -> PolicyRef:
        """Commits the root of a chain (idempotent) and returns policy 0."""
        ...

    async def generate(self, request: GenerateRequest, *, epoch: int = 0) -> list[Completion]:
        """Completions in the order of the prompts."""
        ...

    async def logprobs(self, request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]:
        """Per sequence: nats of each trained token, by the trainer's weights and numerics. BadSpec for a policy with a
        scalar head (engine.specs.adapters)."""
        ...

    async def values(self, request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]:
        """Per sequence: what a policy with a scalar head gives at the position before each trained token, by the
        trainer's weights and numerics; `temperature` has no part in it. BadSpec for a policy with a language head."""
        ...

    async def take_gradient_step(self, request: StepRequest, *, epoch: int = 0) -> CommitRecord:
        """Takes the step exactly once: the committed record, whether it was made now or before."""
        ...

    async def begin_checkpoint(
        self, policy: PolicyRef, *, provenance: Provenance, name: str | None = None, epoch: int = 0
    ) -> None:
        """Takes the policy's checkpoint and returns while it is on its way to storage: the next step need not wait.
        `save_checkpoint` waits for it. Idempotent."""
        ...

    async def save_checkpoint(
        self, policy: PolicyRef, *, provenance: Provenance, name: str | None = None, epoch: int = 0
    ) -> ArtifactRef:
        """Weights and optimizer of a policy, as safetensors, manifest last. Idempotent."""
        ...

    async def export_model(
        self, policy: PolicyRef, model_name: str, *, provenance: Provenance, epoch: int = 0
    ) -> ArtifactRef:
        """The policy as a plain Hugging Face folder in the registry. Idempotent."""
        ...

    async def release(self, run: str, *, epoch: int = 0) -> None:
        """The caller is done with the run for now: its weights leave memory first. Never an error when nothing is
        held, or when a newer epoch acts for the run already."""
        ...

    async def info(self) -> EngineInfo: ...

    async def close(self) -> None: ...
