"""Images in a sequence of token ids: their positions and their encoded bytes. Imports neither torch nor PIL.

The model decodes the bytes into pixels itself (engine.backends.torch.vision_lm). The stored data therefore stays as
small as the given file, and a replay decodes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import BadSpec, UnsupportedFragment
from storage.serialization import digest

MAX_IMAGE_BYTES = 32 << 20
"""Largest size of one encoded image, in bytes."""


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """One image. Its placeholder tokens are `token_ids[start : start + tokens]` of the sequence."""

    start: int
    tokens: int
    data: bytes
    """The bytes of the image file: PNG, JPEG, WebP, GIF or BMP."""


Images = tuple[PlacedImage, ...]
"""The images of one sequence, in the order of their positions."""


def check_images(images: Sequence[PlacedImage], length: int) -> None:
    """Raises BadSpec unless the images are in order, do not overlap, and lie in a sequence of `length` tokens."""
    end = 0
    for number, image in enumerate(images):
        if not isinstance(image, PlacedImage) or not isinstance(image.data, bytes):
            raise BadSpec(
                f"image {number} of a sample is {type(image).__name__}; give "
                "engine.models.images.PlacedImage(start, tokens, data), as serialize_thread returns them"
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


def check_images_accepted(backend: object, images: Iterable[Sequence[PlacedImage]], what: str) -> None:
    """Raises UnsupportedFragment if there are images and `backend`, a trainer or a sampler, accepts only text.

    `backend` is None for a model with a scalar head, which never accepts images. `what` names the data in the message.
    """
    # Without this check a text model would train on placeholder tokens that stand for nothing.
    if any(images) and not getattr(backend, "accepts_images", False):
        name = "a model with a scalar head" if backend is None else type(backend).__name__
        raise UnsupportedFragment(
            f"{what} hold images, and {name} takes text only; use a vision-language model (idefics3, "
            "smolvlm) with engine.trainer.kind='torch' and engine.sampler.kind='torch', or leave the images out"
        )


def images_or_none(images: Iterable[Images]) -> list[Images] | None:
    """The images of each sequence as a list, as requests have them. None if no sequence has images."""
    images_by_sequence = list(images)
    return images_by_sequence if any(images_by_sequence) else None


def images_to_rows(images: Iterable[PlacedImage]) -> list[dict[str, Any]] | None:
    """The images as a cell of a table's column. None (null) if there are none."""
    rows: list[dict[str, Any]] = []
    for image in images:
        rows.append({"start": image.start, "tokens": image.tokens, "data": image.data})
    return rows or None


def image_digests(images: Iterable[PlacedImage]) -> list[str]:
    """sha256 of each image together with its position."""
    return [digest(f"{image.start}/{image.tokens}/".encode() + image.data) for image in images]


def images_from_rows(rows: Sequence[Mapping[str, Any]] | None) -> Images:
    """The images in a cell of a table's column, as `images_to_rows` writes them."""
    return tuple(PlacedImage(row["start"], row["tokens"], row["data"]) for row in rows or ())


def common_prefix_length(images: Sequence[Images], prefix: int) -> int:
    """The length of the longest common prefix of sequences whose first `prefix` tokens are equal.

    The images within the prefix must also be equal, and the prefix must not end within an image."""
    most_images = max(map(len, images), default=0)
    for number in range(most_images):
        # The image of this number in each sequence that has so many.
        present = [sequence[number] for sequence in images if number < len(sequence)]
        first_start = min(image.start for image in present)
        all_equal = len(present) == len(images) and all(image == present[0] for image in present)
        if not all_equal:
            prefix = min(prefix, first_start)
        # A prefix never ends within an image, whose placeholder tokens must stay together.
        for image in present:
            if image.start < prefix < image.start + image.tokens:
                prefix = image.start
        # Images are in order, so all later ones start after the prefix, too.
        if first_start >= prefix:
            break
    return prefix
