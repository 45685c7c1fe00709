"""The chain: policy[k+1] = step(policy[k], batch[k]), one committed record per step request.

Weights are a cache; these records are the truth. A record is put-if-absent under the step it made, so a step
is taken once however often it is asked for, and `state` is a hash chain that names the whole history of a policy:

    state[0]   = H(base weights digest or start state, trainable spec, init seed)
    state[k+1] = H(state[k], content of the StepRequest)

The content of a request leaves out run names and object keys: equal data, config and seed give equal states
under any run key.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar
from uuid import uuid4

from pydantic import Field, FiniteFloat, JsonValue, ValidationError

from storage.errors import CorruptArtifact, ObjectNotFound
from storage.number_types import MAX_EPOCHS, Count, Divisor, Int64, Rate, Temperature
from storage.serialization import Frozen, canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore

M = TypeVar("M", bound=Frozen)

CHAIN_VERSION = 1
"""Version of the chain's *semantics*: what a request means. Part of every state."""


OldLogprobs = Literal["trainer", "sampler"]
"""Whose logprobs stand for the policy that is improved on."""

NanPolicy = Literal["fail", "skip"]
"""What a non-finite gradient does to its update."""


class PolicyRef(Frozen):
    """A policy at one step of its history. `state` names that history; the other fields say where it is kept."""

    run: str
    stage: str
    model: str
    step: int = Field(ge=0)
    state: str

    @property
    def uri(self) -> str:
        return f"policy:{self.run}/{self.stage}/{self.model}@{self.step}#{self.state}"


class OptimizerSpec(Frozen):
    """AdamW (arXiv:1711.05101) as this step uses it; the rate travels with the request, so a resume has no state."""

    lr: Rate
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: Divisor = 1e-8
    weight_decay: Rate = 0.0
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Clip the global gradient norm of each update to this. A very large number clips nothing."""


class MinibatchPlan(Frozen):
    """How one batch becomes optimizer updates."""

    size: Count | None = None
    """Sequences per update; None is the whole batch."""
    epochs: int = Field(1, ge=0, le=MAX_EPOCHS)
    """Passes over the batch; 0: none, and the step leaves the weights as they are."""
    shuffle_seed: Int64 = 0


class StepRequest(Frozen):
    """Everything a gradient step depends on besides the parent's weights."""

    parent: PolicyRef
    batch: ArtifactRef
    reference: PolicyRef | None = None
    old_logprobs: OldLogprobs = "trainer"
    loss: dict[str, JsonValue]
    """An engine LossSpec, dumped. Storage does not interpret it."""
    optimizer: OptimizerSpec
    minibatches: MinibatchPlan = MinibatchPlan()
    temperature: Temperature = 1.0
    """Logits are divided by this before the log-softmax: the temperature the batch was sampled at."""
    controllers_in: dict[str, FiniteFloat] = {}
    cursor_in: dict[str, Int64] = {}
    cursor_out: dict[str, Int64] = {}
    nan_policy: NanPolicy = "fail"
    max_tokens: Count | None = Field(None, exclude_if=lambda tokens: tokens is None)
    """Packed tokens of one forward pass, at most. None: as the engine is configured. It decides the micro-batches and
    never the loss, so it is no part of the state."""

    def content(self) -> dict[str, Any]:
        """The request without the names of runs and objects: what decides the next weights."""
        body = self.model_dump(mode="json", exclude={"parent", "batch", "reference", "max_tokens"})
        return body | {
            "parent": self.parent.state,
            "batch": self.batch.sha256,
            "reference": self.reference.state if self.reference else None,
        }

    def digest(self) -> str:
        return digest(canonical_json(self.content()))

    def next_state(self) -> str:
        return digest(canonical_json([CHAIN_VERSION, self.parent.state, self.content()]))

    def result(self) -> PolicyRef:
        """The policy this request makes, whether or not it was taken yet."""
        return self.parent.model_copy(update={"step": self.parent.step + 1, "state": self.next_state()})


class Root(Frozen):
    """Where a chain starts: a registered base model, or the last policy of an earlier stage."""

    base: ArtifactRef | None = None
    start: PolicyRef | None = None
    base_digest: str
    """Digest of the starting weights (base) or the state they stand for (start)."""
    trainable: dict[str, JsonValue] = {"kind": "full"}
    init_seed: int = 0
    """Only digests are made of it, so a config's seed of any size will do."""

    def state(self) -> str:
        body = self.model_dump(mode="json", exclude={"base", "start"})
        return digest(canonical_json([CHAIN_VERSION, "root", body]))


class Numerics(Frozen):
    """What the bits of a step depend on beyond the request; a redo under other numerics may differ."""

    backend: str
    device: str
    compute_dtype: str
    threads: int
    max_tokens: int
    """Tokens per packed forward: decides the micro-batches."""
    max_tokens_of_updates: tuple[int, ...] = ()
    """The same for each update of the step, where memory made one of them keep to less."""
    micro_batches: int = 0
    layout: str = ""
    """How the trainer was spread over processes, such as "zero3x2"; empty for a single one."""
    versions: dict[str, str] = {}


class RebaseMark(Frozen):
    """Names one rebase of a chain (storage.chain.rebase)."""

    step: int = Field(ge=0)
    attempt: str


