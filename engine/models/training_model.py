"""A policy that can be trained in place: hand-written steps on a tape, or whole requests of the training classes."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, field
from typing import Any

from engine.errors import BadSpec, PermanentEngineError
from engine.models.inference_model import HasWorkspace, InferenceModel, LiveView
from engine.models.primitives import Primitives
from engine.models.scores import check_head
from engine.models.tape import Tape, TapeEntry, commit_tape
from engine.protocol import PolicySpec, SamplingParams
from engine.text.rendering import Renderer
from engine.text.stored_models import renderer_of
from engine.workspace import Workspace
from storage.chain.checkpoint_names import resolve_restart_point
from storage.chain.records import Chain, CommitRecord, OptimizerSpec, PolicyRef, Root, StepRequest, base_model_of
from storage.chain.stages import claim_stage, stage_owner
from storage.registry.models import available_name, registered_key
from storage.store import keys
from storage.store.artifacts import ArtifactRef

log = logging.getLogger(__name__)

TEMPERATURE_LOSSES = ("grpo", "gspo", "cispo", "dpo", "tangents")
"""Losses of logprobs that the model was asked for, and so are at its view's temperature. The likelihood of a given text
has none, nor has a score."""


@dataclass
class _Position:
    """Where a training model stands. Shared by all sampling views of it."""

    root: Root
    policy: PolicyRef | None = None
    stages: int = 0
    tape: Tape = field(default_factory=Tape)
    stepping: asyncio.Lock = field(default_factory=asyncio.Lock)
    made_again: bool = False
    """An earlier attempt of the recipe is made again: a stage opens where it began, not at its head."""
    committed: PolicyRef | None = None
    """The head of an earlier attempt's steps, which stand: a step up to there is not taken but found."""


