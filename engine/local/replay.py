"""`ostinato replay`: executes one committed step again, unchanged or with another loss, learning rate or batch.

A replay commits nothing, so the chain keeps the step as it was committed.
"""

from __future__ import annotations

import math

from pydantic import JsonValue

from engine.errors import UnknownPolicy
from engine.local.redo import OnRedoneStep, PolicyRebuilder, clean_backend, numerics_notes
from engine.local.verify import first_differing
from storage.chain.records import Chain, CommitRecord, StepRequest
from storage.serialization import Frozen


class WhatIf(Frozen):
    """The changes that a replay makes to the committed step.

    A replay without changes should give the committed weights."""

    loss: dict[str, JsonValue] = {}
    """Changed fields of the loss, by name."""
    lr: float | None = None
    """Changed learning rate."""
    batch_of: int | None = None
    """The step whose batch is used instead of the step's own."""

    def __bool__(self) -> bool:
        return self != WhatIf()


class ReplayReport(Frozen):
    """The results of a replayed step and of the committed step, for comparison."""

    chain: str
    step: int
    what_if: WhatIf
    committed: dict[str, float]
    """Metrics in the commit record."""
    replayed: dict[str, float]
    updates: int
    skipped: int
    committed_digest: str | None
    replayed_digest: str
    first_tensor: str | None
    """Name of the first tensor that differs, in the order of names. None when none does, or when the record has no
    digests of tensors."""
    notes: tuple[str, ...]
    """The recorded numerics that this machine could not use, with those that the replay used."""

    @property
    def weights_equal(self) -> bool | None:
        """Whether the weights are equal to the byte. None when the record has no digest."""
        return None if self.committed_digest is None else self.committed_digest == self.replayed_digest

    @property
    def metrics_equal(self) -> bool:
        """Whether both have the same metrics with equal values. NaN counts as equal to NaN."""
        if self.committed.keys() != self.replayed.keys():
            return False
        pairs = [(value, self.replayed[name]) for name, value in self.committed.items()]
        return all(old == new or (math.isnan(old) and math.isnan(new)) for old, new in pairs)


def replay_step(
    chain: Chain, step: int, what_if: WhatIf | None = None, *, on_step: OnRedoneStep = lambda chain, step: None
) -> ReplayReport:
    """Rebuilds policy `step` - 1 and executes `step` again, with the changes of `what_if`.

    Raises UnknownPolicy when `step` or the step of `what_if.batch_of` was never taken, and BadSpec for a loss that does
    not exist.
    """
    what_if = what_if or WhatIf()
    record = require_record(chain, step)
    request = _changed_request(chain, record.request, what_if)
    # The backend follows the committed numerics, since other ones give other bits even without a change.
    with clean_backend(record.numerics) as backend:
        rebuilder = PolicyRebuilder(chain.store, backend, on_step)
        trainer = rebuilder.rebuild(chain, step - 1)
        effect = rebuilder.redo_step(trainer, record, request)

        # Compare the new weights with the committed digests.
        digest, tensor_digests = trainer.weights_digest()
        first_tensor = None
        if digest != record.weights_digest:
            first_tensor = first_differing(record, tensor_digests)
        return ReplayReport(
            chain=f"{chain.run}/{chain.stage}/{chain.model}",
            step=step,
            what_if=what_if,
            committed=record.metrics,
            replayed=effect.metrics,
            updates=effect.updates,
            skipped=len(effect.skipped),
            committed_digest=record.weights_digest,
            replayed_digest=digest,
            first_tensor=first_tensor,
            notes=tuple(numerics_notes(record.numerics, backend.numerics())),
        )


def require_record(chain: Chain, step: int) -> CommitRecord:
    record = chain.record(step) if step >= 1 else None
    if record is None:
        head = max(chain.steps(), default=0)
        steps = f"steps 1 to {head}" if head else "no step yet"
        raise UnknownPolicy(f"{chain.run}/{chain.stage}/{chain.model} has no step {step}; it has {steps}")
    return record


def _changed_request(chain: Chain, request: StepRequest, what_if: WhatIf) -> StepRequest:
    changes: dict[str, object] = {"loss": request.loss | what_if.loss}
    if what_if.lr is not None:
        changes["optimizer"] = request.optimizer.model_copy(update={"lr": what_if.lr})
    if what_if.batch_of is not None:
        changes["batch"] = require_record(chain, what_if.batch_of).request.batch
    return request.model_copy(update=changes)
