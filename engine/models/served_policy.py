"""The policy under which a registered model is served.

The OpenAI routes and the graders that name a judge model use the same policy, so that its weights are in memory once.
"""

from __future__ import annotations

from engine.protocol import PolicySpec
from storage.chain.listing import SERVED
from storage.chain.records import Root
from storage.store import keys
from storage.store.artifacts import ArtifactRef

DEFAULT_CHAIN = "policy"
"""Name of the chain that represents a stage when the stage has several chains."""


def served_policy(model: ArtifactRef) -> PolicySpec:
    """The chain of a served model, which never takes a step. Its run is `served/<name>`, and its stage is
    `0-<digest of the version's content>`."""
    _, name, _ = model.key.split("/")
    root = Root(base=model, base_digest=model.sha256)
    stage = keys.stage_name(0, model.sha256[:16])
    return PolicySpec(run=f"{SERVED}/{name}", stage=stage, model=DEFAULT_CHAIN, root=root)
