"""A vision-language model as the trainer and the sampler see it: the text decoder's packed forward, with the features
of each image in the places of its placeholder tokens. Families: Idefics3 and SmolVLM, one square view per image.

Axes: T packed token · I distinct image · P placeholder token of one image · H hidden
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor, nn

from engine.backends.torch.attention import IMPLEMENTATION, Layout, PackedLayout
from engine.backends.torch.causal_lm import (
    CausalLM,
    check_own_forward,
    check_probe,
    keep_norms_in_float64,
    load_module,
    probe_packed_forward,
)
from engine.backends.torch.packing import Fan
from engine.errors import BadModelFolder, BadSpec
from engine.models.images import Images, PlacedImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What PIL may decode. Of its other decoders some are little tested, and the one of EPS starts Ghostscript."""
MAX_PIXELS = 1 << 25
"""Of one image: 8192 x 4096, about 100 MB as RGB."""
DECODING_ERRORS = (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""What PIL raises for damaged bytes."""


class VisionLM(CausalLM):
    """Packs as a `CausalLM` does; sequences may hold images. All of its weights are one model's: vision tower,
    connector, decoder and head are trained, saved and digested together."""

    accepts_images = True

    def __init__(
        self,
        module: nn.Module,
        *,
        processor: Any,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype | None = None,
    ) -> None:
        """`processor`: transformers' image processor of the model's folder."""
        super().__init__(module, compute_dtype=compute_dtype, master_dtype=master_dtype)
        self.processor = processor
        self.whole = cast(Any, module.base_model)
        self.decoder: nn.Module = self.whole.text_model

    def like(self, module: nn.Module, *, compute_dtype: torch.dtype, master_dtype: torch.dtype | None = None) -> Self:
        return type(self)(module, processor=self.processor, compute_dtype=compute_dtype, master_dtype=master_dtype)

    def use_attention(self, implementation: str) -> None:
        self.decoder.set_attn_implementation(implementation)  # type: ignore[operator]  # the vision tower keeps its own

    @property
    def context_length(self) -> int:
        return int(getattr(self.decoder.config, "max_position_embeddings", 1 << 30))

    @property
    def image_tokens(self) -> int:
        """Placeholder tokens of one image."""
        return int(self.whole.image_seq_len)

    def hidden(self, token_ids: Tensor, positions: Tensor, layout: Layout, images: Images = ()) -> Tensor:
        if not images:
            return super().hidden(token_ids, positions, layout)
        embedded = self._with_features(self.decoder.get_input_embeddings()(token_ids), token_ids, images)  # type: ignore[operator]
        return self.decoder(
            inputs_embeds=embedded, position_ids=positions, use_cache=False, layout=layout
        ).last_hidden_state

    def _with_features(self, embedded_1TH: Tensor, token_ids: Tensor, images: Images) -> Tensor:
        """The embedded tokens of one row with each image's features at its place. Every distinct image passes the
        vision tower once."""
        for image in images:
            if image.tokens != self.image_tokens:
                raise BadSpec(
                    f"an image has {image.tokens} placeholder tokens, and {type(self.module).__name__} makes "
                    f"{self.image_tokens} features of one; tokenise the thread with this model's own processor"
                )
        places = torch.tensor([i.start + at for i in images for at in range(i.tokens)], device=self.device)
        if not bool((token_ids[0, places] == self.module.config.image_token_id).all()):  # type: ignore[union-attr]
            raise BadSpec(
                "the tokens at an image's place are not the model's image token; give the tokens and images of one "
                "serialize_thread"
            )
        distinct = list(dict.fromkeys(image.data for image in images))
        features_IPH = self.features([self.pixels(data) for data in distinct])
        row = {data: number for number, data in enumerate(distinct)}
        which = torch.tensor([row[image.data] for image in images], device=self.device)
        placed_H = features_IPH[which].flatten(0, 1).to(embedded_1TH.dtype)
        return embedded_1TH.index_copy(1, places, placed_H.unsqueeze(0))

    def features(self, pixels: Sequence[Tensor]) -> Tensor:
        """(3, side, side) each -> (I, P, H). With gradient when gradients are on."""
        stacked = torch.stack(list(pixels)).to(self.device).unsqueeze(0)
        return self.whole.get_image_features(stacked, return_dict=True).pooler_output

    def pixels(self, data: bytes) -> Tensor:
        """An encoded image as the vision tower takes it, (3, side, side) in float32. Raises BadSpec for bytes that are
        no image, or one too large to be trusted."""
        values: Tensor = self.processor([[decode_image(data)]], return_tensors="pt")["pixel_values"]
        side = int(self.whole.config.vision_config.image_size)
        if values.shape[1:] != (1, 3, side, side):
            raise BadSpec(
                f"the model's image processor made {tuple(values.shape[1:])} of one image, and its vision tower takes "
                f"one view of {side} x {side}; set do_image_splitting to false, and size and max_image_size to {side}"
            )
        return values[0, 0]


def decode_image(data: bytes) -> Image.Image:
    """The pixels of an encoded image, as RGB. Raises BadSpec for bytes that are no image, and before they are decoded
    for one of too many pixels."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            pixels = opened.width * opened.height
            if pixels <= MAX_PIXELS:
                return opened.convert("RGB")
    except DECODING_ERRORS as error:
        raise BadSpec(
            f"an image of {len(data)} bytes cannot be decoded ({error}); give the bytes of a PNG or JPEG file"
        ) from error
    raise BadSpec(f"an image has {pixels} pixels, at most {MAX_PIXELS} are taken; scale it down first")


def load_vision_lm(folder: Path, *, dtype: torch.dtype, compute_dtype: torch.dtype, device: torch.device) -> VisionLM:
    """Reads a plain Hugging Face folder of one of the VISION_MODEL_TYPES, and checks that the packed forward means what
    the model's own means, with an image and without. Raises BadModelFolder."""
    from transformers import AutoModelForImageTextToText

    processor = load_image_processor(folder)
    module = load_module(AutoModelForImageTextToText, folder, dtype=dtype)
    module.to(device)
    if dtype == torch.float64:
        keep_norms_in_float64(module)
    model = VisionLM(module, processor=processor, compute_dtype=compute_dtype)
    probe_packed_forward(model, folder)
    probe_image(model, folder)
    return model


def load_image_processor(folder: Path) -> Any:
    """transformers' own, on PIL and numpy: what it does not depend on is a torchvision that is there or not. Raises
    BadModelFolder."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    try:  # SmolVLM's image processor is Idefics3's
        return Idefics3ImageProcessorPil.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise BadModelFolder(
            f"the image processor in {folder} does not load ({error}); save the model's processor there with "
            "save_pretrained"
        ) from error


@torch.no_grad()
def probe_image(model: VisionLM, folder: Path) -> None:
    """One short packed forward with an image against the model's own."""
    count, token = model.image_tokens, int(model.module.config.image_token_id)  # type: ignore[union-attr, arg-type]
    if count + 4 > model.context_length:
        raise BadModelFolder(f"{folder}: an image takes {count} tokens, more than the context has room for")
    encoded = io.BytesIO()
    Image.linear_gradient("L").save(encoded, format="PNG")
    image = PlacedImage(2, count, encoded.getvalue())
    ids_T = torch.tensor([1, 2, *[token] * count, 3, 4], device=model.device) % model.vocab_size
    model.use_attention("eager")
    pixels = model.pixels(image.data)[None, None].to(model.device)
    own = model.module(input_ids=ids_T.unsqueeze(0), pixel_values=pixels, use_cache=False).logits[0].float()
    check_own_forward(own, model, folder)
    model.use_attention(IMPLEMENTATION)
    layout, positions_T = PackedLayout([Fan(0, len(ids_T))], device=model.device), torch.arange(len(ids_T))
    hidden = model.hidden(ids_T.unsqueeze(0), positions_T.to(model.device).unsqueeze(0), layout, (image,))
    what = f"{folder}: the packed forward changes this model's logprobs of an image"
    check_probe(model, hidden, own, what, "a way to place images")
