"""The samplers in the engine's process. They differ in how they get the weights of their trainer:

- `WholeModelSampler` shares the weights of a trainer in this process, or copies them to the compute precision;
- `AdapterSampler` shares a base model, and applies the trainer's adapter to it;
- `StagedFilesSampler` reads weight files, because its trainer is in other processes. Of an adapter it reads the base
  once, and then only the adapter.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from engine.backends.protocol import BaseGone, Interrupted, Sampler, Trainer, is_sampled_on_base
from engine.backends.torch.attention import IMPLEMENTATION, register_attention
from engine.backends.torch.causal_lm import CausalLM, frozen_copy, master_dtype_of
from engine.backends.torch.decoding.lean_decoder import LeanModel, can_be_lean, packed_nbytes
from engine.backends.torch.loading import LOADING
from engine.backends.torch.lora import LoraPairs, lora_layers, read_pairs, replace_linears, sampling_pairs, use_pairs
from engine.backends.torch.sampler import TorchSampler
from engine.backends.torch.shared_base import SharedTrainer
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.weight_files.tensor_files import (
    check_shapes,
    read_into,
    shapes_of,
    shapes_of_tensors,
    staging_folder,
)
from engine.errors import BadSpec, SamplerOutOfSync
from engine.models.images import Images
from engine.protocol import ActorCount, Completion, OnToken, SamplerScale, SamplingParams, TokenIds
from engine.specs.engine import LocalEngineSpec, TorchSamplerSpec
from engine.text.tokenizers import Tokenizer
from storage.temporary import process_folder


class TorchSamplerBackend:
    """Makes a new sampler for each trainer. Implements engine.backends.protocol.SamplerBackend."""

    concurrent_calls = 1
    """The engine joins waiting calls for the same weights into one batch instead."""

    def __init__(self, spec: LocalEngineSpec, *, compute_dtype: torch.dtype, device: torch.device) -> None:
        self.compute_dtype, self.device = compute_dtype, device
        self._own_lane = isinstance(spec.sampler, TorchSamplerSpec) and spec.sampler.own_lane
        self._limits = {"max_rows": spec.max_rows, "max_prefill_tokens": spec.max_tokens_per_forward}

    @property
    def actors(self) -> ActorCount:
        return ActorCount()

    def scale(self, count: int) -> SamplerScale:
        raise BadSpec(
            "the torch sampler runs in the engine's own process, which has no replicas to add or to remove; start the "
            "engine with sampler.kind='vllm' and sampler.replicas=1 or more"
        )

    @property
    def devices(self) -> int:
        return 1

    @property
    def tensor_parallel_from_config(self) -> bool:
        """True: the calls of a run cannot change the number of devices of a sampler, which is always 1."""
        return True

    def added_bytes(self, trainer: Trainer) -> int:
        """Bytes of memory that a sampler of this trainer adds to the memory of the trainer."""
        if isinstance(trainer, SharedTrainer):
            return 0  # the copy that all samplers of a base share is counted with the base
        packed = 0
        if isinstance(trainer, TorchTrainer):
            master_dtype = trainer.model.dtype
            has_copy = self._own_lane or self.compute_dtype != master_dtype
            if can_be_lean(trainer.model, self.compute_dtype):
                packed = packed_nbytes(trainer.model, self.compute_dtype, copied=has_copy)
            if not has_copy:
                return packed  # the sampler shares the trainer's weights
        else:
            master_dtype = master_dtype_of(self.compute_dtype)
        # `weights_nbytes` counts the weights in master precision; the sampler's copy has the compute precision.
        copy_nbytes = trainer.weights_nbytes * self.compute_dtype.itemsize // master_dtype.itemsize
        return packed + copy_nbytes * (2 if self._own_lane else 1)  # two: the next weights are staged meanwhile

    def new_sampler(
        self, trainer: Trainer, *, tensor_parallel: int | None = None, tokenizer: Tokenizer | None = None
    ) -> Sampler:
        if tensor_parallel not in (None, 1):
            raise BadSpec(
                f"tp({tensor_parallel}) was given, but the torch sampler runs on one device; "
                "use engine.sampler.kind='vllm', or leave tp out"
            )
        options: dict[str, Any] = {**self._limits, "tokenizer": tokenizer}
        if isinstance(trainer, SharedTrainer):
            return AdapterSampler(trainer, **options)
        if isinstance(trainer, TorchTrainer):
            return WholeModelSampler(trainer, self.compute_dtype, own_lane=self._own_lane, **options)
        return StagedFilesSampler(trainer, self.compute_dtype, self.device, **options)

    def offload_for_training(self) -> None:
        """Does nothing. A sampler with its own copy of the weights keeps that copy in memory during a step."""

    def close(self) -> None:
        """Does nothing: samplers are freed with the policies that use them."""


@dataclass
class StagedModule:
    """A module with the weights of a policy: the trainer's own module, or a copy of it."""

    state: str
    module: nn.Module | None

    def close(self) -> None:
        self.module = None


