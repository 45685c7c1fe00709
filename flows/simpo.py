"""Simple preference optimisation (SimPO, arXiv:2405.14734) as a chain of committed steps. The loop is
`SupervisedLoop.run`; the flow around it is `simpo`.

The mean log-probability of an answer's tokens is its reward, as it is what decides which answer the policy generates.
The loss raises the reward of the preferred answer until it is greater than that of the other one by a margin. Unlike
DPO it has no reference policy: a step needs no pass of it, and nothing but the learning rate and the length of the run
keeps the policy near its start. Because of the mean, a longer answer has no greater reward for its length. Take DPO
where the policy must stay close to the model that it starts from.

    ostinato run simpo --config examples/simpo.yaml
"""

from __future__ import annotations

from typing import Any, Unpack

from engine.handles import TrainingModel
from engine.text.threads import StringThread
from flows.catalogue import SimPOAlgorithm, SimPOConfig
from flows.ops.run_names import flow_run_title
from flows.runs.checked_flow import checked_flow
from flows.training.options import SupervisedOptions
from flows.training.supervised_loop import PreferenceLoop, train_on_dataset
from storage.serialization import Coefficient, Divisor
from tasks.datasets.load import LoadedDataset


class SimPOOptions(SupervisedOptions, total=False):
    """Options of SimPO, declared as the fields of SimPOAlgorithm are."""

    beta: Divisor
    simpo_gamma: Coefficient


class SimPO(PreferenceLoop):
    """Trains `model` in place on pairs (preferred, dispreferred) of threads that begin alike, or on a loaded preference
    dataset. `samples_per_batch` counts pairs. The other arguments are those of SimPOOptions; their defaults are in
    flows.catalogue.SimPOAlgorithm.

    Only the turns after those that both threads begin with are compared, unless the threads' weights say otherwise.
    """

    stage = "simpo"
    options_type = SimPOOptions
    algorithm_type = SimPOAlgorithm

    def __init__(
        self,
        dataset: list[tuple[StringThread, StringThread]] | LoadedDataset,
        model: TrainingModel,
        **options: Unpack[SimPOOptions],
    ) -> None:
        super().__init__(dataset, model, options)


@checked_flow(name="simpo", flow_run_name=flow_run_title)
async def simpo(config: SimPOConfig) -> dict[str, Any]:
    """Trains a model on preferences without a reference model, publishes it and reports.

    Args:
        config: what to train, on which preferences.
    """
    return await train_on_dataset(config, SimPO)
