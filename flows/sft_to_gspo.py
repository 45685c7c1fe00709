"""SFT, then GSPO, on one model in one run: two stages of one history.

Each stage is a chain of its own, and a crash in either is resumed there. The second begins, with a new optimizer, at
the last policy of the first, which is the reference of its KL term whatever happened in between.

    ostinato run sft_to_gspo --config examples/sft_to_gspo.yaml
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.configs.common import DatasetSource
from flows.configs.sft_to_gspo import SFTToGSPOConfig
from flows.display.terminal import TerminalProgress
from flows.gspo import GSPO
from flows.ops.hooks import ON_END
from flows.runs.session import RunSession, default_model_name, finish_run, open_run
from flows.sft import SFT
from flows.training.held_out import HeldoutEvaluator
from flows.training.rollout_flow import reward_arguments
from flows.training.supervised_flow import supervised_arguments
from storage.registry.models import registered_key
from tasks.datasets.spec import DatasetUse
from tasks.publish import publish_model
from tasks.report import write_report


@flow(name="sft_to_gspo", flow_run_name="{config.title}", **ON_END)
async def sft_to_gspo(config: SFTToGSPOConfig) -> dict[str, Any]:
    """Fine-tunes a model on conversations, goes on with GSPO on graded rollouts, evaluates it before, in between and
    after on held-out prompts, publishes it and reports.

    Args:
        config: what to train, on which conversations and prompts, graded how.
    """
    logger = TerminalProgress()
    further: dict[str, tuple[DatasetSource, DatasetUse]] = {"prompts": (config.data.prompts, "prompt")}
    async with open_run("sft_to_gspo", config, logger, use="completion", further=further) as session:
        if session.result is not None:
            return session.result
        workspace = session.workspace
        first, second = await _stages(config, session, logger)
        heldout = HeldoutEvaluator.of_completions(workspace, config.second, session.base, second.grading)
        second.callbacks += heldout.callbacks(config.evaluation)
        start = await first.open()
        before = await heldout.evaluate(start) if config.evaluation.before else None
        await first.run()
        between = await heldout.evaluate(await second.open())
        policy = await second.run()
        after = await heldout.evaluate(policy)
        published = await publish_model(workspace, policy, config.model.publish_as or default_model_name(session.run))
        result = heldout.result(before, after) | {
            "heldout_sft": heldout.result(before, between)["heldout"],
            "heldout_gspo": heldout.result(between, after)["heldout"],
            "run": session.run,
            "policy": policy.uri,
            "model": registered_key(published),
        }
        report = write_report(workspace, policy, before, after, result, samples_shown=config.evaluation.samples_shown)
        return finish_run(session, result | {"report": report})


async def _stages(config: SFTToGSPOConfig, session: RunSession, logger: TerminalProgress) -> tuple[SFT, GSPO]:
    """Both training classes on one model."""
    learning = await supervised_arguments(config.first, session, logger)
    practice = await reward_arguments(config.second, session, logger)
    one = {"model": learning["model"].with_sampling(config.sampling), "dataset": session.further["prompts"]}
    return SFT(**learning), GSPO(**practice | one, max_num_gspo_steps=config.gspo.algorithm.steps)