class WholeModelSampler(TorchSampler):
    """Samples with the weights of a trainer that trains a whole model: with the trainer's own tensors, or with a copy
    of them in the compute precision. On a CPU, linear layers of known architectures are copied in packed form."""

    def __init__(
        self, trainer: TorchTrainer, compute_dtype: torch.dtype, *, own_lane: bool = False, **options: Any
    ) -> None:
        """`options` are those of TorchSampler. With `own_lane` it copies all weights in any precision."""
        model = trainer.model
        self.independent = own_lane
        self._shapes = shapes_of_tensors(model.named_weights())
        self._has_copy = own_lane or compute_dtype != model.dtype
        if self._has_copy:
            module = frozen_copy(model.module, compute_dtype, share=not own_lane)
            model = model.with_module(module, compute_dtype=compute_dtype)
        self._whole_nbytes = model.weights_nbytes()
        super().__init__(model, **options)
        self._lean: LeanModel | None = None
        if can_be_lean(model, compute_dtype):
            self._lean = LeanModel(model)
            self.forward_model = self._lean.model
            if self._has_copy:  # the packed weights take the place of the copy
                self._lean.free_layers()

    def stage(self, trainer: Trainer, state: str) -> StagedModule:
        if not isinstance(trainer, TorchTrainer) or isinstance(trainer, SharedTrainer):
            raise BadSpec("this sampler needs a trainer of a whole model; make a new sampler for this trainer")
        # Without a copy, this sampler has the tensors of its first trainer: a load must not overwrite them.
        if not self._has_copy and trainer.model is not self.model:
            raise BadSpec(
                "this sampler shares the weights of its trainer and cannot take another trainer's weights; make a new "
                "sampler for that trainer"
            )
        check_shapes(shapes_of_tensors(trainer.model.named_weights()), self._shapes, "trainer")
        module = trainer.model.module
        if self.independent:
            module = frozen_copy(module, self.model.compute_dtype, share=False)
        return StagedModule(state, module)

    def load(self, staged: StagedModule) -> None:
        self.loaded_state = None
        assert staged.module is not None  # it is not closed
        with torch.no_grad():
            if self._has_copy:
                source = staged.module.state_dict(keep_vars=True)
                for name, weight in self.model.named_weights():
                    if weight.numel():  # a packed layer's weight is empty
                        weight.copy_(source[name])
            if self._lean is not None:
                self._lean.pack(staged.module)
        self.loaded_state = staged.state

    def nbytes(self) -> int:
        """Bytes of the copies. A sampler with its own lane counts the next weights, too, which are staged meanwhile.
        """
        packed = 0 if self._lean is None else self._lean.nbytes
        staged = self._whole_nbytes if self.independent else 0
        return packed + staged + (self.model.weights_nbytes() if self._has_copy else 0)


class _LoraSampler(TorchSampler):
    """Samples with the pairs of an adapter in the LoraLinear layers of the model."""

    def __init__(self, model: CausalLM, **options: Any) -> None:
        super().__init__(model, **options)
        self._layers = lora_layers(model.module)
        self._pairs: LoraPairs = {}

    def sample(
        self,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        images: Sequence[Images] | None = None,
        *,
        sampled: Sequence[TokenIds] | None = None,
        interrupted: Interrupted | None = None,
    ) -> list[Completion]:
        with use_pairs(self._layers, self._pairs):
            return super().sample(
                prompts, seeds, params, on_token, images, sampled=sampled, interrupted=interrupted
            )


@dataclass
class StagedAdapter:
    """The pairs of matrices of an adapter: the trainer's own, or a copy in the precision of the sampler."""

    state: str
    pairs: LoraPairs

    def close(self) -> None:
        """Does nothing: the sampler goes on using the pairs."""


