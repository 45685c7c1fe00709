"""The calls of `engine.backends.protocol.Trainer` that the frozen base of adapters refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from engine.backends.protocol import Objective
from engine.errors import BadSpec
from engine.models.samples import Sample
from storage.chain.records import OptimizerSpec

UPDATE_REFUSED = "the frozen base of adapters cannot be updated; train an adapter on it instead"


class ReadOnlyPolicy:
    """Mixin of a trainer that is the frozen base of adapters itself, which can only be read: logprobs, digest and
    export. Every call that would change or save it raises BadSpec."""

    def update(
        self,
        samples: Sequence[Sample],
        objective: Objective,
        optimizer: OptimizerSpec,
        *,
        max_tokens: int,
        on_micro_batch: Callable[[], None] = lambda: None,
    ) -> NoReturn:
        raise BadSpec(UPDATE_REFUSED)

    def write_checkpoint(self, folder: Path) -> NoReturn:
        raise BadSpec("the frozen base of adapters has no checkpoint; it is a registered model: use that")

    def read_checkpoint(self, files: dict[str, Path], *, optimizer: bool) -> NoReturn:
        raise BadSpec("a checkpoint cannot be read into the frozen base of adapters; read it into an adapter")
