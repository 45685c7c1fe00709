"""What the local engine asks of trainers and samplers, and of the backends that make them. Synchronous: the engine
calls them from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.losses.spec import LossSpec
from engine.models.samples import Sample
from engine.protocol import ActorCount, Completion, OnToken, SamplingParams, TokenIds, TokenSequence
from engine.specs.adapters import Head, LoraSpec
from storage.chain.records import Numerics, OptimizerSpec


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

    @property
    def scalar(self) -> bool:
        """Whether its head gives one number per token (`values`), not logprobs: each of the two refuses the other with
        BadSpec."""
        ...

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

    def values(self, sequences: Sequence[TokenSequence], *, max_tokens: int) -> list[list[float]]:
        """The scalar head's number at the position before each trained token, per sequence."""
        ...

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

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the weights in master precision that the policy computes with, shared ones included."""
        ...

    @property
    def alive(self) -> bool:
        """False once the process that held it is gone: nothing can be asked of it any more."""
        ...

    def write_config(self, folder: Path) -> None:
        """Writes config.json and generation_config.json, as the model's folder has them."""
        ...

    def stage_weights(self, folder: Path, *, dtype: torch.dtype) -> list[Path]:
        """Writes every weight a sampler needs into `folder` as safetensors files, floating ones in `dtype`, under the
        names that `save_pretrained` gives them: a tied head is not written twice."""
        ...


class Sampler(Protocol):
    """Draws completions from the weights it was last synced with."""

    @property
    def holds(self) -> str | None:
        """State of the policy whose weights it holds; None before the first sync, and after one that failed."""
        ...

    def sync(self, trainer: Trainer, state: str) -> None:
        """Brings it to the trainer's weights, which are those of `state`, and proves it.

        Raises:
            SamplerOutOfSync: the weights did not arrive whole, or do not compute what the trainer's do.
            BadSpec: the trainer's model is not the one that this sampler was made for.
        """
        ...

    def sample(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """One that has `accepts_images` also takes `images`, those of each prompt; no other is given any
        (engine.models.images.check_images_accepted). The same holds of trainers and their sequences."""
        ...

    def nbytes(self) -> int:
        """Bytes of the engine's memory that it alone holds: 0 where it shares the trainer's weights, or has a memory
        of its own."""
        ...

    def close(self) -> None: ...


class TrainerBackend(Protocol):
    """Makes trainers: what `engine.trainer` means on this machine."""

    threads: int
    device: torch.device
    compute_dtype: torch.dtype
    master_dtype: torch.dtype

    @property
    def devices(self) -> int:
        """GPUs that train; a CPU counts as one per machine."""
        ...

    @property
    def actors(self) -> ActorCount:
        """Its processes on Ray. Any thread may ask."""
        ...

    def numerics(self) -> Numerics: ...

    def prepare_thread(self) -> None:
        """Called once in the thread that computes."""
        ...

    def threads_of(self, numerics: Numerics) -> AbstractContextManager[None]:
        """Computes with the thread count of a committed step."""
        ...

    def memory_bytes(self) -> int:
        """What weights, moments and gradients may fill."""
        ...

    def operations_per_second(self) -> float: ...

    def load(self, folder: Path, *, head: Head = "lm", init_seed: int = 0) -> Trainer:
        """A model all of whose weights are trained. A scalar head takes the place of a language head, and starts as
        `init_seed` draws it; a folder with a scalar head keeps its own.

        Raises:
            BadModelFolder: the folder does not load, or its architecture has no scalar head.
            BadSpec: a folder with a scalar head was to have a language head.
        """
        ...

    def try_load(self, folder: Path) -> None:
        """Raises BadModelFolder for a folder that `load` would refuse with the head that it has."""
        ...

    def load_base(self, folder: Path, *, key: str = "") -> Any:
        """A frozen model that adapters share; `key` is its registry key."""
        ...

    def adapter(self, base: Any, spec: LoraSpec, *, init_seed: int) -> Trainer:
        """A new adapter on what `load_base` gave."""
        ...

    def adapter_off(self, base: Any) -> Trainer:
        """The base itself as a policy that is only read."""
        ...

    def close(self) -> None: ...


class SamplerBackend(Protocol):
    """Makes samplers: what `engine.sampler` means on this machine."""

    @property
    def devices(self) -> int:
        """GPUs that sample; a CPU counts as one per copy of the sampler."""
        ...

    @property
    def actors(self) -> ActorCount:
        """Its processes on Ray. Any thread may ask."""
        ...

    @property
    def fixed_tensor_parallel(self) -> bool:
        """Whether a model is always split over as many devices as the config says, whatever `tp(n)` asks for."""
        ...

    def new_bytes(self, trainer: Trainer) -> int:
        """Bytes of the engine's memory that a new sampler for this trainer will take."""
        ...

    def sampler(self, trainer: Trainer, *, tensor_parallel: int | None = None) -> Sampler:
        """A sampler for the trainer's model, perhaps one that other policies of the same model use too."""
        ...

    def offload_for_training(self) -> None:
        """A gradient step is next: gives back device memory that can be given back."""
        ...

    def close(self) -> None: ...
