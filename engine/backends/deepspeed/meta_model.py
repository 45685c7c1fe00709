"""A model without its weights, and where they are read from: a rank never holds a model whole that it keeps a part of.

A *hollow* parameter has its shape, and one number as its storage. Whoever takes the model over gives each parameter
its place, and fills it from `Hollow.weights` by name and range.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.backends.torch.attention import register_attention
from engine.backends.torch.causal_lm import CausalLM, probe_packed_forward
from engine.backends.torch.scalar_lm import (
    HEAD_NAME,
    ScalarLM,
    drawn_head,
    is_scalar,
    load_model,
    new_head,
    probe_scalar_forward,
    scalar_head,
    with_scalar_head,
)
from engine.backends.weight_files.pieces import Tensors
from engine.errors import BadModelFolder, BadSpec
from engine.models.folder import check_model_folder, read_folder_config
from engine.text.images import VISION_MODEL_TYPES

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


class Readable(Protocol):
    """Weights by name and range."""

    def read_into(self, name: str, out: Tensor, *, start: int = 0) -> None:
        """Fills `out` with the elements of the flattened weight from `start` on, cast to its dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Hollow:
    """Persistent buffers are hollow or not; `weights` has them too. Others are as the model computes them."""

    model: CausalLM
    weights: Readable
    """By the names of `model.named_weights()`."""
    probed: bool
    """Whether its packed forward was compared with the model's own."""


def open_hollow(
    folder: Path, *, dtype: torch.dtype, held: torch.dtype, device: torch.device, head_seed: int | None = None
) -> Hollow:
    """The model of a plain Hugging Face folder, built as for `dtype`, with hollow parameters in `held` on `device`.
    `head_seed`: a causal model's, with a new scalar head that it draws in the place of the language head.

    A folder whose tensors have other names than the model (transformers renames them as it loads), and float64, are
    read whole into the machine's memory first.

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
    found = None if dtype == torch.float64 else _from_files(folder, dtype, head_seed)
    if found is None:
        model = load_model(folder, dtype=dtype, compute_dtype=dtype, device=torch.device("cpu"))
        if head_seed is not None:
            model = with_scalar_head(model, new_head(model, head_seed), folder.name)
        loaded = _Loaded({name: tensor.detach() for name, tensor in model.named_weights()})
        found = Hollow(model, loaded, probed=True)
    _hollow_out(found.model.module, held, device)
    return found


def probe(model: CausalLM, folder: Path) -> None:
    """Raises BadModelFolder for an architecture that packs wrongly."""
    (probe_scalar_forward if model.scalar else probe_packed_forward)(model, folder)


@contextmanager
def streamed(hollow: Hollow) -> Iterator[None]:
    """Within it the model computes: each module's own weights are read when it is called, and dropped after it."""
    own = {id(tensor): name for name, tensor in hollow.model.named_weights()}
    empty = {id(p): p.data for p in hollow.model.module.parameters()}

    def fill(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            read = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            hollow.weights.read_into(own[id(parameter)], read)
            parameter.data = read

    def drop(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = empty[id(parameter)]

    handles = []
    for module in hollow.model.module.modules():
        if any(True for _ in module.parameters(recurse=False)):
            handles.append(module.register_forward_pre_hook(fill))
            handles.append(module.register_forward_hook(drop, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# -- without reading weights ----------------------------------------------------------------------------------------


def _from_files(folder: Path, dtype: torch.dtype, head_seed: int | None) -> Hollow | None:
    """None for what only transformers' own loading can read, or refuse by name."""
    try:
        tensors = Tensors(_weight_files(folder))
        model = _build(folder, dtype, scalar=head_seed is not None or is_scalar(folder))
    except Exception:  # noqa: BLE001 - the boundary to transformers: `load_model` says what is wrong with the folder
        return None
    if any(buffer.is_meta for buffer in model.module.buffers()):
        return None
    drawn: dict[str, Tensor] = {}
    if head_seed is not None:
        drawn = {f"{HEAD_NAME}.weight": drawn_head(model.head.in_features, head_seed)}
    names = _names_in_files(model, tensors.shapes(), drawn)
    return None if names is None else Hollow(model, _Renamed(tensors, names, _Loaded(drawn)), probed=False)


def _weight_files(folder: Path) -> list[Path]:
    """Those that transformers reads: others may lie beside them."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return [folder / name for name in sorted(set(weight_map.values()))]


class _EmptyIsMeta(TorchFunctionMode):
    """Weights are made by torch.empty and filled later, so they need no memory; buffers are computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)


def _build(folder: Path, dtype: torch.dtype, *, scalar: bool) -> CausalLM:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, **local)
    if scalar and not is_scalar(folder):
        config.num_labels = 1
    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    with _EmptyIsMeta():
        module: Any = auto.from_config(config, dtype=dtype, attn_implementation="eager", trust_remote_code=False)
    if (folder / "generation_config.json").is_file() and module.can_generate():
        module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    _hollow_out(module, dtype, torch.device("cpu"))
    if scalar:
        scalar_head(module, folder)
        module.config.architectures = [type(module).__name__]
        return ScalarLM(module, compute_dtype=dtype)
    return CausalLM(module, compute_dtype=dtype)


def _hollow_out(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Takes the parameters' storage away. Tied ones stay tied."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                empty = torch.zeros((), dtype=dtype, device=device).expand(parameter.shape)
                hollow = parameter
                if parameter.is_meta:  # cannot be given storage
                    hollow = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                else:
                    parameter.data = empty
                made[id(parameter)] = made[id(hollow)] = (parameter, hollow)
            child._parameters[name] = made[id(parameter)][1]


def _names_in_files(
    model: CausalLM, found: Mapping[str, tuple[int, ...]], drawn: Mapping[str, Tensor]
) -> dict[str, str] | None:
    """Names in the model -> names in the files; None unless each weight is there once, and nothing else. Those that are
    `drawn` are of a new head, and the files have the weights of the old one, if any, beside the decoder's."""
    own = {tensor.data_ptr(): (name, tuple(tensor.shape)) for name, tensor in model.named_weights()}
    aliases: dict[str, list[str]] = defaultdict(list)
    for name, tensor in model.module.state_dict(keep_vars=True).items():
        aliases[own[tensor.data_ptr()][0]].append(name)
    names: dict[str, str] = {}
    for name, shape in own.values():
        if name in drawn:
            continue
        stored = [alias for alias in aliases[name] if alias in found]
        if len(stored) != 1 or found[stored[0]] != shape:
            return None
        names[name] = stored[0]
    left = set(found) - set(names.values())
    if drawn:
        left = {name for name in left if name.startswith(f"{model.module.base_model_prefix}.")}
    return None if left else names


@dataclass(frozen=True, slots=True)
class _Renamed:
    tensors: Tensors
    names: Mapping[str, str]
    drawn: _Loaded
    """Those in no file."""

    def read_into(self, name: str, out: Tensor, *, start: int = 0) -> None:
        if name in self.names:
            self.tensors.read_into(self.names[name], out, start=start)
        else:
            self.drawn.read_into(name, out, start=start)


@dataclass(frozen=True, slots=True)
class _Loaded:
    tensors: Mapping[str, Tensor]

    @torch.no_grad()
    def read_into(self, name: str, out: Tensor, *, start: int = 0) -> None:
        if name not in self.tensors:
            raise BadSpec(f"{name} is no weight of the model; its weights are {sorted(self.tensors)[:5]} and others")
        flat = self.tensors[name].reshape(-1)
        out.detach().view(-1).copy_(flat[start : start + out.numel()])
