"""Odds ratio preference optimisation (ORPO, arXiv:2403.07691) as a chain of committed steps. The loop is
`SupervisedLoop.run`; the flow around it is `orpo`.

One loss does the work of SFT and of a training on preferences: the cross entropy of the preferred answer teaches it,
and a second term raises its odds against those of the other answer, most where the policy ranks the two wrongly.
Fine-tuning alone raises the other answers, too, because they resemble the preferred ones; the second term holds them
down. There is no reference policy. Choose it to adapt a base model in one stage; after SFT, DPO or SimPO use the same
pairs without teaching the answers again.

    ostinato run orpo --config examples/orpo.yaml
"""

from __future__ import annotations

from typing import Any, Unpack

from engine.handles import TrainingModel
from engine.text.threads import StringThread
from flows.catalogue import ORPOAlgorithm, ORPOConfig
from flows.runs.checked_flow import checked_flow
from flows.training.options import SupervisedOptions
from flows.training.supervised_loop import PreferenceLoop, train_on_dataset
from storage.serialization import Coefficient
from tasks.datasets.load import LoadedDataset


class ORPOOptions(SupervisedOptions, total=False):
    """Options of ORPO, declared as the fields of ORPOAlgorithm are."""

    beta: Coefficient


class ORPO(PreferenceLoop):
    """Trains `model` in place on pairs (preferred, dispreferred) of threads that begin alike, or on a loaded preference
    dataset. `samples_per_batch` counts pairs. The other arguments are those of ORPOOptions; their defaults are in
    flows.catalogue.ORPOAlgorithm.

    Only the turns after those that both threads begin with are compared, unless the threads' weights say otherwise.
    """

    stage = "orpo"
    options_type = ORPOOptions
    algorithm_type = ORPOAlgorithm

    def __init__(
        self,
        dataset: list[tuple[StringThread, StringThread]] | LoadedDataset,
        model: TrainingModel,
        **options: Unpack[ORPOOptions],
    ) -> None:
        super().__init__(dataset, model, options)


@checked_flow()
async def orpo(config: ORPOConfig) -> dict[str, Any]:
    """Trains a model on preferred answers and against the others, publishes it and reports.

    Args:
        config: what to train, on which preferences.
    """
    return await train_on_dataset(config, ORPO)
