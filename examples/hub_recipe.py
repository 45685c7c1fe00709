"""GRPO on a dataset of the Hugging Face hub, whose rows a function maps to prompts with their answers.

    python examples/hub_recipe.py
"""

from __future__ import annotations

import asyncio
from typing import Any

from flows import GRPO, Dataset, InputConfig, Model, RecipeContext, dataset_kinds, get_prod_logger, recipe_main
from tasks.graders import LastNumber

GSM8K = {
    "kind": "hub",
    "path": "openai/gsm8k",
    "name": "main",
    "row_function": "hub_recipe:question_and_answer",
    "system_prompt": "Solve the problem. End with the number alone.",
    "limit": 64,
}


class Config(InputConfig):
    model: Model = Model("HuggingFaceTB/SmolLM2-135M-Instruct")
    prompts: Dataset[dataset_kinds.Prompt]
    steps: int = 2


def question_and_answer(row: dict[str, Any]) -> dict[str, Any]:
    """The answer of GSM8K ends with `#### 72`."""
    answer = row["answer"].rpartition("#### ")[2]
    return {"prompt": row["question"], "metadata": {"answer": answer}}


@recipe_main
async def hub_recipe(config: Config, ctx: RecipeContext) -> str:
    """Trains a model of the hub to solve word problems."""
    model = await config.model.to_builder(ctx).spawn_train("policy")
    await GRPO(
        await config.prompts.load(ctx),
        model.max_gen_len(32),
        LastNumber(),
        max_num_grpo_steps=config.steps,
        samples_per_batch=8,
        completions_per_sample=4,
        lr=1e-5,
        logger=get_prod_logger(ctx=ctx),
    ).run()
    return await model.save("gsm8k", ctx=ctx)


if __name__ == "__main__":
    print(asyncio.run(hub_recipe(Config(run="gsm8k-1", prompts=GSM8K))))
