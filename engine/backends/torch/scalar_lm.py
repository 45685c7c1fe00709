"""A decoder whose head gives one number per position: reward and value models, as
`AutoModelForSequenceClassification` with `num_labels = 1` reads and writes them.

A causal model becomes one by a new head in the place of its language head. The new head is not zero: every value would
start at 0, and the first step would leave the decoder without a gradient.

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

from engine.backends.torch.attention import IMPLEMENTATION, PackedLayout
from engine.backends.torch.causal_lm import (
    PROBE_TOLERANCE,
    CausalLM,
    at_least_float32,
    check_own_forward,
    keep_norms_in_float64,
    load_causal_lm,
    load_module,
)
from engine.backends.torch.packing import Fan, Packed
from engine.errors import BadModelFolder, BadSpec
from engine.models.folder import read_head, scalar_head_message
from engine.specs.adapters import Head

HEAD_NAME = "score"
HEAD_STD = 0.02
"""Of a new head's weights: transformers' initializer_range, and about the 1/sqrt(H + 1) of arXiv:2009.01325 for H of
2048: values start around 0, within about one."""


class ScalarLM(CausalLM):
    """Packs as a `CausalLM` does; its numbers are not logprobs."""

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
        raise BadSpec(
            f"{type(self.module).__name__} gives one number per token, not logprobs; train it with a loss on values, "
            "or use a causal language model"
        )

    def values(self, packed: Packed) -> Tensor:
        """The head's number (N,) at the position before each trained token. With gradient when gradients are on."""
        with self.autocast():
            hidden_TH = self.packed_hidden(packed)
        return values_of(self.head, hidden_TH.index_select(0, packed.source_N))


def values_of(head: nn.Linear, hidden_NH: Tensor) -> Tensor:
    """(N,) in float32 at least. In the precision of the head's weights, whatever the decoder computed in: bfloat16
    would leave a value two or three digits."""
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return at_least_float32(head(hidden_NH.to(head.weight.dtype)).squeeze(1))


def is_scalar(folder: Path) -> bool:
    """Whether the folder's config names a model with such a head. False where there is no config to read."""
    return read_head(folder / "config.json") == "scalar"


def load_model(folder: Path, *, dtype: torch.dtype, compute_dtype: torch.dtype, device: torch.device) -> CausalLM:
    """A `ScalarLM` where the folder says so, else a `CausalLM`. Raises BadModelFolder."""
    if not is_scalar(folder):
        return load_causal_lm(folder, dtype=dtype, compute_dtype=compute_dtype, device=device)
    from transformers import AutoModelForSequenceClassification

    module: Any = load_module(AutoModelForSequenceClassification, folder, dtype=dtype)
    scalar_head(module, folder)
    if dtype == torch.float64:
        keep_norms_in_float64(module)
    model = ScalarLM(module.to(device), compute_dtype=compute_dtype)
    probe_scalar_forward(model, folder)
    return model


def load_with_head(
    folder: Path,
    *,
    head: Head,
    init_seed: int,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """The folder's model with the head that is asked for: see TrainerBackend.load. Raises BadModelFolder, BadSpec."""
    if head == "lm":
        check_has_language_head(folder)
    model = load_model(folder, dtype=dtype, compute_dtype=compute_dtype, device=device)
    return model if head == "lm" or model.scalar else with_scalar_head(model, new_head(model, init_seed), folder.name)


def check_has_language_head(folder: Path) -> None:
    """Raises BadSpec for a folder whose model has a scalar one."""
    if is_scalar(folder):
        raise BadSpec(scalar_head_message(folder.name))


def new_head(model: CausalLM, init_seed: int) -> nn.Linear:
    """A head for the decoder of `model`, without bias, on its device and in its master precision."""
    size = int(model.module.config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]
    head = nn.Linear(size, 1, bias=False, device=model.device, dtype=model.dtype)
    with torch.no_grad():
        head.weight.copy_(drawn_head(size, init_seed))
    return head


def drawn_head(size: int, init_seed: int) -> Tensor:
    """(1, H) in float32: uniform with a standard deviation of HEAD_STD, drawn on the CPU by a generator of its own. The
    same bits on every machine, which a normal distribution's are not."""
    seed = hashlib.sha256(f"{init_seed} {HEAD_NAME}.weight".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
    bound = sqrt(3) * HEAD_STD
    return torch.empty(1, size).uniform_(-bound, bound, generator=generator)


def with_scalar_head(model: CausalLM, head: nn.Linear, name: str) -> ScalarLM:
    """A scalar model of `head` on the decoder of `model`, which both hold from then on.

    Raises BadModelFolder where transformers has no such model of the architecture of `name`."""
    from transformers import AutoModelForSequenceClassification

    causal: Any = model.module
    config = copy.deepcopy(causal.config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            module: Any = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    except ValueError as error:
        raise BadModelFolder(f"{name}: {type(causal).__name__} cannot have a scalar head: {error}") from error
    scalar_head(module, Path(name))
    if type(module.base_model) is not type(model.decoder):
        raise BadModelFolder(
            f"{name}: {type(module).__name__} stands on {type(module.base_model).__name__}, and the language model on "
            f"{type(model.decoder).__name__}; a scalar head needs one decoder for both"
        )
    setattr(module, module.base_model_prefix, model.decoder)
    setattr(module, HEAD_NAME, head)
    module.config.architectures = [type(module).__name__]  # which a config that is saved by itself would not say
    return ScalarLM(module, compute_dtype=model.compute_dtype, master_dtype=model.dtype)


def scalar_head(module: Any, folder: Path) -> nn.Linear:
    """The head. Raises BadModelFolder where there is none that gives one number."""
    head = getattr(module, HEAD_NAME, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise BadModelFolder(
            f"{folder}: {type(module).__name__} has no head `score` of one number; give num_labels=1, or another model"
        )
    return head


@torch.no_grad()
def probe_scalar_forward(model: CausalLM, folder: Path) -> None:
    """As for a causal model: one short packed forward against the model's own, whose number is the last token's."""
    length = min(8, model.context_length)
    ids_T = torch.arange(length, device=model.device) * 7 % model.vocab_size
    module: Any = model.module
    pad, module.config.pad_token_id = module.config.pad_token_id, None
    module.set_attn_implementation("eager")
    own = module(input_ids=ids_T.unsqueeze(0), use_cache=False).logits[0].float()
    module.config.pad_token_id = pad
    check_own_forward(own, model, folder)
    module.set_attn_implementation(IMPLEMENTATION)
    layout = PackedLayout([Fan(0, length)], device=model.device)
    hidden = model.hidden(ids_T.unsqueeze(0), torch.arange(length, device=model.device).unsqueeze(0), layout)
    gap = (model.head(hidden[0, -1:]).float() - own).abs().max().item()
    tolerance = PROBE_TOLERANCE if model.dtype in (torch.float32, torch.float64) else 100 * PROBE_TOLERANCE
    if not gap <= tolerance * max(1.0, own.abs().max().item()):
        raise BadModelFolder(
            f"{folder}: packed attention changes this architecture's score by {gap:.2g}; it uses an attention that is "
            "not supported yet"
        )
