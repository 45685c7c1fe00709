"""A registered model as a policy: clients of the OpenAI routes, and graders that name a judge, read the same one, so
that its weights are in memory once."""

from __future__ import annotations

from engine.protocol import PolicySpec
from storage.chain.listing import SERVED
from storage.chain.records import Root
from storage.store import keys
from storage.store.artifacts import ArtifactRef

DEFAULT_CHAIN = "policy"
"""The chain that stands for its stage, where a stage has several."""


def served_policy(model: ArtifactRef) -> PolicySpec:
    """Policy 0 of a chain that never moves: `served/<name>`, stage `0-<digest of the version's content>`."""
    _, name, _ = model.key.split("/")
    root = Root(base=model, base_digest=model.sha256)
    stage = keys.stage_name(0, model.sha256[:16])
    return PolicySpec(run=f"{SERVED}/{name}", stage=stage, model=DEFAULT_CHAIN, root=root)
