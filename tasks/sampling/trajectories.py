"""Reads the grades of a step's trajectories from their tables, without the tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from tasks.sampling.shards import read_tables

_GRADES = ["prompt_id", "completion", "first_turn", "turn_tokens", "graded_turns", "grades", "status", "ending"]


@dataclass
class Trajectory:
    """The grades of one episode, without its tokens."""

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
        """The sum of the grades."""
        return math.fsum(self.grades.values())

    @property
    def name(self) -> str:
        return f"episode {self.number} of prompt {self.prompt!r}"


def read_trajectories(store: ObjectStore, refs: list[ArtifactRef]) -> dict[tuple[str, int], Trajectory]:
    """The trajectories of a step that were neither masked nor ignored, in order: (prompt, number) -> trajectory."""
    trajectories: dict[tuple[str, int], Trajectory] = {}
    for table in read_tables(store, refs, _GRADES):
        for segment in table.to_pylist():
            if segment["status"] != "ok":
                continue
            # The segments of a trajectory are in order, so their turns can be appended.
            name = segment["prompt_id"], segment["completion"]
            trajectory = trajectories.setdefault(name, Trajectory(*name))
            trajectory.ending = segment["ending"]
            trajectory.turn_tokens += segment["turn_tokens"]
            trajectory.grades |= dict(zip(segment["graded_turns"], segment["grades"], strict=True))
    return trajectories
