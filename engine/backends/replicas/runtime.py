"""The interface of a running sampler that proves its weights, as `VllmSampler` uses it: one engine in this process
(vllm_api.InProcessRuntime), or a pool of replicas (pool.ReplicaPool).

A runtime loads weights, samples tokens, and proves which weights it holds. The sampler decides when to load weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from engine.backends.protocol import OnToken
from engine.protocol import Completion, SamplingParams, TokenIds
from engine.text.stops import StopStrings

Manifest = dict[str, tuple[str, tuple[int, ...], str]]
"""The weights that the trainer staged. By tensor name: (dtype as in str(torch.dtype), shape, sha256 of the row-major
bytes). In JSON the tuples are lists; both are accepted."""

Source = Sequence[Path] | Mapping[str, Tensor]
"""Weights to load: safetensors files that the workers can open, or the tensors themselves (same process only)."""


@dataclass(frozen=True, slots=True)
class LoadProof:
    """The proof of one load."""

    state: str
    tensors: int
    """Number of tensors that arrived whole."""
    values_read: int
    """Number of weights that were read back from live layers and found equal, over all workers."""
    unread: tuple[str, ...] = ()
    """Names of tensors that arrived whole, but whose layers do not allow a read-back (quantised ones, for example)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each part: receive, load, readback."""


class Runtime(Protocol):
    """A running sampler. Every method raises WorkerDied if one of its processes is gone, and SamplerOutOfSync if it
    holds other weights than expected."""

    accepts_tensors: bool
    """Whether `load` accepts tensors. Otherwise it needs files."""

    @property
    def needs_weights(self) -> bool:
        """Whether a part of it runs without weights, and cannot load the last ones by itself."""
        ...

    def load(self, source: Source, manifest: Manifest, state: str, *, full: bool = False) -> LoadProof:
        """Loads weights into every worker and proves them.

        The proof: each tensor equals the manifest's (name, shape, dtype, digest), and a sample of the input columns of
        every live layer (with `full`, all columns) equals those of the tensors. Later requests use these weights: the
        prefix cache is reset, and its keys contain the state.

        Raises:
            SamplerOutOfSync: a tensor differs; the message names the worker and the first such tensor.
        """
        ...

    def check(self, state: str, *, full: bool = False) -> None:
        """Reads slices of the live layers again and compares them with those of the load.

        Args:
            full: read all slices that `load` sampled, instead of a few.

        Raises:
            SamplerOutOfSync: a worker holds other weights, or is not the process that loaded `state`.
        """
        ...

    def generate(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        *,
        adapter: str | None = None,
        stops: StopStrings | None = None,
    ) -> list[Completion]:
        """One completion per (prompt, seed), in order, all submitted together. The caller has checked the prompts.

        Args:
            on_token: called with (index, token, logprob) of each new token. An exception of it aborts all completions
                and is raised.
            adapter: name under which `load_adapter` loaded a LoRA adapter.
            stops: the strings of `params.stop`, for the tokens of the model's tokenizer.
        """
        ...

    def score(
        self, sequences: Sequence[TokenIds], *, temperature: float = 1.0, adapter: str | None = None
    ) -> list[list[float]]:
        """Logprobs in nats of every token but the first, for sequences of at least two tokens.

        Raises BadSpec for a temperature other than 1, at which vLLM cannot score.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Raises SamplerOutOfSync if the cache could not be reset."""
        ...

    def load_adapter(self, folder: Path, name: str, manifest: Manifest) -> None:
        """Loads a peft folder under a new name, and proves that the workers hold the tensors of `manifest`, whose names
        are those in adapter_model.safetensors."""
        ...

    def remove_adapter(self, name: str) -> None: ...

    def check_adapter(self, name: str) -> None:
        """Raises SamplerOutOfSync unless every worker still holds exactly what `load_adapter` loaded."""
        ...

    def sleep(self) -> None:
        """Frees device memory. The weights are lost, which `check` notices, unless nothing could be freed."""
        ...

    def wake(self) -> None: ...

    @property
    def alive(self) -> bool: ...

    def close(self) -> None: ...
