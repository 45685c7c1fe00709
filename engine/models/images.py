"""Images in a sequence of token ids: where each one stands, and its encoded bytes. Without torch, without PIL.

The model that is trained or sampled turns the bytes into pixels itself (engine.backends.torch.vision_lm): what is
stored stays as small as the file that was given, and a replay decodes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import BadSpec
from engine.text.errors import UnsupportedFragment
from storage.serialization import digest

MAX_IMAGE_BYTES = 32 << 20
"""Of one encoded image."""


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """One image. Its placeholder tokens are `token_ids[start : start + tokens]` of the sequence."""

    start: int
    tokens: int
    data: bytes
    """The file as it was given: PNG, JPEG, WebP, GIF or BMP."""


Images = tuple[PlacedImage, ...]
"""The images of one sequence, in the order of their places. Empty: it has none."""


def check_images(images: Sequence[PlacedImage], length: int) -> None:
    """Raises BadSpec unless the images follow one another within a sequence of `length` tokens."""
    end = 0
    for number, image in enumerate(images):
        if not isinstance(image, PlacedImage) or not isinstance(image.data, bytes):
            raise BadSpec(
                f"image {number} of a sample is {type(image).__name__}; give engine.images.PlacedImage(start, tokens, "
                "data), as serialize_thread returns them"
            )
        if len(image.data) > MAX_IMAGE_BYTES:
            raise BadSpec(
                f"image {number} of a sample has {len(image.data)} bytes, at most {MAX_IMAGE_BYTES} are taken; scale "
                "it down first"
            )
        if image.start < end or image.tokens < 1 or image.start + image.tokens > length:
            raise BadSpec(
                f"image {number} stands at tokens [{image.start}, {image.start + image.tokens}) of a sample of "
                f"{length} tokens, and the one before it ends at {end}; give the images of serialize_thread with its "
                "own tokens"
            )
        end = image.start + image.tokens


def check_images_accepted(taker: object, images: Iterable[Sequence[PlacedImage]], what: str) -> None:
    """Raises UnsupportedFragment when there are images and `taker`, a trainer or sampler, does not take any."""
    if any(images) and not getattr(taker, "accepts_images", False):
        name = "a model with a scalar head" if taker is None else type(taker).__name__
        raise UnsupportedFragment(
            f"{what} hold images, and {name} takes text only; use a vision-language model (idefics3, "
            "smolvlm) with engine.trainer.kind='torch' and engine.sampler.kind='torch', or leave the images out"
        )


def images_or_none(images: Iterable[Images]) -> list[Images] | None:
    """Those of each sequence, as a request has them; None where no sequence has any."""
    found = list(images)
    return found if any(found) else None


def images_to_rows(images: Iterable[PlacedImage]) -> list[dict[str, Any]] | None:
    """The images as a table's column has them; null where there are none."""
    return [{"start": i.start, "tokens": i.tokens, "data": i.data} for i in images] or None


def image_digests(images: Iterable[PlacedImage]) -> list[str]:
    """sha256 of each image and of its place."""
    return [digest(f"{i.start}/{i.tokens}/".encode() + i.data) for i in images]


def images_from_rows(rows: Sequence[Mapping[str, Any]] | None) -> Images:
    """What `images_to_rows` wrote."""
    return tuple(PlacedImage(row["start"], row["tokens"], row["data"]) for row in rows or ())


def common_prefix_length(images: Sequence[Images], prefix: int) -> int:
    """How much of a prefix of `prefix` equal tokens is equal in its images too, and ends within none of them."""
    for at in range(max(map(len, images), default=0)):
        here = [one[at] if at < len(one) else None for one in images]
        starts = [image.start for image in here if image is not None]
        if any(image != here[0] for image in here):
            prefix = min(prefix, *starts)
        for image in here:
            if image is not None and image.start < prefix < image.start + image.tokens:
                prefix = image.start
        if min(starts) >= prefix:
            break
    return prefix
