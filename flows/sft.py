"""Supervised fine-tuning as a chain of committed steps. The loop is `Supervised.run`; the flow around it is `sft`.

The loss is the cross-entropy of the assistant turns, end-of-turn token included, as a mean over the tokens of the
whole batch.

    ostinato run sft --config examples/sft.yaml
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from engine.handles import TrainingModel
from engine.losses.likelihood import CrossEntropySpec
from engine.text.threads import StringThread
from flows.configs.common import SFTConfig
from flows.display.terminal import TerminalProgress
from flows.ops.hooks import ON_END
from flows.runs.session import open_run
from flows.training.dataset_loop import Supervised, supervised_arguments, train_on_dataset
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.datasets.load import LoadedDataset
from tasks.datasets.spec import InlineDataset
from tasks.load import load_prompts
from tasks.prepare import prepare_completions


class SFT(Supervised):
    """Trains `model` in place on the assistant turns of `dataset`: threads, or a loaded completion dataset. The other
    arguments are those of `Supervised`."""

    stage = "sft"
    loss = CrossEntropySpec()

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        *,
        lr: float = 1e-5,
        samples_per_batch: int = 512,
        **options: Any,
    ) -> None:
        """`truncation` may also be left or right: of a longer conversation its last or first tokens are trained."""
        super().__init__(model, lr=lr, samples_per_batch=samples_per_batch, **options)
        self.dataset = dataset

    async def _prepare(self, policy: PolicyRef, dataset: ArtifactRef, rows: list[int], step: int) -> ArtifactRef:
        return await prepare_completions(
            self.model.workspace, policy, self.model.base, dataset, rows, lengths=self.lengths, step=step
        )

    def _load(self) -> LoadedDataset:
        if isinstance(self.dataset, LoadedDataset):
            return self.dataset
        return load_prompts(self.model.workspace, InlineDataset.of(self.dataset), "completion")


@flow(name="sft", flow_run_name="{config.title}", **ON_END)
async def sft(config: SFTConfig) -> dict[str, Any]:
    """Fine-tunes a model on conversations, publishes it and reports.

    Args:
        config: what to train, on what.
    """
    logger = TerminalProgress()
    async with open_run("sft", config, logger, use="completion") as session:
        if session.result is not None:
            return session.result
        return await train_on_dataset(config, session, SFT(**await supervised_arguments(config, session, logger)))