class AdapterSampler(_LoraSampler):
    """Samples with a shared base model and the adapter that it has loaded last. The trainer computes with the same base
    model, so neither may run while the other does."""

    independent = False

    def __init__(self, trainer: SharedTrainer, **options: Any) -> None:
        super().__init__(trainer.base.sampling_model(), **options)
        self.base = trainer.base

    def stage(self, trainer: Trainer, state: str) -> StagedAdapter:
        """Raises BadSpec unless the trainer is on this sampler's base."""
        if not isinstance(trainer, SharedTrainer) or trainer.base is not self.base:
            raise BadSpec("this sampler needs a trainer on its own base model; make a new sampler for this trainer")
        # In the master precision, the trainer's own matrices are used. DoRA's norms are computed once per load.
        pairs = trainer.pairs
        if self.model is not trainer.model or (trainer.adapter and trainer.adapter.use_dora):
            pairs = sampling_pairs(pairs, self._layers, self.model.dtype)
        return StagedAdapter(state, pairs)

    def load(self, staged: StagedAdapter) -> None:
        self._pairs, self.loaded_state = staged.pairs, staged.state

    def nbytes(self) -> int:
        return 0


@dataclass
class StagedFiles:
    """Weights and adapter of a policy as files."""

    state: str
    base: str | None
    """Digest of the base model of the adapter."""
    weights: list[Path] | None = None
    """None: the sampler has the base already."""
    adapter: Path | None = None
    """Folder of the adapter."""
    adapter_scale: float = 1.0
    folders: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self.folders.close()


class StagedFilesSampler(_LoraSampler):
    """Samples with a model of its own in the compute precision, whose weights come from the files that a trainer in
    other processes stages. If the trainer has an adapter, a load reads only the adapter, once the base is here."""

    independent = True

    def __init__(self, trainer: Trainer, compute_dtype: torch.dtype, device: torch.device, **options: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="config-", dir=process_folder()) as folder:
            trainer.write_config(Path(folder))
            model = _uninitialised_model(Path(folder), compute_dtype, device)
        if is_sampled_on_base(trainer):
            replace_linears(model)
        super().__init__(model, **options)
        self._base_digest: str | None = None
        """Digest of the base whose weights the model has."""

    def stage(self, trainer: Trainer, state: str) -> StagedFiles:
        """Raises BadSpec for a trainer with an adapter if this sampler was made for one without."""
        base = trainer.base if is_sampled_on_base(trainer) else None
        if base is not None and not self._layers:
            raise BadSpec("this sampler has no layers for an adapter; make a new sampler for this trainer")
        with ExitStack() as folders:
            staged = StagedFiles(state, base.digest if base else None)
            # The weights of a base never change, so they are read once.
            if base is None or base.digest != self._base_digest:
                folder = folders.enter_context(staging_folder(trainer.weights_nbytes))
                staged.weights = trainer.stage_weights(folder, dtype=self.model.dtype)
            if base is not None and trainer.adapter is not None:
                staged.adapter_scale = trainer.adapter.scale
                staged.adapter = folders.enter_context(staging_folder(trainer.nbytes(training=False)))
                trainer.export(staged.adapter)
            staged.folders = folders.pop_all()
        return staged

    def load(self, staged: StagedFiles) -> None:
        """Raises SamplerOutOfSync unless the staged tensors have exactly the names and shapes of the weights."""
        self.loaded_state = None
        if staged.weights is not None:
            self._base_digest = None
            self._read_weights(staged.weights, staged.state)
            self._base_digest = staged.base
        elif staged.base != self._base_digest:
            raise BaseGone("the sampler's base model has changed since the adapter was staged; call again")
        self._pairs = {}
        if staged.adapter is not None:
            pairs = read_pairs(staged.adapter, staged.adapter_scale, self.model.device)
            self._pairs = sampling_pairs(pairs, self._layers, self.model.dtype)
        self.loaded_state = staged.state

    def _read_weights(self, files: Sequence[Path], state: str) -> None:
        # The staged tensors have the names of `save_pretrained`.
        target = dict(self.model.exported_weights())
        # Compare all shapes before the first weight changes.
        shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            shapes |= shapes_of(path)
        try:
            check_shapes(shapes, shapes_of_tensors(target.items()), "staged folder")
        except BadSpec as error:
            raise SamplerOutOfSync(f"{error} (policy state {state[:12]})") from error
        for path in files:
            read_into(path, target.__getitem__)

    def nbytes(self) -> int:
        return self.model.weights_nbytes()


def _uninitialised_model(folder: Path, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """A model of the folder's config, whose weights have no defined values yet."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    register_attention()
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # In float32 for the buffers, which keep it. Random weights would take longer than the reading of the real ones.
    with LOADING, no_init_weights():
        module: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=IMPLEMENTATION)
    module.tie_weights()
    if (folder / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(folder)
    return CausalLM(frozen_copy(module, dtype).to(device), compute_dtype=dtype)
