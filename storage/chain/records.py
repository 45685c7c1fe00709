"""The chain of a policy: policy[k] = step(policy[k-1], batch[k]), with one committed record per step.

Weights are a cache; the records are the source of truth. A record is put under its step if there is none, so that a
step is taken once, however often it is requested. `state` is a hash chain that names the whole history of a policy:

    state[0] = H(base weights digest or start state, trainable spec, init seed)
    state[k] = H(state[k-1], content of the StepRequest of step k)

The content of a request leaves out run names and object keys, so that equal data, config and seed give equal states
under any run key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal, Self, TypeVar
from uuid import uuid4

from pydantic import Field, FiniteFloat, JsonValue, ValidationError

from storage.errors import CorruptArtifact, ModelBeingDeleted, ObjectNotFound
from storage.registry.models import check_not_deleted
from storage.serialization import MAX_EPOCHS, Count, Divisor, Frozen, Int64, Rate, Temperature, canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.index import record_run, record_uses
from storage.store.objects import ObjectStore

RecordType = TypeVar("RecordType", bound=Frozen)

CHAIN_VERSION = 1
"""Version of the meaning of a request. It is part of every state."""

OldLogprobs = Literal["trainer", "sampler"]
"""Whether the trainer or the sampler computes the logprobs of the policy before the step."""

StepOldLogprobs = Literal["trainer", "sampler", "forward"]
"""Where a step takes the logprobs of the policy before it from. trainer, sampler: from the batch, whose column was
computed by the trainer or by the sampler. forward: from the forward pass of the step's only update, whose weights are
still those before the step."""

NanPolicy = Literal["fail", "skip"]
"""What a non-finite gradient does: it fails the step, or with `skip_nan_gradients` its update is skipped."""


class PolicyRef(Frozen):
    """A policy after one step. `state` names its history; the other fields name the chain that stores it."""

    run: str
    stage: str
    model: str
    step: int = Field(ge=0)
    state: str

    @property
    def uri(self) -> str:
        return f"policy:{self.full_name}#{self.state}"

    @property
    def full_name(self) -> str:
        """The name by which commands and requests name the policy."""
        return f"{self.run}/{self.stage}/{self.model}@{self.step}"

    @classmethod
    def from_uri(cls, uri: str) -> Self:
        """The policy that `uri` names. Raises ValueError for other text."""
        parts = re.fullmatch(r"policy:(.+)/([^/]+)/([^/@]+)@(\d+)#([^/#]+)", uri)
        if parts is None:
            raise ValueError(f"{uri!r:.200} names no policy; expected policy:run/stage/model@step#state")
        run, stage, model, step, state = parts.groups()
        return cls(run=run, stage=stage, model=model, step=int(step), state=state)


OptimizerKind = Literal["adamw", "muon", "adamw_8bit"]


class OptimizerSpec(Frozen):
    """Settings of the optimizer, AdamW (arXiv:1711.05101) or Muon with AdamW, for one step. They are part of the
    request, so that a resume needs no state of a schedule."""

    kind: OptimizerKind = Field("adamw", exclude_if=lambda kind: kind == "adamw")  # absent from older requests
    """muon: Muon for hidden matrices, AdamW for the other weights. Both have `lr` and `weight_decay`. adamw_8bit: AdamW
    whose moments have 8 bits."""
    lr: Rate
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: Divisor = 1e-8
    weight_decay: Rate = 0.0
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Largest global gradient norm of an update; a larger gradient is scaled down. A very large value clips nothing."""


class MinibatchPlan(Frozen):
    """How one batch is divided into optimizer updates."""

    size: Count | None = None
    """Sequences per optimizer update. None: the whole batch."""
    epochs: int = Field(1, ge=0, le=MAX_EPOCHS)
    """Passes over the batch. 0 leaves the weights unchanged."""
    shuffle_seed: Int64 = 0


class RunUse(Frozen):
    """What the processes of a run have used together, from its first step to the request of a step."""

    seconds: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Time of the loop. That of a process that was killed counts up to its last committed step."""
    gpu_seconds: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The same, times the number of GPUs that the engine had."""
    tokens_sampled: int = Field(0, ge=0)
    """Sampled tokens that the steps before the request were trained on, or that they left out."""


