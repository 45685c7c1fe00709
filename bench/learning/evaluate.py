"""Held-out scores: greedy answers of a model, graded by the grader of a task. Both sides are measured by it."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.learning.calculator import TURNS
from engine.handles import InferenceModel, Model
from engine.specs.engine import LocalEngineSpec
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.store.artifacts import Provenance
from tasks.environments.base import Environment, EnvironmentFactory, turn_grade
from tasks.graders.base import BaseGrader

PROVENANCE = Provenance(code_version="bench", config_digest="0" * 64, seed=0)


class Context:
    """What a model handle needs: an object with a workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace


async def open_model(folder: Path, work: Path, *, run: str = "evaluation") -> InferenceModel:
    """The model of a Hugging Face folder, sampled in this process on one thread. Each model has a `run` of its own."""
    workspace = Workspace(
        store=str(work / "evaluation"), engine=LocalEngineSpec(threads=1), run=run, provenance=PROVENANCE
    )
    model = await Model(str(folder)).to_builder(Context(workspace)).spawn_inference("policy")
    assert isinstance(model, InferenceModel)
    return model


async def mean_grade(
    model: InferenceModel, rows: Sequence[dict[str, Any]], grader: BaseGrader | EnvironmentFactory
) -> float:
    """The mean grade of one answer of the model, as its view samples, to each prompt, or of one episode."""

    async def grade(thread: StringThread) -> float:
        if isinstance(grader, EnvironmentFactory):
            return await episode_grade(model, thread, grader.create_environment(thread.metadata))
        return (await grader.grade(await model.generate(thread))).value

    threads = [StringThread([("user", row["prompt"])], metadata=row["metadata"]) for row in rows]
    return statistics.mean(await asyncio.gather(*(grade(thread) for thread in threads)))


async def episode_grade(model: InferenceModel, thread: StringThread, environment: Environment) -> float:
    """Plays one episode of at most `calculator.TURNS` answers. Returns the sum of its grades."""
    total = 0.0
    state: StringThread | None = await environment.initialize_state(thread)
    for _ in range(TURNS):
        assert state is not None
        answered = await model.generate(state)
        state, grades = await environment.react_to(answered)
        total += turn_grade(grades) or 0.0
        if state is None:
            return total
    return total + (turn_grade(await environment.on_limit(answered, "turns")) or 0.0)


async def heldout_scores(
    folders: Sequence[Path],
    rows: Sequence[dict[str, Any]],
    grader: BaseGrader | EnvironmentFactory,
    *,
    new_tokens: int,
    work: Path,
) -> list[float]:
    """The mean grade of greedy answers to all rows, or of the episodes that begin with them, for the model of each
    folder."""
    scores = []
    for number, folder in enumerate(folders):
        model = await open_model(folder, work, run=f"evaluation-{number}")
        scores.append(await mean_grade(model.temperature(0.0).max_gen_len(new_tokens), rows, grader))
        await model.dealloc()
    return scores
