"""Trajectories as their table has them, without the tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from tasks.sampling.shards import read_tables

_GRADES = ["prompt_id", "completion", "first_turn", "turn_tokens", "graded_turns", "grades", "status", "ending"]


@dataclass
class Trajectory:
    """What the grades of one episode say, without its tokens."""

    prompt: str
    number: int
    ending: str = ""
    turn_tokens: list[int] = field(default_factory=list)
    """Sampled tokens of each turn."""
    grades: dict[int, float] = field(default_factory=dict)
    """Turn -> grade."""

    @property
    def turns(self) -> int:
        return len(self.turn_tokens)

    @property
    def reward(self) -> float:
        """All of them together."""
        return math.fsum(self.grades.values())

    @property
    def name(self) -> str:
        return f"episode {self.number} of prompt {self.prompt!r}"


def read_trajectories(store: ObjectStore, refs: list[ArtifactRef]) -> dict[tuple[str, int], Trajectory]:
    """The trajectories of a step that were played to an end, in their order."""
    found: dict[tuple[str, int], Trajectory] = {}
    for table in read_tables(store, refs, _GRADES):
        for row in table.to_pylist():
            if row["status"] != "ok":
                continue
            name = row["prompt_id"], row["completion"]
            one = found.setdefault(name, Trajectory(*name))
            one.ending = row["ending"]
            one.turn_tokens += row["turn_tokens"]  # its segments stand in order
            one.grades |= dict(zip(row["graded_turns"], row["grades"], strict=True))
    return found
