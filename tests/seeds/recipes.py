"""Recipes in the documents' shape and our own words: a GRPO recipe with several graders, PPO with a value model, and
fine-tuning followed by GSPO under a judge. Small enough for tests."""

from __future__ import annotations

from engine.text.threads import StringThread
from flows.dpo import DPO
from flows.grpo import GRPO
from flows.gspo import GSPO
from flows.loggers import JobNotifier, get_prod_logger
from flows.parameters import Dataset, Grader, Model, dataset_kinds
from flows.ppo import PPO
from flows.recipe import InputConfig, RecipeContext, recipe_main
from flows.sft import SFT
from flows.training.schedules import CosineSchedulerWithoutWarmup
from tasks.graders.base import BaseGrader, Grade
from tasks.graders.combined import CombinedGrader
from tasks.graders.judges import BinaryJudgeGrader


class GradedConfig(InputConfig):
    """What the first recipe takes."""

    model: Model
    prompts: Dataset[dataset_kinds.Prompt]
    graders: set[Grader]
    learning_rate: float = 1e-3
    steps: int = 2
    longest: int = 6


class Brevity(BaseGrader):
    """1 for an answer of at most three characters."""

    async def grade(self, thread: StringThread) -> Grade:
        return Grade(value=float(len(thread.last_content()) <= 3), grader_key=self.grader_key)


@recipe_main
async def graded(config: GradedConfig, ctx: RecipeContext) -> dict[str, object]:
    """GRPO on the mean of the configured graders and one of the recipe's own."""
    model = await config.model.to_builder(ctx).tp(ctx.world_size).spawn_train("policy", 256)
    stage = JobNotifier().stage_notifier("training")
    configured = [await grader.load(ctx) for grader in sorted(config.graders, key=lambda grader: grader.path)]
    grader = CombinedGrader("reward", [*configured, Brevity("brevity")], weights=[1.0] * len(configured) + [0.5])
    await grader.setup()
    await GRPO(
        dataset=await config.prompts.load(ctx),
        model=model.max_gen_len(config.longest),
        grader=grader,
        logger=get_prod_logger(ctx=ctx),
        lr=config.learning_rate,
        max_num_grpo_steps=config.steps,
        samples_per_batch=8,
        samples_per_mini_batch=4,
        completions_per_sample=4,
        checkpoint_frequency=None,
    ).run()
    stage.report_progress(config.steps, config.steps)
    await grader.teardown()
    return {"model": await model.save("graded", ctx=ctx), "step": (await model.policy()).step}


class PreferenceConfig(InputConfig):
    """What the second recipe takes."""

    model: Model
    pairs: Dataset[dataset_kinds.Preference]
    prompts: Dataset[dataset_kinds.Prompt]


@recipe_main
async def preferred(config: PreferenceConfig, ctx: RecipeContext) -> list[str]:
    """DPO, then PPO with a value model of the same base. The model is saved as a further version of its name."""
    # Both models have the same base.
    builder = await config.model.to_builder(ctx, tokens_to_generate=6)
    policy = await builder.spawn_train("policy", 256)
    value = await builder.into_scoring_model().spawn_train("value", 256)
    await DPO(
        dataset=await config.pairs.load(ctx),
        model=policy,
        logger=get_prod_logger(ctx=ctx),
        lr=1e-3,
        lr_scheduler=CosineSchedulerWithoutWarmup(1e-3),
        samples_per_batch=2,
    ).run()
    first = await policy.save_model_safely("preferred", ctx=ctx)
    # PPO continues from the policy that DPO has trained.
    await PPO(
        dataset=await config.prompts.load(ctx),
        model=policy,
        value_model=value,
        grader=CombinedGrader("reward", [Brevity("brevity")]),
        logger=get_prod_logger(ctx=ctx),
        max_num_ppo_steps=2,
        value_only_fraction=0.5,
        lr_policy=1e-3,
        lr_value=1e-3,
        samples_per_batch=4,
        checkpoint_frequency=None,
    ).run()
    return [first, await policy.save_model_safely("preferred", ctx=ctx)]


class TwoStageConfig(InputConfig):
    """What the third recipe takes."""

    demonstrations: Dataset[dataset_kinds.Completion]
    prompts: Dataset[dataset_kinds.Prompt]
    model_to_train: Model
    sft_learning_rate: float = 1e-3
    gspo_learning_rate: float = 1e-3
    gspo_steps: int = 2


@recipe_main
async def two_stages(config: TwoStageConfig, ctx: RecipeContext) -> str:
    """SFT, then GSPO with the grades of a judge model."""
    builder = await config.model_to_train.to_builder(ctx, tp=1, kv_cache_len=131072, tokens_to_generate=6)
    model = await builder.spawn_train("sft_then_gspo", max_batch_size=10_000)
    logger = get_prod_logger(ctx=ctx)
    # First stage.
    await SFT(
        dataset=await config.demonstrations.load(ctx),
        model=model,
        logger=logger,
        lr=config.sft_learning_rate,
        epochs=1,
        samples_per_batch=2,
        max_grad_norm=1.0,
        weight_decay=0.01,
    ).run()

    # Second stage, graded by a judge model.
    judging = await config.model_to_train.to_builder(ctx, tp=1, kv_cache_len=131072)
    judge = await judging.spawn_inference("judge")
    grader = BinaryJudgeGrader(grader_key="quality", criteria="Is the answer of use?", model=judge)
    await GSPO(
        dataset=await config.prompts.load(ctx),
        model=model,
        grader=CombinedGrader(grader_key="combined", graders=[grader]),
        logger=logger,
        lr=config.gspo_learning_rate,
        samples_per_batch=8,
        samples_per_mini_batch=4,
        max_grad_norm=1.0,
        clip_range=0.2,
        kl_beta=0.1,
        max_num_gspo_steps=config.gspo_steps,
        completions_per_sample=4,
    ).run()
    return await model.save(model_name="two-stages-final", ctx=ctx)
