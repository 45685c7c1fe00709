"""The rank side of LoRA adapters on a frozen base that they share.

An adapter is small, so every rank has all of its weights, in master precision. Stages 1 to 3 split its master copy and
its moments over the ranks, and sum its gradients, as ZeRO does below stage 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from engine.backends.deepspeed import files
from engine.backends.deepspeed.frozen_base import FrozenBaseModel, RankBase, check_head
from engine.backends.deepspeed.memory import adapter_spec
from engine.backends.deepspeed.meta_model import TensorsInMemory
from engine.backends.deepspeed.options import RankOptions, deepspeed_config
from engine.backends.deepspeed.rank_model import RankModel
from engine.backends.deepspeed.rank_optimizer import RankOptimizer
from engine.backends.deepspeed.sharded_model import ReplicatedModel, ShardedModel, ZeroModel, parameter_groups
from engine.backends.deepspeed.trainer import ZeroTrainer
from engine.backends.torch.lora import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    PEFT_PREFIX,
    LoraPairs,
    new_pairs,
    pair_tensors,
    peft_config,
    target_layers,
    use_pairs,
)
from engine.backends.torch.optimizers import hidden_matrices
from engine.backends.torch.scalar_lm import HEAD_NAME
from engine.backends.weight_files.tensor_files import shapes_of_tensors, write_tensors
from engine.specs.adapters import LoraSpec
from storage.chain.records import OptimizerSpec


class AdaptedModel(FrozenBaseModel):
    """The base with an adapter. Forward passes go through the base, gradients and steps through the adapter's own
    sharded model."""

    def __init__(self, base: RankBase, adapter: ShardedModel) -> None:
        super().__init__(base, adapter.model)
        self._adapter, self.shards = adapter, adapter.shards
        self.exchanges_nothing = self.exchanges_nothing and adapter.exchanges_nothing

    def evaluate(self, function: Callable[[RankModel], Tensor]) -> Tensor:
        return self._adapter.evaluate(lambda model: self.base.run(lambda: function(model)))

    def backward(self, loss: Tensor) -> None:
        self._adapter.backward(loss)
        self.base.after_backward()

    def step(self, optimizer: OptimizerSpec) -> tuple[float, bool]:
        return self._adapter.step(optimizer)

    def drop_gradients(self) -> None:
        self._adapter.drop_gradients()

    def close(self) -> None:
        self._adapter.close()


class ZeroAdapter(ZeroTrainer):
    """Trains one LoRA adapter, and a scalar head if the spec has one, as engine.backends.torch.shared_base does."""

    def __init__(self, base: RankBase, spec: LoraSpec, *, init_seed: int) -> None:
        check_head(base, spec)
        self.base, self.spec = base, spec
        options, device = base.options, base.model.device
        # The weights of the adapter, equal on all ranks.
        targets = target_layers(base.model, base.layers, spec)
        self.pairs = new_pairs(
            targets,
            spec,
            init_seed=init_seed,
            dtype=options.master_dtype,
            device=device,
            gathered_weight=base.gathered_weight,
        )
        model = base.scalar_model(init_seed=init_seed) if spec.head == "scalar" else base.model
        named: dict[str, nn.Parameter] = dict(pair_tensors(self.pairs))
        if spec.head == "scalar":
            named |= {f"{HEAD_NAME}.{name}": parameter for name, parameter in model.head.named_parameters()}
        self._named = named = dict(sorted(named.items()))

        # Hand them over. DeepSpeed may change them meanwhile, so they are filled again afterwards.
        initial = {name: parameter.detach().clone() for name, parameter in named.items()}
        sharded = AdaptedModel(base, _shard(model, named, options))
        state = files.ShardedState(
            shards=sharded.shards,
            buffers={},
            exported={},
            trained={name: name for name in named},
            device=device,
            master_dtype=options.master_dtype,
        )
        files.fill(state, TensorsInMemory(initial))
        super().__init__(sharded, state, options)

    def own_weights(self) -> AbstractContextManager[object]:
        return use_pairs(self.base.layers, self.pairs)

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return files.weights_digest(self.state, base=self.base.digest)

    def sampled_state(self) -> files.ShardedState:
        """The weights of the base without the adapter, or the merged weights with DoRA
        (engine.backends.protocol.is_sampled_on_base)."""
        return self.whole_state() if self.spec.use_dora else self.base.state

    def whole_state(self) -> files.ShardedState:
        """The merged weights."""
        base, exported = self.base.state, self.base.state.exported
        if self.spec.head == "scalar":
            exported = self._scalar_names(exported)
        return MergedState(
            shards=base.shards,
            buffers=base.buffers,
            exported=exported,
            trained={},
            device=base.device,
            master_dtype=base.master_dtype,
            pairs=self.pairs,
            head={name: weight.detach() for name, weight in self._named.items() if name.startswith(HEAD_NAME)},
        )

    def _scalar_names(self, exported: Mapping[str, str]) -> dict[str, str]:
        """The base's `exported` names of the decoder under the names of the scalar model, and the adapter's own head.
        """
        before, after = (f"{model.module.base_model_prefix}." for model in (self.base.model, self.model))
        names: dict[str, str] = {}
        for name, source in exported.items():
            if name.startswith(before):
                names[after + name.removeprefix(before)] = source
        return names | {name: name for name in self._named if name.startswith(HEAD_NAME)}

    def export_adapter(self, folder: Path) -> list[str]:
        """Writes a peft adapter folder on rank 0, which names the base by its registry key. Returns the names of the
        files."""
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            write_tensors(folder / ADAPTER_FILE, ((PEFT_PREFIX + name, weight) for name, weight in self._named.items()))
            (folder / ADAPTER_CONFIG_FILE).write_text(peft_config(self.spec, self.pairs, self.base.key))
        dist.barrier()
        return [ADAPTER_CONFIG_FILE, ADAPTER_FILE]


def _shard(model: RankModel, named: Mapping[str, nn.Parameter], options: RankOptions) -> ShardedModel:
    """The trained weights of an adapter over the ranks."""
    hidden = hidden_matrices(named.items(), model.module)
    optimizer = RankOptimizer(parameter_groups(named.values()), hidden, model.device)
    if options.trainer.zero_stage == 0:
        return ReplicatedModel(model, named, optimizer, bucket_mib=options.trainer.bucket_mib)
    in_float32 = options.model_copy(update={"trainer": adapter_spec(options.trainer), "compute_dtype": "float32"})
    config = deepspeed_config(in_float32, parameters=sum(parameter.numel() for parameter in named.values()))
    module = nn.ParameterList(named.values())
    return ZeroModel(model, module, named, shapes_of_tensors(named.items()), optimizer, config)


@dataclass(frozen=True, slots=True)
class MergedState(files.ShardedState):
    """The weights of a base with an adapter merged into them. Every rank has the whole adapter."""

    pairs: LoraPairs
    head: Mapping[str, Tensor]
    """The scalar head of the adapter, by name. Empty if it has none."""

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.head:
            return tuple(self.head[name].shape)
        return files.ShardedState.shape(self, name)

    def own_parts(self) -> Iterator[tuple[str, int, Tensor]]:
        # A merged weight needs the whole weight of the base, so each rank has every n-th tensor as a whole.
        for index, name in enumerate(sorted(self.exported.values())):
            tensor = self.assemble(name, on=index % dist.get_world_size())
            if tensor is not None:
                yield name, 0, tensor.reshape(-1)

    def assemble(self, name: str, *, on: int) -> Tensor | None:
        if name in self.head:
            return self.head[name] if dist.get_rank() == on else None
        weight = files.ShardedState.assemble(self, name, on=on)
        pair = self.pairs.get(name.removesuffix(".weight"))
        if weight is None or pair is None or not name.endswith(".weight"):
            return weight
        return pair.merged(weight)
