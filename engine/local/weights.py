"""What is checked in a folder's weights before a model is built of them."""

from __future__ import annotations

import torch

from engine.backends.weight_files.tensor_files import read_tensors
from engine.errors import BadModelFolder, BadSpec
from engine.models.folder import ModelFolder
from engine.models.size import SUFFIX, folder_parameter_count
from storage.errors import CorruptArtifact

NARROWEST_CHECKED = 2
"""Bytes of an element. torch cannot tell which elements of narrower floating types, of quantized weights, are NaN."""


def checked_parameter_count(folder: ModelFolder) -> int:
    """The number of elements in the folder's weights. Raises BadModelFolder for a file that is torn, and for a tensor
    that holds NaN or infinity."""
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
        if not tensor.is_floating_point() or tensor.element_size() < NARROWEST_CHECKED:
            continue
        finite = torch.isfinite(tensor)
        if not finite.all():
            what = "NaN" if tensor.isnan().any() else "infinity"
            raise BadModelFolder(
                f"{folder.path / name}: the tensor {tensor_name} holds {what} in {int((~finite).sum())} of its "
                f"{tensor.numel()} elements; export the model again from a checkpoint whose weights are finite"
            )
