"""Reward models (arXiv:2203.02155): a model learns to give a conversation a number, from pairs or ratings.

The score of a conversation is the scalar head's number at its last token. A step raises the score of the chosen answer
and lowers that of the rejected one, by -log σ(s⁺ - s⁻) (Bradley and Terry), most for pairs in the wrong order; only
differences count, so the zero of the scores is arbitrary. Rated conversations are fitted by squared error. Choose it
when comparisons are to grade the samples of GRPO or PPO. The policy then learns its weaknesses too: watch samples, not
only the reward. The paper trains all pairs of one prompt together; here a batch has its pairs in the order of the
dataset. The loop is `SupervisedLoop.run`; the flow around it is `reward_model`.

    ostinato run reward_model --config examples/reward_model.yaml
"""

from __future__ import annotations

from typing import Any, Unpack

from engine.handles import TrainingModel
from engine.losses.pairs import RankingSpec
from engine.losses.values import MSESpec
from engine.text.threads import StringThread
from flows.catalogue import PreferenceOptimizer, RewardModelAlgorithm, RewardModelConfig
from flows.ops.run_names import flow_run_title
from flows.runs.checked_flow import checked_flow
from flows.training.options import SupervisedOptions
from flows.training.supervised_loop import SupervisedLoop, train_on_dataset
from tasks.datasets.load import LoadedDataset
from tasks.datasets.spec import InlineDataset, InlinePairs
from tasks.load import load_prompts


class RewardModelling(SupervisedLoop):
    """Trains a scalar `model` (`builder.into_scoring_model()`) in place.

    `dataset`: pairs (preferred, dispreferred) of threads that begin alike, or threads that end with an answer and have
    its rating in metadata["res"]; or a loaded dataset of either kind. `samples_per_batch` counts pairs, or threads. The
    other arguments are those of flows.training.options.SupervisedOptions; their defaults are in
    flows.catalogue.
    """

    stage = "reward_model"
    algorithm_type = RewardModelAlgorithm
    optimizer_type = PreferenceOptimizer

    def __init__(
        self,
        dataset: list[tuple[StringThread, StringThread]] | list[StringThread] | LoadedDataset,
        model: TrainingModel,
        **options: Unpack[SupervisedOptions],
    ) -> None:
        super().__init__(model, options)
        self.dataset = dataset
        self.loss = RankingSpec() if _ranks(dataset) else MSESpec()

    def load_dataset(self) -> LoadedDataset:
        if isinstance(self.dataset, LoadedDataset):
            return self.dataset
        if self.loss.pairwise:
            pairs = InlinePairs.of(self.dataset)  # type: ignore[arg-type]  # `_ranks` checked them
            return load_prompts(self.model.workspace, pairs, "preference")
        threads = InlineDataset.of(self.dataset)  # type: ignore[arg-type]
        return load_prompts(self.model.workspace, threads, "rating")


def _ranks(dataset: list[tuple[StringThread, StringThread]] | list[StringThread] | LoadedDataset) -> bool:
    """Whether they are pairs. Raises ValueError when some are."""
    if isinstance(dataset, LoadedDataset):
        return dataset.ref.kind == "pairs"
    kinds = {isinstance(item, StringThread) for item in dataset}
    if len(kinds) > 1:
        raise ValueError("given threads and pairs of threads; a reward model learns from one kind at a time")
    return kinds != {True}


@checked_flow(name="reward_model", flow_run_name=flow_run_title)
async def reward_model(config: RewardModelConfig) -> dict[str, Any]:
    """Trains a reward model on preferences or ratings, publishes it and reports.

    Args:
        config: what to train, on which preferences or ratings.
    """
    return await train_on_dataset(config, RewardModelling)
