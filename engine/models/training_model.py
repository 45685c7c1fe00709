"""`TrainingModel`: the handle of a policy that can be trained.

It takes hand-written steps from its tape (`optim_step`) and the step requests of the training classes (`take_step`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, field
from typing import Any

from engine.errors import BadSpec, PermanentEngineError
from engine.losses.spec import parse_loss
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
from storage.chain.run_record import claim_stage, stage_owner
from storage.registry.models import available_name, registered_key
from storage.store import keys
from storage.store.artifacts import ArtifactRef

log = logging.getLogger(__name__)


@dataclass
class _ChainPosition:
    """The position of a training model on its chain. Copies of the model with other sampling parameters, such as
    `model.temperature(0.7)`, share this object."""

    root: Root
    policy: PolicyRef | None = None
    """The current policy. None until the first stage is opened."""
    next_stage_number: int = 0
    """Number of the next stage that is opened. It counts from 0."""
    tape: Tape = field(default_factory=Tape)
    stepping: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a step, so that concurrent calls of `optim_step` take their steps one after the other."""
    reuses_committed: bool = False
    """Whether committed steps are reused. A stage then opens at its policy 0, not at its head."""
    last_committed: PolicyRef | None = None
    """The last policy that an earlier attempt committed. Steps up to it are read from the chain and not taken again."""


