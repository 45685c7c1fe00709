"""The average of several policies of one chain as a published model (LAWA, arXiv:2209.14981).

The policies are rebuilt on this machine, from their checkpoints where these are stored. An adapter is merged into the
base model first: the mean of the products B A is not the product of the means.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.errors import PermanentEngineError
from engine.local.redo import PolicyRebuilder, clean_backend
from engine.local.saving import scratch
from engine.text.tokenizers import TOKENIZER_FILES
from storage.chain.checkpoint_names import named_checkpoints
from storage.chain.listing import stored_checkpoint_steps
from storage.chain.records import Chain, PolicyRef, base_model_of
from storage.registry.models import find_published, publish_model
from storage.serialization import canonical_json, digest
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore


def last_checkpoints(chain: Chain, count: int) -> list[PolicyRef]:
    """The policies of the last `count` checkpoints of a chain, ascending. A step that has only the name of a
    checkpoint counts, because its policy can be computed again.

    Raises PermanentEngineError if the chain has fewer.
    """
    steps = set(stored_checkpoint_steps(chain))
    for checkpoint in named_checkpoints(chain.store, chain.run):
        policy = checkpoint.policy
        if (policy.stage, policy.model) == (chain.stage, chain.model):
            steps.add(policy.step)
    steps.discard(0)
    if len(steps) < count:
        raise PermanentEngineError(
            f"{chain.run}/{chain.stage}/{chain.model} has the checkpoints of steps {sorted(steps)}, and the average of "
            f"{count} was asked for; give a smaller --last, or train with checkpoints.every_steps"
        )
    return [chain.policy(step) for step in sorted(steps)[-count:]]


def publish_average(
    store: ObjectStore, policies: Sequence[PolicyRef], model_name: str, *, provenance: Provenance
) -> ArtifactRef:
    """Publishes the mean of the weights of these policies of one chain under `model_name`. Its parents are the
    policies, the last one first. Idempotent.

    The sum is taken in float64, in the order of the steps. A tensor of whole numbers is that of the last policy.
    """
    last = policies[-1]
    chain = Chain.of(store, last)
    states = [policy.state for policy in policies]
    version = f"{last.step:06d}-mean{len(policies)}-{digest(canonical_json(states))[:12]}"
    published = find_published(store, model_name, version)
    if published is not None:
        return published
    with scratch(store) as folder, scratch(store) as base_folder:
        # the weights of each policy, in the format of a published model
        numerics = chain.committed_record(last.step).numerics
        with clean_backend(numerics) as backend:
            rebuilder = PolicyRebuilder(store, backend)
            exports = []
            for policy in policies:
                trainer = rebuilder.rebuild(chain, policy.step)
                exports.append(trainer.export_merged(folder / str(policy.step)))
        files = dict(exports[-1])
        for name in files:
            if name.endswith(".safetensors"):
                files[name] = folder / name
                _write_mean([export[name] for export in exports], files[name])
        tokenizer = materialise_files(store, base_model_of(store, last).key, base_folder, names=TOKENIZER_FILES)
        return publish_model(
            store,
            model_name,
            version,
            {**tokenizer, **files},
            provenance=provenance,
            parents=[policy.uri for policy in reversed(policies)],
            extra={"averaged": len(policies)},
        )


def _write_mean(paths: Sequence[Path], to: Path) -> None:
    """Writes the mean of the tensors of equal files. One tensor of each file is in memory at a time, and the result."""
    means = {}
    with safe_open(paths[-1], framework="pt") as last:
        metadata = last.metadata()
        for name in last.keys():  # noqa: SIM118 - the file is no dictionary
            tensor = last.get_tensor(name)
            means[name] = _mean(name, paths, tensor) if tensor.is_floating_point() else tensor
    save_file(means, to, metadata=metadata)


def _mean(name: str, paths: Sequence[Path], like: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(like.shape, dtype=torch.float64)
    for path in paths:
        with safe_open(path, framework="pt") as file:
            total += file.get_tensor(name)
    return (total / len(paths)).to(like.dtype)
