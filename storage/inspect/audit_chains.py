"""One chain, checked: its root, its links, its batches, the accounts of its steps, its rebases."""

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
    """Reports to `found`, and leaves the states of the chain there."""

    def __init__(self, store: ObjectStore, run: str, stage: str, model: str, found: Findings) -> None:
        self.store, self.found = store, found
        self.chain = Chain(store, run, stage, model)
        self.name = (run, stage, model)
        self.rebases: dict[int, Rebase] = {}
        self._mark: RebaseMark | None = None
        """What the record looked at last says that its parent descends from."""

    def check(self) -> None:
        self.found.counts["chains"] += 1
        parent = self._root()
        if parent is None:
            return
        self._read_rebases()
        steps = set(self.chain.steps())
        for step in range(1, max(steps, default=0) + 1):
            record = self._record(step)
            if record is None:
                return
            parent = self._link(record, parent, step)
            self._material(record)
        for rebase in self.rebases.values():
            self._rebase(rebase)

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
        rebase = self.rebases.get(step - 1)
        if record.rebase not in (self._mark, rebase.mark if rebase else None):
            mark = record.rebase
            named = f"the rebase {mark.attempt[:12]} at step {mark.step}, which is not there" if mark else "no rebase"
            self.found.error(key, f"descends from {named}, the step before it from another", FORK)
        self._mark = record.rebase
        self.found.counts["steps"] += 1
        self.found.states[self.name][step] = record.state
        return parent.model_copy(update={"step": step, "state": record.state})

    # -- rebases -----------------------------------------------------------------------------------------------

    def _read_rebases(self) -> None:
        for info in self.store.list(keys.rebases_prefix(*self.name)):
            step = keys.rebase_step(info.key)
            if step is None:
                continue  # nothing that a store keeps: said elsewhere
            try:
                self.rebases[step] = read_rebase(self.store, info.key)
            except CorruptArtifact as error:
                self.found.error(info.key, str(error), FORK)
            self.found.counts["rebases"] += 1

    def _rebase(self, rebase: Rebase) -> None:
        """It is of a policy that the chain has, and what goes on from it can be reached."""
        step = rebase.policy.step
        key = keys.rebase(*self.name, step)
        mine = (rebase.policy.run, rebase.policy.stage, rebase.policy.model) == self.name
        if not mine or self.found.states[self.name].get(step) != rebase.policy.state:
            self.found.error(key, f"is of {rebase.policy.uri}, which the chain does not have", FORK)
            return
        following = self._following(step)
        if following is not None and following.rebase != rebase.mark:
            return  # void: another engine took the step from the weights before it
        try:
            manifest = read_manifest(self.store, rebase.checkpoint.key)
        except ObjectNotFound:
            self.found.error(rebase.checkpoint.key, f"is gone, and the chain goes on from it after step {step}", FORK)
            return
        except CorruptArtifact:
            return  # said of the artifact
        said = (manifest.sha256, manifest.extra.get("state"), manifest.extra.get("weights_digest"))
        if said != (rebase.checkpoint.sha256, rebase.policy.state, rebase.weights_digest):
            self.found.error(rebase.checkpoint.key, f"is not what the chain goes on from after step {step}", FORK)

    def _following(self, step: int) -> CommitRecord | None:
        try:
            return self.chain.record(step + 1)
        except CorruptArtifact:
            return None  # said of the record

    # -- material ----------------------------------------------------------------------------------------------

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
        for problem in check_accounting(self.store, record):
            self.found.error(key, problem, "look at the tables of that step; a step is never taken again")
        self._strays(record)

    def _strays(self, record: CommitRecord) -> None:
        """Shards of a committed step that its batch does not descend from: sampled, and lost."""
        try:
            material = step_inputs(self.store, record)
        except StorageError:
            return  # said by the accounts
        known = {ref.key for ref in (*material.rollouts, *material.graded, material.batch)}
        own = keys.step_prefix(self.name[0], self.name[1], record.policy.step - 1)
        if not record.request.batch.key.startswith(own):
            return  # shared with the run that this one was forked from
        for info in self.store.list(own):
            owner = key_patterns.artifact_of_manifest(info.key)
            if owner is not None and owner not in known:
                self.found.error(owner, f"is of the step {record.policy.uri}, whose batch does not know it", RESTORE)
