"""Checks the weights of a model folder before a model is built from them."""

from __future__ import annotations

import torch

from engine.backends.weight_files.tensor_files import read_tensors
from engine.errors import BadModelFolder, BadSpec
from engine.models.folder import ModelFolder
from engine.models.size import SUFFIX, folder_parameter_count
from storage.errors import CorruptArtifact

MIN_CHECKED_BYTES = 2
"""Element size in bytes from which tensors are checked. torch cannot find NaN in narrower floating-point types, which
quantized weights use."""


def checked_parameter_count(folder: ModelFolder) -> int:
    """Counts the elements of the folder's weights and checks that all of them are finite.

    Raises BadModelFolder for an incomplete file, and for a tensor that holds NaN or infinity."""
    try:
        count = folder_parameter_count(folder.files)
        for name in sorted(folder.files):
            if name.endswith(SUFFIX):
                _check_finite(folder, name)
    except (BadSpec, CorruptArtifact) as error:
        raise BadModelFolder(f"{folder.path} does not load: {error}") from error
    return count


def _check_finite(folder: ModelFolder, name: str) -> None:
    for tensor_name, tensor in read_tensors(folder.files[name]):
        if not tensor.is_floating_point() or tensor.element_size() < MIN_CHECKED_BYTES:
            continue
        finite = torch.isfinite(tensor)
        if not finite.all():
            value = "NaN" if tensor.isnan().any() else "infinity"
            raise BadModelFolder(
                f"{folder.path / name}: the tensor {tensor_name} holds {value} in {int((~finite).sum())} of its "
                f"{tensor.numel()} elements; export the model again from a checkpoint whose weights are finite"
            )
