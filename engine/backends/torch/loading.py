"""Reading a plain Hugging Face folder into the model class that its config asks for: `CausalLM`, `ScalarLM` or
`VisionLM`."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from engine.backends.torch.attention import register_attention
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.probes import probe_model
from engine.backends.torch.scalar_lm import ScalarLM, check_scalar_head, is_scalar, new_head, with_scalar_head
from engine.backends.torch.vision_lm import VisionLM, load_image_processor
from engine.backends.weight_files.tensor_files import shapes_of, shapes_of_tensors
from engine.errors import BadModelFolder, BadSpec
from engine.models.folder import check_model_folder, read_folder_config, scalar_head_message
from engine.specs.adapters import Head
from engine.text.images import VISION_MODEL_TYPES

LOADING = threading.Lock()
"""transformers patches itself and torch while it loads a model; two loads at the same time would leave the patches in
place."""


def load_model(folder: Path, *, dtype: torch.dtype, compute_dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Reads the folder's model, and checks that packed forward passes and decoding compute what the model's own forward
    pass computes.

    `dtype` is that of the weights. Only safetensors files are read, and no code of the folder runs.

    Raises:
        BadModelFolder: no config, pickled weights, missing, unexpected or mis-shaped tensors, or a model with a layer
            that cannot be packed.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    # Each branch loads the module and wraps it.
    model: CausalLM
    if is_scalar(folder):
        module = _load_module(AutoModelForSequenceClassification, folder, dtype=dtype, device=device)
        check_scalar_head(module, folder)
        model = ScalarLM(module, compute_dtype=compute_dtype)
    elif read_folder_config(folder).get("model_type") in VISION_MODEL_TYPES:
        processor = load_image_processor(folder)
        module = _load_module(AutoModelForImageTextToText, folder, dtype=dtype, device=device)
        model = VisionLM(module, processor=processor, compute_dtype=compute_dtype)
    else:
        module = _load_module(AutoModelForCausalLM, folder, dtype=dtype, device=device)
        model = CausalLM(module, compute_dtype=compute_dtype)
    probe_model(model, folder)
    return model


def load_with_head(
    folder: Path, *, head: Head, init_seed: int, dtype: torch.dtype, compute_dtype: torch.dtype, device: torch.device
) -> CausalLM:
    """The folder's model with the given head; see `TrainerBackend.load`. Raises BadModelFolder, BadSpec."""
    if head == "lm":
        check_has_language_head(folder)
    model = load_model(folder, dtype=dtype, compute_dtype=compute_dtype, device=device)
    if head == "lm" or model.scalar:
        return model
    return with_scalar_head(model, new_head(model, init_seed), folder.name)


def check_has_language_head(folder: Path) -> None:
    """Raises BadSpec for a folder whose model has a scalar head."""
    if is_scalar(folder):
        raise BadSpec(scalar_head_message(folder.name))


def _load_module(auto: Any, folder: Path, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The module that `auto` (a transformers AutoModelFor… class) reads from the folder, on `device`.

    Raises BadModelFolder for tensors that are missing, unexpected or broken."""
    # Check config and shapes before memory for the weights is allocated.
    check_model_folder(folder)
    register_attention()
    try:
        with LOADING:
            _check_shapes(auto, folder)
            loaded: tuple[Any, dict[str, Any]] = auto.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except BadModelFolder:
        raise
    except Exception as error:  # the boundary to transformers: a broken file may raise any type of exception
        raise BadModelFolder(f"{folder} does not load as a causal language model: {error}") from error
    # transformers only warns of weights that are missing or left over. Here they are errors.
    module, report = loaded
    _check_loading_report(report, folder)
    module.to(device)
    if dtype == torch.float64:
        _keep_norms_in_float64(module)
    return module


def _check_loading_report(report: dict[str, Any], folder: Path) -> None:
    """Raises BadModelFolder if transformers reports missing, unexpected or mismatched weights."""
    problems: list[str] = []
    for kind, names in report.items():
        if names and kind != "error_msgs":
            first_names = sorted(map(str, names))[:5]
            problems.append(f"{kind.replace('_', ' ')}: {', '.join(first_names)}")
    if problems:
        raise BadModelFolder(
            f"the weights in {folder} do not fit its config.json: {'; '.join(problems)}. Export the model again with "
            "save_pretrained"
        )


def _check_shapes(auto: Any, folder: Path) -> None:
    """Raises BadModelFolder where config.json and the files give a tensor different shapes, before memory is allocated
    for either. Quantized files hold packed shapes, so they are skipped. Tensors that transformers renames are compared
    after loading."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        return
    # The shapes that config.json gives, without memory for weights.
    with torch.device("meta"):
        module = auto.from_config(config, attn_implementation="eager", trust_remote_code=False)
    expected = shapes_of_tensors(module.state_dict().items())
    # The shapes in the files, from their headers.
    stored: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= shapes_of(path)
    # Compare the tensors that both have. Missing ones are reported after loading, when renamed ones are known.
    differences: list[str] = []
    for name in sorted(expected.keys() & stored.keys()):
        if expected[name] != stored[name]:
            differences.append(f"{name} is {expected[name]} by it and {stored[name]} in the files")
    if differences:
        raise BadModelFolder(
            f"the weights in {folder} do not fit its config.json in {len(differences)} tensors: "
            f"{'; '.join(differences[:5])}; give the config.json that they were saved with"
        )


def _keep_norms_in_float64(module: nn.Module) -> None:
    """Makes RMSNorm compute in float64. transformers computes it in float32 for any weights, which limits a float64
    check to 1e-8."""
    for norm in module.modules():
        if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon"):
            scale: Any = norm.weight
            shape, eps = (scale.shape[0],), float(norm.variance_epsilon)  # type: ignore[arg-type]
            norm.forward = partial(rms_norm, normalized_shape=shape, weight=scale, eps=eps)  # type: ignore[method-assign]
