"""A recipe of one's own: reward a property of the text with a plain function.

    python examples/recipe.py      (in the environment of `make demo` or `ostinato demo`, which brings the model)
"""

from __future__ import annotations

import asyncio

from prefect import flow

from engine.handles import Model
from engine.text.threads import StringThread
from flows import GRPO, RecipeContext
from tasks.graders import BaseGrader

THINGS = ("a book", "the time", "a glass of water", "some advice", "a pen", "help", "the bill", "a ticket")


async def brief_and_polite(thread: StringThread) -> float:
    answer = thread.last_content()
    return float("please" in answer.lower()) - 0.01 * max(0, len(answer) - 60)


@flow
async def polite(steps: int = 4) -> str:
    ctx = RecipeContext.open(run=f"polite-{steps}")
    builder = Model(".ostinato/models/smollm2-135m-instruct").to_builder(ctx)
    model = await builder.spawn_train("policy")
    prompts = [StringThread([("user", f"Ask me for {thing}.")]) for thing in THINGS]
    grader = BaseGrader.from_function("polite", brief_and_polite, version="1")
    await GRPO(
        prompts,
        model.max_gen_len(24),
        grader,
        max_num_grpo_steps=steps,
        samples_per_batch=32,
        samples_per_mini_batch=16,
        completions_per_sample=8,
        clip_range=0.2,
        lr=2e-5,
        checkpoint_frequency=None,
    ).run()
    return await model.save("polite")


if __name__ == "__main__":
    print(asyncio.run(polite()))
