"""Train a LoRA adapter on a base model in 4 bits (QLoRA), and publish the merged model.

    python examples/qlora.py   (needs the extra `qlora`, and the model of `ostinato demo`)
"""

from __future__ import annotations

import asyncio

from flows import SFT, Dataset, InputConfig, Model, RecipeContext, dataset_kinds, recipe_main


class Config(InputConfig):
    model: Model
    completions: Dataset[dataset_kinds.Completion]
    steps: int = 4


@recipe_main
async def qlora(config: Config, ctx: RecipeContext) -> str:
    builder = config.model.to_builder(ctx).with_adapter(rank=16, alpha=32, load_in_4bit=True)
    model = await builder.spawn_train("policy", 2048)
    completions = await config.completions.load(ctx)
    await SFT(completions, model, lr=2e-4, samples_per_batch=32, max_steps=config.steps).run()
    return await model.save("sums-qlora")


if __name__ == "__main__":
    config = Config(
        run="qlora",
        model=".ostinato/models/smollm2-135m-instruct",
        completions="examples/data/sums-completions.jsonl",
    )
    print(asyncio.run(qlora(config)))
