"""The torch trainer: packed forwards, AdamW on master weights, one process, CPU or one GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine.backends.causal_lm import CausalLM, digest_weights
from engine.backends.packing import Packable, micro_batches, pack
from engine.backends.protocol import Objective, UpdateReport
from engine.backends.tensor_files import check_shapes, read_into, shapes_of, write_tensors
from engine.errors import BadSpec, NonFiniteGradient, OutOfMemory, SampleTooLong
from engine.losses.normalisation import token_weights
from engine.losses.registry import LOSSES, LossInputs
from engine.protocol import TokenSequence
from engine.samples import Sample
from storage.chain import OptimizerSpec

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STAGED_FILE = "model.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")

T = TypeVar("T")


@dataclass(slots=True)
class _Accumulated:
    """What the micro-batches of one update added up to, besides the gradient."""

    max_tokens: int
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    micro_batches: int = 0


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
        self._check(samples)
        total_tokens = sum(sample.trained for sample in samples)
        if total_tokens == 0:
            raise BadSpec("no token of the minibatch is trained (every weight is 0); leave such samples out")
        adamw = self._adamw(optimizer)
        adamw.zero_grad(set_to_none=True)
        taught = [sample for sample in samples if not _without_gradient(sample, objective)]

        def accumulate(max_tokens: int) -> _Accumulated:
            found = _Accumulated(max_tokens)
            for indices in micro_batches(taught, max_tokens=max_tokens):
                self._backward([taught[i] for i in indices], objective, total_tokens, len(samples), found.sums)
                found.micro_batches += 1
                on_micro_batch()
            return found

        with self.in_use():
            found = self._split_once(accumulate, taught, max_tokens)
        report = UpdateReport(micro_batches=found.micro_batches, max_tokens=found.max_tokens)
        parameters = [parameter for _, parameter in self.trained()]
        for parameter in parameters:
            if parameter.grad is None:  # no sample had a gradient: it is zero, and the moments still act
                parameter.grad = torch.zeros_like(parameter)
        norm = float(nn.utils.clip_grad_norm_(parameters, optimizer.max_grad_norm))
        passed_tokens = sum(sample.trained for sample in taught)
        report.metrics = {
            **{
                name.removesuffix("_sum") + "_mean": value / passed_tokens
                for name, value in found.sums.items()
                if name != "loss"
            },
            "loss": found.sums["loss"],
            "grad_norm": norm,
            "tokens": float(total_tokens),
        }
        if norm != norm or norm in (float("inf"), float("-inf")):
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

    def _split_once(self, run: Callable[[int], T], sequences: Sequence[Packable], max_tokens: int) -> T:
        """`run(max_tokens)`; where memory does not do, once more from the start, without gradients, with half of it."""
        tried = max_tokens
        for _ in range(2):
            try:
                return run(tried)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0]
            # here, not above: the error's traceback holds the tensors of the forward that failed
            for _, parameter in self.trained():
                parameter.grad = None
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
            failed, longest = tried, max((len(sequence.token_ids) for sequence in sequences), default=0)
            tried = max(max_tokens // 2, longest)
            if tried >= failed:
                break
        raise OutOfMemory(
            f"a pass of at most {failed} packed tokens (longest sequence {longest}) does not fit "
            f"{self.model.device} memory: {reason}. Lower max_tokens_per_forward (max_batch_size, now "
            f"{max_tokens}) or the longest sequence, or free memory held by other processes"
        )

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
            trained = [parameter for _, parameter in self.trained()]
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
        self._check(sequences)

        def run(max_tokens: int) -> list[list[float]]:
            found: list[list[float]] = [[] for _ in sequences]
            for indices in micro_batches(sequences, max_tokens=max_tokens):
                packed = pack([sequences[i] for i in indices], device=self.model.device)
                values_N = self.model.logprobs(packed, temperature=temperature)
                for index, part in zip(indices, values_N.split(list(packed.trained_S)), strict=True):
                    found[index] = part.tolist()
            return found

        with self.in_use():
            return self._split_once(run, sequences, max_tokens)

    def _check(self, sequences: Sequence[Packable]) -> None:
        """Positions beyond the context were never trained: rotary ones extrapolate without a word. Ids beyond the
        vocabulary have no row in the embedding."""
        last = self.model.vocab_size - 1
        for index, sequence in enumerate(sequences):
            ids = sequence.token_ids
            if len(ids) > self.model.context_length:
                raise SampleTooLong(
                    f"a sequence of {len(ids)} tokens (group {sequence.group!r}) passes the model's context "
                    f"of {self.model.context_length}; shorten it or leave it out"
                )
            if ids and (min(ids) < 0 or max(ids) > last):
                wrong = next(token for token in ids if not 0 <= token <= last)
                raise BadSpec(
                    f"sample {index} (group {sequence.group!r}) has the token id {wrong} at position "
                    f"{ids.index(wrong)}; the model's are 0..{last}. Was it rendered with another model's tokenizer?"
                )

    # -- state ------------------------------------------------------------------------------------------------

    def reset_optimizer(self) -> None:
        self._optimizer = None

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return digest_weights(self.model)

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
        check_shapes(shapes_of(files[WEIGHTS_FILE]), _shapes(mine), "checkpoint")
        moments_file = files.get(OPTIMIZER_FILE) if optimizer else None
        if moments_file is not None:
            trained = _shapes(self.trained())
            shapes = {f"{moment}.{name}": shape for moment in MOMENTS for name, shape in trained.items()}
            shapes |= {f"step.{name}": () for name in trained}
            check_shapes(shapes_of(moments_file), shapes, "optimizer's checkpoint")
        read_into(files[WEIGHTS_FILE], mine.__getitem__)
        self.reset_optimizer()
        if moments_file is not None:
            read_into(moments_file, self._new_moment)

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


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of the device, or of the CPU, whose allocator raises a plain RuntimeError."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in said or "not enough memory" in said


_OLD = {"trainer": "old_logprobs", "sampler": "sampler_logprobs"}


def _shapes(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in dict(tensors).items()}


def _without_gradient(sample: Sample, objective: Objective) -> bool:
    """True for a policy-gradient sample whose loss is exactly 0 whatever the weights: no pass is spent on it."""
    if sample.trained == 0:
        return True
    kl_beta = getattr(objective.loss, "kl_beta", None)
    return kl_beta == 0 and sample.advantages is not None and not any(sample.advantages)
