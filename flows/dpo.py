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
from flows.catalogue import DPOAlgorithm, DPOConfig
from flows.runs.checked_flow import checked_flow
from flows.training.arguments import accept_aliases
from flows.training.options import SupervisedOptions
from flows.training.supervised_loop import PreferenceLoop, train_on_dataset
from storage.serialization import Coefficient, Divisor
from tasks.datasets.load import LoadedDataset


class DPOOptions(SupervisedOptions, total=False):
    """Options of DPO, declared as the fields of DPOAlgorithm are."""

    kl_beta: Divisor
    loss_variant: DPOVariant
    label_smoothing: float | None
    length_normalised: bool
    rpo_alpha: Coefficient
    reference_free: bool


@accept_aliases()
class DPO(PreferenceLoop):
    """Trains `model` in place on pairs (preferred, dispreferred) of threads that begin alike, or on a loaded preference
    dataset. `samples_per_batch` counts pairs. The other arguments are those of DPOOptions; their defaults are in
    flows.catalogue.DPOAlgorithm.

    Only the turns after those that both threads begin with are compared, unless the threads' weights say otherwise.
    """

    stage = "dpo"
    options_type = DPOOptions
    algorithm_type = DPOAlgorithm

    def __init__(
        self,
        dataset: list[tuple[StringThread, StringThread]] | LoadedDataset,
        model: TrainingModel,
        **options: Unpack[DPOOptions],
    ) -> None:
        super().__init__(dataset, model, options)


@checked_flow()
async def dpo(config: DPOConfig) -> dict[str, Any]:
    """Trains a model on preferences, publishes it and reports.

    Args:
        config: what to train, on which preferences.
    """
    return await train_on_dataset(config, DPO)
