"""Train a LoRA adapter on two DeepSpeed ranks, publish the merged model, and sample an answer of it.

    python examples/lora_two_ranks.py   (needs the extras `deepspeed` and `cluster`, and the model of `ostinato demo`)

On a machine with two GPUs, each rank takes one. Without GPUs, both are processes on the CPU.
"""

from __future__ import annotations

import asyncio

from engine.text.threads import StringThread
from flows import SFT, Dataset, InputConfig, Model, RecipeContext, dataset_kinds, get_prod_logger, recipe_main


class Config(InputConfig):
    model: Model
    answers: Dataset[dataset_kinds.Completion]
    steps: int = 4


@recipe_main
async def lora_on_two_ranks(config: Config, ctx: RecipeContext) -> dict[str, str]:
    model = await config.model.to_builder(ctx).with_adapter(rank=16, alpha=32).spawn_train("policy", 2048)
    await SFT(
        await config.answers.load(ctx),
        model,
        lr=2e-4,
        samples_per_batch=8,
        max_steps=config.steps,
        logger=get_prod_logger(ctx=ctx),
    ).run()
    key = await model.save("sums-lora")
    published = await Model(key).to_builder(ctx, tokens_to_generate=12).spawn_inference("published")
    answer = await published.temperature(0).generate(StringThread([("user", "What is 3 + 4?")]))
    return {"model": key, "answer": answer.last_content()}


if __name__ == "__main__":
    config = Config(
        run="lora-two-ranks",
        model=".ostinato/models/smollm2-135m-instruct",
        answers="examples/data/sums-completions.jsonl",
        engine={"kind": "local", "trainer": {"kind": "deepspeed", "ranks": 2, "zero_stage": 2}},
    )
    print(asyncio.run(lora_on_two_ranks(config)))
