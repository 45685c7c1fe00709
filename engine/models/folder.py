"""Checks Hugging Face model folders, reads their configs, counts their parameters from the headers of the files, and
resolves registry keys. Does not import torch.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

from engine.errors import BadModelFolder
from engine.specs.adapters import Head
from storage.errors import CorruptArtifact
from storage.registry.hub import find_imported, parse_hub_repo
from storage.registry.models import find_model
from storage.store.artifacts import MANIFEST_NAME, ArtifactRef, digest_of, file_entries, read_manifest
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of pickled weights, which can run code when they are read. They are neither read nor published."""

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 8 * 2**20
"""Largest config.json that is read. Those of models have some kilobytes, or a megabyte with the names of classes."""
LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""The keys that config.json files use for the number of layers."""
EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The keys that config.json files use for the number of experts."""
ORIGINAL_LENGTH = "original_max_position_embeddings"
CONTEXT_KEYS = ("max_position_embeddings", ORIGINAL_LENGTH, "rope_parameters", "rope_scaling")
"""The keys that `context_length_in` reads."""
CONTEXT_SOURCE = " (max_position_embeddings of its config.json, or original_max_position_embeddings with longrope)"
"""What messages say of where a context length comes from."""
UNKNOWN_CONTEXT = 1 << 30
"""The context length of a model whose config.json gives none."""
LONGROPE = ("longrope", "su")
"""The names of longrope in configs."""
SCALAR_ARCHITECTURE = "ForSequenceClassification"
"""Ending of the class names of transformers' models with a scalar head."""

SUFFIX = ".safetensors"
METADATA = "__metadata__"
"""The only key of a header that does not name a tensor."""
MAX_HEADER_BYTES = 100 << 20
"""The limit of the safetensors library."""
BYTES_IN_4BIT = 4.5 / 8
"""Bytes of a weight in NF4: 4 bits, and a float32 number for each block of 64 weights."""


@dataclass(frozen=True)
class ModelFolder:
    """A checked model folder: its path, its name in the registry, and the files that are published."""

    path: Path
    name: str
    files: dict[str, Path]

    def digest(self) -> str:
        """sha256 of the published files. Its first 12 digits are the version."""
        return digest_of(file_entries(self.files, lambda file: file))

    @classmethod
    def of(cls, path: Path, *, name: str | None = None) -> ModelFolder:
        """Checks the folder at `path`. Its name is `name`, or by default the folder's name. Raises BadModelFolder."""
        check_model_folder(path)
        files: dict[str, Path] = {}
        for file in sorted(path.iterdir()):
            if file.is_file() and file.suffix not in PICKLE_SUFFIXES:
                files[file.name] = file
        # The folder may be one of a local store. The registry writes a manifest of its own.
        files.pop(MANIFEST_NAME, None)
        return cls(path, name or _name_of(path), files)


def registry_version(digest: str) -> str:
    """The version under which an imported folder with this digest is registered."""
    return digest[:12]


def local_folder(source: str) -> Path | None:
    """The folder that `source` names on this machine. None if there is none: `source` is then a registry key."""
    folder = Path(os.path.expanduser(source))
    return folder if source and folder.is_dir() else None


def split_key(source: str) -> tuple[str, str | None]:
    """Splits a registry key into (name, version or None). Raises BadModelFolder for a key that looks like a path."""
    # A path that does not exist would otherwise be looked up as a name, with a confusing error.
    name, _, version = source.partition("@")
    if Path(source).exists() or "/" in source or source.startswith(".") or source.endswith("@"):
        raise BadModelFolder(
            f"{source!r} is not a model folder; give a folder, the key of a registered model, or owner/name of the hub"
        )
    return name, version or None


def registered_model(store: ObjectStore, source: str) -> ArtifactRef:
    """Finds a registered model by its key: `name`, `name@version`, or the commit of the hub that it was made of.

    Raises BadModelFolder when there is none."""
    repo = parse_hub_repo(source, "model")
    if repo is not None:
        model = find_imported(store, repo)
        if model is None:
            raise BadModelFolder(
                f"given {source!r}, which {store.url} does not have; give a folder, a registered model, or the commit "
                "of a hub's model that a run has imported"
            )
        return model
    name, version = split_key(source)
    model = find_model(store, name, version)
    if model is None:
        raise BadModelFolder(
            f"no model {source!r}: not a local folder, and not registered in {store.url}; give an existing "
            "Hugging Face folder, a key that 'save' returned, or a model of the hub as owner/name"
        )
    return model


def head_of(store: ObjectStore, model: ArtifactRef) -> Head:
    """The head of a registered model."""
    return _head_in(stored_config(store, model))


