"""`ostinato replay`: one committed step executed again, as it was or with something else in its place.

Nothing is committed: a step that was taken is never taken again, whatever a replay of it shows.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from engine.errors import UnknownPolicy
from engine.local.redo import OnStep, Redo, clean_backend, numerics_notes
from engine.local.verify import first_differing
from storage.chain.records import Chain, CommitRecord, StepRequest
from storage.serialization import Frozen


class WhatIf(Frozen):
    """What a replay puts in the place of what was committed. Without any of it the weights must come out equal."""

    loss: dict[str, JsonValue] = {}
    """Fields of the loss, by name."""
    lr: float | None = None
    batch_of: int | None = None
    """The step whose batch is used."""

    def __bool__(self) -> bool:
        return self != WhatIf()


class ReplayReport(Frozen):
    """What came out, beside what was committed."""

    chain: str
    step: int
    what_if: WhatIf
    committed: dict[str, float]
    """Metrics of the record."""
    replayed: dict[str, float]
    updates: int
    skipped: int
    committed_digest: str | None
    replayed_digest: str
    first_tensor: str | None
    """The first that differs, where the record can tell."""
    notes: tuple[str, ...]
    """What is not here as it was when the step was committed."""

    @property
    def weights_equal(self) -> bool | None:
        """To the byte; None when the record keeps no digest."""
        return None if self.committed_digest is None else self.committed_digest == self.replayed_digest

    @property
    def metrics_equal(self) -> bool:
        return self.committed == self.replayed


def replay_step(
    chain: Chain, step: int, what_if: WhatIf | None = None, *, on_step: OnStep = lambda chain, step: None
) -> ReplayReport:
    """Brings weights to `step` - 1 and executes `step` once more.

    Raises UnknownPolicy when it was not taken, BadSpec for a loss that there is not.
    """
    what_if = what_if or WhatIf()
    record = _record(chain, step)
    request = _changed(chain, record.request, what_if)
    with clean_backend(record.numerics) as backend:
        redo = Redo(chain.store, backend, on_step)
        trainer = redo.nearest(chain, step - 1)
        effect = redo.step(trainer, record, request)
        digest, parts = trainer.weights_digest()
        return ReplayReport(
            chain=f"{chain.run}/{chain.stage}/{chain.model}",
            step=step,
            what_if=what_if,
            committed=record.metrics,
            replayed=effect.metrics,
            updates=effect.updates,
            skipped=effect.skipped,
            committed_digest=record.weights_digest,
            replayed_digest=digest,
            first_tensor=None if digest == record.weights_digest else first_differing(record, parts),
            notes=tuple(numerics_notes(record.numerics, backend.numerics())),
        )


def _record(chain: Chain, step: int) -> CommitRecord:
    record = chain.record(step) if step >= 1 else None
    if record is None:
        head = max(chain.steps(), default=0)
        raise UnknownPolicy(
            f"{chain.run}/{chain.stage}/{chain.model} has no step {step}; it has "
            + (f"steps 1 to {head}" if head else "no step yet")
        )
    return record


def _changed(chain: Chain, request: StepRequest, what_if: WhatIf) -> StepRequest:
    changes: Mapping[str, object] = {
        "loss": request.loss | what_if.loss,
        "optimizer": request.optimizer if what_if.lr is None else request.optimizer.model_copy(
            update={"lr": what_if.lr}
        ),
        "batch": request.batch if what_if.batch_of is None else _record(chain, what_if.batch_of).request.batch,
    }
    return request.model_copy(update=changes)
