"""Images of a conversation: reads their bytes, and makes room for them in the text of a chat template.

The bytes come from `data:` URLs, or from local files. A file becomes a `data:` URL when a thread is loaded into a
dataset or rendered, so that a stored thread is complete and a replay sees the same image. Images are never downloaded.
"""

from __future__ import annotations

import base64
import binascii
import json
import mimetypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ThreadError, TokenizerMissing, UnsupportedFragment
from engine.models.images import MAX_IMAGE_BYTES, PlacedImage
from engine.text.fragments import ImageFragment
from engine.text.turns import fragments_of

if TYPE_CHECKING:
    from engine.text.threads import StringThread, TokenizedTurn
    from engine.text.turns import Turn

VISION_MODEL_TYPES: tuple[str, ...] = ("idefics3", "smolvlm")
"""The `model_type`s of supported vision-language models: plain rotary positions, one square view per image."""

PROCESSOR_FILES: tuple[str, ...] = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How a model's prompt represents an image: a fixed number of placeholder tokens between two markers."""

    token: str
    """Placeholder token. The chat template writes it once per image."""
    token_id: int
    count: int
    """Placeholder tokens per image."""
    before: str
    """Text before the placeholders of an image."""
    after: str
    """Text after the placeholders of an image."""

    @property
    def expansion(self) -> str:
        """The text of one image."""
        return self.before + self.token * self.count + self.after

    def expand(self, text: str, images: int) -> str:
        """Replaces each image token in the template's text by the text of one image.

        Raises ThreadError unless the text has exactly one image token per image.
        """
        count = text.count(self.token)
        if count != images:
            raise ThreadError(
                f"the chat template's text has {count} times {self.token!r} for {images} images; expected one each: "
                "take the token out of the conversation's own text, and give images as ImageFragment"
            )
        return text.replace(self.token, self.expansion)


def takes_images(folder: Path) -> bool:
    """Whether the model in this folder takes images, by its config."""
    return _read_json(folder / "config.json").get("model_type") in VISION_MODEL_TYPES


def image_tokens_of(folder: Path, tokenizer: Any, name: str) -> ImageTokens | None:
    """Reads from a model folder how prompts represent images. Returns None for a model that takes text only.

    Raises TokenizerMissing for a vision-language model whose processor is missing, or cuts images into tiles.
    """
    config = _read_json(folder / "config.json")
    if config.get("model_type") not in VISION_MODEL_TYPES:
        return None

    # The settings of the image processor are in a file of their own, or a part of the processor's.
    processor = _read_json(folder / "processor_config.json")
    image_processor = _read_json(folder / "preprocessor_config.json") or processor.get("image_processor") or {}
    if not image_processor:
        raise TokenizerMissing(
            f"{name} is a vision-language model without {' or '.join(PROCESSOR_FILES)}; save its processor there with "
            "save_pretrained"
        )
    if image_processor.get("do_image_splitting", True):
        raise TokenizerMissing(
            f"the image processor of {name} cuts images into tiles (do_image_splitting), and this engine takes one "
            'view per image; set "do_image_splitting": false in its processor\'s config'
        )

    # The vision encoder gives one vector per patch, and the connector merges scale_factor x scale_factor of them.
    vision = config.get("vision_config", {})
    patches_per_side = int(vision.get("image_size", 224)) // int(vision.get("patch_size", 32))
    count = patches_per_side**2 // int(config.get("scale_factor", 2)) ** 2
    if processor.get("image_seq_len", count) != count:
        raise TokenizerMissing(
            f"processor_config.json of {name} has image_seq_len {processor['image_seq_len']}, and its config.json "
            f"makes {count} tokens of an image; expected them equal: save the processor that belongs to the model"
        )
    token_id = int(config["image_token_id"])
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    marker = "<fake_token_around_image>"
    return ImageTokens(token, token_id, count, before=f"{marker}<global-img>", after=marker)


# -- bytes of images -------------------------------------------------------------------------------------------


