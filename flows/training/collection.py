"""What a step of reinforcement learning trains on: prompts taken, completions sampled, graded, and drawn again where a
group teaches nothing (dynamic sampling); and the same for the next steps while this one trains (`Lookahead`).

Everything is decided by committed grades and the cursor, so that a resumed run collects what the first one would have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from engine.errors import PermanentEngineError
from engine.handles import TrainingModel
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.batches.rl import informative_prompts
from tasks.datasets.load import LoadedDataset
from tasks.datasets.order import DataCursor, repetitions, take
from tasks.sampling.completions import PromptShard, Truncation

RefillEnd = Literal["short", "fail"]


class NothingToLearn(PermanentEngineError):
    """Dynamic sampling did not fill a batch in its rounds, and was asked to fail then."""


@dataclass(frozen=True)
class Collected:
    """Committed rollouts of one step and their grades, shard by shard."""

    rollouts: list[ArtifactRef]
    graded: list[ArtifactRef]
    cursor_in: DataCursor
    cursor_out: DataCursor


Sample = Callable[[PolicyRef, list[PromptShard], int], Awaitable[tuple[list[ArtifactRef], list[ArtifactRef]]]]
"""(policy, shards, step) -> the rollouts of the shards, and their grades."""


@dataclass(frozen=True)
class PromptBatch:
    """How prompts of a dataset become shards."""

    model: TrainingModel
    data: LoadedDataset
    prompts: int
    """Per step."""
    completions: int
    """Per prompt."""
    prompts_per_shard: int
    seed: int
    max_prompt_tokens: int | None = None
    truncation: Truncation = "error"

    def take(self, cursor: DataCursor, prompts: int) -> tuple[list[int], DataCursor]:
        return take(cursor, prompts, rows=self.data.rows, seed=self.seed)

    def shards(self, rows: list[int], *, after: list[int] | None = None, first: int = 0) -> list[PromptShard]:
        """`after`: rows that the same step took before these; `first`: the number of the first shard."""
        earlier = repetitions([*(after or []), *rows])[len(after or []) :]
        size = self.prompts_per_shard
        return [
            PromptShard(
                base=self.model.base,
                dataset=self.data.ref,
                index=first + number,
                rows=tuple(rows[start : start + size]),
                completions=self.completions,
                repetitions=tuple(earlier[start : start + size]),
                max_prompt_tokens=self.max_prompt_tokens,
                truncation=self.truncation,
            )
            for number, start in enumerate(range(0, len(rows), size))
        ]


@dataclass(frozen=True)
class Refill:
    """Dynamic sampling (DAPO, arXiv:2503.14476): groups of equal rewards are left out, and other prompts drawn."""

    rounds: int
    """Draws after the first, at most."""
    end: RefillEnd = "short"
    """What happens when these did not fill the batch: a smaller one is trained, or the run fails."""


@dataclass(frozen=True)
class Collector:
    """Makes the rollouts of one step."""

    batch: PromptBatch
    sample: Sample
    refill: Refill | None = None

    async def collect(self, policy: PolicyRef, cursor: DataCursor, *, step: int) -> Collected:
        """Those of 0-based `step`, sampled from `policy`. Committed shards are not made again."""
        found = Collected([], [], cursor, cursor)
        rows: list[int] = []
        wanted = self.batch.prompts
        for _ in range(1 + (self.refill.rounds if self.refill else 0)):
            new, after = self.batch.take(found.cursor_out, wanted)
            shards = self.batch.shards(new, after=rows, first=len(found.rollouts))
            rollouts, graded = await self.sample(policy, shards, step)
            rows += new
            found = Collected([*found.rollouts, *rollouts], [*found.graded, *graded], cursor, after)
            if self.refill is None:
                return found
            wanted = self.batch.prompts - await self._teaching(found)
            if wanted <= 0:
                return found
        assert self.refill is not None
        if self.refill.end == "fail":
            raise NothingToLearn(
                f"step {step}: after {1 + self.refill.rounds} draws of prompts, {wanted} of {self.batch.prompts} "
                "groups are still missing: the others have equal rewards. Raise max_refill_rounds, set "
                "refill_end='short', or give prompts that the model sometimes solves"
            )
        return found

    async def _teaching(self, found: Collected) -> int:
        store = self.batch.model.workspace.open_store()
        return await asyncio.to_thread(informative_prompts, store, found.graded)


@dataclass
class Lookahead:
    """Collects step after step, `staleness` steps ahead of training: those of step k come from policy max(0, k -
    staleness), neither an older nor a newer one, whatever was ready when."""

    collector: Collector
    cursor: DataCursor
    """Where the data stands when the first step is collected."""
    total_steps: int | None
    staleness: int = 0
    _under_way: dict[int, asyncio.Task[Collected]] = field(default_factory=dict)

    async def collected(self, policy: PolicyRef) -> Collected:
        """What the step after `policy` trains on; begins what may be collected from `policy` already."""
        step = policy.step
        last = step + self.staleness if self.total_steps is None else min(step + self.staleness, self.total_steps - 1)
        for ahead in range(step, last + 1):
            if ahead not in self._under_way:
                before = self._under_way.get(ahead - 1)
                self._under_way[ahead] = asyncio.create_task(self._collect(policy, ahead, before))
        found = await self._under_way[step]
        self._under_way.pop(step - 1, None)
        return found

    async def _collect(self, policy: PolicyRef, step: int, before: asyncio.Task[Collected] | None) -> Collected:
        cursor = self.cursor if before is None else (await before).cursor_out
        source = max(0, step - self.staleness)
        sampled = policy if source == policy.step else self.collector.batch.model.chain_of(policy).policy(source)
        return await self.collector.collect(sampled, cursor, step=step)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