def stored_config(store: ObjectStore, model: ArtifactRef) -> dict[str, Any]:
    """The config.json of a registered model. Empty if the model has none."""
    with tempfile.TemporaryDirectory() as folder:
        files = materialise_files(store, model.key, Path(folder), names=(CONFIG_FILE,))
        return read_config(files.get(CONFIG_FILE, Path(folder, CONFIG_FILE)))


def read_head(path: Path) -> Head:
    """The head of the model that a config.json describes. "lm" if the file is missing or names no architecture."""
    return _head_in(read_config(path))


def _head_in(config: Mapping[str, Any]) -> Head:
    names = config.get("architectures")
    if not isinstance(names, list):
        return "lm"
    is_scalar = any(str(name).endswith(SCALAR_ARCHITECTURE) for name in names)
    return "scalar" if is_scalar else "lm"


def read_folder_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Empty if the file is missing or is not a JSON object."""
    return read_config(folder / CONFIG_FILE)


def dtype_of_config(config: Mapping[str, Any]) -> Literal["float32", "bfloat16", "float16"]:
    """The type of the weights that a parsed config.json names; float32 if it names none, or another one."""
    text_config = config.get("text_config")
    inner = text_config if isinstance(text_config, dict) else {}
    for name in (config.get("dtype"), config.get("torch_dtype"), inner.get("dtype"), inner.get("torch_dtype")):
        if name in ("float32", "bfloat16", "float16"):
            return name  # type: ignore[no-any-return]
    return "float32"


def read_config(path: Path) -> dict[str, Any]:
    """A parsed config.json. Empty if the file is missing or is not a JSON object.

    Raises BadModelFolder for a file of more than MAX_CONFIG_BYTES."""
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise BadModelFolder(
                f"{path} has {size:,} bytes; expected at most {MAX_CONFIG_BYTES:,}: give the {CONFIG_FILE} of the model"
            )
        config = json.loads(path.read_text(encoding="utf-8"))
    except BadModelFolder:
        raise
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def context_length_in(config: Mapping[str, Any]) -> int | None:
    """The longest sequence of a model in tokens, by its config.json. None if the config does not give it.

    With longrope (Phi-3.5, Phi-4-mini), a token past `original_max_position_embeddings` changes the rotary factors of
    all tokens of its forward pass: of other sequences, and of its own sequence's earlier tokens. So the context ends
    there. Dynamic NTK changes the factors past `max_position_embeddings`, where the context ends anyway."""
    # The config of a vision-language model has the config of its language model inside.
    text_config = config.get("text_config")
    if config.get("max_position_embeddings") is None and isinstance(text_config, dict):
        config = text_config
    lengths = [config.get("max_position_embeddings")]
    # The parameters of rotary embeddings may be given per type of layer.
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    for parameters in (rope, *(rope.values() if isinstance(rope, dict) else ())):
        if isinstance(parameters, dict) and parameters.get("rope_type", parameters.get("type")) in LONGROPE:
            lengths += [config.get(ORIGINAL_LENGTH), parameters.get(ORIGINAL_LENGTH)]
    return min((length for length in lengths if isinstance(length, int)), default=None)


def experts_in(config: Mapping[str, Any]) -> str:
    """Whether a config.json describes a mixture of experts: "num_experts=128", for messages. Empty if not."""
    for part in (config, config.get("text_config"), config.get("ffn_config")):  # DBRX has the last
        for key in EXPERTS_KEYS:
            if isinstance(part, Mapping) and isinstance(part.get(key), int) and part[key] > 1:
                return f"{key}={part[key]}"
    return ""


def router_loss_warning(store: ObjectStore, model: ArtifactRef) -> str | None:
    """The warning to give before a registered model is trained, if it is a mixture of experts."""
    experts = experts_in(stored_config(store, model))
    if not experts:
        return None
    return (
        f"{model.key} is a mixture of experts ({experts}), and is trained without its router loss: no term keeps the "
        "load of the experts even, and a token may go to other experts in training than when it was sampled. Watch "
        "logprob_gap, keep the run short or its learning rate low, or use a dense model"
    )


def scalar_head_message(name: str) -> str:
    """The message for a model with a scalar head that is used as a language model."""
    return (
        f"{name} has a scalar head, which gives values and no logprobs; spawn it with builder.into_scoring_model(), or "
        "give a causal language model"
    )


def check_model_folder(folder: Path) -> None:
    """Raises BadModelFolder unless the folder is a Hugging Face folder with safetensors weights. Loads nothing."""
    if not (folder / "config.json").is_file():
        raise BadModelFolder(
            f"{folder} has no config.json; give a Hugging Face model folder (config, tokenizer, *.safetensors)"
        )
    if any(folder.glob("*.safetensors")):
        _check_layers(folder)
        return

    # There are no weights that may be read. Say why, if there are others.
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickled:
        raise BadModelFolder(
            f"{folder} holds pickled weights ({', '.join(pickled[:3])}), which can run code when read; convert them "
            "with save_pretrained(..., safe_serialization=True)"
        )
    raise BadModelFolder(f"{folder} has a config.json but no *.safetensors weights")


def _check_layers(folder: Path) -> None:
    """Raises BadModelFolder for a config.json with more layers than the files have tensors.

    Building such a model would take minutes before it fails."""
    # The largest number of layers that the config names, at the top or in a part such as text_config.
    config = read_folder_config(folder)
    groups = [config, *(value for value in config.values() if isinstance(value, dict))]
    layers: dict[str, int] = {}
    for group in groups:
        for key in LAYER_KEYS:
            if isinstance(group.get(key), int):
                layers[key] = group[key]
    largest = max(layers, key=layers.__getitem__, default="")

    # Each layer has at least one tensor.
    try:
        names = tensor_names(folder)
    except CorruptArtifact:
        return  # loading the file reports what is wrong with it
    if not largest or layers[largest] <= len(names):
        return
    raise BadModelFolder(
        f"{folder}: its config.json says {largest}={layers[largest]}, and its safetensors files hold {len(names)} "
        f"tensors of {_layer_count(names)} layers; give the config.json that the weights were saved with"
    )


def _layer_count(tensor_names: list[str]) -> int:
    """The number of layers by the numbers in the tensors' names, such as model.layers.7.mlp.weight."""
    last_layer = -1
    for name in tensor_names:
        for part in name.split("."):
            if part.isdecimal():
                last_layer = max(last_layer, int(part))
    return last_layer + 1


