"""The `sft_to_gspo` flow: SFT, then GSPO, on one model in one run.

The two are stages of the run, each with its own chain of steps, and a crash in either stage is resumed there. GSPO
begins with the last policy of SFT and a new optimizer. That policy is also the reference of its KL term.

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
    """Fine-tunes a model on conversations, continues with GSPO on graded rollouts, and publishes it. Evaluates it on
    held-out prompts before, between and after the two stages, and writes a report.

    Args:
        config: the model, its conversations and prompts, and the grader.
    """
    logger = TerminalProgress()
    further: dict[str, tuple[DatasetSource, DatasetUse]] = {"prompts": (config.data.prompts, "prompt")}
    async with open_run("sft_to_gspo", config, logger, use="completion", further=further) as session:
        if session.result is not None:
            return session.result
        workspace = session.workspace
        first, second = await _training_stages(config, session, logger)
        heldout = HeldoutEvaluator.of_completions(workspace, config.second, session.base, second.grading)
        second.callbacks += heldout.callbacks(config.evaluation)
        # train, with an evaluation around each stage
        start = await first.open()
        before = await heldout.evaluate(start) if config.evaluation.before else None
        await first.run()
        between = await heldout.evaluate(await second.open())
        policy = await second.run()
        after = await heldout.evaluate(policy)
        # publish the model and the report
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


async def _training_stages(
    config: SFTToGSPOConfig, session: RunSession, logger: TerminalProgress
) -> tuple[SFT, GSPO]:
    """The training classes of both stages, which train the same model."""
    sft_arguments = await supervised_arguments(config.first, session, logger)
    gspo_arguments = await reward_arguments(config.second, session, logger)
    # the arguments of a flow have their own model and dataset; here GSPO continues the model of SFT
    gspo_arguments |= {
        "model": sft_arguments["model"].with_sampling(config.sampling),
        "dataset": session.further["prompts"],
    }
    return SFT(**sft_arguments), GSPO(**gspo_arguments, max_num_gspo_steps=config.gspo.algorithm.steps)
