"""Decides whether a redo that gave other weights than the committed ones differs from them by rounding alone.

A device may not repeat its sums to the bit: on CUDA, some kernels add in an order that changes from call to call. Other
devices, layouts and versions add in other orders, too. Rounding grows in the first steps, and then stays at the noise
of the precision. In bfloat16 this is one or a few percent of an update, since small differences flip the rounding of
activations. So each redone update is compared with the committed one, by their sketches (weight_files.sketches), and
the bound is measured: the same steps are redone, with rounding noise added to the weights before each of them. A redo
is *close* if every update differs from the committed one by at most `FACTOR` times as much as the noise made it differ,
and every tensor of it by at most `TENSOR_FACTOR` times, or by `FLIPPED` of its own update. A learning rate that is 1.1
times too high changes an update by 0.09 of its length, a lost step or another batch by about a half or more.

Noise may or may not move a token over a threshold, such as the clip range of its ratio, and an update with that token
differs much more from one without it. So a step that one redo with noise does not explain is redone with other noise,
up to `NOISY_REDOS` times, and the largest difference counts. Measured on the tiny model in bfloat16 (six steps of GRPO
at a rate of 1e-3, whose updates differ by 0.03 or by 0.25 of their length): one redo with noise leaves 24 % of the
chains unexplained, two 7 %, four 1 %, six 0.05 %. Where noise alone changes an update by 0.25 of its length, smaller
mistakes, such as that learning rate, cannot be told from it. Noise that passes a threshold rarely does so in few redos,
so a difference that is only a little too large is redone up to `NEAR_REDOS` times: in a chaos campaign, one step
differed by 0.0105, and the noise of eight redos was needed to explain it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.backends.protocol import Trainer
from engine.backends.weight_files.sketches import Sketch, sketch_from_text
from storage.chain.rebase import RedoneStep, difference_texts
from storage.chain.records import CommitRecord, Numerics

FACTOR = 2.0
"""Largest ratio of the difference to the noise, over all tensors. Both are estimated with an error of a few percent."""
TENSOR_FACTOR = 5.0
"""The same for one tensor, where both are estimated with an error of 17 %."""
FLIPPED = 0.1
"""Share of its own update by which a tensor may differ in any case. AdamW moves each element by about the rate, so one
of 3,000 elements whose gradient is nearly 0 and changes its sign changes the update by 0.036. A wrong tensor differs by
about a half or more."""
NOISY_REDOS, NEAR_REDOS = 6, 24
NEAR, FAR = 2.0, 8.0
"""After NOISY_REDOS redos, only a difference of at most NEAR bounds is redone with other noise. One of more than FAR
bounds is never redone again."""


def noise_of(committed: Numerics, here: Numerics) -> float:
    """Relative rounding noise that is added to the weights: half a unit in the last place of the master weights, or
    under other numerics the noise of the coarser compute precision."""
    noise = _half_unit(committed, here)
    if not difference_texts(committed, here):
        return noise
    return max(noise, _compute_noise(committed.compute_dtype), _compute_noise(here.compute_dtype))


def _compute_noise(name: str) -> float:
    """Relative noise of a weight that has about the same effect as the rounding of a forward and a backward pass."""
    dtype = getattr(torch, name, torch.bfloat16)
    # Matrix products of 16 bits are summed in float32, and only their results are rounded. Wider ones are summed in
    # their own precision, so that each product of many terms is several units off.
    units = 0.25 if dtype in (torch.bfloat16, torch.float16) else 2.0
    return units * torch.finfo(dtype).eps


def _half_unit(committed: Numerics, here: Numerics) -> float:
    """Relative error with which the master weights are stored: they have float32, or float64 if they compute in it."""
    stored_in = torch.float64 if committed.compute_dtype == here.compute_dtype == "float64" else torch.float32
    return torch.finfo(stored_in).eps / 2


@dataclass
class Redo:
    """What was seen while committed steps were redone."""

    records: list[CommitRecord] = field(default_factory=list)
    """The records of all redone steps, in order."""
    updates: dict[int, Sketch] = field(default_factory=dict)
    """Sketches of the redone updates, by step: of the steps whose weights differ from the committed ones."""
    first_digest: str = ""
    """Digest of the redone weights at the first of these steps."""
    first_tensors: dict[str, str] = field(default_factory=dict)
    """Digests of its tensors, by name."""

    def add(self, record: CommitRecord, update: Sketch, digest: str, tensor_digests: dict[str, str]) -> None:
        """Adds a redone step, whose weights have these digests and whose update has this sketch."""
        self.records.append(record)
        if digest == record.weights_digest:
            return
        if not self.updates:
            self.first_digest, self.first_tensors = digest, tensor_digests
        self.updates[record.policy.step] = update

    @property
    def differing(self) -> list[CommitRecord]:
        """The records of the steps whose weights differ, in order."""
        return [record for record in self.records if record.policy.step in self.updates]


@dataclass(frozen=True)
class Judgement:
    """Whether the differences of a redo are rounding."""

    repeats: bool
    """Whether a second redo under the committed numerics gave the same bits as the first. Rounding explains no
    difference then."""
    steps: tuple[RedoneStep, ...] = ()
    """How far each differing step is from the committed one. Empty if the device repeats."""

    @property
    def is_close(self) -> bool:
        return not self.repeats and all(step.is_close for step in self.steps)


def judge_redo(
    redo: Redo,
    here: Numerics,
    *,
    restart: Callable[[], Trainer],
    redo_step: Callable[[Trainer, CommitRecord], object],
) -> Judgement:
    """Redoes the steps of `redo` again, to tell rounding from another step.

    Args:
        here: the numerics of the redo.
        restart: returns a trainer with the weights and moments that the redo started from.
        redo_step: redoes one committed step on that trainer.
    """
    first = redo.differing[0]

    # On a device that seems to repeat its sums, a second redo under the committed numerics shows whether it does.
    repeat = first.numerics.repeats and here.repeats
    if repeat and not difference_texts(first.numerics, here, everything=True):
        trainer = restart()
        for record in redo.records:
            redo_step(trainer, record)
            if record is first:
                break
        if trainer.weights_digest()[0] == redo.first_digest:
            return Judgement(repeats=True)
        del trainer

    # Redo the steps with rounding noise, which shows how far rounding carries.
    relative, half_unit = noise_of(first.numerics, here), _half_unit(first.numerics, here)
    noises: dict[int, _Noise] = {}
    judgement = Judgement(repeats=False)
    for number in range(NEAR_REDOS):
        trainer = restart()
        for record in redo.records:
            step = record.policy.step
            trainer.add_rounding_noise(relative, seed=_seed_of(step, number))
            before = trainer.weights_sketch()
            redo_step(trainer, record)
            if step in redo.updates:
                noisy = trainer.weights_sketch() - before
                # The new weights are rounded when they are stored, each time.
                stored_N = half_unit * np.linalg.norm(before, axis=1)
                noise_N = np.hypot(np.linalg.norm(redo.updates[step] - noisy, axis=1), stored_N)
                noises.setdefault(step, _Noise(noise_N)).add(noise_N)
        del trainer
        names = sorted(redo.first_tensors)
        steps = tuple(_judge_step(r, redo.updates[r.policy.step], noises[r.policy.step], names) for r in redo.differing)
        judgement = Judgement(repeats=False, steps=steps)
        limit = FAR if number + 1 < NOISY_REDOS else NEAR
        if judgement.is_close or any(step.distance is None or step.distance > limit * step.bound for step in steps):
            break
    return judgement


@dataclass
class _Noise:
    """How far noise moved an update, at most over several redos."""

    of_tensors_N: NDArray[np.float64]
    whole: float = 0.0

    def add(self, noise_N: NDArray[np.float64]) -> None:
        self.of_tensors_N = np.maximum(self.of_tensors_N, noise_N)
        self.whole = max(self.whole, float(np.linalg.norm(noise_N)))


def _seed_of(step: int, number: int) -> int:
    """The seed of the noise of a step in the redo of this number, from 0. It has 32 bits: torch's generator on the CPU
    does not use higher ones."""
    return (step + number * 0x9E3779B1) % (1 << 32)


def _judge_step(
    record: CommitRecord, redone: Sketch, measured: _Noise, names: Sequence[str]
) -> RedoneStep:
    """Judges one step by the sketch of its redone update, and by how far noise moved it."""
    step, committed = record.policy.step, sketch_from_text(record.update_sketch)
    if committed is None or committed.shape != redone.shape:
        return RedoneStep(step=step, distance=None, bound=0.0)

    # Lengths of the committed update, of the difference and of the noise: of each tensor, and over all tensors.
    lengths_N = np.linalg.norm(committed, axis=1)
    differences_N = np.linalg.norm(redone - committed, axis=1)
    length = float(np.linalg.norm(lengths_N)) or 1.0
    difference, noise = float(np.linalg.norm(differences_N)), measured.whole
    if not np.isfinite(difference) or not np.isfinite(noise):
        return RedoneStep(step=step, distance=None, bound=0.0)

    # A tensor may be as noisy as all together, even if its own sketch saw less.
    noises_N = np.maximum(measured.of_tensors_N, lengths_N * noise / length)
    excess_N = differences_N - np.maximum(TENSOR_FACTOR * noises_N, FLIPPED * lengths_N)
    worst = int(np.argmax(excess_N))
    return RedoneStep(
        step=step,
        distance=difference / length,
        bound=FACTOR * noise / length,
        tensor=names[worst] if excess_N[worst] > 0 else None,
    )