class CommitRecord(Frozen):
    """The commit of one step request."""

    schema_version: int = 1
    request: StepRequest
    state: str
    controllers_out: dict[str, float] = {}
    metrics: dict[str, float] = {}
    updates: int
    """Optimizer updates made by this step."""
    skipped: int = 0
    """Updates left out because of a non-finite gradient (nan_policy = "skip")."""
    numerics: Numerics
    rebase: RebaseMark | None = None
    """The last rebase that the parent's weights descend from. What the state names does not depend on it; what the
    weights are to the bit does."""
    weights_digest: str | None = None
    tensor_digests: tuple[str, ...] = ()
    """The first 8 hex digits of each tensor's digest, in the order of their names: a redo that differs can name the
    first tensor that does. With weights_digest, or empty."""
    attempt: str = Field(default_factory=lambda: uuid4().hex)
    time: str = Field(default_factory=lambda: datetime.now(UTC).isoformat())

    @property
    def policy(self) -> PolicyRef:
        return self.request.result()

    @property
    def cursor_out(self) -> dict[str, int]:
        return self.request.cursor_out


class Chain:
    """The committed records of one policy. Readers see whole records or none."""

    def __init__(self, store: ObjectStore, run: str, stage: str, model: str) -> None:
        self.store, self.run, self.stage, self.model = store, run, stage, model

    @classmethod
    def of(cls, store: ObjectStore, policy: PolicyRef) -> Chain:
        return cls(store, policy.run, policy.stage, policy.model)

    def root(self) -> Root | None:
        data = self._get(keys.chain_root(self.run, self.stage, self.model))
        return None if data is None else _parse(Root, data, "chain root")

    def create_root(self, root: Root) -> Root:
        """Commits the root; returns the one that stands (the first writer's)."""
        key = keys.chain_root(self.run, self.stage, self.model)
        put = self.store.put_if_absent(key, canonical_json(root.model_dump(mode="json")))
        return _parse(Root, put.data, key)

    def record(self, step: int) -> CommitRecord | None:
        """The record that made policy `step` (>= 1), or None when it is not committed."""
        key = keys.chain_record(self.run, self.stage, self.model, step)
        data = self._get(key)
        return None if data is None else _parse(CommitRecord, data, key)

    def committed_record(self, step: int) -> CommitRecord:
        """The record of a step (>= 1) that is known to be committed. Raises ObjectNotFound when it is not there."""
        record = self.record(step)
        if record is None:
            key = keys.chain_record(self.run, self.stage, self.model, step)
            raise ObjectNotFound(
                f"step {step} was taken, but its record {key} is not in {self.store.url}; restore it from a backup, or "
                "give this process the store that the engine works on"
            )
        return record

    def commit(self, record: CommitRecord) -> CommitRecord:
        """Commits `record`; returns the record that stands, which is another's if that came first."""
        key = keys.chain_record(self.run, self.stage, self.model, record.policy.step)
        put = self.store.put_if_absent(key, canonical_json(record.model_dump(mode="json")))
        return record if put.won else _parse(CommitRecord, put.data, key)

    def policy(self, step: int) -> PolicyRef:
        """The ref of a committed step. Raises ObjectNotFound when that step was not taken."""
        if step == 0:
            root = self.root()
            state = root.state() if root else None
        else:
            record = self.record(step)
            state = record.state if record else None
        if state is None:
            raise ObjectNotFound(f"policy {self.run}/{self.stage}/{self.model} has no committed step {step}")
        return PolicyRef(run=self.run, stage=self.stage, model=self.model, step=step, state=state)

    def head(self) -> PolicyRef:
        """The last committed policy."""
        return self.policy(max(self.steps(), default=0))

    def steps(self) -> Iterator[int]:
        """Committed steps (>= 1), ascending."""
        for info in self.store.list(keys.chain_prefix(self.run, self.stage, self.model)):
            step = keys.record_step(info.key)
            if step is not None:
                yield step

    def records(self, after: int, until: int) -> Iterator[CommitRecord]:
        """The records of steps after+1 .. until. Raises CorruptArtifact when one is missing or does not link."""
        parent = self.policy(after).state
        for step in range(after + 1, until + 1):
            record = self.record(step)
            if record is None or record.request.parent.state != parent or record.state != record.request.next_state():
                raise CorruptArtifact(
                    f"the chain {self.run}/{self.stage}/{self.model} is broken at step {step}: the record is "
                    f"{'missing' if record is None else 'not a child of the step before it'}; "
                    "restore the object from a backup, or fork the run before that step"
                )
            parent = record.state
            yield record

    def _get(self, key: str) -> bytes | None:
        try:
            return self.store.get(key)
        except ObjectNotFound:
            return None


def base_model_of(store: ObjectStore, policy: PolicyRef) -> ArtifactRef:
    """The registered model that a chain, or the chain it continues, started from. Raises ObjectNotFound."""
    root = Chain.of(store, policy).root()
    while root is not None and root.start is not None:
        root = Chain.of(store, root.start).root()
    if root is None or root.base is None:
        raise ObjectNotFound(f"{policy.uri} does not descend from a registered model")
    return root.base


def _parse(model: type[M], data: bytes, key: str) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise CorruptArtifact(f"{key} is not a readable {model.__name__}: {error}") from error
