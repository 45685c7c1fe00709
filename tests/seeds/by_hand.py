"""GRPO written by hand out of the primitives, as the documents walk through it; and a command to run and to kill it.

    python -m tests.seeds.by_hand STORE MODEL [PLACE]        dies by SIGKILL at PLACE, such as 2:before_step
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from engine.handles import InferenceModel, Model, TrainingModel
from engine.specs.engine import LocalEngineSpec
from engine.text.threads import StringThread, TokenizedThread
from flows.recipe import RecipeContext
from flows.training.schedules import CosineScheduler
from tasks.batches.iteration import DataSet, async_map, async_map_batch, get_minibatches, repeat_thread
from tasks.graders.base import BaseGrader
from tests.fixtures.grading import even_share

PROMPTS = [StringThread(turns=[("user", str(digit))]) for digit in range(10)]
ITERATIONS, MINI_BATCHES = 3, 2


async def reward(thread: StringThread) -> float:
    return even_share(thread)


@dataclass
class Drawn:
    """One completion and what its loss needs."""

    tokens: TokenizedThread
    old: list[float]
    reference: list[float]
    advantage: float


class HandGRPO:
    """Group-relative policy optimisation, in lines that a reader can change."""

    def __init__(
        self, model: TrainingModel, grader: BaseGrader, *, group: int = 4, prompts: int = 2, lr: float = 1e-3
    ) -> None:
        self.dataset = DataSet(PROMPTS, allow_looping=True, seed=7)
        self.model, self.score = model, grader.score_float_value
        self.group, self.prompts = group, prompts
        self.rate = CosineScheduler(lr)
        self.losses: list[float] = []
        self.visit: Callable[[str], None] = lambda place: None

    async def start(self) -> None:
        self.reference: InferenceModel = await self.model.clone_inf()

    async def draw(self, prompt: StringThread) -> list[Drawn]:
        """The group of one prompt, its rewards made relative."""
        tokens = await async_map_batch(self.model.generate_tokens, repeat_thread(prompt), batch_size=self.group)
        texts = await async_map(self.model.detokenize_thread, tokens)
        scores = np.array(await async_map(self.score, texts), dtype=np.float32)
        relative = scores - scores.mean()
        relative /= relative.std() + 1e-8
        old = await async_map(self.model.logprobs_per_token, tokens)
        reference = await async_map(self.reference.logprobs_per_token, tokens)
        return [Drawn(*one) for one in zip(tokens, old, reference, relative, strict=True)]

    async def train(self, drawn: Drawn) -> None:
        await self.model.train_grpo(
            drawn.tokens, drawn.old, drawn.reference, [drawn.advantage] * len(drawn.tokens.logprobs), 0.2, 0.01
        )

    async def iteration(self, progress: float) -> None:
        groups = await async_map_batch(self.draw, self.dataset, self.prompts)
        drawn = list(chain.from_iterable(groups))
        for number, batch in enumerate(get_minibatches(drawn, len(drawn) // MINI_BATCHES)):
            await async_map(self.train, batch)
            self.visit(f"before_step_{number}")
            metrics = await self.model.optim_step(self.rate(progress), wd=0.0, max_grad_norm=1.0)
            self.losses.append(metrics["loss"])
            self.visit(f"after_step_{number}")

    async def run(self, iterations: int) -> None:
        """A plain loop, as the documents have it."""
        await self.start()
        for done in range(iterations):
            await self.iteration(done / iterations)

    async def run_resumable(self, ctx: RecipeContext, iterations: int) -> None:
        await self.start()
        async for done in ctx.steps(iterations, self.dataset):
            visit, self.visit = self.visit, partial(self._visit_in, done, self.visit)
            await self.iteration(done / iterations)
            self.visit = visit

    def _visit_in(self, done: int, visit: Callable[[str], None], place: str) -> None:
        visit(f"{done}:{place}")


async def recipe(ctx: RecipeContext, model: str, visit: Callable[[str], None]) -> TrainingModel:
    """The recipe, whose `visit` hears of each place that it passes."""
    spawned = await Model(model).to_builder(ctx, tokens_to_generate=6).spawn_train("policy", 256)
    algorithm = HandGRPO(spawned.min_gen_len(6), BaseGrader.from_function("even", reward))
    algorithm.visit = visit
    await algorithm.run_resumable(ctx, ITERATIONS)
    return spawned


def main(store: Path, model: str, place: str = "") -> None:
    def visit(here: str) -> None:
        if here == place:
            os.kill(os.getpid(), signal.SIGKILL)

    ctx = RecipeContext.open("by-hand", store=str(store), engine=LocalEngineSpec(deterministic=True, threads=1))
    asyncio.run(recipe(ctx, model, visit))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