class StepRequest(Frozen):
    """Everything that a gradient step depends on, except the weights of the parent."""

    # the artifacts and policies that the step reads
    parent: PolicyRef
    batch: ArtifactRef
    reference: PolicyRef | None = None
    old_logprobs: StepOldLogprobs = "trainer"
    # the algorithm
    loss: dict[str, JsonValue]
    """The engine's LossSpec as JSON. Storage does not interpret it."""
    optimizer: OptimizerSpec
    minibatches: MinibatchPlan = MinibatchPlan()
    temperature: Temperature = 1.0
    """Temperature at which the batch was sampled. Logits are divided by it before the log-softmax."""
    # state that is carried from step to step
    controllers_in: dict[str, FiniteFloat] = {}
    cursor_in: dict[str, Int64] = {}
    cursor_out: dict[str, Int64] = {}
    nan_policy: NanPolicy = "fail"
    max_tokens: Count | None = Field(None, exclude_if=lambda tokens: tokens is None)
    """Largest number of packed tokens in one forward pass. None: the engine's setting. It decides the micro-batches and
    not the loss, so it is not part of the state."""
    used: RunUse | None = Field(None, exclude_if=lambda used: used is None)
    """What the run had used when the step was requested. It decides when a run with a budget ends, and no step, so it
    is not part of the state."""

    def content(self) -> dict[str, Any]:
        """Returns the request without the names of runs and objects: what decides the next weights."""
        # refs contain names: replace them by what they name
        body = self.model_dump(mode="json", exclude={"parent", "batch", "reference", "max_tokens", "used"})
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
        """Returns the policy that this step makes, whether or not it is committed yet."""
        return self.parent.model_copy(update={"step": self.parent.step + 1, "state": self.next_state()})


class Root(Frozen):
    """The start of a chain: a registered base model, or a policy of an earlier stage."""

    base: ArtifactRef | None = None
    start: PolicyRef | None = None
    base_digest: str
    """Digest of the base model's weights, or the state of `start`."""
    trainable: dict[str, JsonValue] = {"kind": "full"}
    init_seed: int = Field(0, ge=0, lt=2**64)
    """Seed of the initial values of new parameters. It is only hashed."""

    def state(self) -> str:
        body = self.model_dump(mode="json", exclude={"base", "start"})
        return digest(canonical_json([CHAIN_VERSION, "root", body]))


class Numerics(Frozen):
    """What the bits of a step's weights depend on, in addition to the request. A redo under other numerics may
    give other bits."""

    backend: str
    device: str
    compute_dtype: str
    threads: int
    max_tokens: int
    """Packed tokens per forward pass, which decide the micro-batches."""
    max_tokens_of_updates: tuple[int, ...] = ()
    """`max_tokens` of each update of the step, if one of them had to use less for lack of memory. Otherwise empty."""
    micro_batches: int = 0
    layout: str = ""
    """How the trainer was divided over processes, such as "zero3x2". Empty for a single process."""
    versions: dict[str, str] = {}
    repeats: bool = True
    """Whether the device repeated its sums to the bit, as far as one small update could tell."""


class RebaseMark(Frozen):
    """Names one rebase of a chain (storage.chain.rebase)."""

    step: int = Field(ge=0)
    attempt: str


class SkippedUpdate(Frozen):
    """An optimizer update that was skipped because its gradient was not finite (`skip_nan_gradients`)."""

    update: int = Field(ge=1)
    """The number of the update in its step, from 1."""
    grad_norm: Literal["nan", "inf"]
    """The norm of the gradient. It is text, since JSON has neither number."""
    row: int | None = None
    """The first row of the update with NaN or infinity in its columns, counted from 0 in the table of the batch. None:
    all columns are finite, and the gradient overflowed."""

    def __str__(self) -> str:
        where = "all its rows are finite" if self.row is None else f"row {self.row} is not finite (rows count from 0)"
        return f"update {self.update} had a gradient of norm {self.grad_norm}, and {where}"


class CommitRecord(Frozen):
    """The commit of one gradient step."""

    schema_version: int = 1
    # the request and its result
    request: StepRequest
    state: str
    controllers_out: dict[str, float] = {}
    metrics: dict[str, float] = {}
    # what the optimizer did
    updates: int
    """Optimizer updates made by this step."""
    skipped: int = 0
    """Updates that were skipped because of a non-finite gradient (`skip_nan_gradients`)."""
    skipped_updates: tuple[SkippedUpdate, ...] = Field((), exclude_if=lambda updates: not updates)
    """Why each of them was skipped. Empty in records of before this field."""
    # what the bits of the weights depend on
    numerics: Numerics
    rebase: RebaseMark | None = None
    """The last rebase that the parent's weights descend from. The bits of the weights depend on it; the state does
    not."""
    weights_digest: str
    """Digest of the new weights."""
    tensor_digests: tuple[str, ...] = ()
    """The first 8 hex digits of each tensor's digest, in the order of the tensors' names. A redo finds by them the
    first tensor that differs."""
    update_sketch: str = ""
    """Linear sketch of the change of the weights, in the same order. A redo on a device that does not repeat its sums
    to the bit finds by it whether its weights differ by rounding alone."""
    attempt: str = Field(default_factory=lambda: uuid4().hex)
    time: str = Field(default_factory=lambda: datetime.now(UTC).isoformat())

    @property
    def policy(self) -> PolicyRef:
        return self.request.result()

    @property
    def cursor_out(self) -> dict[str, int]:
        return self.request.cursor_out


