"""Publishes a policy in the registry as a plain Hugging Face model folder."""

from __future__ import annotations

from functools import partial

from engine.backends.protocol import Trainer
from engine.local.scratch import scratch
from engine.text.tokenizers import TOKENIZER_FILES
from storage.chain.records import PolicyRef, base_model_of
from storage.errors import VersionConflict
from storage.registry.models import find_published, publish_model
from storage.serialization import canonical_json, digest
from storage.store.artifacts import ArtifactRef, Provenance, digest_of, file_entries
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore


def publish_policy(
    store: ObjectStore, trainer: Trainer, policy: PolicyRef, model_name: str, *, provenance: Provenance
) -> ArtifactRef:
    """Publishes the trainer's weights, those of `policy`, with the tokenizer of the base model. Idempotent."""
    # The version names the content, so that a second export of the same weights is the same version.
    weights_digest, _ = trainer.weights_digest()
    version = f"{policy.step:06d}-{digest(canonical_json([weights_digest, policy.state]))[:12]}"
    published = find_published(store, model_name, version)
    if published is not None:
        return published

    with scratch(store) as folder, scratch(store) as base_folder:
        # Collect the tokenizer, the merged model and, for peft, the adapter alone.
        exported = trainer.export_merged(folder / "whole")
        if trainer.adapter is not None:
            adapter = trainer.export(folder / "adapter")
            exported |= {f"adapter/{name}": path for name, path in adapter.items()}
        tokenizer = materialise_files(store, base_model_of(store, policy).key, base_folder, names=TOKENIZER_FILES)
        files = {**tokenizer, **exported}

        publish = partial(
            publish_model,
            store,
            model_name,
            files=files,
            provenance=provenance,
            parents=(policy.uri,),
            extra={"weights_digest": weights_digest, "state": policy.state},
        )
        try:
            return publish(version)
        except VersionConflict:
            # An engine with another library version or device was killed after it claimed this version. Its files
            # differ, so publish these files under a version of their own.
            files_digest = digest_of(file_entries(files, lambda file: file))
            return publish(f"{version}-{files_digest[:8]}")