def _name_of(folder: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.") or "model"


def parameter_count(store: ObjectStore, model: ArtifactRef) -> int:
    """Number of elements of all tensors of a registered model. Raises CorruptArtifact."""
    return sum(prod(shape) for _, shape in _stored_shapes(store, model))


def base_nbytes(
    store: ObjectStore, model: ArtifactRef, *, compute_bytes: int, master_bytes: int, load_in_4bit: bool
) -> int:
    """Estimated bytes of a registered model as the frozen base of adapters: `compute_bytes` per weight. With
    `load_in_4bit` its linear layers take `BYTES_IN_4BIT` per weight, the others `master_bytes`. Raises CorruptArtifact.
    """
    if not load_in_4bit:
        return parameter_count(store, model) * compute_bytes
    linear, others = 0, 0
    for name, shape in _stored_shapes(store, model):
        if len(shape) == 2 and "embed" not in name and "head" not in name:
            linear += prod(shape)
        else:
            others += prod(shape)
    return int(linear * BYTES_IN_4BIT + others * master_bytes)


def folder_parameter_count(files: Mapping[str, Path]) -> int:
    """Number of elements of all tensors in the files of a local folder. Raises CorruptArtifact."""
    count = 0
    for name, path in files.items():
        if name.endswith(SUFFIX):
            with path.open("rb") as file:
                count += _elements(file, name)
    return count


def tensor_names(folder: Path) -> list[str]:
    """Names of all tensors in the folder's safetensors files. Raises CorruptArtifact."""
    names: list[str] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with path.open("rb") as file:
            names += _shapes(file, path.name)
    return names


def _stored_shapes(store: ObjectStore, model: ArtifactRef) -> Iterator[tuple[str, list[int]]]:
    """(name, shape) of every tensor of a registered model."""
    for entry in read_manifest(store, model.key).files:
        if entry.name.endswith(SUFFIX) and "/" not in entry.name:
            with store.open(entry.key) as file:
                yield from _shapes(file, entry.key).items()


def _elements(file: BinaryIO, name: str) -> int:
    return sum(prod(shape) for shape in _shapes(file, name).values())


def _shapes(file: BinaryIO, name: str) -> dict[str, list[int]]:
    """The shape of each tensor of an open safetensors file. Raises CorruptArtifact."""
    # A safetensors file begins with the size of its JSON header, in 8 bytes.
    size = int.from_bytes(file.read(8), "little")
    if not 0 < size <= MAX_HEADER_BYTES:
        raise CorruptArtifact(f"{name} does not begin like a safetensors file; export the model again")
    try:
        header = json.loads(file.read(size))
        shapes = {}
        for tensor, entry in header.items():
            if tensor != METADATA:
                shapes[tensor] = [int(dimension) for dimension in entry["shape"]]
        return shapes
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CorruptArtifact(f"{name} has no readable safetensors header: {error}") from error
