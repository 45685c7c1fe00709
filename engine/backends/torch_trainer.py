"""The torch trainer: packed forwards, AdamW on master weights, one process, CPU or one GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.backends.causal_lm import CausalLM, digest_weights
from engine.backends.packing import Packable, micro_batches, pack
from engine.backends.protocol import Objective, UpdateReport
from engine.errors import BadSpec, NonFiniteGradient, SampleTooLong
from engine.losses.normalisation import token_weights
from engine.losses.registry import LOSSES, LossInputs
from engine.protocol import TokenSequence
from engine.samples import Sample
from storage.chain import OptimizerSpec

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


class TorchTrainer:
    """Implements engine.backends.protocol.Trainer on one `CausalLM`."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self._optimizer: torch.optim.AdamW | None = None

    # -- gradient ---------------------------------------------------------------------------------------------

    def update(
        self,
        samples: Sequence[Sample],
        objective: Objective,
        optimizer: OptimizerSpec,
        *,
        max_tokens: int,
        on_micro_batch: Callable[[], None] = lambda: None,
    ) -> UpdateReport:
        self._check_lengths(samples)
        report = UpdateReport()
        total_tokens = sum(sample.trained for sample in samples)
        if total_tokens == 0:
            raise BadSpec("no token of the minibatch is trained (every weight is 0); leave such samples out")
        adamw = self._adamw(optimizer)
        adamw.zero_grad(set_to_none=True)
        sums: dict[str, float] = defaultdict(float)
        taught = [sample for sample in samples if not _without_gradient(sample, objective)]
        passed_tokens = sum(sample.trained for sample in taught)
        for indices in micro_batches(taught, max_tokens=max_tokens):
            chosen = [taught[i] for i in indices]
            self._backward(chosen, objective, total_tokens, len(samples), sums)
            report.micro_batches += 1
            on_micro_batch()
        parameters = [p for p in self.model.module.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:  # no sample had a gradient: it is zero, and the moments still act
                parameter.grad = torch.zeros_like(parameter)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, optimizer.max_grad_norm))
        report.metrics = {
            **{
                name.removesuffix("_sum") + "_mean": value / passed_tokens
                for name, value in sums.items()
                if name != "loss"
            },
            "loss": sums["loss"],
            "grad_norm": norm,
            "tokens": float(total_tokens),
        }
        if norm != norm or norm in (float("inf"), float("-inf")):
            report.skipped = True
            if not objective.skip_non_finite:
                raise NonFiniteGradient(f"the gradient norm of {len(samples)} samples is {norm}")
        else:
            adamw.step()
        adamw.zero_grad(set_to_none=True)
        return report

    def _backward(
        self,
        samples: Sequence[Sample],
        objective: Objective,
        total_tokens: int,
        total_sequences: int,
        sums: dict[str, float],
    ) -> None:
        packed = pack(samples, device=self.model.device)
        logprobs_N = self.model.logprobs(packed, temperature=objective.temperature)
        inputs = LossInputs(
            logprobs_N=logprobs_N,
            old_N=self._column(samples, f"{_OLD[objective.old_logprobs]}", logprobs_N),
            reference_N=self._column(samples, "reference_logprobs", logprobs_N),
            advantages_N=self._column(samples, "advantages", logprobs_N),
        )
        token_loss = LOSSES[objective.loss.kind](inputs, objective.loss)
        weights_N = token_weights(
            [sample.trained for sample in samples],
            norm=objective.loss.norm,
            total_tokens=total_tokens,
            total_sequences=total_sequences,
            constant=getattr(objective.loss, "norm_constant", None),
        ).to(logprobs_N)
        loss = (token_loss.values_N * weights_N).sum()
        loss.backward()
        sums["loss"] += loss.item()
        for name, value in token_loss.sums.items():
            sums[name] += float(value)

    @staticmethod
    def _column(samples: Sequence[Sample], name: str, like: Tensor) -> Tensor | None:
        """One optional per-token column of all samples, flat; None when no sample has it."""
        columns = [getattr(sample, name) for sample in samples]
        if all(column is None for column in columns):
            return None
        if any(column is None for column in columns):
            raise BadSpec(f"some samples of the batch have {name} and some have none; give it for all or for none")
        return torch.tensor([v for column in columns for v in column], dtype=like.dtype, device=like.device)

    def _adamw(self, spec: OptimizerSpec) -> torch.optim.AdamW:
        if self._optimizer is None:
            trained = [p for p in self.model.module.parameters() if p.requires_grad]
            # norms and biases are not decayed: decay pulls towards zero what should stay near one
            matrices = {"params": [p for p in trained if p.ndim >= 2]}
            others = {"params": [p for p in trained if p.ndim < 2]}
            self._optimizer = torch.optim.AdamW([matrices, others], fused=True)
        for index, group in enumerate(self._optimizer.param_groups):
            group.update(
                lr=spec.lr,
                betas=(spec.beta1, spec.beta2),
                eps=spec.eps,
                weight_decay=spec.weight_decay if index == 0 else 0.0,
            )
        return self._optimizer

    # -- logprobs ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(
        self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int
    ) -> list[list[float]]:
        """Nats of every trained token, per sequence, in the order given."""
        self._check_lengths(sequences)
        found: list[list[float]] = [[] for _ in sequences]
        for indices in micro_batches(sequences, max_tokens=max_tokens):
            packed = pack([sequences[i] for i in indices], device=self.model.device)
            values_N = self.model.logprobs(packed, temperature=temperature)
            for index, part in zip(indices, values_N.split(list(packed.trained_S)), strict=True):
                found[index] = part.tolist()
        return found

    def _check_lengths(self, sequences: Sequence[Packable]) -> None:
        """Positions beyond the context were never trained: rotary ones extrapolate without a word."""
        longest = max(sequences, key=lambda sequence: len(sequence.token_ids), default=None)
        if longest is not None and len(longest.token_ids) > self.model.context_length:
            raise SampleTooLong(
                f"a sequence of {len(longest.token_ids)} tokens (group {longest.group!r}) passes the model's context "
                f"of {self.model.context_length}; shorten it or leave it out"
            )

    # -- state ------------------------------------------------------------------------------------------------

    def reset_optimizer(self) -> None:
        self._optimizer = None

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return digest_weights(self.model)

    def write_checkpoint(self, folder: Path) -> dict[str, Path]:
        folder.mkdir(parents=True, exist_ok=True)
        files = {WEIGHTS_FILE: folder / WEIGHTS_FILE}
        save_file({name: t.detach().contiguous() for name, t in self.model.named_weights()}, files[WEIGHTS_FILE])
        moments = self._moments()
        if moments:
            files[OPTIMIZER_FILE] = folder / OPTIMIZER_FILE
            save_file(moments, files[OPTIMIZER_FILE])
        return files

    def _moments(self) -> dict[str, Tensor]:
        if self._optimizer is None:
            return {}
        tensors = {}
        for name, parameter in self._named_parameters():
            for moment, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}.{name}"] = value.contiguous()
        return tensors

    def _named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return sorted((n, p) for n, p in self.model.module.named_parameters() if p.requires_grad)

    def read_checkpoint(self, files: dict[str, Path], *, optimizer: bool) -> None:
        weights = load_file(files[WEIGHTS_FILE], device=str(self.model.device))
        mine = dict(self.model.named_weights())
        if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in weights.items()}:
            differing = sorted(n for n in mine.keys() | weights.keys() if _shape(mine, n) != _shape(weights, n))
            raise BadSpec(f"the checkpoint does not fit the model; first differing tensor: {differing[0]}")
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(weights[name])
        self.reset_optimizer()
        if optimizer and OPTIMIZER_FILE in files:
            moments = load_file(files[OPTIMIZER_FILE], device=str(self.model.device))
            adamw = self._adamw(OptimizerSpec(lr=0.0))
            parameters = dict(self._named_parameters())
            for key, value in moments.items():
                moment, name = key.split(".", 1)
                adamw.state[parameters[name]][moment] = value

    def export(self, folder: Path) -> dict[str, Path]:
        folder.mkdir(parents=True, exist_ok=True)
        self.model.module.save_pretrained(folder, safe_serialization=True)  # type: ignore[operator]
        return {path.name: path for path in sorted(folder.iterdir())}


_OLD = {"trainer": "old_logprobs", "sampler": "sampler_logprobs"}


def _shape(tensors: dict[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None


def _without_gradient(sample: Sample, objective: Objective) -> bool:
    """True for a policy-gradient sample whose loss is exactly 0 whatever the weights: no pass is spent on it."""
    if sample.trained == 0:
        return True
    kl_beta = getattr(objective.loss, "kl_beta", None)
    return kl_beta == 0 and sample.advantages is not None and not any(sample.advantages)