class TrainingModel(InferenceModel, Primitives):
    """A policy that can be trained: in place, one committed step at a time."""

    def __init__(
        self,
        workspace: Workspace,
        name: str,
        renderer: Renderer,
        sampling: SamplingParams,
        base: ArtifactRef,
        max_batch_size: int,
        root: Root,
    ) -> None:
        super().__init__(workspace, name, renderer, sampling, base, None)
        self.max_batch_size = max_batch_size
        self._at = _Position(root)

    @property
    def tape(self) -> Tape:
        """The `train_*` calls since the last step."""
        return self._at.tape

    @property
    def trainable(self) -> dict[str, Any]:
        """Which part of the weights is trained (engine.specs.adapters), as plain data."""
        return self._at.root.trainable

    # -- where it stands ---------------------------------------------------------------------------------------

    async def policy(self) -> PolicyRef:
        if self._at.policy is None:
            await self._open("recipe")
        assert self._at.policy is not None
        return self._at.policy

    async def begin_stage(
        self, name: str, *, checkpoint: str | None = None, start: PolicyRef | None = None, exclusive: bool = False
    ) -> PolicyRef:
        """Opens the next stage and returns its policy 0: the base model, or where the stage before ended; where a named
        `checkpoint` (storage.chain.checkpoint_names) or the policy `start` is, of this run or another, if one is
        given. Its optimizer is a new one in any case.

        `exclusive`: the artifacts of the stage's steps are this model's only. If another model of the run has begun a
        stage of this name, the stage is called `NAME.MODEL`. The choice is kept in the store, so a resumed run makes
        the same one.

        The handle then stands at the stage's last committed step, so that a resumed run goes on from there. Raises
        NoSuchCheckpoint, and BadSpec for one of another base model or with another trained part.
        """
        store, run, position = self.workspace.open_store(), self.workspace.run, self._at.stages
        stage = keys.stage_name(position, name)
        while exclusive and stage_owner(store, run, stage) not in (None, self.name):
            stage = f"{stage}.{self.name}"
        root = self._stage_root(stage, checkpoint, start)
        # nothing is awaited between the question whose stage it is and this answer
        claim_stage(store, PolicyRef(run=run, stage=stage, model=self.name, step=0, state=root.state()))
        opened = await self.engine.create_policy(PolicySpec(run=run, stage=stage, model=self.name, root=root))
        self._at.policy = self.chain_of(opened).head()
        self._at.stages = position + 1  # calls that open the same stage concurrently open it once
        return opened

    def _stage_root(self, stage: str, checkpoint: str | None, start: PolicyRef | None) -> Root:
        """Where the stage's chain starts."""
        root, start_at = self._at.root, start or self._at.policy
        if checkpoint is not None:
            store, run = self.workspace.open_store(), self.workspace.run
            start_at = resolve_restart_point(store, checkpoint, run=run, stage=stage, model=self.name)
        if start_at is None:
            return root
        if start_at is not self._at.policy:
            self._check_goes_on_from(start_at)
        return Root(start=start_at, base_digest=start_at.state, trainable=root.trainable)

    def _check_goes_on_from(self, start: PolicyRef) -> None:
        base, root = base_model_of(self.workspace.open_store(), start), self.chain_of(start).root()
        if base.sha256 != self.base.sha256:
            raise BadSpec(f"{start.uri} descends from {base.key}, and {self.name!r} was spawned from {self.base.key}")
        if root is not None and root.trainable != self.trainable:
            raise BadSpec(f"{start.uri} trained {root.trainable}, and {self.name!r} trains {self.trainable}")

    def chain_of(self, policy: PolicyRef) -> Chain:
        return Chain.of(self.workspace.open_store(), policy)

    def set_policy(self, policy: PolicyRef) -> None:
        """Moves the handle to a committed policy of its chain."""
        self._at.policy = policy

    def replay(self) -> None:
        """The recipe around this handle ran before: it opens where its stage began, so that code before the loop sees
        what it saw then, and `optim_step` finds the committed steps instead of taking them again."""
        self._at.made_again = True

    def resume_from(self, policy: PolicyRef) -> None:
        """Stands at a policy of an earlier attempt; the steps that the attempt committed after it are found again."""
        self._at.policy, self._at.committed = policy, self.chain_of(policy).head()
        self._at.stages = max(self._at.stages, int(policy.stage.partition("-")[0]) + 1)

    async def _open(self, stage: str) -> None:
        start = await self.begin_stage(stage)
        if self._at.made_again:
            self.resume_from(start)

    # -- copies ------------------------------------------------------------------------------------------------

    async def clone_inf(self) -> InferenceModel:
        """A frozen copy of the policy as it is now."""
        return self._reader(InferenceModel(*self._parts(), await self.policy()))

    def inf(self) -> InferenceModel:
        """A live view that cannot train: it reads whatever policy this model stands at."""
        return self._reader(LiveView(*self._parts(), self.policy))

    def _parts(self) -> tuple[Workspace, str, Renderer, SamplingParams, ArtifactRef]:
        return self.workspace, self.name, self.renderer, self.sampling, self.base

    def _reader(self, reader: InferenceModel) -> InferenceModel:
        reader.tensor_parallel, reader.stops = self.tensor_parallel, self.stops
        return reader

    # -- steps -------------------------------------------------------------------------------------------------

    async def optim_step(
        self, lr: float, wd: float = 0.0, max_grad_norm: float = 1.0, skip_nan_gradients: bool = False
    ) -> dict[str, float]:
        """Commits the tape and takes one step: global-norm clipping, AdamW. Returns loss, grad_norm, tokens.

        Exactly once: what was on the tape is in one committed step, however often answers are lost on the way. A
        transient error leaves the tape as it was, so the same call may be made again; a permanent one clears it, since
        these samples will never make this step. Calls made while a step is taken belong to the next one, and a second
        step without further `train_*` calls is refused.
        """
        async with self._at.stepping:
            policy = await self.policy()
            calls = self._at.tape.take()
            optimizer, lasting = OptimizerSpec(lr=lr, weight_decay=wd, max_grad_norm=max_grad_norm), False
            try:
                record = self._found(policy, calls) or await self._step(policy, calls, optimizer, skip_nan_gradients)
                lasting = True
            except PermanentEngineError:
                lasting = True
                raise
            finally:
                if not lasting:
                    self._at.tape.put_back(calls)
        return record.metrics

    async def _step(
        self, policy: PolicyRef, calls: list[TapeEntry], optimizer: OptimizerSpec, skip_nan_gradients: bool
    ) -> CommitRecord:
        loss, batch = commit_tape(calls, self.workspace, policy)
        request = StepRequest(
            parent=policy,
            batch=batch,
            loss=loss,
            optimizer=optimizer,
            temperature=self.sampling.temperature or 1.0 if loss["kind"] in TEMPERATURE_LOSSES else 1.0,
            nan_policy="skip" if skip_nan_gradients else "fail",
            max_tokens=self.workspace.max_tokens,
        )
        return await self.take_step(request)

    def _found(self, policy: PolicyRef, calls: list[TapeEntry]) -> CommitRecord | None:
        """The step after `policy` that an earlier attempt of the recipe committed. It stands, whatever this attempt
        sampled: a committed step is never taken again."""
        head = self._at.committed
        if not calls or head is None or head.stage != policy.stage or policy.step >= head.step:
            return None
        record = self.chain_of(policy).record(policy.step + 1)
        if record is None or record.request.parent.state != policy.state:
            return None
        log.info("step %d of %s was committed by an earlier attempt and stands", policy.step + 1, policy.stage)
        self._at.policy = record.policy
        return record

    async def take_step(self, request: StepRequest) -> CommitRecord:
        """Takes a step exactly once and moves this handle to its result."""
        record = await self.engine.take_gradient_step(request, epoch=self.workspace.epoch)
        self._at.policy = record.policy
        return record

    # -- loading and saving ------------------------------------------------------------------------------------

    async def load(self, key: str) -> PolicyRef:
        """Goes on from another model's weights, by registry key or folder, in a stage of its own with a new optimizer.
        Returns its policy 0. Raises BadSpec for a model with another tokenizer or head; what is on the tape stays."""
        base = await self.engine.import_model(key, provenance=self.workspace.provenance)
        store = self.workspace.open_store()
        theirs, ours = renderer_of(store, base).tokenizer, self.renderer.tokenizer
        probe = "".join(map(chr, range(32, 127)))
        if (theirs.vocab_size, theirs.encode(probe)) != (ours.vocab_size, ours.encode(probe)):
            raise BadSpec(
                f"{key!r} has another tokenizer ({theirs.vocab_size} ids) than {self.name!r} ({ours.vocab_size}): its "
                "threads would be other tokens; spawn it as a model of its own"
            )
        root = Root(base=base, base_digest=base.sha256, trainable=self.trainable, init_seed=self._at.root.init_seed)
        check_head(store, base, "scalar" if self.trainable.get("head") == "scalar" else "lm")
        self._at.root, self._at.policy = root, None
        self.base = base
        await self._open("load")
        return self.chain_of(await self.policy()).policy(0)

    async def save(
        self, model_name: str, inference_only: bool = True, ctx: HasWorkspace | None = None
    ) -> str:
        """Publishes the policy as a plain Hugging Face folder and returns its key, `name@version`.

        `inference_only=False` also writes a checkpoint with the optimizer's moments. `ctx` is accepted as in the
        docs; the handle's own workspace is what is used.
        """
        policy = await self.policy()
        provenance, epoch = self.workspace.provenance, self.workspace.epoch
        if not inference_only:
            await self.engine.save_checkpoint(policy, provenance=provenance, name=model_name, epoch=epoch)
        ref = await self.engine.export_model(policy, _registry_name(model_name), provenance=provenance, epoch=epoch)
        return registered_key(ref)

    async def save_model_safely(
        self, model_name: str, inference_only: bool = True, ctx: HasWorkspace | None = None
    ) -> str:
        """`save` under a name that no other model has: `name`, else `name-2`, `name-3`, …"""
        name = available_name(self.workspace.open_store(), _registry_name(model_name), (await self.policy()).uri)
        return await self.save(name, inference_only, ctx)


def _registry_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise BadSpec(f"model name {name!r}: use letters, digits, '.', '_' and '-' (at most 128), no path")
    return name
