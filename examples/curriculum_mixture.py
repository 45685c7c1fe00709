"""A curriculum over a mixture: of every four prompts, three are sums, small ones first, and one is a product.

    python examples/curriculum_mixture.py      (with the model of `make demo` or `ostinato demo`)
"""

from __future__ import annotations

import asyncio
from typing import Any

from flows import GRPO, Dataset, InputConfig, Model, RecipeContext, dataset_kinds, recipe_main
from tasks.graders import LastNumber

SUMS = {
    "kind": "file",
    "path": "examples/data/sums-train.jsonl",
    "order": "curriculum",
    "curriculum_column": "answer",
}
PRODUCTS = {"kind": "file", "path": "examples/data/products-train.jsonl"}
MIXTURE: dict[str, Any] = {
    "kind": "mixture",
    "parts": [{"dataset": SUMS, "weight": 3}, {"dataset": PRODUCTS, "weight": 1}],
}


class Config(InputConfig):
    model: Model
    prompts: Dataset[dataset_kinds.Prompt]
    steps: int = 4


@recipe_main
async def arithmetic(config: Config, ctx: RecipeContext) -> str:
    prompts = await config.prompts.load_table(ctx)
    for part in prompts.parts:
        print(f"{part.name}: {part.rows} prompts, weight {part.weight:g}, {part.order}")
    model = await config.model.to_builder(ctx).spawn_train("policy", 2048)
    await GRPO(
        prompts,
        model.max_gen_len(8),
        LastNumber(),
        max_num_grpo_steps=config.steps,
        samples_per_batch=32,  # 8 prompts: 6 sums and 2 products
        samples_per_mini_batch=32,
        completions_per_sample=4,
        lr=3e-5,
    ).run()
    return await model.save("arithmetic")


if __name__ == "__main__":
    config = Config(run="arithmetic-1", model=".ostinato/models/smollm2-135m-instruct", prompts=MIXTURE)
    print(asyncio.run(arithmetic(config)))