class Chain:
    """Reads and commits the records of one policy. Readers see whole records or none."""

    def __init__(self, store: ObjectStore, run: str, stage: str, model: str) -> None:
        self.store, self.run, self.stage, self.model = store, run, stage, model

    @classmethod
    def of(cls, store: ObjectStore, policy: PolicyRef) -> Chain:
        return cls(store, policy.run, policy.stage, policy.model)

    def root(self) -> Root | None:
        """Returns the root, or None if the chain has not begun. Raises CorruptArtifact."""
        return self._read(Root, keys.chain_root(self.run, self.stage, self.model))

    def create_root(self, root: Root) -> Root:
        """Commits the root if there is none, and returns the committed one. Raises ModelBeingDeleted."""
        key = keys.chain_root(self.run, self.stage, self.model)
        # the index first, so that nothing that the chain starts from is taken for unused
        record_run(self.store, self.run)
        record_run(self.store, self.run, "chains")
        record_uses(self.store, key, used_by_root(root))
        put = self.store.put_if_absent(key, canonical_json(root.model_dump(mode="json")))
        created = _parse(Root, put.data, key)
        # after the root: a deletion looks for roots after it has marked the model, so one of the two notices the other
        if created.base is not None:
            try:
                check_not_deleted(self.store, created.base.key)
            except ModelBeingDeleted:
                if put.won:
                    self.store.delete(key)
                raise
        return created

    def record(self, step: int) -> CommitRecord | None:
        """Returns the record of `step` (>= 1), or None if the step is not committed. Raises CorruptArtifact."""
        return self._read(CommitRecord, keys.chain_record(self.run, self.stage, self.model, step))

    def committed_record(self, step: int) -> CommitRecord:
        """Returns the record of a step (>= 1) that is known to be committed. Raises ObjectNotFound if it is missing."""
        record = self.record(step)
        if record is None:
            key = keys.chain_record(self.run, self.stage, self.model, step)
            raise ObjectNotFound(
                f"step {step} was taken, but its record {key} is not in {self.store.url}; restore it from a backup, or "
                "give this process the store that the engine works on"
            )
        return record

    def commit(self, record: CommitRecord) -> CommitRecord:
        """Commits `record` if its step has none, and returns the committed record of the step."""
        key = keys.chain_record(self.run, self.stage, self.model, record.policy.step)
        put = self.store.put_if_absent(key, canonical_json(record.model_dump(mode="json")))
        return record if put.won else _parse(CommitRecord, put.data, key)

    def policy(self, step: int) -> PolicyRef:
        """Returns the policy after a committed step. Raises ObjectNotFound if that step is not committed."""
        # step 0 is the root, every other step a record
        if step == 0:
            root = self.root()
            state = root.state() if root else None
        else:
            record = self.record(step)
            state = record.state if record else None
        if state is None:
            problem = f"no committed step {step}" if step else "not begun"
            raise ObjectNotFound(f"policy {self.run}/{self.stage}/{self.model} has {problem}")
        return PolicyRef(run=self.run, stage=self.stage, model=self.model, step=step, state=state)

    def head(self) -> PolicyRef:
        """Returns the policy after the last committed step."""
        return self.policy(max(self.steps(), default=0))

    def steps(self) -> Iterator[int]:
        """Yields the committed steps (>= 1), ascending."""
        for info in self.store.list(keys.chain_prefix(self.run, self.stage, self.model)):
            step = keys.record_step(info.key)
            if step is not None:
                yield step

    def records(self, after: int, until: int) -> Iterator[CommitRecord]:
        """Yields the records of steps after+1 .. until.

        Raises CorruptArtifact if one is missing or is not a child of the step before it.
        """
        parent = self.policy(after).state
        for step in range(after + 1, until + 1):
            # a valid record names the state before it, and its own state follows from its request
            record = self.record(step)
            if record is None or record.request.parent.state != parent or record.state != record.request.next_state():
                problem = "missing" if record is None else "not a child of the step before it"
                raise CorruptArtifact(
                    f"the chain {self.run}/{self.stage}/{self.model} is broken at step {step}: the record is "
                    f"{problem}; restore the object from a backup, or fork the run before that step"
                )
            parent = record.state
            yield record

    def _read(self, record_class: type[RecordType], key: str) -> RecordType | None:
        try:
            data = self.store.get(key)
        except ObjectNotFound:
            return None
        return _parse(record_class, data, key)


def used_by_root(root: Root) -> list[str]:
    """Returns what a chain with this root uses, as in the index: the model or the run that it starts from."""
    used = [] if root.base is None else [root.base.key]
    return used if root.start is None else [*used, keys.run_prefix(root.start.run)]


def base_model_of(store: ObjectStore, policy: PolicyRef) -> ArtifactRef:
    """Returns the registered model from which the policy's chain, or the first chain before it, started.

    Raises ObjectNotFound.
    """
    # follow the starts of chains back to one that starts from a base model
    root = Chain.of(store, policy).root()
    while root is not None and root.start is not None:
        root = Chain.of(store, root.start).root()
    if root is None or root.base is None:
        raise ObjectNotFound(f"{policy.uri} does not descend from a registered model")
    return root.base


def _parse(record_class: type[RecordType], data: bytes, key: str) -> RecordType:
    try:
        return record_class.model_validate_json(data)
    except ValidationError as error:
        raise CorruptArtifact(f"{key} is not a readable {record_class.__name__}: {error}") from error
