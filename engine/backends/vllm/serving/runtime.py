"""Where vLLM runs, as `VllmSampler` sees it: one engine in this process (adapter.InProcess), or a pool of replicas.

A runtime moves tokens and weights and answers for both; what a state is, and when to sync, is the sampler's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from engine.backends.protocol import OnToken
from engine.protocol import Completion, SamplingParams, TokenIds

EXTENSION = "engine.backends.vllm.weight_sync.extension.Extension"
"""What runs inside vLLM's workers: receives weights, reads them back out of the live layers."""

Manifest = dict[str, tuple[str, tuple[int, ...], str]]
"""What the trainer staged, by tensor name: (dtype as in str(torch.dtype), shape, sha256 of the row-major bytes).
As JSON the tuples are lists; both are accepted."""

Source = Sequence[Path] | Mapping[str, Tensor]
"""Weights to load: safetensors files that the workers can open, or the tensors themselves (same process only)."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How vLLM is built for one architecture; what a `VllmSpec` and a trainer together amount to."""

    dtype: Literal["float32", "bfloat16"]
    max_context: int
    """Longest prompt and completion together, tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    tensor_parallel: int = 1
    kv_cache_bytes: int | None = None
    """None: what `gpu_share` leaves."""
    gpu_share: float = 0.9
    eager: bool = True
    max_lora_rank: int | None = None
    """None: built without LoRA, which costs a third of the decoding speed."""
    lora_targets: tuple[str, ...] = ()
    """Last parts of the names of the layers that may be adapted, never the head: with it vLLM cannot score prompts."""
    sleep: bool = False
    """Whether `sleep` gives memory back."""
    max_rows: int = 256
    """Completions that decode together."""
    extension: str = EXTENSION


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a load was proven to be."""

    state: str
    tensors: int
    values_read: int
    """Weights read back out of live layers and found equal, over all workers."""
    unread: tuple[str, ...] = ()
    """Tensors that were received whole, but live in layers whose values cannot be read back (quantised ones, say)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By part: receive, load, readback."""


class Runtime(Protocol):
    """Every method raises WorkerDied when a process of it is gone; a wrong answer about weights is SamplerOutOfSync."""

    takes_tensors: bool
    """Whether `load` takes tensors as they are; else it takes files."""

    @property
    def wants_weights(self) -> bool:
        """Whether a part of it is up without weights, and cannot find the last ones by itself."""
        ...

    def load(self, source: Source, manifest: Manifest, state: str, *, full: bool = False) -> Receipt:
        """Loads the weights into every worker and proves it: each tensor equals the manifest's (names, shapes, dtypes,
        digests), and sampled input columns of every live layer (`full`: all) equal those of the tensors. Afterwards
        requests are of `state`: the prefix cache is reset, and salted with the state besides.

        Raises:
            SamplerOutOfSync: names the worker and the first tensor that differs.
        """
        ...

    def check(self, state: str, *, full: bool = False) -> None:
        """Reads the slices that `load` sampled (`full`: other ones too, as many as were kept) out of the live layers
        again; raises SamplerOutOfSync unless every worker is the process that loaded `state` and still holds it."""
        ...

    def generate(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Completion]:
        """One completion per (prompt, seed), in order, all submitted together; `adapter` was loaded by that name. What
        `on_token` raises aborts all of them and is raised. The prompts were checked."""
        ...

    def score(
        self, sequences: Sequence[TokenIds], *, temperature: float = 1.0, adapter: str | None = None
    ) -> list[list[float]]:
        """Nats of every token but the first, per sequence of at least two; temperature 1 is all that vLLM scores at:
        another is a BadSpec."""
        ...

    def reset_prefix_cache(self) -> None:
        """Raises SamplerOutOfSync when it could not be reset."""
        ...

    def load_adapter(self, folder: Path, name: str, manifest: Manifest) -> None:
        """Hot-loads a peft folder under a name that was not used before; proves that the workers hold what `manifest`
        says, under the names in adapter_model.safetensors."""
        ...

    def remove_adapter(self, name: str) -> None: ...

    def check_adapter(self, name: str) -> None:
        """Raises SamplerOutOfSync unless every worker still holds exactly what `load_adapter` put there."""
        ...

    def sleep(self) -> None:
        """Gives device memory back: the weights are gone afterwards (`check` says so) unless nothing could be freed."""
        ...

    def wake(self) -> None: ...

    @property
    def alive(self) -> bool: ...

    def close(self) -> None: ...
