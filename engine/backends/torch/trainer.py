"""The torch trainer: packed forwards, AdamW on master weights, one process, CPU or one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine.backends.protocol import Objective, UpdateReport
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.packing import Packable, Packed, micro_batches, pack
from engine.backends.torch.updates import (
    Accumulated,
    Totals,
    adamw_groups,
    check_gives,
    check_reads,
    check_sequences,
    forward_of,
    is_out_of_memory,
    metrics_of,
    micro_batch_loss,
    per_sequence,
    set_adamw,
    split_once,
    totals_of,
    validate_batch,
    without_gradient,
)
from engine.backends.weight_files.digests import digest_tensors
from engine.backends.weight_files.pieces import moment_shapes, open_checkpoint
from engine.backends.weight_files.tensor_files import check_shapes, write_tensors
from engine.errors import NonFiniteGradient, OutOfMemory
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from storage.chain.records import OptimizerSpec

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STAGED_FILE = "model.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")

T = TypeVar("T")


class TorchTrainer:
    """Implements engine.backends.protocol.Trainer on one `CausalLM`, all of whose weights it trains and owns."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self._optimizer: torch.optim.AdamW | None = None

    # -- what is trained --------------------------------------------------------------------------------------

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters with their names, in a fixed order."""
        return [(name, p) for name, p in self.model.module.named_parameters() if p.requires_grad]

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """What a checkpoint holds, sorted by name: weights that this trainer alone owns."""
        return self.model.named_weights()

    def in_use(self) -> AbstractContextManager[object]:
        """Around every forward: the model computes with this trainer's weights."""
        return nullcontext()

    def nbytes(self, *, training: bool = True) -> int:
        """Bytes of the weights it alone owns; with `training` also one gradient and two moments per trained weight,
        which is their peak in an update, held now or not. Without: the moments that are held now. Activations,
        buffers that no file holds and a sampler's copy are not in it."""
        held = sum(tensor.nbytes for _, tensor in self.weights())
        if training:
            return held + 3 * sum(parameter.nbytes for _, parameter in self.trained())
        return held + sum(tensor.nbytes for tensor in self._moments().values())

    @property
    def weights_nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.model.named_weights())

    @property
    def alive(self) -> bool:
        return True

    @property
    def accepts_images(self) -> bool:
        return self.model.accepts_images

    @property
    def scalar(self) -> bool:
        return self.model.scalar

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
        check_reads(objective.loss, scalar=self.model.scalar, name=type(self.model.module).__name__)
        self._check(samples)
        totals = totals_of(samples)
        adamw = self._adamw(optimizer)
        adamw.zero_grad(set_to_none=True)
        taught = [sample for sample in samples if not without_gradient(sample, objective)]
        validate_batch(taught, objective)

        def accumulate(max_tokens: int) -> Accumulated:
            found = Accumulated(max_tokens)
            for indices in micro_batches(taught, max_tokens=max_tokens, whole_groups=objective.loss.pairwise):
                self._backward([taught[i] for i in indices], objective, totals, found.sums)
                found.micro_batches += 1
                on_micro_batch()
            return found

        with self.in_use():
            found = self._split_once(accumulate, taught, max_tokens, whole_groups=objective.loss.pairwise)
        report = UpdateReport(micro_batches=found.micro_batches, max_tokens=found.max_tokens)
        parameters = [parameter for _, parameter in self.trained()]
        for parameter in parameters:
            if parameter.grad is None:  # no sample had a gradient: it is zero, and the moments still act
                parameter.grad = torch.zeros_like(parameter)
        norm = float(nn.utils.clip_grad_norm_(parameters, optimizer.max_grad_norm))
        report.metrics = metrics_of(found.sums, passed=taught, totals=totals, grad_norm=norm)
        if not isfinite(norm):
            report.skipped = True
            if not objective.skip_non_finite:
                raise NonFiniteGradient(f"the gradient norm of {len(samples)} samples is {norm}")
        else:
            self._step(adamw)
        adamw.zero_grad(set_to_none=True)
        return report

    def _step(self, adamw: torch.optim.AdamW) -> None:
        """The first one makes the moments, which no smaller micro-batch would make room for."""
        try:
            adamw.step()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            moments = 2 * sum(parameter.nbytes for _, parameter in self.trained())
            raise OutOfMemory(
                f"AdamW's moments, {moments / 2**30:.2f} GiB, do not fit {self.model.device} memory: "
                f"{str(error).splitlines()[0]}. Train a smaller model or a LoRA adapter, or use a larger device"
            ) from None

    def _split_once(
        self,
        run: Callable[[int], T],
        sequences: Sequence[Packable],
        max_tokens: int,
        *,
        whole_groups: bool = False,
    ) -> T:
        def forget() -> None:
            for _, parameter in self.trained():
                parameter.grad = None

        device = self.model.device
        return split_once(run, sequences, max_tokens, device=device, forget=forget, whole_groups=whole_groups)

    def _backward(
        self, samples: Sequence[Sample], objective: Objective, totals: Totals, sums: dict[str, float]
    ) -> None:
        forward = forward_of(self.model, objective)
        loss, found = micro_batch_loss(forward, samples, objective, totals, device=self.model.device)
        loss.backward()
        sums["loss"] += loss.item()
        for name, value in found.items():
            sums[name] += float(value)

    def _adamw(self, spec: OptimizerSpec) -> torch.optim.AdamW:
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(
                adamw_groups([parameter for _, parameter in self.trained()]), fused=True
            )
        set_adamw(self._optimizer.param_groups, spec, decayed=lambda index: index == 0)
        return self._optimizer

    # -- reading ----------------------------------------------------------------------------------------------

    def logprobs(
        self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int
    ) -> list[list[float]]:
        """Nats of every trained token, per sequence, in the order given."""
        check_gives("logprobs", scalar=self.scalar, name=type(self.model.module).__name__)
        return self._read(sequences, lambda packed: self.model.logprobs(packed, temperature=temperature), max_tokens)

    def values(self, sequences: Sequence[TokenSequence], *, max_tokens: int) -> list[list[float]]:
        """The scalar head's number before every trained token, per sequence, in the order given."""
        check_gives("values", scalar=self.scalar, name=type(self.model.module).__name__)
        return self._read(sequences, self.model.values, max_tokens)

    @torch.no_grad()
    def _read(
        self, sequences: Sequence[TokenSequence], forward: Callable[[Packed], Tensor], max_tokens: int
    ) -> list[list[float]]:
        self._check(sequences)

        def run(max_tokens: int) -> list[list[float]]:
            found: list[list[float]] = [[] for _ in sequences]
            for indices in micro_batches(sequences, max_tokens=max_tokens):
                packed = pack([sequences[i] for i in indices], device=self.model.device)
                for index, part in zip(indices, per_sequence(forward(packed), packed), strict=True):
                    found[index] = part
            return found

        with self.in_use():
            return self._split_once(run, sequences, max_tokens)

    def _check(self, sequences: Sequence[Packable]) -> None:
        check_sequences(
            sequences, vocab_size=self.model.vocab_size, context_length=self.model.context_length
        )

    # -- state ------------------------------------------------------------------------------------------------

    def reset_optimizer(self) -> None:
        self._optimizer = None

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return digest_tensors(self.model.named_weights())

    def write_checkpoint(self, folder: Path) -> dict[str, Path]:
        """Weights, and moments where there are some; in memory no more than one tensor besides them."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {WEIGHTS_FILE: folder / WEIGHTS_FILE}
        write_tensors(files[WEIGHTS_FILE], self.weights())
        moments = self._moments()
        if moments:
            files[OPTIMIZER_FILE] = folder / OPTIMIZER_FILE
            write_tensors(files[OPTIMIZER_FILE], moments.items())
        return files

    def _moments(self) -> dict[str, Tensor]:
        """AdamW's own tensors: `step.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`; none before the first update."""
        if self._optimizer is None:
            return {}
        return {
            f"{moment}.{name}": value
            for name, parameter in self.trained()
            for moment, value in self._optimizer.state.get(parameter, {}).items()
        }

    def read_checkpoint(self, files: dict[str, Path], *, optimizer: bool) -> None:
        """Copies the files into the weights in place, and makes the moments. BadSpec leaves both as they were."""
        mine = dict(self.weights())
        given = open_checkpoint(files)
        check_shapes(given.weights.shapes(), _shapes(mine), "checkpoint")
        moments = given.moments if optimizer else None
        if moments is not None:
            expected = moment_shapes(_shapes(self.trained()), MOMENTS)
            check_shapes(moments.shapes(), expected, "optimizer's checkpoint")
        for name, tensor in mine.items():
            given.weights.read_into(name, tensor)
        self.reset_optimizer()
        if moments is not None:
            for key in moments.shapes():
                moments.read_into(key, self._new_moment(key))

    def _new_moment(self, key: str) -> Tensor:
        moment, name = key.split(".", 1)
        parameter = dict(self.trained())[name]
        like = parameter.detach()
        made = torch.empty_like(like) if moment in MOMENTS else torch.empty((), device=like.device)
        self._adamw(OptimizerSpec(lr=0.0)).state[parameter][moment] = made
        return made

    def write_config(self, folder: Path) -> None:
        module: Any = self.model.module
        module.config.save_pretrained(folder)
        if getattr(module, "generation_config", None) is not None:
            module.generation_config.save_pretrained(folder)

    def stage_weights(self, folder: Path, *, dtype: torch.dtype) -> list[Path]:
        """The model's own weights; an adapter in use is not merged into them."""
        path = folder / STAGED_FILE
        write_tensors(path, self.model.exported_weights(), floating=dtype)
        return [path]

    def export(self, folder: Path) -> dict[str, Path]:
        return self.export_merged(folder)

    def export_merged(self, folder: Path) -> dict[str, Path]:
        folder.mkdir(parents=True, exist_ok=True)
        self.model.module.save_pretrained(folder, safe_serialization=True)  # type: ignore[operator]
        return {path.name: path for path in sorted(folder.iterdir())}


def _shapes(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in dict(tensors).items()}
