"""A meta model: a model without its weights, and the source that its weights are read from.

A rank keeps a part of the model, and never holds the whole of it. A parameter of a meta model has its shape, but its
storage is one number. The code that takes the model over gives each parameter its storage, and fills it from
`MetaModel.weights` by name and range.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.backends.torch.attention import register_attention
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.loading import load_model
from engine.backends.torch.scalar_lm import (
    HEAD_NAME,
    ScalarLM,
    check_scalar_head,
    initial_head_weight,
    is_scalar,
    new_head,
    with_scalar_head,
)
from engine.backends.weight_files.pieces import StoredTensors
from engine.errors import BadModelFolder, BadSpec
from engine.models.folder import check_model_folder, read_folder_config
from engine.text.images import VISION_MODEL_TYPES

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


class WeightSource(Protocol):
    """Weights that are read by name and range."""

    def read_into(self, name: str, out: Tensor, *, start: int = 0) -> None:
        """Fills `out` with the elements of the flattened weight from `start` on, cast to the dtype of `out`."""
        ...


@dataclass(frozen=True, slots=True)
class MetaModel:
    """A model whose parameters have no storage yet. Persistent buffers may have none either, and are among `weights`;
    the other buffers are as the model computes them."""

    model: CausalLM
    weights: WeightSource
    """The weights, by the names of `model.named_weights()`."""
    probed: bool
    """Whether the model's packed forward pass was compared with its own forward pass."""


def open_meta_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    parameter_dtype: torch.dtype,
    device: torch.device,
    head_seed: int | None = None,
) -> MetaModel:
    """The meta model of a plain Hugging Face folder, built for `dtype`, with parameters in `parameter_dtype` on
    `device`. With `head_seed`, a causal model's language head is replaced by a new scalar head from that seed.

    A folder whose tensors have other names than the model's (transformers renames them as it loads), and any folder in
    float64, is first read whole into the machine's memory.

    Raises:
        BadModelFolder: as `load_model`, and for a vision-language model.
    """
    check_model_folder(folder)
    if read_folder_config(folder).get("model_type") in VISION_MODEL_TYPES:
        raise BadModelFolder(
            f"{folder.name} is a vision-language model, and DeepSpeed trains models of text here; set "
            "engine.trainer.kind='torch'"
        )
    register_attention()
    # Open the files without reading weights if possible, otherwise let transformers load the folder.
    meta_model: MetaModel | None = None
    if dtype != torch.float64:
        meta_model = _open_files(folder, dtype, head_seed)
    if meta_model is None:
        meta_model = _load_whole(folder, dtype, head_seed)
    _drop_storage(meta_model.model.module, parameter_dtype, device)
    return meta_model


