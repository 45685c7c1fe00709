"""Builds the commit record of a step."""

from __future__ import annotations

from engine.local.apply import StepEffect
from engine.local.loaded_policies import LoadedPolicy
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import CommitRecord, Numerics, StepRequest

SMALL_MODEL_BYTES = 256 << 20
"""Up to this many bytes of weights, every commit record holds a digest of them."""
LARGE_MODEL_DIGEST_EVERY = 10
"""Larger models: every n-th commit record holds a digest."""
TENSOR_DIGITS = 8
"""Number of hex digits of each tensor's digest in a commit record."""


def step_record(
    request: StepRequest, effect: StepEffect, loaded: LoadedPolicy, numerics: Numerics, spec: LocalEngineSpec
) -> CommitRecord:
    """Returns the commit record of a step that was applied to `loaded` under `numerics`."""
    # The limits of the updates are recorded only if one of them differs from the engine's limit.
    limits_differ = bool(set(effect.max_tokens) - {spec.max_tokens_per_forward})
    numerics = numerics.model_copy(
        update={
            "micro_batches": effect.micro_batches,
            "max_tokens_of_updates": effect.max_tokens if limits_differ else (),
        }
    )

    # A digest reads all weights, so large models get one only at some steps.
    weights_digest: str | None = None
    tensor_digests: dict[str, str] = {}
    if _is_digest_due(loaded, request.parent.step + 1, spec.digest_every):
        weights_digest, tensor_digests = loaded.trainer.weights_digest()
    return CommitRecord(
        request=request,
        state=request.next_state(),
        controllers_out=request.controllers_in,
        metrics=effect.metrics,
        updates=effect.updates,
        skipped=len(effect.skipped),
        skipped_updates=tuple(effect.skipped),
        numerics=numerics,
        rebase=loaded.rebase,
        weights_digest=weights_digest,
        tensor_digests=tuple(tensor_digests[name][:TENSOR_DIGITS] for name in sorted(tensor_digests)),
    )


def _is_digest_due(loaded: LoadedPolicy, step: int, every: int | None) -> bool:
    """Whether the record of `step` holds a digest. `every` is the config's `digest_every`."""
    if every is None:
        is_small = loaded.trainer.weights_nbytes <= SMALL_MODEL_BYTES
        every = 1 if is_small else LARGE_MODEL_DIGEST_EVERY
    return step % every == 0
