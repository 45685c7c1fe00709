"""The torch trainer: packed forward passes, and an optimizer on master weights, in one process on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from engine.backends.protocol import FrozenBase, Objective, UpdateReport
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.determinism import warn_only_restored
from engine.backends.torch.optimizers import TrainerOptimizer, expected_moments, kind_of_moments
from engine.backends.torch.packing import Packable, Packed, micro_batches, pack
from engine.backends.torch.updates import (
    Accumulated,
    Totals,
    check_gives,
    check_loss_fits_head,
    check_policy_not_nan,
    check_sequences,
    count_totals,
    has_gradient,
    is_out_of_memory,
    make_forward,
    micro_batch_loss,
    retry_on_out_of_memory,
    split_by_sequence,
    update_metrics,
    validate_batch,
)
from engine.backends.weight_files.digests import digest_tensors
from engine.backends.weight_files.pieces import open_checkpoint
from engine.backends.weight_files.sketches import Sketch, multiply_by_noise, sketch_of_tensors
from engine.backends.weight_files.tensor_files import check_shapes, shapes_of_tensors, write_tensors
from engine.errors import NonFiniteGradient, OutOfMemory
from engine.models.samples import FloatArray, Sample
from engine.protocol import TokenSequence
from engine.specs.adapters import LoraSpec
from storage.chain.records import OptimizerSpec

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STAGED_FILE = "model.safetensors"

T = TypeVar("T")


class TorchTrainer:
    """Implements engine.backends.protocol.Trainer for one `CausalLM`. It trains the weights that require a gradient."""

    base: FrozenBase | None = None
    adapter: LoraSpec | None = None

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self._optimizer: TrainerOptimizer | None = None

    # -- what is trained --------------------------------------------------------------------------------------

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters with their names, in a fixed order."""
        return [(name, p) for name, p in self.model.module.named_parameters() if p.requires_grad]

    def _trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.trained_parameters()]

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights that only this trainer owns, sorted by name. A checkpoint stores these."""
        return self.model.named_weights()

    def with_own_weights(self) -> AbstractContextManager[object]:
        """A context within which the model computes with this trainer's weights."""
        return nullcontext()

    def nbytes(self, *, training: bool = True) -> int:
        """Bytes of the weights that only this trainer owns, plus gradients and moments if training.

        With `training`, this is the peak of an update: one gradient and two moments per trained weight, whether they
        are allocated now or not. Without it, only the moments that are allocated now are added. Activations, buffers
        that are in no file, and a sampler's copy are not included."""
        weights = sum(tensor.nbytes for _, tensor in self.weights())
        if training:
            return weights + 3 * sum(parameter.nbytes for parameter in self._trained_parameters())
        return weights + sum(tensor.nbytes for tensor in self._optimizer_tensors().values())

    @property
    def weights_nbytes(self) -> int:
        return self.model.weights_nbytes()

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
        """Makes one optimizer update over `samples`: sums the gradients of the micro-batches and takes one step."""
        # Check everything before anything changes.
        loss = objective.loss
        check_loss_fits_head(loss, scalar=self.model.scalar, name=type(self.model.module).__name__)
        self._check(samples)
        totals = count_totals(samples)
        torch_optimizer = self._optimizer_for(optimizer)
        torch_optimizer.zero_grad()
        with_gradient = [sample for sample in samples if has_gradient(sample, objective)]
        validate_batch(with_gradient, objective)

        def accumulate(max_tokens: int) -> Accumulated:
            accumulated = Accumulated(max_tokens)
            for indices in micro_batches(with_gradient, max_tokens=max_tokens, whole_groups=loss.pairwise):
                micro_batch = [with_gradient[index] for index in indices]
                self._accumulate_micro_batch(micro_batch, objective, totals, accumulated)
                accumulated.micro_batches += 1
                on_micro_batch()
            return accumulated

        with self.with_own_weights(), self.model.cached_casts():
            accumulated = self._retry_on_out_of_memory(
                accumulate, with_gradient, max_tokens, whole_groups=loss.pairwise
            )
        check_policy_not_nan(accumulated.sums)

        # A parameter without a gradient gets zeros, because its moments still change it.
        parameters = self._trained_parameters()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

        norm = float(nn.utils.clip_grad_norm_(parameters, optimizer.max_grad_norm))
        if isfinite(norm):
            self._step(torch_optimizer)
        elif not objective.skip_nan_gradients:
            raise NonFiniteGradient(f"the gradient norm of {len(samples)} samples is {norm}")
        torch_optimizer.zero_grad()
        return UpdateReport(
            metrics=update_metrics(accumulated.sums, forward_samples=with_gradient, totals=totals)
            | {"grad_norm": norm},
            skipped=not isfinite(norm),
            micro_batches=accumulated.micro_batches,
            max_tokens=accumulated.max_tokens,
        )

    def _step(self, optimizer: TrainerOptimizer) -> None:
        """Takes one optimizer step. The first step allocates the moments.

        If memory runs out, it raises OutOfMemory: smaller micro-batches do not help."""
        try:
            optimizer.step()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            moments = 2 * sum(parameter.nbytes for parameter in self._trained_parameters())
            raise OutOfMemory(
                f"the moments of {optimizer.kind}, up to {moments / 2**30:.2f} GiB, do not fit {self.model.device} "
                f"memory: "
                f"{str(error).splitlines()[0]}. Train a smaller model or a LoRA adapter, or use a larger device"
            ) from None

    def _retry_on_out_of_memory(
        self, run: Callable[[int], T], sequences: Sequence[Packable], max_tokens: int, *, whole_groups: bool = False
    ) -> T:
        def drop_gradients() -> None:
            for parameter in self._trained_parameters():
                parameter.grad = None

        return retry_on_out_of_memory(
            run,
            sequences,
            max_tokens,
            device=self.model.device,
            drop_gradients=drop_gradients,
            whole_groups=whole_groups,
        )

    def _accumulate_micro_batch(
        self, samples: Sequence[Sample], objective: Objective, totals: Totals, accumulated: Accumulated
    ) -> None:
        forward = make_forward(self.model, objective)
        loss, sums = micro_batch_loss(forward, samples, objective, totals, device=self.model.device)
        with warn_only_restored():
            loss.backward()
        accumulated.add(loss, sums)

    def _optimizer_for(self, spec: OptimizerSpec) -> TrainerOptimizer:
        """Returns the optimizer. Creates it if there is none, and always applies `spec`."""
        if self._optimizer is None:
            self._optimizer = TrainerOptimizer(spec.kind, self.trained_parameters(), self.model.module)
        self._optimizer.apply(spec)
        return self._optimizer

    # -- forward passes ---------------------------------------------------------------------------------------

    def logprobs(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[FloatArray]:
        """Logprobs of every trained token in nats, per sequence, in the order of the sequences."""
        check_gives("logprobs", scalar=self.scalar, name=type(self.model.module).__name__)
        return self._forward_per_sequence(
            sequences, lambda packed: self.model.logprobs(packed, temperature=temperature), max_tokens
        )

    def entropies(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[FloatArray]:
        """Entropies in nats before every trained token, per sequence, in the order of the sequences."""
        check_gives("logprobs", scalar=self.scalar, name=type(self.model.module).__name__)
        return self._forward_per_sequence(
            sequences, lambda packed: self.model.logprobs_and_entropy(packed, temperature=temperature)[1], max_tokens
        )

    def top_logprobs(self, sequences: Sequence[TokenSequence], *, count: int, max_tokens: int) -> list[FloatArray]:
        """As CausalLM.top_logprobs, per sequence, in the order of the sequences."""
        check_gives("logprobs", scalar=self.scalar, name=type(self.model.module).__name__)
        return self._forward_per_sequence(
            sequences, lambda packed: self.model.top_logprobs(packed, count), max_tokens
        )

    def values(self, sequences: Sequence[TokenSequence], *, max_tokens: int) -> list[FloatArray]:
        """The scalar head's number before every trained token, per sequence, in the order of the sequences."""
        check_gives("values", scalar=self.scalar, name=type(self.model.module).__name__)
        return self._forward_per_sequence(sequences, self.model.values, max_tokens)

    @torch.no_grad()
    def _forward_per_sequence(
        self, sequences: Sequence[TokenSequence], forward: Callable[[Packed], Tensor], max_tokens: int
    ) -> list[FloatArray]:
        self._check(sequences)

        def run(max_tokens: int) -> list[FloatArray]:
            values: list[FloatArray] = [np.zeros(0) for _ in sequences]
            for indices in micro_batches(sequences, max_tokens=max_tokens):
                packed = pack([sequences[index] for index in indices], device=self.model.device)
                for index, sequence_values in zip(indices, split_by_sequence(forward(packed), packed), strict=True):
                    values[index] = sequence_values
            return values

        with self.with_own_weights(), self.model.cached_casts():
            return self._retry_on_out_of_memory(run, sequences, max_tokens)

    def _check(self, sequences: Sequence[Packable]) -> None:
        check_sequences(sequences, vocab_size=self.model.vocab_size, context_length=self.model.context_length)

    # -- state ------------------------------------------------------------------------------------------------

    def reset_optimizer(self) -> None:
        self._optimizer = None

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return digest_tensors(self.model.named_weights())

    def weights_sketch(self) -> Sketch:
        return sketch_of_tensors(self.weights())

    @torch.no_grad()
    def add_rounding_noise(self, relative: float, *, seed: int) -> None:
        generator = torch.Generator(self.model.device).manual_seed(seed)
        for _, tensor in self.weights():
            multiply_by_noise(tensor, relative, generator)

    def write_checkpoint(self, folder: Path) -> dict[str, Path]:
        """Writes the weights, and the moments if there are any. It takes no more memory than one tensor."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {WEIGHTS_FILE: folder / WEIGHTS_FILE}
        write_tensors(files[WEIGHTS_FILE], self.weights())
        moments = self._optimizer_tensors()
        if moments:
            files[OPTIMIZER_FILE] = folder / OPTIMIZER_FILE
            write_tensors(files[OPTIMIZER_FILE], moments.items())
        return files

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's own tensors: `step.NAME`, `exp_avg.NAME` and `exp_avg_sq.NAME` of AdamW,
        `momentum_buffer.NAME` of Muon, `state1.NAME`, `state2.NAME` and their scales of AdamW in 8 bits. Empty before
        the first update."""
        if self._optimizer is None:
            return {}
        moments: dict[str, Tensor] = {}
        for name, parameter in self.trained_parameters():
            for moment, value in self._optimizer.tensors(parameter).items():
                moments[f"{moment}.{name}"] = value
        return moments

    def read_checkpoint(self, files: dict[str, Path], *, optimizer: bool) -> None:
        """Loads the weights in place, and with `optimizer` the moments. Without it, the old moments are discarded.

        If it raises BadSpec, nothing has changed."""
        # Check everything before anything changes.
        weights = dict(self.weights())
        checkpoint = open_checkpoint(files)
        check_shapes(checkpoint.weights.shapes(), shapes_of_tensors(weights.items()), "checkpoint")
        moments = checkpoint.moments if optimizer else None
        if moments is not None:
            kind = kind_of_moments(moments.shapes())
            expected = expected_moments(kind, self.trained_parameters(), self.model.module)
            check_shapes(moments.shapes(), expected, "optimizer's checkpoint")

        # Copy the weights in place, then create the moments that the checkpoint has.
        for name, tensor in weights.items():
            checkpoint.weights.read_into(name, tensor)
        self.reset_optimizer()
        if moments is not None:
            # The learning rate has no effect: every update sets its own.
            optimizer_of_moments = self._optimizer_for(OptimizerSpec(lr=0.0, kind=kind))
            parameters = dict(self.trained_parameters())
            for key in moments.shapes():
                moment, name = key.split(".", 1)
                optimizer_of_moments.read_tensor(parameters[name], moment, partial(moments.read_into, key))

    def write_config(self, folder: Path) -> None:
        module: Any = self.model.module
        module.config.save_pretrained(folder)
        if getattr(module, "generation_config", None) is not None:
            module.generation_config.save_pretrained(folder)

    def stage_weights(self, folder: Path, *, dtype: torch.dtype) -> list[Path]:
        """Writes the model's own weights for a sampler. An adapter in use is not merged into them."""
        path = folder / STAGED_FILE
        write_tensors(path, self.model.exported_weights(), floating=dtype)
        return [path]

    def export(self, folder: Path) -> dict[str, Path]:
        """Writes a Hugging Face model folder without a tokenizer. Returns the files by name."""
        return self.export_merged(folder)

    def export_merged(self, folder: Path) -> dict[str, Path]:
        """Does the same as `export`, since there is no adapter to merge."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.module.save_pretrained(folder, safe_serialization=True)  # type: ignore[operator]
        return files_in(folder)


def files_in(folder: Path) -> dict[str, Path]:
    """The files of a folder by name, sorted."""
    return {path.name: path for path in sorted(folder.iterdir())}
