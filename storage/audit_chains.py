"""One chain, checked: its root, its links, its batches, the accounts of its steps."""

from __future__ import annotations

from storage import keys
from storage.accounting import account, material_of
from storage.artifacts import find_artifact
from storage.chain import Chain, CommitRecord, PolicyRef, Root
from storage.errors import CorruptArtifact, ObjectNotFound, StorageError
from storage.findings import RESTORE, Findings
from storage.objects import ObjectStore

FORK = f"{RESTORE}, or fork the run before that step"


class ChainAudit:
    """Reports to `found`, and leaves the states of the chain there."""

    def __init__(self, store: ObjectStore, run: str, stage: str, model: str, found: Findings) -> None:
        self.store, self.found = store, found
        self.chain = Chain(store, run, stage, model)
        self.name = (run, stage, model)

    def check(self) -> None:
        self.found.counts["chains"] += 1
        parent = self._root()
        if parent is None:
            return
        steps = set(self.chain.steps())
        for step in range(1, max(steps, default=0) + 1):
            record = self._record(step)
            if record is None:
                return
            parent = self._link(record, parent, step)
            self._material(record)

    def _root(self) -> PolicyRef | None:
        key = keys.chain_root(*self.name)
        try:
            root = self.chain.root()
        except CorruptArtifact as error:
            self.found.error(key, str(error), RESTORE)
            return None
        if root is None:
            self.found.error(key, "is gone, and steps of its chain are committed", RESTORE)
            return None
        self._origin(key, root)
        policy = self.chain.policy(0)
        self.found.states[self.name][0] = policy.state
        return policy

    def _origin(self, key: str, root: Root) -> None:
        """The base model or the policy that the chain starts from is there."""
        try:
            if root.base is not None:
                base = find_artifact(self.store, root.base.key)
                problem = None if base == root.base else f"starts from {root.base.key}, which is not there as it was"
            else:
                assert root.start is not None  # a root has a base or a start
                problem = self._policy_problem(root.start)
        except StorageError as error:
            problem = f"starts from what cannot be read: {error}"
        if problem:
            self.found.error(key, problem, f"{RESTORE}; nothing of this chain can be rebuilt without it")

    def _policy_problem(self, policy: PolicyRef) -> str | None:
        try:
            there = Chain.of(self.store, policy).policy(policy.step)
        except ObjectNotFound:
            return f"names {policy.uri}, which no chain has"
        return None if there.state == policy.state else f"names {policy.uri}, its chain has {there.state[:12]} there"

    def _record(self, step: int) -> CommitRecord | None:
        key = keys.chain_record(*self.name, step)
        try:
            record = self.chain.record(step)
        except CorruptArtifact as error:
            self.found.error(key, str(error), FORK)
            return None
        if record is None:
            self.found.error(key, "is gone, and steps after it are committed", FORK)
        return record

    def _link(self, record: CommitRecord, parent: PolicyRef, step: int) -> PolicyRef:
        key, request = keys.chain_record(*self.name, step), record.request
        if request.parent != parent:
            self.found.error(key, f"is not a child of step {step - 1}, its parent is {request.parent.uri}", FORK)
        if record.state != request.next_state():
            self.found.error(
                key, f"says state {record.state[:12]}, its request makes {request.next_state()[:12]}", FORK
            )
        if request.reference is not None and (problem := self._policy_problem(request.reference)):
            self.found.error(key, problem, RESTORE)
        self.found.counts["steps"] += 1
        self.found.states[self.name][step] = record.state
        return parent.model_copy(update={"step": step, "state": record.state})

    def _material(self, record: CommitRecord) -> None:
        key, batch = keys.chain_record(*self.name, record.policy.step), record.request.batch
        try:
            there = find_artifact(self.store, batch.key)
        except CorruptArtifact as error:
            self.found.error(batch.key, str(error), FORK)
            return
        if there is None:
            self.found.error(batch.key, f"is gone, and the step {key} was made from it", FORK)
            return
        if there.sha256 != batch.sha256:
            self.found.error(
                batch.key, f"is {there.sha256[:12]}, the step {key} was made from {batch.sha256[:12]}", FORK
            )
            return
        for problem in account(self.store, record):
            self.found.error(key, problem, "look at the tables of that step; a step is never taken again")
        self._strays(record)

    def _strays(self, record: CommitRecord) -> None:
        """Shards of a committed step that its batch does not descend from: sampled, and lost."""
        try:
            material = material_of(self.store, record)
        except StorageError:
            return  # said by the accounts
        known = {ref.key for ref in (*material.rollouts, *material.graded, material.batch)}
        own = keys.step_prefix(self.name[0], self.name[1], record.policy.step - 1)
        if not record.request.batch.key.startswith(own):
            return  # shared with the run that this one was forked from
        for info in self.store.list(own):
            owner = keys.artifact_of(info.key)
            if owner is not None and owner not in known:
                self.found.error(owner, f"is of the step {record.policy.uri}, whose batch does not know it", RESTORE)
