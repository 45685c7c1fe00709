"""Kahneman-Tversky optimisation (KTO, arXiv:2402.01306): the policy learns from answers with a label each, desirable or
not.

People judge gains and losses against a point of comparison. A step raises the desirable answers and lowers the others,
relative to the reference, and least those that are already far from the point of comparison: the KL divergence to the
reference, estimated from mismatched pairs of a prompt and another prompt's answer. Choose it where answers have a
thumbs-up or a thumbs-down and no counterpart for the same prompt; with pairs, DPO learns from the comparison too. The
baseline is computed over the whole batch, before the step, and committed with the batch. The loop is
`SupervisedLoop.run`; the flow around it is `kto`.

    ostinato run kto --config examples/kto.yaml
"""

from __future__ import annotations

from typing import Any, Unpack

from engine.handles import TrainingModel
from engine.text.threads import StringThread
from flows.catalogue import KTOAlgorithm, KTOConfig
from flows.runs.checked_flow import checked_flow
from flows.training.options import SupervisedOptions
from flows.training.supervised_loop import PreferenceLoop, train_on_dataset
from storage.serialization import Coefficient, Divisor
from tasks.datasets.load import LoadedDataset


class KTOOptions(SupervisedOptions, total=False):
    """Options of KTO, declared as the fields of KTOAlgorithm are."""

    kl_beta: Divisor
    desirable_weight: Coefficient
    undesirable_weight: Coefficient


class KTO(PreferenceLoop):
    """Trains `model` in place on threads that end with an answer and have its label in metadata["res"], 1 for a
    desirable answer and 0 for another, or on a loaded dataset of them. `samples_per_batch` counts answers. The other
    arguments are those of KTOOptions; their defaults are in flows.catalogue.KTOAlgorithm.
    """

    stage = "kto"
    options_type = KTOOptions
    algorithm_type = KTOAlgorithm

    def __init__(
        self, dataset: list[StringThread] | LoadedDataset, model: TrainingModel, **options: Unpack[KTOOptions]
    ) -> None:
        super().__init__(dataset, model, options)


@checked_flow()
async def kto(config: KTOConfig) -> dict[str, Any]:
    """Trains a model on answers with a label each, publishes it and reports.

    Args:
        config: what to train, on which answers.
    """
    return await train_on_dataset(config, KTO)
