"""Train a LoRA adapter on two DeepSpeed ranks, and publish the merged model.

    python examples/lora_two_ranks.py   (needs the extras `deepspeed` and `cluster`, and the model of `ostinato demo`)

On a machine with two GPUs, each rank takes one. Without GPUs, both are processes on the CPU.
"""

from __future__ import annotations

import asyncio

from engine.specs.engine import LocalEngineSpec
from engine.specs.trainer import DeepSpeedSpec
from flows.grpo import GRPO
from flows.parameters import Dataset, Model, dataset_kinds
from flows.recipe import InputConfig, RecipeContext, recipe_main
from tasks.graders.rules import LastNumber


class Config(InputConfig):
    engine: LocalEngineSpec = LocalEngineSpec(trainer=DeepSpeedSpec(ranks=2, zero_stage=2))
    model: Model
    prompts: Dataset[dataset_kinds.Prompt]
    steps: int = 4


@recipe_main
async def lora_on_two_ranks(config: Config, ctx: RecipeContext) -> str:
    builder = config.model.to_builder(ctx).with_adapter(rank=16, alpha=32)
    model = await builder.spawn_train("policy", 2048)
    await GRPO(
        await config.prompts.load(ctx),
        model.max_gen_len(16),
        LastNumber(),
        max_num_grpo_steps=config.steps,
        samples_per_batch=32,
        samples_per_mini_batch=16,
        lr=1e-4,
    ).run()
    return await model.save("sums-lora")


if __name__ == "__main__":
    config = Config(
        run="lora-two-ranks",
        model=".ostinato/models/smollm2-135m-instruct",
        prompts="examples/data/sums-train.jsonl",
    )
    print(asyncio.run(lora_on_two_ranks(config)))
