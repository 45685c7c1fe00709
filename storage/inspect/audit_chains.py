"""Checks one chain: its root, its records and their links, its batches, the accounting of its steps, its rebases."""

from __future__ import annotations

from storage.chain.rebase import Rebase, read_rebase
from storage.chain.records import Chain, CommitRecord, PolicyRef, RebaseMark, Root
from storage.errors import CorruptArtifact, ObjectNotFound, StorageError
from storage.inspect.accounting import check_accounting, step_inputs
from storage.inspect.findings import RESTORE, Findings
from storage.store import key_patterns, keys
from storage.store.artifacts import find_artifact, read_manifest
from storage.store.objects import ObjectStore

FORK = f"{RESTORE}, or fork the run before that step"


class ChainAudit:
    """Checks one chain. Adds its problems and its states to `findings`."""

    def __init__(self, store: ObjectStore, run: str, stage: str, model: str, findings: Findings) -> None:
        self.store, self.findings = store, findings
        self.chain = Chain(store, run, stage, model)
        self.name = (run, stage, model)
        self.rebases: dict[int, Rebase] = {}
        self._mark: RebaseMark | None = None
        """The rebase that the parent of the record checked last descends from, according to that record."""
        self._cursor: dict[str, int] = {}
        """The position in the dataset after the record checked last. Empty without one."""

    def check(self) -> None:
        """Checks the chain up to the first missing or unreadable record."""
        self.findings.counts["chains"] += 1
        parent = self._check_root()
        if parent is None:
            return
        self._read_rebases()
        # every step up to the last one must have a record
        steps = set(self.chain.steps())
        for step in range(1, max(steps, default=0) + 1):
            record = self._read_record(step)
            if record is None:
                return
            parent = self._check_link(record, parent, step)
            self._check_cursor(record)
            self._check_inputs(record)
        for rebase in self.rebases.values():
            self._check_rebase(rebase)

    def _check_root(self) -> PolicyRef | None:
        key = keys.chain_root(*self.name)
        try:
            root = self.chain.root()
        except CorruptArtifact as error:
            self.findings.error(key, str(error), RESTORE)
            return None
        if root is None:
            self.findings.error(key, "is gone, and steps of its chain are committed", RESTORE)
            return None
        self._check_origin(key, root)
        policy = self.chain.policy(0)
        self.findings.states[self.name][0] = policy.state
        return policy

    def _check_origin(self, key: str, root: Root) -> None:
        """Checks that the base model or the policy that the chain starts from exists."""
        try:
            if root.base is not None:
                base = find_artifact(self.store, root.base.key)
                problem = None if base == root.base else f"starts from {root.base.key}, which is missing or has changed"
            elif root.start is not None:
                problem = self._policy_problem(root.start)
            else:
                problem = "names neither a base model nor a policy that the chain starts from"
        except StorageError as error:
            problem = f"starts from an artifact that cannot be read: {error}"
        if problem:
            self.findings.error(key, problem, f"{RESTORE}; nothing of this chain can be rebuilt without it")

    def _policy_problem(self, policy: PolicyRef) -> str | None:
        """Returns the problem with a policy that the chain refers to, or None."""
        try:
            state = Chain.of(self.store, policy).policy(policy.step).state
        except ObjectNotFound:
            return f"names {policy.uri}, which no chain has"
        except StorageError as error:
            return f"names {policy.uri}, whose chain cannot be read: {error}"
        return None if state == policy.state else f"names {policy.uri}, but its chain has {state[:12]} there"

    def _read_record(self, step: int) -> CommitRecord | None:
        key = keys.chain_record(*self.name, step)
        try:
            record = self.chain.record(step)
        except CorruptArtifact as error:
            self.findings.error(key, str(error), FORK)
            return None
        if record is None:
            self.findings.error(key, "is gone, and steps after it are committed", FORK)
        return record

    def _check_link(self, record: CommitRecord, parent: PolicyRef, step: int) -> PolicyRef:
        """Checks the parent, state, reference and rebase of a record. Returns the policy that it made."""
        key, request = keys.chain_record(*self.name, step), record.request
        # parent, state and reference
        if request.parent != parent:
            before = f"step {step - 1}" if step > 1 else "the chain's root"
            self.findings.error(key, f"is not a child of {before}, its parent is {request.parent.uri}", FORK)
        if record.state != request.next_state():
            self.findings.error(
                key, f"says state {record.state[:12]}, its request makes {request.next_state()[:12]}", FORK
            )
        problem = self._policy_problem(request.reference) if request.reference is not None else None
        if problem:
            self.findings.error(key, problem, RESTORE)
        # the parent descends from the same rebase as the record before it, or from one at its own step
        rebase = self.rebases.get(step - 1)
        if record.rebase not in (self._mark, rebase.mark if rebase else self._mark):
            mark = record.rebase
            name = f"the rebase {mark.attempt[:12]} at step {mark.step}, which is not there" if mark else "no rebase"
            self.findings.error(key, f"descends from {name}, the step before it from another", FORK)
        self._mark = record.rebase
        self.findings.counts["steps"] += 1
        self.findings.states[self.name][step] = record.state
        return parent.model_copy(update={"step": step, "state": record.state})

    # -- rebases -----------------------------------------------------------------------------------------------

    def _read_rebases(self) -> None:
        for info in self.store.list(keys.rebases_prefix(*self.name)):
            step = keys.rebase_step(info.key)
            if step is None:
                continue  # no object of a store, which the audit of the store reports
            try:
                self.rebases[step] = read_rebase(self.store, info.key)
            except CorruptArtifact as error:
                self.findings.error(info.key, str(error), FORK)
            self.findings.counts["rebases"] += 1

    def _check_rebase(self, rebase: Rebase) -> None:
        """Checks that the rebase is of a policy of the chain, and that its checkpoint exists if it is in effect."""
        step = rebase.policy.step
        key = keys.rebase(*self.name, step)
        # the policy
        is_of_chain = (rebase.policy.run, rebase.policy.stage, rebase.policy.model) == self.name
        if not is_of_chain or self.findings.states[self.name].get(step) != rebase.policy.state:
            self.findings.error(key, f"is of {rebase.policy.uri}, which the chain does not have", FORK)
            return
        # a rebase is void if another engine took the next step from the weights before it
        next_record = self._next_record(step)
        if next_record is not None and next_record.rebase != rebase.mark:
            return
        # the checkpoint
        try:
            manifest = read_manifest(self.store, rebase.checkpoint.key)
        except ObjectNotFound:
            problem = f"is gone, and the chain continues from it after step {step}"
            self.findings.error(rebase.checkpoint.key, problem, FORK)
            return
        except CorruptArtifact:
            return  # reported with the artifact
        stored = (manifest.sha256, manifest.extra.get("state"), manifest.extra.get("weights_digest"))
        if stored != (rebase.checkpoint.sha256, rebase.policy.state, rebase.weights_digest):
            problem = f"is not the checkpoint from which the chain continues after step {step}"
            self.findings.error(rebase.checkpoint.key, problem, FORK)

    def _next_record(self, step: int) -> CommitRecord | None:
        try:
            return self.chain.record(step + 1)
        except CorruptArtifact:
            return None  # reported with the record

    # -- inputs of steps ----------------------------------------------------------------------------------------------

    def _check_cursor(self, record: CommitRecord) -> None:
        """Checks that a step begins in the dataset where the step before it ended, so that no row is skipped or taken
        again."""
        before, begins = self._cursor, record.request.cursor_in
        self._cursor = record.cursor_out
        if before and begins and before != begins:
            ended = _position(before)
            problem = f"begins at {_position(begins)} of its dataset, but the step before it ended at {ended}"
            self.findings.error(keys.chain_record(*self.name, record.policy.step), problem, FORK)

    def _check_inputs(self, record: CommitRecord) -> None:
        """Checks the batch of a step, the accounting of its prompts, and that none of its shards is left over."""
        key, batch = keys.chain_record(*self.name, record.policy.step), record.request.batch
        # the batch
        try:
            stored = find_artifact(self.store, batch.key)
        except CorruptArtifact as error:
            self.findings.error(batch.key, str(error), FORK)
            return
        if stored is None:
            self.findings.error(batch.key, f"is gone, and the step {key} was made from it", FORK)
            return
        if stored.sha256 != batch.sha256:
            self.findings.error(
                batch.key, f"is {stored.sha256[:12]}, the step {key} was made from {batch.sha256[:12]}", FORK
            )
            return
        # the prompts, and shards that were not used
        for problem in check_accounting(self.store, record):
            self.findings.error(key, problem, "look at the tables of that step; a step is never taken again")
        self._check_unused_shards(record)

    def _check_unused_shards(self, record: CommitRecord) -> None:
        """Reports shards of a committed step that its batch does not descend from: they were sampled and then lost."""
        try:
            inputs = step_inputs(self.store, record)
        except StorageError:
            return  # reported by the accounting
        used = {ref.key for ref in (*inputs.rollouts, *inputs.graded, inputs.batch)}
        # a round of rejection sampling makes its dataset of what it sampled before its first step
        for dataset in inputs.datasets:
            used.update(uri.partition("#")[0] for uri in dataset.parents)
        step_folder = keys.step_prefix(self.name[0], self.name[1], record.policy.step - 1)
        if not record.request.batch.key.startswith(step_folder):
            return  # the step is shared with the run that this one was forked from
        for info in self.store.list(step_folder):
            artifact = key_patterns.artifact_of_manifest(info.key)
            # A process that was replaced may leave a segment that its successor did not go on from.
            if artifact is not None and artifact not in used and not keys.is_segment(artifact):
                problem = f"is of the step {record.policy.uri}, whose batch does not descend from it"
                self.findings.error(artifact, problem, RESTORE)


def _position(cursor: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in cursor.items())
