"""Finds how a policy or a registered model was made, from the records of chains and the parents in manifests.

A lineage is a list of segments, oldest first: the parts of chains that lead from a registered base model to the policy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from pydantic import JsonValue

from storage.chain.fork import ForkInfo, read_fork
from storage.chain.listing import has_objects, is_auxiliary, run_chains, stage_position
from storage.chain.records import Chain, CommitRecord, PolicyRef
from storage.chain.run_record import find_run, read_run
from storage.errors import CorruptArtifact, ObjectNotFound
from storage.inspect.accounting import StepInputs, step_inputs
from storage.registry.decisions import resolve_model
from storage.registry.models import find_model, registered_key
from storage.serialization import Frozen, canonical_text, flatten
from storage.store import keys
from storage.store.artifacts import ArtifactRef, map_files, read_manifest
from storage.store.index import run_entries
from storage.store.objects import ObjectInfo, ObjectStore
from storage.store.tables import read_table

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
RUNS_CACHED = 10_000
"""Runs whose inputs are kept in memory."""


class RunSteps(Frozen):
    """Consecutive steps of a chain that one run took."""

    run: str
    first: int
    """First of the steps, counted from 1."""
    last: int
    learning_rates: tuple[float, float]
    """Learning rates of the first and of the last step."""
    settings: dict[str, JsonValue] = {}
    """Settings in which the runs of the chain differ: dotted key -> value. A key that the run does not have is left
    out."""

    @property
    def title(self) -> str:
        """The steps and their run in words."""
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{steps} of {self.run}"

    @property
    def rate_text(self) -> str:
        """The learning rate, or those of the first and the last step."""
        rates = [f"{rate:.3g}" for rate in dict.fromkeys(self.learning_rates)]
        return " → ".join(rates)


def steps_by_run(chain: Chain, until: int) -> tuple[RunSteps, ...]:
    """Returns which run took the steps 1 .. `until` of a chain, oldest first. Empty if the chain's own run took all of
    them. Raises ObjectNotFound, CorruptArtifact."""
    ranges = _ranges(chain.store, chain.run, chain.stage, chain.model, until)
    if ranges in ([], [(chain.run, 1, until)]):
        return ()
    # a fork has copies of the shared records, so all of them are read from its own chain
    rates, configs, requests = [], [], []
    for run, first, last in ranges:
        first_record, last_record = chain.committed_record(first), chain.committed_record(last)
        rates.append((first_record.request.optimizer.lr, last_record.request.optimizer.lr))
        configs.append(_config(chain.store, run))
        requests.append(_request_settings(last_record))
    settings = _differing(configs)
    if not any(settings):
        # the config of a recipe may not hold its settings
        settings = _differing(requests)
    steps = []
    for number, (run, first, last) in enumerate(ranges):
        values = settings[number]
        steps.append(RunSteps(run=run, first=first, last=last, learning_rates=rates[number], settings=values))
    return tuple(steps)


def differing_settings(steps: tuple[RunSteps, ...]) -> list[tuple[str, list[str]]]:
    """Returns (dotted key, its value in each of the `steps`) of the settings in which they differ. A missing value is
    "–", and a digest is shortened."""
    names: set[str] = set()
    for part in steps:
        names |= part.settings.keys()
    rows = []
    for name in sorted(names):
        rows.append((name, [_text(part.settings.get(name, "–")) for part in steps]))
    return rows


def _text(value: JsonValue) -> str:
    text = value if isinstance(value, str) else canonical_text(value)
    return text[:12] if _SHA256.fullmatch(text) else text


def _ranges(store: ObjectStore, run: str, stage: str, model: str, until: int) -> list[tuple[str, int, int]]:
    """Returns (run, first step, last step) of each run that took some of the steps 1 .. `until`, oldest first."""
    fork = read_fork(store, run)
    shared = 0 if fork is None else min(until, _shared_steps(fork, stage, model, until))
    ranges = _ranges(store, fork.run, stage, model, shared) if fork is not None and shared else []
    if until > shared:
        ranges.append((run, shared + 1, until))
    return ranges


def _shared_steps(fork: ForkInfo, stage: str, model: str, until: int) -> int:
    """Returns how many of the steps 1 .. `until` of a chain the fork shares with its origin."""
    if stage == fork.stage:
        return next((policy.step for policy in fork.shared if policy.model == model), 0)
    # earlier stages are shared whole, later ones not at all
    is_earlier = (stage_position(stage), stage) < (stage_position(fork.stage), fork.stage)
    return until if is_earlier else 0


def _config(store: ObjectStore, run: str) -> dict[str, Any]:
    """Returns dotted key -> value of the config that decides the run's result. Empty for a fork that has not run."""
    info = find_run(store, run)
    return flatten(info.semantic) if info else {}


