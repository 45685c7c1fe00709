"""How often a redo that differs is redone with other noise, with a trainer whose updates are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.weight_files.sketches import BUCKETS, Sketch, sketch_to_text
from engine.local.closeness import NEAR_REDOS, NOISY_REDOS, Redo, judge_redo
from storage.chain.records import CommitRecord, Numerics, OptimizerSpec, PolicyRef, StepRequest
from storage.store.artifacts import ArtifactRef

NUMERICS = Numerics(backend="b", device="cuda", compute_dtype="bfloat16", threads=1, max_tokens=1, repeats=False)
COMMITTED = np.ones((2, BUCKETS))


class Scripted:
    """A trainer whose only weights are their sketch. A step adds `update`."""

    def __init__(self, update: Sketch) -> None:
        self.sketch, self.update = np.zeros_like(update), update
        self.drawn: tuple[float, ...] = ()

    def add_rounding_noise(self, relative: float, *, seed: int) -> None:
        """The noise is in `update`. Notes what torch would draw with the seed."""
        drawn = torch.rand(4, generator=torch.Generator().manual_seed(seed))
        self.drawn = tuple(drawn.tolist())

    def weights_sketch(self) -> Sketch:
        return self.sketch


def judged(difference: float, noises: list[float]) -> tuple[bool, int]:
    """(whether a redo that differs by `difference` of the update is close, number of noisy redos), where the noise
    moves the redone update by `noises`, one after the other, and then by the last of them."""
    batch = ArtifactRef(key="batch", kind="batch", sha256="0" * 64, bytes=1, rows=1, parents=())
    parent = PolicyRef(run="r", stage="0-s", model="policy", step=0, state="0" * 64)
    request = StepRequest(parent=parent, batch=batch, loss={}, optimizer=OptimizerSpec(lr=1.0))
    record = CommitRecord(
        request=request, state=request.next_state(), updates=1, numerics=NUMERICS, weights_digest="committed",
        update_sketch=sketch_to_text(COMMITTED),
    )  # fmt: skip
    redo = Redo()
    redo.add(record, COMMITTED * (1 + difference), "redone", {"a": "1", "b": "2"})
    restarts: list[Scripted] = []

    def moves() -> Iterator[float]:
        yield from noises
        while True:
            yield noises[-1]

    amounts = moves()

    def restart() -> Any:
        restarts.append(Scripted(COMMITTED * (1 + difference + next(amounts))))
        return restarts[-1]

    def redo_step(trainer: Any, record: CommitRecord) -> None:
        trainer.sketch = trainer.sketch + trainer.update

    judgement = judge_redo(redo, NUMERICS, restart=restart, redo_step=redo_step)
    assert len({trainer.drawn for trainer in restarts}) == len(restarts)  # each redo has noise of its own
    return judgement.is_close, len(restarts)


@pytest.mark.parametrize(
    ("difference", "noises", "is_close", "redos"),
    [
        # twice the noise explains it at once
        (0.019, [0.01], True, 1),
        # the third redo passes the threshold that the first two did not
        (0.03, [0.01, 0.01, 0.02], True, 3),
        # a difference of more than eight bounds is no rounding
        (0.17, [0.01], False, 1),
        # more than two bounds: six redos decide
        (0.05, [0.01], False, NOISY_REDOS),
        # within two bounds: the twentieth redo explains it, or 24 do not
        (0.03, [0.01] * 19 + [0.02], True, 20),
        (0.03, [0.01], False, NEAR_REDOS),
    ],
)
def test_redos_with_noise(difference: float, noises: list[float], is_close: bool, redos: int) -> None:
    assert judged(difference, noises) == (is_close, redos)
