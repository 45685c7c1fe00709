"""`ostinato replay --rollouts`: samples the completions of a committed step again.

Each call of the engine is repeated as it was: the committed segments of a shard say which completions a call went on
with, from which policy, and after how many tokens it ended. Equal calls give equal tokens on the torch sampler with
`deterministic`; without it, the engine may have joined calls into one batch, whose sums were rounded in another way.
vLLM draws other random numbers than the torch sampler, which samples here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.backends.protocol import Sampler, sync
from engine.backends.torch.trainer_samplers import TorchSamplerBackend
from engine.errors import BadSpec
from engine.local.redo import OnRedoneStep, PolicyRebuilder, clean_backend, numerics_notes
from engine.local.replay import require_record
from engine.models.images import images_from_rows
from engine.protocol import SamplingParams, TokenIds
from engine.specs.engine import LocalEngineSpec
from engine.text.stored_models import tokenizer_of
from engine.workspace import segment_seed
from storage.chain.records import Chain, PolicyRef, base_model_of
from storage.inspect.accounting import step_inputs
from storage.serialization import Frozen
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import read_table

_COLUMNS = ["token_ids", "logprobs", "seed", "policy_states", "policy_tokens", "images"]


class RolloutsReport(Frozen):
    """The completions of one step, sampled again."""

    chain: str
    step: int
    completions: int
    tokens: int
    cuts: int
    """Number of segments after which completions went on."""
    different_completions: int
    different_tokens: int
    """Tokens from the first one on that differs within a segment."""
    gap_mean: float
    """Mean |difference of log-probability| of the equal tokens, in nats."""
    gap_max: float
    notes: tuple[str, ...]
    """The recorded numerics that this machine could not use, with those that the replay used."""

    @property
    def equal(self) -> bool:
        return self.different_tokens == 0


@dataclass
class _Call:
    """One call of the sampler for some completions of a shard."""

    policy: PolicyRef
    lengths: dict[int, int]
    """Number of sampled tokens of each completion of the call, by its index in the shard."""


@dataclass
class _Shard:
    """The completions of a shard, the calls that sampled them, and how far they have been sampled again."""

    params: SamplingParams
    rows: list[dict[str, Any]]
    calls: list[_Call]
    done: list[int]
    """Recorded tokens of each completion that the replayed calls have passed."""
    different: dict[int, int] = field(default_factory=dict)
    """Different tokens of the completions that have any."""
    gaps: list[float] = field(default_factory=list)

    def replay(self, sampler: Sampler, call: _Call) -> None:
        """Repeats a call, and compares its tokens."""
        indices = list(call.lengths)
        wanted, drawn = sum(call.lengths.values()), 0

        def count(index: int, token: int, logprob: float) -> None:
            nonlocal drawn
            drawn += 1

        images: dict[str, Any] = {}  # only for a model that takes some
        if any(self.rows[index].get("images") for index in indices):
            images["images"] = [images_from_rows(self.rows[index]["images"]) for index in indices]
        sampled = [self._completion(index)[: self.done[index]] for index in indices]
        again = sampler.sample(
            [self._prompt(index) for index in indices],
            [segment_seed(self.rows[index]["seed"], self.done[index]) for index in indices],
            self.params,
            count,
            sampled=sampled if any(sampled) else None,
            interrupted=lambda: drawn >= wanted,
            **images,
        )
        for index, completion in zip(indices, again, strict=True):
            self._compare(index, call.lengths[index], completion.token_ids, completion.logprobs)

    def _compare(self, index: int, length: int, tokens: TokenIds, logprobs: Sequence[float]) -> None:
        begin = self.done[index]
        recorded = self._completion(index)[begin : begin + length]
        equal = 0
        while equal < min(length, len(tokens)) and tokens[equal] == recorded[equal]:
            equal += 1
        reported = self.rows[index]["logprobs"][begin : begin + equal]
        self.gaps += [abs(new - old) for new, old in zip(logprobs[:equal], reported, strict=True)]
        if max(length, len(tokens)) > equal:
            self.different[index] = self.different.get(index, 0) + max(length, len(tokens)) - equal
        self.done[index] += length

    def _prompt(self, index: int) -> TokenIds:
        row = self.rows[index]
        return list(row["token_ids"][: len(row["token_ids"]) - len(row["logprobs"])])

    def _completion(self, index: int) -> TokenIds:
        row = self.rows[index]
        return list(row["token_ids"][len(row["token_ids"]) - len(row["logprobs"]) :])


def replay_rollouts(
    chain: Chain, step: int, *, on_step: OnRedoneStep = lambda chain, step: None
) -> RolloutsReport:
    """Rebuilds the policies that sampled for `step` and samples its completions again, with the torch sampler.

    Raises UnknownPolicy if the step was never taken, and BadSpec if its completions were not sampled by such calls."""
    record = require_record(chain, step)
    store = chain.store
    rollouts = step_inputs(store, record).rollouts
    # answers of a dataset were not sampled
    sampled = [ref for ref in rollouts if not read_manifest(store, ref.key).extra.get("dataset_answers")]
    shards = [_read_shard(store, ref) for ref in sampled]
    if not shards:
        raise BadSpec(f"step {step} of {chain.run}/{chain.stage} sampled no completions; give a step that did")
    policies = {call.policy for shard in shards for call in shard.calls}
    with clean_backend(record.numerics) as backend:
        spec = LocalEngineSpec(max_tokens_per_forward=record.numerics.max_tokens)
        samplers = TorchSamplerBackend(spec, compute_dtype=backend.compute_dtype, device=backend.device)
        rebuilder = PolicyRebuilder(store, backend, on_step)
        tokenizer = tokenizer_of(store, base_model_of(store, record.request.parent))
        for policy in sorted(policies, key=lambda policy: policy.step):
            trainer = rebuilder.rebuild(chain, policy.step)
            sampler = samplers.new_sampler(trainer, tokenizer=tokenizer)
            sync(sampler, trainer, policy.state)
            for shard in shards:
                for call in shard.calls:
                    if call.policy == policy:
                        shard.replay(sampler, call)
            sampler.close()
        notes = tuple(numerics_notes(record.numerics, backend.numerics()))
    gaps = np.array([gap for shard in shards for gap in shard.gaps] or [0.0])
    return RolloutsReport(
        chain=f"{chain.run}/{chain.stage}/{chain.model}",
        step=step,
        completions=sum(len(shard.rows) for shard in shards),
        tokens=sum(sum(shard.done) for shard in shards),
        cuts=sum(len(shard.calls) - 1 for shard in shards),
        different_completions=sum(len(shard.different) for shard in shards),
        different_tokens=sum(sum(shard.different.values()) for shard in shards),
        gap_mean=float(gaps.mean()),
        gap_max=float(gaps.max()),
        notes=notes,
    )


def _read_shard(store: ObjectStore, ref: ArtifactRef) -> _Shard:
    """The completions of a rollouts table, and the calls that sampled them."""
    manifest = read_manifest(store, ref.key)
    sampling = manifest.extra.get("sampling")
    if sampling is None:
        raise BadSpec(
            f"{ref.key} has no sampling parameters: its completions are the turns of episodes, whose prompts depend on "
            "the environment. Give a step of a run without an environment"
        )
    rows = read_table(store, ref, _COLUMNS).to_pylist()
    left = [len(row["logprobs"]) for row in rows]
    policies = {policy.state: policy for policy in map(PolicyRef.from_uri, _policy_uris(manifest.parents))}
    calls: list[_Call] = []

    # the calls that were interrupted: a segment of another task that lost is no parent of the table
    while True:
        segment = find_artifact(store, keys.segment_of(ref.key, len(calls)))
        if segment is None or segment.uri not in manifest.parents:
            break
        of_rows = {row["index"]: len(row["token_ids"]) for row in read_table(store, segment).to_pylist()}
        calls.append(_Call(PolicyRef.from_uri(_policy_uris(segment.parents)[-1]), of_rows))
        for row, length in of_rows.items():
            left[row] -= length

    # the last call, to the end of each completion
    rest = {number: length for number, length in enumerate(left) if length}
    if rest:
        first = PolicyRef.from_uri(_policy_uris(manifest.parents)[0])
        states = rows[next(iter(rest))].get("policy_states")
        calls.append(_Call(policies[states[-1]] if states else first, rest))
    return _Shard(SamplingParams.model_validate(sampling), rows, calls, [0] * len(rows))


def _policy_uris(parents: Sequence[str]) -> list[str]:
    return [uri for uri in parents if uri.startswith("policy:")]
