"""Compares the logprobs of sampled tokens with those of the policies that their rows name, for `ostinato verify`.

If weights were updated in flight, each completion and each row of an episode has parts that different policies sampled
(the columns `policy_states` and `policy_tokens` of a rollouts table). A part is scored by teacher forcing: under the
weights of its policy, after the prompt and the parts before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from engine.backends.logprob_gap import allowed_gap
from engine.backends.protocol import Trainer
from engine.models.images import images_from_rows
from engine.models.samples import FloatArray
from engine.protocol import TokenSequence
from storage.chain.records import Chain, CommitRecord, PolicyRef
from storage.inspect.accounting import step_inputs
from storage.inspect.findings import Findings
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.tables import read_table

FEW_TOKENS = 4.0
"""The bound of the mean of n tokens is 1 + FEW_TOKENS / sqrt(n) times that of many."""
_COLUMNS = ["token_ids", "loss_mask", "logprobs", "turn_tokens", "policy_states", "policy_tokens", "images"]


class _Part(NamedTuple):
    """A part of a completion whose logprobs can be compared."""

    sequence: TokenSequence
    """The tokens up to the end of the part. Only those of the part are scored."""
    logprobs: FloatArray
    """As the sampler reported them."""


class SampledParts:
    """The parts that the policies of one chain sampled, and how far their logprobs are from the policies'."""

    def __init__(self, chain: Chain, findings: Findings) -> None:
        self._chain, self._findings = chain, findings
        self.tokens = 0
        """Number of tokens that were compared."""
        self._sum, self._max = 0.0, 0.0
        self._tables: dict[int, list[tuple[ArtifactRef, pa.Table]]] = {}
        """The rollouts of the steps for which policies from the last compared one on may have sampled."""

    @property
    def notes(self) -> list[str]:
        if not self.tokens:
            return []
        mean = self._sum / self.tokens
        return [
            f"{self.tokens} sampled tokens were scored under the policies that they name: their logprobs differ by "
            f"{mean:.2g} nats in the mean, at most by {self._max:.2g}"
        ]

    def compare(self, trainer: Trainer, policy: PolicyRef) -> None:
        """Scores what the policy sampled for the steps after it. `trainer` has its weights. Call it in the order of the
        policies."""
        self._tables = {number: tables for number, tables in self._tables.items() if number > policy.step}
        step = policy.step
        while (record := self._chain.record(step + 1)) is not None:
            rules: Any = read_manifest(self._chain.store, record.request.batch.key).extra.get("rules")
            in_flight = isinstance(rules, dict) and rules.get("weight_updates") == "in_flight"
            if not in_flight or step - policy.step > rules["max_staleness"]:
                return
            if step + 1 not in self._tables:
                self._tables[step + 1] = list(self._read_shards(record))
            for rollouts, table in self._tables[step + 1]:
                self._compare_shard(trainer, policy, record, rollouts, table)
            step += 1

    def _read_shards(self, record: CommitRecord) -> Iterator[tuple[ArtifactRef, pa.Table]]:
        for rollouts in step_inputs(self._chain.store, record).rollouts:
            table = read_table(self._chain.store, rollouts, _COLUMNS)
            if "policy_states" in table.column_names:
                yield rollouts, table

    def _compare_shard(
        self, trainer: Trainer, policy: PolicyRef, record: CommitRecord, rollouts: ArtifactRef, table: pa.Table
    ) -> None:
        parts = list(self._parts(policy, rollouts, table))
        if not parts:
            return
        scored = trainer.logprobs(
            [part.sequence for part in parts],
            temperature=record.request.temperature,
            max_tokens=record.numerics.max_tokens,
        )
        reported_T = np.concatenate([part.logprobs for part in parts])
        gaps_T = np.abs(np.concatenate(scored).astype(np.float64) - reported_T)
        self.tokens += len(gaps_T)
        self._sum += float(gaps_T.sum())
        self._max = max(self._max, float(gaps_T.max()))
        # The mean of a few tokens varies much more than that of many, for which the bound is meant.
        of_many = allowed_gap("auto", getattr(torch, record.numerics.compute_dtype))
        mean, allowed = float(gaps_T.mean()), of_many * (1 + FEW_TOKENS / len(gaps_T) ** 0.5)
        if not mean <= allowed:  # also true for NaN
            self._findings.error(
                rollouts.key,
                f"its tokens of {policy.uri} have logprobs that differ from those of this policy by {mean:.3g} nats in "
                f"the mean, and rounding explains {allowed:g}",
                "the table was altered, or a sampler had other weights than it said; the steps that trained on it are "
                "what was committed, and the run can be forked before them",
            )

    def _parts(self, policy: PolicyRef, rollouts: ArtifactRef, table: pa.Table) -> Iterator[_Part]:
        """The parts of the shard that the policy sampled."""
        # The sampler masks the ends of answers before min_new_tokens, so those logprobs are not the policy's.
        extra: Any = read_manifest(self._chain.store, rollouts.key).extra
        masked = extra.get("min_new_tokens", (extra.get("sampling") or {}).get("min_new_tokens", 0))
        for row in table.to_pylist():
            # of the sampled tokens: the position in the row, and the number within its answer
            positions = np.flatnonzero(row["loss_mask"])
            in_answer = np.concatenate([np.arange(length) for length in row["turn_tokens"]] or [positions])
            start = 0
            for state, length in zip(row["policy_states"], row["policy_tokens"], strict=True):
                part, start = np.arange(start, start + length), start + length
                part = part[in_answer[part] >= masked]
                if state != policy.state or not len(part):
                    continue
                ids = np.array(row["token_ids"][: positions[part[-1]] + 1], np.int32)
                mask = np.zeros(len(ids), bool)
                mask[positions[part]] = True
                sequence = TokenSequence(ids, mask, images=images_from_rows(row.get("images")))
                yield _Part(sequence, np.array(row["logprobs"])[part])
