"""Direct preference optimisation (arXiv:2305.18290): the policy learns from pairs of a better and a worse answer.

A step raises the chosen answer and lowers the rejected one, both relative to the reference, and most for the pairs that
the policy still ranks wrongly; `beta` says how far the policy may leave the reference. Choose it when people or a judge
compare answers and no grader gives a number: it samples nothing, so it is cheap, but it learns only about the answers
in its data. Both answers may become less probable together, as long as the distance grows. The reference is the policy
that the stage began with, as in the paper. Its logprobs are computed once per batch, before the step, and committed
with the batch. The loop is `SupervisedLoop.run`; the flow around it is `dpo`.

    ostinato run dpo --config examples/dpo.yaml
"""

from __future__ import annotations

from typing import Any, Unpack

from engine.handles import TrainingModel
from engine.losses.pairs import DPOVariant
from engine.text.threads import StringThread
from flows.configs.preferences import DPOAlgorithm, DPOConfig, PreferenceOptimizer
from flows.ops.run_names import flow_run_title
from flows.runs.checked_flow import checked_flow
from flows.training.aliases import accept_aliases
from flows.training.options import SupervisedOptions
from flows.training.supervised_flow import train_on_dataset
from flows.training.supervised_loop import SupervisedLoop
from storage.serialization import Divisor
from tasks.datasets.load import LoadedDataset
from tasks.datasets.spec import InlinePairs
from tasks.load import load_prompts


class DPOOptions(SupervisedOptions, total=False):
    """Options of DPO, declared as the fields of DPOAlgorithm are."""

    kl_beta: Divisor
    loss_variant: DPOVariant
    label_smoothing: float | None


@accept_aliases()
class DPO(SupervisedLoop):
    """Trains `model` in place on pairs (preferred, dispreferred) of threads that begin alike, or on a loaded preference
    dataset. `samples_per_batch` counts pairs. The other arguments are those of DPOOptions; their defaults are in
    flows.configs.preferences.

    Only the turns after those that both threads begin with are compared, unless the threads' weights say otherwise.
    """

    stage = "dpo"
    options_type = DPOOptions
    algorithm_type = DPOAlgorithm
    optimizer_type = PreferenceOptimizer

    def __init__(
        self,
        dataset: list[tuple[StringThread, StringThread]] | LoadedDataset,
        model: TrainingModel,
        **options: Unpack[DPOOptions],
    ) -> None:
        super().__init__(model, options)
        self.dataset = dataset
        assert isinstance(self.algorithm, DPOAlgorithm)
        self.loss = self.algorithm.loss

    def load_dataset(self) -> LoadedDataset:
        if not isinstance(self.dataset, LoadedDataset):
            return load_prompts(self.model.workspace, InlinePairs.of(self.dataset), "preference")
        if self.dataset.ref.kind != "pairs":
            raise ValueError(
                f"{self.dataset.ref.key} holds {self.dataset.ref.kind}; DPO needs pairs: load it with kind='preference'"
            )
        return self.dataset


@checked_flow(name="dpo", flow_run_name=flow_run_title)
async def dpo(config: DPOConfig) -> dict[str, Any]:
    """Trains a model on preferences, publishes it and reports.

    Args:
        config: what to train, on which preferences.
    """
    return await train_on_dataset(config, DPO)