@contextmanager
def streamed_weights(meta_model: MetaModel) -> Iterator[None]:
    """Within this context the model computes: the weights of each layer, and of each module outside of the layers, are
    read when it is called, and dropped afterwards."""
    # Look parameters up by identity, because hooks get modules, not names.
    names = {id(tensor): name for name, tensor in meta_model.model.named_weights()}
    empty = {id(parameter): parameter.data for parameter in meta_model.model.module.parameters()}

    def fill(parameters: Sequence[nn.Parameter], *_: Any) -> None:
        for parameter in parameters:
            weight = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            meta_model.weights.read_into(names[id(parameter)], weight)
            parameter.data = weight

    def drop(parameters: Sequence[nn.Parameter], *_: Any) -> None:
        for parameter in parameters:
            parameter.data = empty[id(parameter)]

    handles = []
    for module, parameters in _called_with(meta_model.model.module):
        handles.append(module.register_forward_pre_hook(partial(fill, parameters)))
        handles.append(module.register_forward_hook(partial(drop, parameters), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _called_with(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """The modules whose weights are read when they are called, with these weights. A layer is one of them as a whole,
    because it may use the weights of a part without calling the part, as layers with convolutions do."""
    parameters = list(module.parameters(recurse=False))
    if parameters:
        yield module, parameters
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList):
            yield child, list(child.parameters())
        else:
            yield from _called_with(child)


def _load_whole(folder: Path, dtype: torch.dtype, head_seed: int | None) -> MetaModel:
    """The model as transformers loads it, with its weights in the machine's memory."""
    model = load_model(folder, dtype=dtype, compute_dtype=dtype, device=torch.device("cpu"))
    if head_seed is not None:
        model = with_scalar_head(model, new_head(model, head_seed), folder.name)
    weights = TensorsInMemory({name: tensor.detach() for name, tensor in model.named_weights()})
    return MetaModel(model, weights, probed=True)


# -- without reading weights ----------------------------------------------------------------------------------------


def _open_files(folder: Path, dtype: torch.dtype, head_seed: int | None) -> MetaModel | None:
    """The meta model whose weights are read from the folder's files. None if only transformers' own loading can read
    the folder, or say what is wrong with it."""
    try:
        tensors = StoredTensors(_weight_files(folder))
        model = _build(folder, dtype, scalar=head_seed is not None or is_scalar(folder))
    except Exception:  # noqa: BLE001 - the boundary to transformers: `load_model` says what is wrong with the folder
        return None
    # A buffer that the model makes with torch.empty has no values without a file.
    if any(buffer.is_meta for buffer in model.module.buffers()):
        return None
    # A new scalar head is in no file.
    new_weights: dict[str, Tensor] = {}
    if head_seed is not None:
        new_weights[f"{HEAD_NAME}.weight"] = initial_head_weight(model.head.in_features, head_seed)
    names = _names_in_files(model, tensors.shapes(), new_weights)
    if names is None:
        return None
    return MetaModel(model, _RenamedTensors(tensors, names, TensorsInMemory(new_weights)), probed=False)


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads. The folder may contain other safetensors files."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return [folder / name for name in sorted(set(weight_map.values()))]


class _EmptyIsMeta(TorchFunctionMode):
    """Puts the tensors of torch.empty on the meta device. transformers makes weights with torch.empty and fills them
    later, so they need no memory; buffers are computed as usual."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = dict(kwargs or {})
        if func is torch.empty and arguments.get("device") is None:
            arguments["device"] = "meta"
        return func(*args, **arguments)


def _build(folder: Path, dtype: torch.dtype, *, scalar: bool) -> CausalLM:
    """The model of the folder's config, without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # A causal model gets a scalar head.
    if scalar and not is_scalar(folder):
        config.num_labels = 1
    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    # Build the module without memory for its weights.
    with _EmptyIsMeta():
        module: Any = auto.from_config(config, dtype=dtype, attn_implementation="eager", trust_remote_code=False)
    if (folder / "generation_config.json").is_file() and module.can_generate():
        module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    _drop_storage(module, dtype, torch.device("cpu"))
    if not scalar:
        return CausalLM(module, compute_dtype=dtype)
    check_scalar_head(module, folder)
    module.config.architectures = [type(module).__name__]
    return ScalarLM(module, compute_dtype=dtype)


def _drop_storage(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Gives every parameter a storage of one number. Tied parameters stay tied."""
    # The key is the id of the old parameter or of its replacement. The value keeps both alive, so that no id is used
    # twice.
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                empty = torch.zeros((), dtype=dtype, device=device).expand(parameter.shape)
                replacement = parameter
                # The data of a parameter on the meta device cannot be set, so it needs a new parameter.
                if parameter.is_meta:
                    replacement = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                else:
                    parameter.data = empty
                replaced[id(parameter)] = replaced[id(replacement)] = (parameter, replacement)
            child._parameters[name] = replaced[id(parameter)][1]


def _names_in_files(
    model: CausalLM, stored: Mapping[str, tuple[int, ...]], new_weights: Mapping[str, Tensor]
) -> dict[str, str] | None:
    """Names in the model -> names in the files, whose tensors have the shapes `stored`. None unless the files have each
    weight once, and no others.

    `new_weights` are those of a new head. The files may then have the weights of the old head besides the decoder's.
    """
    weights = {tensor.data_ptr(): (name, tuple(tensor.shape)) for name, tensor in model.named_weights()}
    # A tied weight has several names in the model. The files may have any of them, but only one.
    aliases: dict[str, list[str]] = defaultdict(list)
    for name, tensor in model.module.state_dict(keep_vars=True).items():
        aliases[weights[tensor.data_ptr()][0]].append(name)
    names: dict[str, str] = {}
    for name, shape in weights.values():
        if name in new_weights:
            continue
        stored_names = [alias for alias in aliases[name] if alias in stored]
        if len(stored_names) != 1 or stored[stored_names[0]] != shape:
            return None
        names[name] = stored_names[0]
    # No tensor of the files may be left over, except the old head's.
    unused = set(stored) - set(names.values())
    if new_weights:
        unused = {name for name in unused if name.startswith(f"{model.module.base_model_prefix}.")}
    return None if unused else names


@dataclass(frozen=True, slots=True)
class _RenamedTensors:
    """Weights in files under other names, and weights that are in no file."""

    tensors: StoredTensors
    names: Mapping[str, str]
    """Names in the model -> names in the files."""
    new_weights: TensorsInMemory

    def read_into(self, name: str, out: Tensor, *, start: int = 0) -> None:
        if name in self.names:
            self.tensors.read_into(self.names[name], out, start=start)
        else:
            self.new_weights.read_into(name, out, start=start)


@dataclass(frozen=True, slots=True)
class TensorsInMemory:
    """Weights in the machine's memory."""

    tensors: Mapping[str, Tensor]

    @torch.no_grad()
    def read_into(self, name: str, out: Tensor, *, start: int = 0) -> None:
        if name not in self.tensors:
            raise BadSpec(f"{name} is no weight of the model; its weights are {sorted(self.tensors)[:5]} and others")
        flat = self.tensors[name].reshape(-1)
        out.detach().view(-1).copy_(flat[start : start + out.numel()])
