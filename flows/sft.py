"""Supervised fine-tuning: the policy learns to repeat answers that are given.

Each step raises the probability of every token of the assistant turns, given what precedes it, and most where the model
found it unlikely. Choose it when good answers exist: to teach a format or a skill before reinforcement learning. It
cannot exceed its data, and it does not lower wrong answers except through the ones that it raises. The loss is the
cross-entropy of the assistant turns, end-of-turn token included, as a mean over the tokens of the whole batch. The loop
is `SupervisedLoop.run`; the flow around it is `sft`.

    ostinato run sft --config examples/sft.yaml
"""

from __future__ import annotations

from typing import Any, Unpack

from engine.handles import TrainingModel
from engine.losses.likelihood import CrossEntropySpec
from engine.text.threads import StringThread
from flows.configs.common import SFTConfig
from flows.configs.optimizer import SFTOptimizer
from flows.runs.checked_flow import checked_flow
from flows.training.options import SupervisedOptions
from flows.training.supervised_loop import SupervisedLoop, train_on_dataset
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.batches.rl import prepare_conversations
from tasks.datasets.load import LoadedDataset
from tasks.datasets.spec import InlineDataset
from tasks.load import load_prompts


class SFT(SupervisedLoop):
    """Trains `model` in place on the assistant turns of `dataset`: threads, or a loaded completion dataset.

    Of a longer conversation than `max_tokens`, `truncation="left"` trains the last tokens and "right" the first. The
    other arguments are those of flows.training.options.SupervisedOptions; their defaults are in
    flows.configs.common.SFTAlgorithm and flows.configs.optimizer.SFTOptimizer.
    """

    stage = "sft"
    optimizer_type = SFTOptimizer
    loss = CrossEntropySpec()

    def __init__(
        self, dataset: list[StringThread] | LoadedDataset, model: TrainingModel, **options: Unpack[SupervisedOptions]
    ) -> None:
        super().__init__(model, options)
        self.dataset = dataset

    async def prepare(self, policy: PolicyRef, dataset: ArtifactRef, rows: list[int], step: int) -> ArtifactRef:
        return await prepare_conversations(
            self.model.workspace, policy, self.model.base, dataset, rows, lengths=self.lengths, step=step
        )

    def load_dataset(self) -> LoadedDataset:
        if isinstance(self.dataset, LoadedDataset):
            return self.dataset
        return load_prompts(self.model.workspace, InlineDataset.of(self.dataset), "completion")


@checked_flow()
async def sft(config: SFTConfig) -> dict[str, Any]:
    """Fine-tunes a model on conversations, publishes it and reports.

    Args:
        config: what to train, on what.
    """
    return await train_on_dataset(config, SFT)
