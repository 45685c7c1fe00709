"""What made a model, and what a prompt touched: the parents of manifests and the records of chains, walked.

A lineage is a list of segments, oldest first: stretches of chains that lead from a registered base model to the policy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from storage.chain.listing import run_chains
from storage.chain.records import Chain, CommitRecord, PolicyRef
from storage.chain.run_record import read_run
from storage.errors import CorruptArtifact, ObjectNotFound
from storage.inspect.accounting import StepInputs, step_inputs
from storage.registry.models import find_model, registered_key
from storage.serialization import Frozen
from storage.store import keys
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import read_table

_POLICY = re.compile(r"(?:policy:)?(.+)/([^/]+)/([^/@]+)@(\d+)(?:#([0-9a-f]+))?")


class Segment(Frozen):
    """Steps 1 .. until of a chain."""

    run: str
    stage: str
    model: str
    until: int

    @property
    def title(self) -> str:
        return f"{self.run}/{self.stage}/{self.model}"


class StepLineage(Frozen):
    """One gradient step and what it was made from."""

    policy: str
    """The policy it made, as an uri."""
    step: int
    batch: str
    """Uri of an artifact, like those below."""
    rollouts: tuple[str, ...]
    graded: tuple[str, ...]
    datasets: tuple[str, ...]
    prompts: tuple[str, ...]
    """Ids of the dataset rows, each once."""
    completions: int
    """Sampled; of a step on given completions, trained."""
    reward_mean: float | None
    learning_rate: float
    loss: float | None
    grad_norm: float | None


class Lineage(Frozen):
    """How a policy came to be."""

    target: str
    """What was asked about: `model name@version`, `run …` or `policy …`."""
    policy: PolicyRef | None
    """None for a model that was imported."""
    base: str | None
    """Registered model that it all began with, `name@version`."""
    segments: tuple[Segment, ...]

    def chains(self, store: ObjectStore) -> Iterator[tuple[Chain, int]]:
        for segment in self.segments:
            yield Chain(store, segment.run, segment.stage, segment.model), segment.until

    def records(self, store: ObjectStore) -> Iterator[CommitRecord]:
        """Every step, oldest first."""
        for chain, until in self.chains(store):
            yield from chain.records(after=0, until=until)


def lineage_of(store: ObjectStore, target: str) -> Lineage:
    """The lineage of a registered model (`name`, `name@version`), a policy (`run/stage/model@step`) or a run (its last
    stage's longest chain). Raises ObjectNotFound, CorruptArtifact."""
    policy, model = None, None
    if _POLICY.fullmatch(target):
        policy, said = resolve_policy(store, target), f"policy {target}"
    elif (model := _model(store, target)) is not None:
        policy, said = policy_of_model(store, model), f"model {registered_key(model)}"
    else:
        policy, said = last_policy_of_run(store, target), f"run {target}"
    if policy is None:
        assert model is not None  # a policy and a run have one
        return Lineage(target=said, policy=None, base=registered_key(model), segments=())
    base, segments = _segments(store, policy)
    return Lineage(target=said, policy=policy, base=base, segments=tuple(segments))


def step_lineage(store: ObjectStore, record: CommitRecord) -> StepLineage:
    """What one step was made from. Raises ObjectNotFound, CorruptArtifact when some of it is gone."""
    material = step_inputs(store, record)
    rewards, completions, prompts = _grades(store, material)
    return StepLineage(
        policy=record.policy.uri,
        step=record.policy.step,
        batch=material.batch.uri,
        rollouts=tuple(ref.uri for ref in material.rollouts),
        graded=tuple(ref.uri for ref in material.graded),
        datasets=tuple(ref.uri for ref in material.datasets),
        prompts=tuple(prompts),
        completions=completions,
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        learning_rate=record.request.optimizer.lr,
        loss=record.metrics.get("loss"),
        grad_norm=record.metrics.get("grad_norm"),
    )


def training_datasets(store: ObjectStore, target: str) -> set[str]:
    """sha256 of every dataset that a model, policy or run was trained on, its ancestors' too."""
    found = set()
    lineage = lineage_of(store, target)
    for chain, until in lineage.chains(store):
        try:
            inputs = read_run(store, chain.run).semantic.get("inputs")
        except ObjectNotFound:
            inputs = None  # a fork that did not run yet
        if isinstance(inputs, dict) and isinstance(inputs.get("dataset"), str):
            found |= {str(sha256) for name, sha256 in inputs.items() if name != "model"}
        else:  # a recipe does not say: its steps do
            steps = (step_lineage(store, record) for record in chain.records(after=0, until=until))
            found |= {uri.rpartition("#")[2] for step in steps for uri in step.datasets}
    return found


def resolve_policy(store: ObjectStore, text: str) -> PolicyRef:
    """The committed policy of `run/stage/model@step`, or of a policy's uri. Raises ObjectNotFound, also when the uri's
    state is another one than the chain has."""
    match = _POLICY.fullmatch(text)
    if not match:
        raise ObjectNotFound(f"{text!r} is no policy; give run/stage/model@step")
    run, stage, model, step, state = match.groups()
    policy = Chain(store, run, stage, model).policy(int(step))
    if state is not None and policy.state != state:
        raise ObjectNotFound(f"{text} is of another history: that step is {policy.state[:12]} in {store.url}")
    return policy


def policy_of_model(store: ObjectStore, model: ArtifactRef) -> PolicyRef | None:
    """The policy that a registered model is; None when it was imported. Raises ObjectNotFound when its run is gone."""
    uri = next((parent for parent in model.parents if parent.startswith("policy:")), None)
    return None if uri is None else resolve_policy(store, uri)


def last_policy_of_run(store: ObjectStore, run: str) -> PolicyRef:
    """The last policy of a run: of its last stage's longest chain."""
    chains = run_chains(store, run) if keys.is_run(run) else []
    if not chains:
        raise ObjectNotFound(f"{run!r} is neither a registered model nor a run with a chain in {store.url}")
    heads = [chain.head() for chain in chains if chain.stage == chains[-1].stage]
    return max(heads, key=lambda head: head.step)


def _model(store: ObjectStore, target: str) -> ArtifactRef | None:
    name, _, version = target.partition("@")
    return find_model(store, name, version or None) if keys.is_name(name) else None


def _segments(store: ObjectStore, policy: PolicyRef) -> tuple[str | None, list[Segment]]:
    """The registered model at the very beginning, and the segments from there to `policy`."""
    segments: list[Segment] = []
    at: PolicyRef | None = policy
    base: ArtifactRef | None = None
    while at is not None:
        root = Chain.of(store, at).root()
        if root is None:
            raise CorruptArtifact(f"{at.uri} has no root: restore {keys.chain_root(at.run, at.stage, at.model)}")
        segments.append(Segment(run=at.run, stage=at.stage, model=at.model, until=at.step))
        base = root.base
        # a base model may be the end of another run
        at = root.start if root.base is None else policy_of_model(store, read_manifest(store, root.base.key).ref)
    return None if base is None else registered_key(base), segments[::-1]


def _grades(store: ObjectStore, material: StepInputs) -> tuple[list[float], int, list[str]]:
    """(valid rewards, completions, prompt ids in their order)."""
    if not material.rollouts:
        ids = read_table(store, material.batch, ["group"])["group"].to_pylist()
        return [], len(ids), list(dict.fromkeys(ids))
    ids = [i for ref in material.rollouts for i in read_table(store, ref, ["prompt_id"])["prompt_id"].to_pylist()]
    rows = [row for ref in material.graded for row in read_table(store, ref, ["reward", "status"]).to_pylist()]
    return [row["reward"] for row in rows if row["status"] == "ok"], len(ids), list(dict.fromkeys(ids))