class TrainingModel(InferenceModel, Primitives):
    """A policy that can be trained, one committed step at a time."""

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
        self._position = _ChainPosition(root)

    @property
    def tape(self) -> Tape:
        """The `train_*` calls since the last step."""
        return self._position.tape

    @property
    def trainable(self) -> dict[str, Any]:
        """The trained part of the weights (engine.specs.adapters), as plain data."""
        return self._position.root.trainable

    # -- position on the chain ---------------------------------------------------------------------------------

    async def policy(self) -> PolicyRef:
        """Returns the current policy. Opens the first stage, `0-recipe`, if no stage is open."""
        if self._position.policy is None:
            await self._open("recipe")
        assert self._position.policy is not None
        return self._position.policy

    async def begin_stage(
        self, name: str, *, checkpoint: str | None = None, start: PolicyRef | None = None, exclusive: bool = False
    ) -> PolicyRef:
        """Opens the next stage and returns its policy 0. The stage starts with a new optimizer.

        It starts from the base model, or from the last policy of the previous stage. A named `checkpoint`
        (storage.chain.checkpoint_names) or a policy `start`, of this or another run, replaces that start.

        `exclusive`: no other model writes to this stage. If another model of the run has begun a stage of this name,
        the stage is called `NAME.MODEL`. The choice is kept in the store, so a resumed run makes the same one.

        The handle moves to the stage's last committed step, so that a resumed run continues there. Raises
        NoSuchCheckpoint, and BadSpec for a start with another base model or another trained part.
        """
        # A resumed run must choose the same name, so the owner of a stage is read from the store.
        store, run, position = self.workspace.open_store(), self.workspace.run, self._position.next_stage_number
        stage = keys.stage_name(position, name)
        while exclusive and stage_owner(store, run, stage) not in (None, self.name):
            stage = f"{stage}.{self.name}"
        root = self._stage_root(stage, checkpoint, start)
        # Nothing is awaited between reading the owner of the stage and this claim, so no other model can come between.
        claim_stage(store, PolicyRef(run=run, stage=stage, model=self.name, step=0, state=root.state()))
        opened = await self.engine.create_policy(PolicySpec(run=run, stage=stage, model=self.name, root=root))
        self._position.policy = self.chain_of(opened).head()
        # Not `+= 1`: concurrent calls that open the same stage count it once.
        self._position.next_stage_number = position + 1
        return opened

    def _stage_root(self, stage: str, checkpoint: str | None, start: PolicyRef | None) -> Root:
        """The root of the stage's chain."""
        root, start_at = self._position.root, start or self._position.policy
        if checkpoint is not None:
            store, run = self.workspace.open_store(), self.workspace.run
            start_at = resolve_restart_point(store, checkpoint, run=run, stage=stage, model=self.name)
        if start_at is None:
            return root
        if start_at is not self._position.policy:
            self._check_same_base_and_trainable(start_at)
        return Root(start=start_at, base_digest=start_at.state, trainable=root.trainable)

    def _check_same_base_and_trainable(self, start: PolicyRef) -> None:
        """Raises BadSpec for a start with another base model or another trained part."""
        base, root = base_model_of(self.workspace.open_store(), start), self.chain_of(start).root()
        if base.sha256 != self.base.sha256:
            raise BadSpec(f"{start.uri} descends from {base.key}, and {self.name!r} was spawned from {self.base.key}")
        if root is not None and root.trainable != self.trainable:
            raise BadSpec(f"{start.uri} trained {root.trainable}, and {self.name!r} trains {self.trainable}")

    def chain_of(self, policy: PolicyRef) -> Chain:
        return Chain.of(self.workspace.open_store(), policy)

    def set_policy(self, policy: PolicyRef) -> None:
        """Moves the handle to a committed policy of its chain."""
        self._position.policy = policy

    def reuse_committed_steps(self) -> None:
        """Makes `optim_step` return the steps that an earlier attempt of the recipe committed, not take them again.

        Call it before the first stage opens. The stage then opens at policy 0, so code before the training loop sees
        the same policy as in the earlier attempt."""
        self._position.reuses_committed = True

    def resume_from(self, policy: PolicyRef) -> None:
        """Moves to a policy of an earlier attempt. Steps that the attempt committed after it are not taken again."""
        self._position.policy, self._position.last_committed = policy, self.chain_of(policy).head()
        following_number = int(policy.stage.partition("-")[0]) + 1
        self._position.next_stage_number = max(self._position.next_stage_number, following_number)

    async def _open(self, stage: str) -> None:
        start = await self.begin_stage(stage)
        if self._position.reuses_committed:
            self.resume_from(start)

    # -- copies ------------------------------------------------------------------------------------------------

    async def clone_inf(self) -> InferenceModel:
        """Returns an inference model that keeps the current policy."""
        return self._copy_settings_to(InferenceModel(*self._parts(), await self.policy()))

    def inf(self) -> InferenceModel:
        """Returns an inference model that always uses the current policy of this model."""
        return self._copy_settings_to(LiveView(*self._parts(), self.policy))

    def _parts(self) -> tuple[Workspace, str, Renderer, SamplingParams, ArtifactRef]:
        return self.workspace, self.name, self.renderer, self.sampling, self.base

    def _copy_settings_to(self, model: InferenceModel) -> InferenceModel:
        """Sets the parallelism of this model on `model`, and returns it."""
        model.tensor_parallel = self.tensor_parallel
        return model

    # -- steps -------------------------------------------------------------------------------------------------

    async def optim_step(
        self, lr: float, wd: float = 0.0, max_grad_norm: float = 1.0, skip_nan_gradients: bool = False
    ) -> dict[str, float]:
        """Commits the tape as a batch and takes one AdamW step with global-norm clipping.

        Returns metrics, among them loss, grad_norm and tokens. The samples of the tape enter at most one committed
        step, even if replies of the engine are lost. If an earlier attempt of the recipe committed this step, the
        metrics of that step are returned and the tape is dropped.

        After a transient error the tape is unchanged, so the same call may be made again. A permanent error clears it.
        `train_*` calls that are made during a step belong to the next one. A step without `train_*` calls raises
        BadSpec.
        """
        async with self._position.stepping:
            # Take the tape now, so that calls during the step are part of the next one.
            policy = await self.policy()
            calls = self._position.tape.take()
            optimizer = OptimizerSpec(lr=lr, weight_decay=wd, max_grad_norm=max_grad_norm)

            # After anything but a permanent error, cancellation included, the samples go back on the tape.
            calls_used_up = False
            try:
                record = self._reuse_committed_step(policy, calls)
                if record is None:
                    record = await self._step(policy, calls, optimizer, skip_nan_gradients)
                calls_used_up = True
            except PermanentEngineError:
                calls_used_up = True
                raise
            finally:
                if not calls_used_up:
                    self._position.tape.put_back(calls)
        return record.metrics

    async def _step(
        self, policy: PolicyRef, calls: list[TapeEntry], optimizer: OptimizerSpec, skip_nan_gradients: bool
    ) -> CommitRecord:
        # The batch is committed before the call, so a retry of the call names the same batch.
        loss, batch = commit_tape(calls, self.workspace, policy)
        temperature = 1.0
        if parse_loss(loss).uses_sampling_temperature:
            # Greedy samples have logprobs at temperature 1.
            temperature = self.sampling.temperature or 1.0
        request = StepRequest(
            parent=policy,
            batch=batch,
            loss=loss,
            optimizer=optimizer,
            temperature=temperature,
            nan_policy="skip" if skip_nan_gradients else "fail",
            max_tokens=self.workspace.max_tokens,
        )
        return await self.take_step(request)

    def _reuse_committed_step(self, policy: PolicyRef, calls: list[TapeEntry]) -> CommitRecord | None:
        """If an earlier attempt of the recipe committed the step after `policy`, returns its record and moves the
        handle to its policy.

        The step is used even if this attempt sampled something else, because a committed step is never taken again."""
        head = self._position.last_committed
        if not calls or head is None or head.stage != policy.stage or policy.step >= head.step:
            return None
        record = self.chain_of(policy).record(policy.step + 1)
        if record is None or record.request.parent.state != policy.state:
            return None
        log.info("step %d of %s was committed by an earlier attempt and is used", policy.step + 1, policy.stage)
        self._position.policy = record.policy
        return record

    async def take_step(self, request: StepRequest) -> CommitRecord:
        """Asks the engine for the step and moves this handle to the policy of the step.

        If the step was committed before, the engine returns its record and does not take it again."""
        # The handle moves only after the reply: a lost reply leaves it at the parent, and a retry gets the same record.
        record = await self.engine.take_gradient_step(request, epoch=self.workspace.epoch)
        self._position.policy = record.policy
        return record

    # -- loading and saving ------------------------------------------------------------------------------------

    async def load(self, key: str) -> PolicyRef:
        """Continues from another model's weights, by the key of a model, in a new stage with a new optimizer.

        Returns the policy 0 of the stage. The tape is kept. Raises BadSpec for a model with another tokenizer or head.
        """
        pinned_key = self.workspace.pinned_model(key)
        base = await self.engine.import_model(pinned_key, provenance=self.workspace.provenance)
        store = self.workspace.open_store()
        new, current = renderer_of(store, base).tokenizer, self.renderer.tokenizer
        probe = "".join(map(chr, range(32, 127)))  # the printable ASCII characters
        if (new.vocab_size, new.encode(probe)) != (current.vocab_size, current.encode(probe)):
            raise BadSpec(
                f"{key!r} has another tokenizer ({new.vocab_size} ids) than {self.name!r} ({current.vocab_size}): "
                "it would give a text other token ids; spawn it as a model of its own"
            )
        check_head(store, base, "scalar" if self.trainable.get("head") == "scalar" else "lm")

        # Open a stage that starts from it.
        init_seed = self._position.root.init_seed
        self._position.root = Root(base=base, base_digest=base.sha256, trainable=self.trainable, init_seed=init_seed)
        self._position.policy = None
        self.base = base
        await self._open("load")
        return self.chain_of(await self.policy()).policy(0)

    async def save(self, model_name: str, inference_only: bool = True, ctx: HasWorkspace | None = None) -> str:
        """Publishes the policy as a plain Hugging Face folder and returns its key, `name@version`.

        `inference_only=False` also writes a checkpoint with the optimizer's moments. `ctx` is ignored. It is accepted
        only because published code examples pass it; the workspace of the handle is used.
        """
        policy = await self.policy()
        provenance, epoch = self.workspace.provenance, self.workspace.epoch
        # The exported folder has no moments, without which training cannot continue as before.
        if not inference_only:
            await self.engine.save_checkpoint(policy, provenance=provenance, name=model_name, epoch=epoch)
        ref = await self.engine.export_model(policy, _registry_name(model_name), provenance=provenance, epoch=epoch)
        return registered_key(ref)

    async def save_model_safely(
        self, model_name: str, inference_only: bool = True, ctx: HasWorkspace | None = None
    ) -> str:
        """Like `save`, under a name that no other model has: `name`, else `name-2`, `name-3`, …

        `ctx` is ignored, as in `save`."""
        name = available_name(self.workspace.open_store(), _registry_name(model_name), (await self.policy()).uri)
        return await self.save(name, inference_only, ctx)


def _registry_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise BadSpec(f"model name {name!r}: use letters, digits, '.', '_' and '-' (at most 128), no path")
    return name
