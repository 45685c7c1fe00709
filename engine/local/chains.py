"""Creates chains and checks policies against the committed chains.

A committed root can never be changed, so everything that would fail later is checked before it is committed.
"""

from __future__ import annotations

from engine.errors import BadSpec, StepConflict, UnknownPolicy
from engine.models.scores import check_head
from engine.protocol import PolicySpec
from engine.specs.adapters import parse_trainable
from storage.chain.records import Chain, PolicyRef, Root
from storage.errors import ObjectNotFound
from storage.store.artifacts import ArtifactRef, find_artifact
from storage.store.objects import ObjectStore


def check_committed(store: ObjectStore, policy: PolicyRef) -> None:
    """Raises UnknownPolicy unless the chain has committed this step with this state."""
    try:
        committed = Chain.of(store, policy).policy(policy.step)
    except ObjectNotFound as error:
        raise UnknownPolicy(f"{error}; take the steps before it, or check run, stage and model") from error
    if committed.state != policy.state:
        raise UnknownPolicy(
            f"{policy.run}/{policy.stage}/{policy.model}@{policy.step} is committed as "
            f"{committed.state[:12]}, not as {policy.state[:12]}; the reference belongs to another history"
        )


def create_chain(store: ObjectStore, spec: PolicySpec) -> PolicyRef:
    """Commits the root of a chain if it has none, and returns policy 0.

    Raises:
        BadSpec, UnknownPolicy: the root is invalid (see `check_root`). Nothing was committed.
        StepConflict: the chain already has a different root.
    """
    chain = Chain(store, spec.run, spec.stage, spec.model)
    committed_root = chain.root()
    if committed_root is None:
        check_root(store, spec.root)
        committed_root = chain.create_root(spec.root)
    # Another process may have committed its root first, so compare even after create_root.
    if committed_root.state() != spec.root.state():
        raise StepConflict(
            f"the chain {spec.run}/{spec.stage}/{spec.model} starts from {committed_root.base_digest[:12]}, but "
            f"{spec.root.base_digest[:12]} was given: the base model, the trainable part or the seed changed; "
            "use another run key"
        )
    return chain.policy(0)


def check_root(store: ObjectStore, root: Root) -> None:
    """Checks the root of a new chain without loading a model.

    Raises:
        BadSpec: the trainable part is unknown, or the base model does not exist, has another digest, or lacks the head
            to be trained.
        UnknownPolicy: the policy to start from was never committed.
    """
    # A root starts either from a registered model or from a policy of an earlier stage.
    trainable = parse_trainable(root.trainable)
    if root.base is not None and root.start is None:
        _check_base(store, root.base, root.base_digest)
        check_head(store, root.base, trainable.head)
    elif root.start is not None and root.base is None:
        _check_start(store, root, root.start)
    else:
        raise BadSpec("a chain starts from a base model or from an earlier policy; give exactly one of base and start")


def check_same_trainable(root: Root, previous: Root) -> None:
    """Raises BadSpec unless the stage of `root` trains the same part of the model as the previous stage."""
    if previous.trainable != root.trainable:
        assert root.start is not None
        raise BadSpec(
            f"the new stage trains {root.trainable}, but it starts from {root.start.uri}, which trained "
            f"{previous.trainable}; publish that policy as a model and start from it, or train the same part"
        )


def _check_base(store: ObjectStore, base: ArtifactRef, base_digest: str) -> None:
    registered = find_artifact(store, base.key)
    if registered is None or registered.kind != "model":
        raise BadSpec(f"there is no model {base.key} in {store.url}; import the model, and give the reference returned")
    if not registered.sha256 == base.sha256 == base_digest:
        raise BadSpec(
            f"{base.key} has the digest {registered.sha256[:12]}, but the root says {base.sha256[:12]} in base and "
            f"{base_digest[:12]} in base_digest; give the digest of the registered model in both"
        )


def _check_start(store: ObjectStore, root: Root, start: PolicyRef) -> None:
    check_committed(store, start)
    if root.base_digest != start.state:
        raise BadSpec(
            f"the root starts from the state {start.state[:12]}, but gives base_digest={root.base_digest[:12]}; give "
            "the state of the policy as base_digest"
        )
    previous = Chain.of(store, start).root()
    assert previous is not None  # the policy is committed, so its chain has a root
    check_same_trainable(root, previous)
