"""The interface of a running sampler that proves its weights, as `VllmSampler` uses it: one engine in this process
(vllm_api.InProcessRuntime), or a pool of replicas (pool.ReplicaPool).

A runtime loads weights, samples tokens, and proves which weights it holds. The sampler decides when to load weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.backends.protocol import Interrupted, OnToken
from engine.backends.replicas.broadcast import BroadcastGroup, DeviceInfo, Parts
from engine.backends.weight_files.digests import digest_tensor
from engine.backends.weight_files.tensor_files import read_tensors
from engine.errors import BadSpec, SamplerOutOfSync
from engine.protocol import Completion, SamplingParams, TokenIds
from engine.text.stops import StopStrings

Manifest = dict[str, tuple[str, tuple[int, ...], str]]
"""The weights that the trainer staged. By tensor name: (dtype as in str(torch.dtype), shape, digest of the
tensor). In JSON the tuples are lists; both are accepted."""


class Senders(Protocol):
    """The processes that have the weights and send them to the replicas. They are the first members of a broadcast
    group, or of several: each pool of replicas has its own. Every method may block, and may be called in any thread,
    one at a time for each group."""

    def is_in(self, group: str) -> bool:
        """Whether they are in the group of this name, as far as they know."""
        ...

    def devices(self) -> list[DeviceInfo]:
        """The device of each of them. Raises WorkerDied."""
        ...

    def join(self, group: BroadcastGroup) -> None:
        """Returns when all members of the group are connected. Raises BroadcastAborted and WorkerDied."""
        ...

    def send(self, source: Source, manifest: Manifest, group: str) -> None:
        """Sends the weights to the group of this name. Raises BroadcastAborted, WorkerDied, or SamplerOutOfSync for
        weights that have changed."""
        ...

    def leave(self, group: str, reason: str) -> None:
        """Leaves the group of this name, whose other members abort. Does not block."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HeldWeights:
    """Weights that the processes of a trainer hold until they have sent them."""

    senders: Senders
    number: int
    """The number under which the senders hold them."""
    manifest: Manifest
    parts: Parts
    """Which sender has which part."""
    close: Callable[[], None]
    """Lets the senders drop them."""


@runtime_checkable
class SendsWeights(Protocol):
    """A trainer in several processes, which send the weights themselves."""

    def hold_weights(self, *, dtype: torch.dtype) -> HeldWeights:
        """Copies every weight that a sampler needs, where it is: floating-point weights in `dtype`, under the names
        that `save_pretrained` uses. The trainer may change its weights afterwards."""
        ...


Source = Sequence[Path] | Mapping[str, Tensor] | HeldWeights
"""Weights to load: safetensors files that the workers can open, the tensors themselves, or weights that the trainer's
processes send. Tensors are only for the same process, or to be broadcast."""


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
        sampled: Sequence[TokenIds] | None = None,
        interrupted: Interrupted | None = None,
    ) -> list[Completion]:
        """One completion per (prompt, seed), in order, all submitted together. The caller has checked the prompts.

        Args:
            on_token: called with (index, token, logprob) of each new token. An exception of it aborts all completions
                and is raised.
            adapter: name under which `load_adapter` loaded a LoRA adapter.
            stops: the strings of `params.stop`, for the tokens of the model's tokenizer.
            sampled: the tokens that each completion has already.
            interrupted: ends the call, as in engine.backends.protocol.Sampler.
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


def any_broken(replies: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a worker reports that no further load can repair it, so that its process must be replaced."""
    return any(reply.get("broken") for reply in replies)


def worker_ids_of(replies: Sequence[Mapping[str, Any]]) -> list[str]:
    return [reply["worker_id"] for reply in replies]


def check_replies(replies: Sequence[Mapping[str, Any]], worker_ids: Sequence[str], *, who: str = "vLLM") -> None:
    """Raises SamplerOutOfSync if a worker reports an error, or the workers are not those of `worker_ids`, in order."""
    for reply in replies:
        if reply.get("error"):
            raise SamplerOutOfSync(f"{who}, worker {reply['rank']}: {reply['error']}")
    # A worker makes a new id whenever its process starts, so other ids mean that the weights are gone.
    if worker_ids_of(replies) != list(worker_ids):
        raise SamplerOutOfSync(f"{who} was restarted: its workers are not those that the weights were loaded into")


def proof_from_replies(replies: Sequence[Mapping[str, Any]], state: str, *, who: str = "vLLM") -> LoadProof:
    """The proof of one load, over all workers of one engine. Raises SamplerOutOfSync if a worker reports an error."""
    check_replies(replies, worker_ids_of(replies), who=who)
    if not replies or any(reply["state"] != state for reply in replies):
        states = [reply["state"] for reply in replies]
        raise SamplerOutOfSync(f"{who} replied for other weights than {state}: {states}")
    # Each worker proves its part of the model, so one worker's reply is the proof of a part.
    parts: list[LoadProof] = []
    for reply in replies:
        unread = tuple(reply["unread"])
        parts.append(LoadProof(state, reply["tensors"], reply["values"], unread, reply["seconds"]))
    return _combine(parts, state)


def merge_proofs(proofs: Sequence[LoadProof], state: str) -> LoadProof:
    """One proof for all replicas. Raises SamplerOutOfSync if they received different numbers of tensors."""
    if len({proof.tensors for proof in proofs}) > 1:
        raise SamplerOutOfSync(f"the replicas hold unequal numbers of tensors of {state}: {proofs}")
    return _combine(proofs, state)


def _combine(proofs: Sequence[LoadProof], state: str) -> LoadProof:
    """One proof for all of several. They were made at the same time, so the longest duration counts."""
    values_read = 0
    unread = set[str]()
    seconds: dict[str, float] = {}
    for proof in proofs:
        values_read += proof.values_read
        unread.update(proof.unread)
        for part, duration in proof.seconds.items():
            seconds[part] = max(duration, seconds.get(part, 0.0))
    return LoadProof(state, proofs[0].tensors, values_read, tuple(sorted(unread)), seconds)


def entry_of(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    """(dtype, shape, digest)."""
    return str(tensor.dtype), tuple(tensor.shape), digest_tensor(tensor)


def manifest_of(tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """The manifest of (name, tensor) pairs. Raises BadSpec if a name occurs twice."""
    manifest: Manifest = {}
    for name, tensor in tensors:
        if name in manifest:
            raise BadSpec(f"tensor {name} was staged twice")
        manifest[name] = entry_of(tensor)
    return manifest


def manifest_of_files(paths: Sequence[Path]) -> Manifest:
    """The manifest of safetensors files. Raises BadSpec for an incomplete file, or if a name occurs twice."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for path in paths:
            yield from read_tensors(path)

    return manifest_of(tensors())


def digest_of(manifest: Manifest) -> str:
    """Equal for equal names, dtypes, shapes and bytes; the order of the tensors does not matter."""
    lines = (f"{name} {dtype} {list(shape)} {digest}\n" for name, (dtype, shape, digest) in sorted(manifest.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