def _request_settings(record: CommitRecord) -> dict[str, Any]:
    """Returns dotted key -> value of the settings that a step was requested with, except for its learning rate."""
    settings = flatten(record.request.model_dump(mode="json", include={"loss", "optimizer", "temperature"}))
    del settings["optimizer.lr"]
    return settings


def _differing(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns of each config the entries whose values are not the same in all configs that are not empty."""
    known = [config for config in configs if config]
    if not known:
        return configs
    # the keys that all of them have, with equal values; compared as JSON, since True == 1 in Python
    equal = {name: canonical_text(value) for name, value in known[0].items()}
    for config in known[1:]:
        for name in list(equal):
            if name not in config or canonical_text(config[name]) != equal[name]:
                del equal[name]
    return [{name: value for name, value in config.items() if name not in equal} for config in configs]


_POLICY = re.compile(r"(?:policy:)?(.+)/([^/]+)/([^/@]+)@(\d+)(?:#([0-9a-f]+))?")


class ChainSegment(Frozen):
    """Steps 1 .. until of a chain."""

    run: str
    stage: str
    model: str
    until: int
    forked: tuple[RunSteps, ...] = ()
    """Which run took which of the steps, oldest first. Empty if `run` took all of them."""

    @property
    def runs(self) -> tuple[tuple[str, int, int], ...]:
        """(run, first step, last step) of each run that took some of the steps, oldest first."""
        if not self.forked:
            return ((self.run, 1, self.until),)
        return tuple((steps.run, steps.first, steps.last) for steps in self.forked)

    @property
    def title(self) -> str:
        """run/stage/model"""
        return f"{self.run}/{self.stage}/{self.model}"


class StepLineage(Frozen):
    """One gradient step and the artifacts from which it was made."""

    policy: str
    """URI of the policy that the step made."""
    step: int
    batch: str
    """URI of the batch. The fields below hold URIs of artifacts, too."""
    rollouts: tuple[str, ...]
    graded: tuple[str, ...]
    datasets: tuple[str, ...]
    prompts: tuple[str, ...]
    """Ids of the prompts, each once, in order."""
    completions: int
    """Number of sampled completions. For a step on completions of the dataset, of trained ones."""
    reward_mean: float | None
    learning_rate: float
    loss: float | None
    grad_norm: float | None


class Lineage(Frozen):
    """How a policy was made."""

    target: str
    """The subject of the lineage: `model name@version`, `run …` or `policy …`."""
    policy: PolicyRef | None
    """The policy whose lineage this is. None for an imported model."""
    base: str | None
    """`name@version` of the registered model at the very beginning."""
    segments: tuple[ChainSegment, ...]
    deleted: str | None = None
    """The run that made `base`, if that run was deleted. The lineage begins after it."""

    def facts(self) -> dict[str, str | None]:
        """Base model, policy and segments in words, by name."""
        policy = self.policy.uri if self.policy else "deleted" if self.deleted else "imported"
        facts = {"base model": self.base, "policy": policy}
        if self.deleted:
            facts["deleted"] = f"run {self.deleted}, which made the base model"
        for number, segment in enumerate(self.segments, 1):
            steps_text = f"steps 1 to {segment.until}" if segment.until else "no step yet"
            facts[f"segment {number}"] = f"{segment.title}, {steps_text}"
        return facts

    def chains(self, store: ObjectStore) -> Iterator[tuple[Chain, int]]:
        """Yields (chain, last step) of each segment, oldest first."""
        for segment in self.segments:
            yield Chain(store, segment.run, segment.stage, segment.model), segment.until

    def records(self, store: ObjectStore) -> Iterator[CommitRecord]:
        """Yields the record of every step, oldest first."""
        for chain, until in self.chains(store):
            yield from chain.records(after=0, until=until)


def lineage_of(store: ObjectStore, target: str) -> Lineage:
    """Returns the lineage of a registered model (`name`, `name@version`, `name@alias`), a policy
    (`run/stage/model@step`) or a run.

    Of a run, it is the lineage of the longest chain of the last stage. Raises ObjectNotFound, CorruptArtifact.
    """
    # a policy, a model or a run, in this order
    if _POLICY.fullmatch(target):
        policy, title = resolve_policy(store, target), f"policy {target}"
        return _lineage_of_policy(store, policy, title)
    model = _find_model(store, target)
    if model is None:
        return _lineage_of_policy(store, last_policy_of_run(store, target), f"run {target}")
    title = f"model {registered_key(model)}"
    deleted = deleted_run_of_model(store, model)
    model_policy = None if deleted else policy_of_model(store, model)
    if model_policy is None:
        return Lineage(target=title, policy=None, base=registered_key(model), segments=(), deleted=deleted)
    return _lineage_of_policy(store, model_policy, title)


def step_lineage(store: ObjectStore, record: CommitRecord) -> StepLineage:
    """Returns the artifacts, prompts and results of one step. Raises ObjectNotFound, CorruptArtifact."""
    inputs = step_inputs(store, record)
    rewards = _valid_rewards(store, inputs)
    prompt_ids = _prompt_ids(store, inputs)
    # the scalar results come from the record
    return StepLineage(
        policy=record.policy.uri,
        step=record.policy.step,
        batch=inputs.batch.uri,
        rollouts=tuple(ref.uri for ref in inputs.rollouts),
        graded=tuple(ref.uri for ref in inputs.graded),
        datasets=tuple(ref.uri for ref in inputs.datasets),
        prompts=tuple(dict.fromkeys(prompt_ids)),
        completions=len(prompt_ids),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        learning_rate=record.request.optimizer.lr,
        loss=record.metrics.get("loss"),
        grad_norm=record.metrics.get("grad_norm"),
    )


def training_datasets(store: ObjectStore, target: str) -> set[str]:
    """Returns the sha256 of every dataset that a model, policy or run and its ancestors were trained on."""
    digests: set[str] = set()
    for segment in lineage_of(store, target).segments:
        chain = Chain(store, segment.run, segment.stage, segment.model)
        # the first steps of a fork were trained on the datasets of its origin
        for run, first, last in segment.runs:
            info = find_run(store, run)
            inputs = info.semantic.get("inputs") if info else None
            if isinstance(inputs, dict) and isinstance(inputs.get("dataset"), str):
                digests |= {str(sha256) for name, sha256 in inputs.items() if name != "model"}
                continue
            # the configuration of a recipe does not name its datasets: read them from the steps
            for record in chain.records(after=first - 1, until=last):
                digests |= {uri.rpartition("#")[2] for uri in step_lineage(store, record).datasets}
    return digests


def runs_by_dataset(store: ObjectStore) -> dict[str, list[str]]:
    """Returns the runs that name a dataset among their inputs, by the sha256 of the dataset. The config of a recipe
    does not name its datasets. It reads the record of every run once in this process."""
    entries = {run: entry for run, entry in sorted(run_entries(store).items()) if not is_auxiliary(run)}

    def inputs_of(run: str) -> frozenset[str]:
        try:
            return _recorded_inputs(store, run, entries[run])
        except ObjectNotFound:
            # a fork that has not run yet
            return frozenset()

    users: dict[str, list[str]] = {}
    for run, digests in zip(entries, map_files(inputs_of, list(entries)), strict=True):
        for sha256 in digests:
            users.setdefault(sha256, []).append(run)
    return users


@lru_cache(maxsize=RUNS_CACHED)
def _recorded_inputs(store: ObjectStore, run: str, _entry: ObjectInfo) -> frozenset[str]:
    """The texts among the inputs in the record of a run, which never change. Raises ObjectNotFound, which is not
    cached. A run that was deleted and created again has another entry in the index."""
    inputs = read_run(store, run).semantic.get("inputs")
    # the inputs of an evaluation are groups of digests
    values = flatten(inputs).values() if isinstance(inputs, dict) else ()
    return frozenset(value for value in values if isinstance(value, str))


def resolve_policy(store: ObjectStore, text: str) -> PolicyRef:
    """Returns the committed policy of `run/stage/model@step`, or of a policy's URI.

    Raises ObjectNotFound, also if the chain has another state at that step than the URI.
    """
    match = _POLICY.fullmatch(text)
    if not match:
        raise ObjectNotFound(f"{text!r} is not a policy; give run/stage/model@step")
    run, stage, model, step, state = match.groups()
    policy = Chain(store, run, stage, model).policy(int(step))
    if state is not None and policy.state != state:
        raise ObjectNotFound(f"{text} is of another history: that step is {policy.state[:12]} in {store.url}")
    return policy


def policy_of_model(store: ObjectStore, model: ArtifactRef) -> PolicyRef | None:
    """Returns the policy from which a registered model was made, or None if it was imported.

    Raises ObjectNotFound if its run is gone.
    """
    # an imported model has no policy among its parents
    uri = next((parent for parent in model.parents if parent.startswith("policy:")), None)
    if uri is None:
        return None
    return resolve_policy(store, uri)


def deleted_run_of_model(store: ObjectStore, model: ArtifactRef) -> str | None:
    """Returns the run that made a registered model if nothing of that run is left, else None."""
    uri = next((parent for parent in model.parents if parent.startswith("policy:")), None)
    run = None if uri is None else keys.run_of_parent(uri)
    return None if run is None or has_objects(store, run) else run


def last_policy_of_run(store: ObjectStore, run: str) -> PolicyRef:
    """Returns the last policy of the longest chain of a run's last stage. Raises ObjectNotFound."""
    chains = run_chains(store, run) if keys.is_run(run) else []
    if not chains:
        raise ObjectNotFound(f"{run!r} is neither a registered model nor a run with a chain in {store.url}")
    # the last stage may have several models: take the one with the most steps
    heads = [chain.head() for chain in chains if chain.stage == chains[-1].stage]
    return max(heads, key=lambda head: head.step)


def _lineage_of_policy(store: ObjectStore, policy: PolicyRef, title: str) -> Lineage:
    """Follows the chains back from `policy` to the registered model at the very beginning."""
    segments: list[ChainSegment] = []
    end: PolicyRef | None = policy
    base: ArtifactRef | None = None
    deleted: str | None = None
    while end is not None:
        root = Chain.of(store, end).root()
        if root is None:
            raise CorruptArtifact(f"{end.uri} has no root: restore {keys.chain_root(end.run, end.stage, end.model)}")
        forked = steps_by_run(Chain.of(store, end), end.step)
        segments.append(ChainSegment(run=end.run, stage=end.stage, model=end.model, until=end.step, forked=forked))
        # the chain before ends at the start policy, or at the policy from which the base model was made
        base = root.base
        if base is None:
            end = root.start
        else:
            model = read_manifest(store, base.key).ref
            deleted = deleted_run_of_model(store, model)
            end = None if deleted else policy_of_model(store, model)
    base_key = None if base is None else registered_key(base)
    return Lineage(target=title, policy=policy, base=base_key, segments=tuple(segments[::-1]), deleted=deleted)


def _find_model(store: ObjectStore, target: str) -> ArtifactRef | None:
    name, _, version = resolve_model(store, target).partition("@")
    if not keys.is_name(name):
        return None
    return find_model(store, name, version or None)


def _prompt_ids(store: ObjectStore, inputs: StepInputs) -> list[str]:
    """Returns the prompt id of each completion: sampled ones, or those of the batch if nothing was sampled."""
    if not inputs.rollouts:
        return list(read_table(store, inputs.batch, ["group"])["group"].to_pylist())
    prompt_ids: list[str] = []
    for ref in inputs.rollouts:
        prompt_ids += read_table(store, ref, ["prompt_id"])["prompt_id"].to_pylist()
    return prompt_ids


def _valid_rewards(store: ObjectStore, inputs: StepInputs) -> list[float]:
    """Returns the rewards of the completions with a valid grade."""
    rewards: list[float] = []
    if not inputs.rollouts:
        return rewards
    for ref in inputs.graded:
        rows = read_table(store, ref, ["reward", "status"]).to_pylist()
        rewards += [row["reward"] for row in rows if row["status"] == "ok"]
    return rewards
