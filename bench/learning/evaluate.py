"""Held-out scores: greedy answers of a model, graded by the grader of a task. Both sides are measured by it."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.handles import InferenceModel, Model
from engine.specs.engine import LocalEngineSpec
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.store.artifacts import Provenance
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


async def mean_grade(model: InferenceModel, rows: Sequence[dict[str, Any]], grader: BaseGrader) -> float:
    """The mean grade of one answer of the model, as its view samples, to each prompt."""
    threads = [StringThread([("user", row["prompt"])], metadata=row["metadata"]) for row in rows]
    answers = await asyncio.gather(*(model.generate(thread) for thread in threads))
    return statistics.mean([(await grader.grade(answer)).value for answer in answers])


async def heldout_scores(
    folders: Sequence[Path], rows: Sequence[dict[str, Any]], grader: BaseGrader, *, new_tokens: int, work: Path
) -> list[float]:
    """The mean grade of greedy answers to all rows, for the model of each folder."""
    scores = []
    for number, folder in enumerate(folders):
        model = await open_model(folder, work, run=f"evaluation-{number}")
        scores.append(await mean_grade(model.temperature(0.0).max_gen_len(new_tokens), rows, grader))
        await model.dealloc()
    return scores