def image_bytes(url: str) -> bytes:
    """Returns the bytes of an image that a `data:` URL holds or a local path names.

    Raises UnsupportedFragment for a URL that would have to be downloaded, ThreadError for unreadable images.
    """
    if url.startswith("data:"):
        data = _decode_data_url(url)
    elif "://" in url:
        raise UnsupportedFragment(
            f"the image is at {url[:80]!r}, and images are never fetched: a run could not be repeated. Give its bytes "
            "as a data: URL (data:image/png;base64,…), or the path of a local file"
        )
    else:
        data = _read_image_file(url)
    if not data:
        raise ThreadError("the image has no bytes; give those of a PNG or JPEG file")
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_large(len(data))
    return data


def _decode_data_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ThreadError(f"the image's URL begins {head[:60]!r}; expected data:image/png;base64,… with its bytes")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ThreadError(f"the image's data: URL is not valid base64 ({error}); encode the file's bytes") from error


def _read_image_file(name: str) -> bytes:
    path = Path(os.path.expanduser(name))
    try:
        # Check the size before the file is read into memory.
        size = path.stat().st_size
        if size > MAX_IMAGE_BYTES:
            raise _too_large(size)
        return path.read_bytes()
    except OSError as error:
        raise ThreadError(f"the image {name[:200]!r} cannot be read ({error}); give an existing file") from error


def _too_large(size: int) -> ThreadError:
    return ThreadError(f"the image has {size} bytes, at most {MAX_IMAGE_BYTES} are taken; scale it down first")


def embed_images(thread: StringThread) -> StringThread:
    """Returns the thread with every image as a `data:` URL. It is the same object if nothing changes.

    Raises the errors of `image_bytes`.
    """
    turns, changed = [], False
    for turn in thread.turns:
        content = turn.content
        if any(isinstance(part, ImageFragment) for part in fragments_of(content)):
            content = tuple(_embed_if_image(part) for part in fragments_of(content))
            # An image that is a data: URL already stays as it is.
            changed = changed or content != turn.content
        turns.append((turn.role, content))
    return type(thread)(turns, thread.metadata, thread.weights, thread.tools) if changed else thread


def _embed_if_image(part: Any) -> Any:
    return embed_image(part) if isinstance(part, ImageFragment) else part


def embed_image(image: ImageFragment) -> ImageFragment:
    """Returns the image as a `data:` URL. Raises the errors of `image_bytes`."""
    data = image_bytes(image.url)
    if image.url.startswith("data:"):
        return image
    media_type = mimetypes.guess_type(image.url)[0] or "application/octet-stream"
    return ImageFragment(url=f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}")


# -- images in turns -------------------------------------------------------------------------------------------


def images_in(turns: Iterable[Turn | TokenizedTurn]) -> list[tuple[int, ImageFragment]]:
    """Returns (index of the turn, image) for all images, in order."""
    images: list[tuple[int, ImageFragment]] = []
    for index, turn in enumerate(turns):
        images.extend((index, part) for part in fragments_of(turn.content) if isinstance(part, ImageFragment))
    return images


def placed_images(turns: Iterable[TokenizedTurn], image_tokens: ImageTokens | None) -> tuple[PlacedImage, ...]:
    """Returns the images of tokenised turns with their positions in the thread's token ids.

    A sampled turn has no images, even if the model sampled image tokens. `image_tokens` is None for a model that takes
    text only.

    Raises UnsupportedFragment when there are images and `image_tokens` is None; ThreadError when the number of image
    tokens does not match.
    """
    # `offset` is the position of the turn's first token in the thread.
    images, offset = [], 0
    count = image_tokens.count if image_tokens else 0
    for index, turn in enumerate(turns):
        fragments = [image for _, image in images_in([turn])]
        if fragments and image_tokens is None:
            raise UnsupportedFragment(f"turn {index} holds an image; this model takes text only: remove it")
        positions: list[int] = []
        if fragments and image_tokens:
            positions = [i for i, token in enumerate(turn.token_ids) if token == image_tokens.token_id]
        # Text that spells the image token would otherwise shift the images of its turn.
        if len(positions) != count * len(fragments):
            raise ThreadError(
                f"turn {index} has {len(positions)} image tokens for {len(fragments)} images; expected {count} for "
                "each, as tokenize_thread writes them"
            )
        for number, image in enumerate(fragments):
            images.append(PlacedImage(offset + positions[number * count], count, image_bytes(image.url)))
        offset += len(turn.token_ids)
    return tuple(images)


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, and {} if there is no file or no object in it. Raises TokenizerMissing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerMissing(f"{path.name} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}
