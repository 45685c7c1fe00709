"""A vision-language model, as the trainer and the sampler use it: the packed forward pass of the text decoder, with the
features of each image in the places of its placeholder tokens.

Supported families: Idefics3 and SmolVLM, with one square view per image.

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

from engine.backends.torch.attention import Layout
from engine.backends.torch.causal_lm import CausalLM
from engine.errors import BadModelFolder, BadSpec
from engine.models.images import Images

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that PIL may decode. Some of its other decoders are little tested, and the EPS decoder starts Ghostscript."""
MAX_PIXELS = 1 << 25
"""Largest number of pixels of one image: 8192 x 4096, about 100 MB as RGB."""
DECODING_ERRORS = (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""Exceptions that PIL raises for damaged bytes."""


class VisionLM(CausalLM):
    """A causal language model whose sequences may contain images. Vision tower, connector, decoder and head are
    trained, saved and digested together, as the weights of one model."""

    accepts_images = True

    def __init__(
        self, module: nn.Module, *, processor: Any, compute_dtype: torch.dtype, master_dtype: torch.dtype | None = None
    ) -> None:
        """`processor` is transformers' image processor of the model's folder."""
        super().__init__(module, compute_dtype=compute_dtype, master_dtype=master_dtype)
        self.processor = processor
        self.whole = cast(Any, module.base_model)
        self.decoder: nn.Module = self.whole.text_model

    def with_module(
        self, module: nn.Module, *, compute_dtype: torch.dtype, master_dtype: torch.dtype | None = None
    ) -> Self:
        return type(self)(module, processor=self.processor, compute_dtype=compute_dtype, master_dtype=master_dtype)

    def use_attention(self, implementation: str) -> None:
        """Sets the decoder's attention. The vision tower keeps its own."""
        self.decoder.set_attn_implementation(implementation)  # type: ignore[operator]

    @property
    def image_tokens(self) -> int:
        """Number of placeholder tokens of one image."""
        return int(self.whole.image_seq_len)

    def hidden(self, token_ids_BT: Tensor, positions_BT: Tensor, layout: Layout, images: Images = ()) -> Tensor:
        if not images:
            return super().hidden(token_ids_BT, positions_BT, layout)
        embedded_1TH = self.decoder.get_input_embeddings()(token_ids_BT)  # type: ignore[operator]
        return self.decoder(
            inputs_embeds=self._with_features(embedded_1TH, token_ids_BT, images),
            position_ids=positions_BT,
            use_cache=False,
            layout=layout,
        ).last_hidden_state

    def _with_features(self, embedded_1TH: Tensor, token_ids_1T: Tensor, images: Images) -> Tensor:
        """The embedded tokens of one row, with the features of each image in its place. Equal images pass the vision
        tower once."""
        # Find the places of all placeholder tokens, which must be the model's image token.
        places: list[int] = []
        for image in images:
            if image.tokens != self.image_tokens:
                raise BadSpec(
                    f"an image has {image.tokens} placeholder tokens, and {type(self.module).__name__} makes "
                    f"{self.image_tokens} features of one; tokenise the thread with this model's own processor"
                )
            places += range(image.start, image.start + image.tokens)
        places_P = torch.tensor(places, device=self.device)
        if not bool((token_ids_1T[0, places_P] == self.module.config.image_token_id).all()):  # type: ignore[union-attr]
            raise BadSpec(
                "the tokens at an image's place are not the model's image token; give the tokens and images of one "
                "serialize_thread"
            )
        # Compute the features of each distinct image.
        distinct = list(dict.fromkeys(image.data for image in images))
        features_IPH = self.features([self.pixels(data) for data in distinct])
        index_of = {data: index for index, data in enumerate(distinct)}
        index = torch.tensor([index_of[image.data] for image in images], device=self.device)
        # Put the features in the place of the placeholders' embeddings.
        placed_PH = features_IPH[index].flatten(0, 1).to(embedded_1TH.dtype)
        return embedded_1TH.index_copy(1, places_P, placed_PH.unsqueeze(0))

    def features(self, pixels: Sequence[Tensor]) -> Tensor:
        """Features (I, P, H) of images (3, side, side). Differentiable when gradients are on."""
        stacked = torch.stack(list(pixels)).to(self.device).unsqueeze(0)
        return self.whole.get_image_features(stacked, return_dict=True).pooler_output

    def pixels(self, data: bytes) -> Tensor:
        """An encoded image as the vision tower takes it: (3, side, side) in float32. Raises BadSpec for bytes that are
        not an image, and for an image that is too large."""
        values: Tensor = self.processor([[decode_image(data)]], return_tensors="pt")["pixel_values"]
        side = int(self.whole.config.vision_config.image_size)
        if values.shape[1:] != (1, 3, side, side):
            raise BadSpec(
                f"the model's image processor made {tuple(values.shape[1:])} of one image, and its vision tower takes "
                f"one view of {side} x {side}; set do_image_splitting to false, and size and max_image_size to {side}"
            )
        return values[0, 0]


def decode_image(data: bytes) -> Image.Image:
    """The pixels of an encoded image, as RGB. Raises BadSpec for bytes that are not an image. An image of too many
    pixels raises it before it is decoded."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            pixels = opened.width * opened.height
            if pixels <= MAX_PIXELS:
                return opened.convert("RGB")
    except DECODING_ERRORS as error:
        raise BadSpec(
            f"an image of {len(data)} bytes cannot be decoded ({error}); give the bytes of a PNG or JPEG file"
        ) from error
    raise BadSpec(f"an image has {pixels} pixels, and at most {MAX_PIXELS} are taken; scale it down first")


def load_image_processor(folder: Path) -> Any:
    """transformers' image processor of the folder, in its variant on PIL and numpy, so that the result does not depend
    on whether torchvision is installed. Raises BadModelFolder."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    try:  # SmolVLM's image processor is Idefics3's
        return Idefics3ImageProcessorPil.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise BadModelFolder(
            f"the image processor in {folder} does not load ({error}); save the model's processor there with "
            "save_pretrained"
        ) from error
