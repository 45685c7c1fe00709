"""A decoder whose head gives one number per position: reward models and value models, in the format of
`AutoModelForSequenceClassification` with `num_labels = 1`.

A causal model becomes a scalar one when a new head replaces its language head. The new head is not zero: with zeros,
every value would start at 0, and the first step would give the decoder no gradient.

Axes: T packed token · N trained token · H hidden
"""

from __future__ import annotations

import copy
import hashlib
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.backends.torch.causal_lm import CausalLM, at_least_float32
from engine.backends.torch.packing import Packed
from engine.errors import BadModelFolder, BadSpec
from engine.models.folder import read_head

HEAD_NAME = "score"
HEAD_STD = 0.02
"""Standard deviation of a new head's weights. It is transformers' initializer_range, and about the 1/sqrt(H + 1) of
arXiv:2009.01325 at H = 2048. Values then start around 0, within about 1."""


class ScalarLM(CausalLM):
    """A `CausalLM` with values in the place of logprobs."""

    scalar = True

    def __init__(
        self, module: nn.Module, *, compute_dtype: torch.dtype, master_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(module, compute_dtype=compute_dtype, master_dtype=master_dtype)
        self.head = module.score  # type: ignore[assignment]

    @property
    def vocab_size(self) -> int:
        return int(self.module.config.vocab_size)  # type: ignore[union-attr, arg-type]

    def logprobs(self, packed: Packed, *, temperature: float = 1.0) -> Tensor:
        """Raises BadSpec: a scalar head has no logprobs."""
        raise BadSpec(
            f"{type(self.module).__name__} gives one number per token, not logprobs; train it with a loss on values, "
            "or use a causal language model"
        )

    def values(self, packed: Packed) -> Tensor:
        """The head's number at the position before each trained token (N,). Differentiable when gradients are on."""
        with self.autocast():
            hidden_TH = self.packed_hidden(packed)
        return values_of(self.head, hidden_TH.index_select(0, packed.source_N))


def values_of(head: nn.Linear, hidden_NH: Tensor) -> Tensor:
    """Values (N,) in float32 at least. They are computed in the precision of the head's weights, whatever the decoder
    computed in: in bfloat16, a value would have two or three digits."""
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return at_least_float32(head(hidden_NH.to(head.weight.dtype)).squeeze(1))


def is_scalar(folder: Path) -> bool:
    """Whether the folder's config names a model with a scalar head. False if there is no readable config."""
    return read_head(folder / "config.json") == "scalar"


def new_head(model: CausalLM, init_seed: int) -> nn.Linear:
    """A new scalar head for the decoder of `model`, without bias, on its device and in its master precision."""
    hidden_size = int(model.module.config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]
    head = nn.Linear(hidden_size, 1, bias=False, device=model.device, dtype=model.dtype)
    with torch.no_grad():
        head.weight.copy_(initial_head_weight(hidden_size, init_seed))
    return head


def initial_head_weight(hidden_size: int, init_seed: int) -> Tensor:
    """(1, H) in float32, uniform with a standard deviation of HEAD_STD.

    It is drawn on the CPU from a generator of its own. A uniform distribution has the same bits on every machine; a
    normal distribution does not.
    """
    seed = hashlib.sha256(f"{init_seed} {HEAD_NAME}.weight".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
    bound = sqrt(3) * HEAD_STD
    return torch.empty(1, hidden_size).uniform_(-bound, bound, generator=generator)


def with_scalar_head(model: CausalLM, head: nn.Linear, name: str) -> ScalarLM:
    """A scalar model of `head` on the decoder of `model`; the two models share the decoder.

    Raises BadModelFolder if transformers has no scalar model for the architecture of the model `name`."""
    from transformers import AutoModelForSequenceClassification

    causal: Any = model.module
    # transformers' scalar model of the same config, without memory for weights.
    config = copy.deepcopy(causal.config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            module: Any = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    except ValueError as error:
        raise BadModelFolder(f"{name}: {type(causal).__name__} cannot have a scalar head: {error}") from error
    check_scalar_head(module, Path(name))
    if type(module.base_model) is not type(model.decoder):
        raise BadModelFolder(
            f"{name}: the decoder of {type(module).__name__} is a {type(module.base_model).__name__}, and that of the "
            f"language model a {type(model.decoder).__name__}; a scalar head needs one decoder for both"
        )
    # Its decoder and head are replaced by the real ones.
    setattr(module, module.base_model_prefix, model.decoder)
    setattr(module, HEAD_NAME, head)
    module.config.architectures = [type(module).__name__]  # saving a config alone does not set this
    return ScalarLM(module, compute_dtype=model.compute_dtype, master_dtype=model.dtype)


def check_scalar_head(module: Any, folder: Path) -> None:
    """Raises BadModelFolder unless the module has a head `score` that gives one number."""
    head = getattr(module, HEAD_NAME, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise BadModelFolder(
            f"{folder}: {type(module).__name__} has no head 'score' of one number; give num_labels=1, or another model"
        )
