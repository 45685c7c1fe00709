"""The `sft_to_gspo` flow: SFT, then GSPO, on one model in one run.

The two are stages of the run, each with its own chain of steps, and a crash in either stage is resumed there. GSPO
begins with the last policy of SFT and a new optimizer. That policy is also the reference of its KL term.

    ostinato run sft_to_gspo --config examples/sft_to_gspo.yaml
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flows.callbacks import Cadence
from flows.catalogue import SFTToGSPOConfig
from flows.display.terminal import TerminalProgress
from flows.gspo import GSPO
from flows.runs.checked_flow import checked_flow
from flows.runs.session import RunSession, open_run
from flows.sft import SFT
from flows.training.finish import publish_and_report
from flows.training.held_out import HeldoutEvaluator
from flows.training.rollout_flow import rollout_arguments
from flows.training.supervised_loop import supervised_arguments


@checked_flow()
async def sft_to_gspo(config: SFTToGSPOConfig) -> dict[str, Any]:
    """Fine-tunes a model on conversations, continues with GSPO on graded rollouts, and publishes it. Evaluates it on
    held-out prompts before, between and after the two stages, and writes a report.

    Args:
        config: the model, its conversations and prompts, and the grader.
    """
    logger = TerminalProgress()
    async with open_run(config, logger) as session:
        if session.result is not None:
            return session.result
        first, second = await _training_stages(config, session, logger)
        heldout = HeldoutEvaluator.of_config(session.workspace, config.second, session.base, second.source)
        # evaluate before SFT, and before, during and after GSPO
        first.callbacks += heldout.callbacks(Cadence(at_start=config.evaluation.before, at_end=False))
        second.callbacks += heldout.callbacks(replace(Cadence.of(config.evaluation), at_start=True))
        start = await first.open()
        await first.run()
        middle = await second.open()
        policy = await second.run()
        # these return what the loops have committed; a resumed run begins after the first ones
        before = await heldout.evaluate(start) if config.evaluation.before else None
        between, after = await heldout.evaluate(middle), await heldout.evaluate(policy)
        differences = heldout.result(before, after) | {
            "heldout_sft": heldout.result(before, between)["heldout"],
            "heldout_gspo": heldout.result(between, after)["heldout"],
        }
        return await publish_and_report(
            session, logger, config.model, policy,
            before=before, after=after, further=differences | second.ending_entry,
            samples_shown=config.evaluation.samples_shown,
        )  # fmt: skip


async def _training_stages(config: SFTToGSPOConfig, session: RunSession, logger: TerminalProgress) -> tuple[SFT, GSPO]:
    """The training classes of both stages, which train the same model."""
    sft_arguments = await supervised_arguments(config.first, session, logger)
    gspo_arguments = await rollout_arguments(config.second, session, logger)
    # the arguments of a flow have their own model and dataset; here GSPO continues the model of SFT
    gspo_arguments |= {
        "model": sft_arguments["model"].with_sampling(config.sampling),
        "dataset": session.datasets["prompts"],
    }
    return SFT(**sft_arguments), GSPO(**gspo_arguments)
