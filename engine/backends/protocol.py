"""What the local engine asks of a trainer and of a sampler. Synchronous: the engine calls them from one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from engine.losses.spec import LossSpec
from engine.protocol import Completion, SamplingParams, TokenIds, TokenSequence
from engine.samples import Sample
from storage.chain import OptimizerSpec

OnToken = Callable[[int, int, float], None]
"""Hears of a token as it is drawn: (index of the prompt in the call, token id, its logprob in nats). It runs in the
compute thread, so it must be quick; what it raises ends the call."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What one optimizer update minimises."""

    loss: LossSpec
    temperature: float = 1.0
    old_logprobs: str = "trainer"
    skip_non_finite: bool = False


@dataclass(slots=True)
class UpdateReport:
    """One optimizer update: what it did, in numbers."""

    metrics: dict[str, float] = field(default_factory=dict)
    skipped: bool = False
    micro_batches: int = 0
    max_tokens: int = 0
    """Packed tokens per forward that this update kept to: what was asked, or half of it where memory did not do."""


class Trainer(Protocol):
    """Weights, gradients and AdamW moments of one policy: a whole model, or an adapter on a base that many share."""

    def update(
        self,
        samples: Sequence[Sample],
        objective: Objective,
        optimizer: OptimizerSpec,
        *,
        max_tokens: int,
        on_micro_batch: Callable[[], None],
    ) -> UpdateReport:
        """One optimizer update over `samples`; the loss is normalised over all of them, however they are split.

        Memory that does not hold one micro-batch halves `max_tokens` once, for this update. Raises OutOfMemory when
        half does not do either.
        """
        ...

    def logprobs(
        self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int
    ) -> list[list[float]]: ...

    def reset_optimizer(self) -> None: ...

    def weights_digest(self) -> tuple[str, dict[str, str]]: ...

    def write_checkpoint(self, folder: Path) -> dict[str, Path]:
        """Writes weights and moments as safetensors; returns the files by name."""
        ...

    def read_checkpoint(self, files: dict[str, Path], *, optimizer: bool) -> None:
        """Loads what `write_checkpoint` wrote; without `optimizer`, moments start anew."""
        ...

    def export(self, folder: Path) -> dict[str, Path]:
        """Writes what was trained (no tokenizer): a plain Hugging Face folder, or a peft adapter folder; returns the
        files by name."""
        ...

    def export_merged(self, folder: Path) -> dict[str, Path]:
        """Writes a plain Hugging Face folder (no tokenizer) that loads without anything else; an adapter is merged
        into its base."""
        ...

    def nbytes(self, *, training: bool = True) -> int:
        """Bytes this policy alone holds: weights, and with `training` gradients and both moments at their peak."""
        ...


class Sampler(Protocol):
    """Draws completions from the weights it was last synced with."""

    def sample(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
    ) -> list[Completion]: ...
