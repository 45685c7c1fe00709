"""Probes of a loaded model: one short packed forward pass is compared with the model's own forward pass.

An architecture whose attention is not what packed attention computes is rejected before it trains.

Axes: T token · H hidden · V vocabulary
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from engine.backends.torch.attention import IMPLEMENTATION, PackedLayout
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.packing import PrefixGroup
from engine.backends.torch.vision_lm import VisionLM
from engine.errors import BadModelFolder
from engine.models.images import Images, PlacedImage

PROBE_TOKENS = 8
PROBE_TOLERANCE = 2e-3
"""Largest mean |difference| of logprobs, in nats, that rounding may cause in float32. A wrong mask or scale causes far
more."""


@torch.no_grad()
def probe_packed_forward(model: CausalLM, folder: Path) -> None:
    """Raises BadModelFolder unless a packed row of text has the logprobs of the model's own forward pass."""
    token_ids_T = _probe_tokens(model)
    model.use_attention("eager")
    expected_TV = model.module(input_ids=token_ids_T.unsqueeze(0), use_cache=False).logits[0].float()
    _check_finite(expected_TV, model, folder)
    hidden_1TH = _packed_hidden(model, token_ids_T)
    what = f"{folder}: packed attention changes this architecture's logprobs"
    _check_logprobs(model, hidden_1TH, expected_TV, what, "an attention")


@torch.no_grad()
def probe_scalar_forward(model: CausalLM, folder: Path) -> None:
    """Raises BadModelFolder unless a packed row has the score of the model's own forward pass, which is the number of
    the last token."""
    token_ids_T = _probe_tokens(model)
    module: Any = model.module
    # Without a padding token, the model's own forward scores the last position.
    pad, module.config.pad_token_id = module.config.pad_token_id, None
    module.set_attn_implementation("eager")
    expected_1 = module(input_ids=token_ids_T.unsqueeze(0), use_cache=False).logits[0].float()
    module.config.pad_token_id = pad
    _check_finite(expected_1, model, folder)
    module.set_attn_implementation(IMPLEMENTATION)
    hidden_1TH = _layout_hidden(model, token_ids_T)
    gap = (model.head(hidden_1TH[0, -1:]).float() - expected_1).abs().max().item()
    if not gap <= _tolerance(model) * max(1.0, expected_1.abs().max().item()):
        raise BadModelFolder(
            f"{folder}: packed attention changes this architecture's score by {gap:.2g}; it uses an attention that is "
            "not supported yet"
        )


@torch.no_grad()
def probe_image(model: VisionLM, folder: Path) -> None:
    """Raises BadModelFolder unless a packed row with an image has the logprobs of the model's own forward pass."""
    count, token = model.image_tokens, int(model.module.config.image_token_id)  # type: ignore[union-attr, arg-type]
    if count + 4 > model.context_length:
        raise BadModelFolder(
            f"{folder}: an image takes {count} tokens, more than the context of {model.context_length} has room for; "
            "use a model with a longer context"
        )
    # Build a sequence with one image between text tokens.
    encoded = io.BytesIO()
    Image.linear_gradient("L").save(encoded, format="PNG")
    image = PlacedImage(2, count, encoded.getvalue())
    token_ids_T = torch.tensor([1, 2, *[token] * count, 3, 4], device=model.device) % model.vocab_size
    model.use_attention("eager")
    pixels = model.pixels(image.data)[None, None].to(model.device)
    outputs = model.module(input_ids=token_ids_T.unsqueeze(0), pixel_values=pixels, use_cache=False)
    expected_TV = outputs.logits[0].float()
    _check_finite(expected_TV, model, folder)
    hidden_1TH = _packed_hidden(model, token_ids_T, (image,))
    what = f"{folder}: the packed forward changes this model's logprobs of an image"
    _check_logprobs(model, hidden_1TH, expected_TV, what, "a way to place images")


def _probe_tokens(model: CausalLM) -> Tensor:
    length = min(PROBE_TOKENS, model.context_length)
    return torch.arange(length, device=model.device) * 7 % model.vocab_size


def _packed_hidden(model: CausalLM, token_ids_T: Tensor, images: Images = ()) -> Tensor:
    model.use_attention(IMPLEMENTATION)
    return _layout_hidden(model, token_ids_T, images)


def _layout_hidden(model: CausalLM, token_ids_T: Tensor, images: Images = ()) -> Tensor:
    """Hidden states (1, T, H) of one packed sequence."""
    length = len(token_ids_T)
    layout = PackedLayout([PrefixGroup(0, length)], device=model.device)
    positions_T = torch.arange(length, device=model.device)
    return model.hidden(token_ids_T.unsqueeze(0), positions_T.unsqueeze(0), layout, images)


def _check_finite(expected: Tensor, model: CausalLM, folder: Path) -> None:
    """Raises BadModelFolder where the model's own forward pass gave NaN, which says nothing about its attention."""
    if expected.isnan().any():
        raise BadModelFolder(
            f"{folder}: the model's own forward in {model.compute_dtype} gives NaN; if its weights are finite, they "
            "overflow: set engine.compute_dtype='float32', or give other weights"
        )


def _check_logprobs(model: CausalLM, hidden_1TH: Tensor, expected_TV: Tensor, what: str, used: str) -> None:
    """Raises BadModelFolder unless the hidden states give the logprobs of the expected logits."""
    logprobs_TV = model.logits(hidden_1TH)[0].log_softmax(-1)
    gap = (logprobs_TV - expected_TV.log_softmax(-1)).abs().mean().item()
    tolerance = _tolerance(model)
    if not gap <= tolerance:
        raise BadModelFolder(
            f"{what} by {gap:.2g} nats (at most {tolerance:g} expected); it uses {used} that is not supported yet"
        )


def _tolerance(model: CausalLM) -> float:
    return PROBE_TOLERANCE if model.dtype in (torch.float32, torch.float64) else 100 * PROBE_TOLERANCE
