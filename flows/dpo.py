"""Direct preference optimisation (arXiv:2305.18290) as a chain of committed steps. The loop is `Supervised.run`; the
flow around it is `dpo`.

The reference is the policy that the stage began with. Its logprobs are computed once per batch, before the step, and
committed with the batch.

    ostinato run dpo --config examples/dpo.yaml
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from engine.handles import TrainingModel
from engine.losses.pairs import DPOSpec, DPOVariant
from engine.text.threads import StringThread
from flows.configs.preferences import DPOConfig
from flows.display.terminal import TerminalProgress
from flows.ops.hooks import ON_END
from flows.runs.session import open_run
from flows.training.aliases import accept_aliases
from flows.training.dataset_loop import Supervised, supervised_arguments, train_on_dataset
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.batches.truncation import check_uncut
from tasks.datasets.load import LoadedDataset
from tasks.datasets.spec import InlinePairs
from tasks.load import load_prompts
from tasks.prepare import prepare_pairs


@accept_aliases()
class DPO(Supervised):
    """Trains `model` in place on pairs (preferred, dispreferred) of threads that begin alike, or on a loaded preference
    dataset. `samples_per_batch` counts pairs. The other arguments are those of `Supervised`.

    Only the turns after those that both threads begin with are compared, unless the threads' weights say otherwise.
    """

    stage = "dpo"

    def __init__(
        self,
        dataset: list[tuple[StringThread, StringThread]] | LoadedDataset,
        model: TrainingModel,
        *,
        lr: float = 1e-6,
        samples_per_batch: int = 32,
        kl_beta: float = 0.1,
        loss_variant: DPOVariant = "sigmoid",
        label_smoothing: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, lr=lr, samples_per_batch=samples_per_batch, **options)
        check_uncut(self.lengths)
        self.dataset = dataset
        self.loss = DPOSpec(beta=kl_beta, variant=loss_variant, label_smoothing=label_smoothing)

    async def _prepare(self, policy: PolicyRef, dataset: ArtifactRef, rows: list[int], step: int) -> ArtifactRef:
        workspace, reference = self.model.workspace, await self.open()
        return await prepare_pairs(
            workspace, policy, self.model.base, dataset, rows, reference=reference, lengths=self.lengths, step=step
        )

    def _load(self) -> LoadedDataset:
        if not isinstance(self.dataset, LoadedDataset):
            return load_prompts(self.model.workspace, InlinePairs.of(self.dataset), "preference")
        if self.dataset.ref.kind != "pairs":
            raise ValueError(
                f"{self.dataset.ref.key} holds {self.dataset.ref.kind}; DPO needs pairs: load it with kind='preference'"
            )
        return self.dataset

    def _reference(self, start: PolicyRef) -> PolicyRef | None:
        return start


@flow(name="dpo", flow_run_name="{config.title}", **ON_END)
async def dpo(config: DPOConfig) -> dict[str, Any]:
    """Trains a model on preferences, publishes it and reports.

    Args:
        config: what to train, on which preferences.
    """
    logger = TerminalProgress()
    async with open_run("dpo", config, logger, use="preference") as session:
        if session.result is not None:
            return session.result
        return await train_on_dataset(config, session, DPO(**await supervised_arguments(config, session, logger)))
