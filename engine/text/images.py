"""Images of a conversation: where their bytes come from, and how a chat template's text makes room for them.

Bytes come from `data:` URLs, or from files of this machine that become `data:` URLs when a thread enters a dataset or
is rendered: what is stored is whole, and a replay sees what the run saw. Nothing is ever fetched.
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

from engine.models.images import MAX_IMAGE_BYTES, PlacedImage
from engine.text.errors import ThreadError, TokenizerMissing, UnsupportedFragment
from engine.text.fragments import ImageFragment

if TYPE_CHECKING:
    from engine.text.threads import StringThread, TokenizedTurn
    from engine.text.turns import Turn

VISION_MODEL_TYPES: tuple[str, ...] = ("idefics3", "smolvlm")
"""`model_type`s whose images the engine takes: plain rotary positions, one square view per image."""

PROCESSOR_FILES: tuple[str, ...] = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How a model's prompt makes room for an image."""

    token: str
    """What the chat template writes for an image."""
    token_id: int
    count: int
    """Placeholder tokens of one image."""
    before: str
    after: str

    @property
    def expansion(self) -> str:
        return self.before + self.token * self.count + self.after

    def expanded(self, text: str, images: int) -> str:
        """The template's text of `images` images with room for each. Raises ThreadError when other text spells the
        image token."""
        if (found := text.count(self.token)) != images:
            raise ThreadError(
                f"the chat template's text has {found} times {self.token!r} for {images} images; expected one each: "
                "take the token out of the conversation's own text, and give images as ImageFragment"
            )
        return text.replace(self.token, self.expansion)


def image_tokens_of(folder: Path, tokenizer: Any, name: str) -> ImageTokens | None:
    """What the processor of a model folder says; None for a model of text only.

    Raises TokenizerMissing for a vision-language model whose processor is missing, or cuts images into tiles.
    """
    config = _json(folder / "config.json")
    if config.get("model_type") not in VISION_MODEL_TYPES:
        return None
    processor, own = _json(folder / "processor_config.json"), _json(folder / "preprocessor_config.json")
    own = own or processor.get("image_processor") or {}
    if not own:
        raise TokenizerMissing(
            f"{name} is a vision-language model without {' or '.join(PROCESSOR_FILES)}; save its processor there with "
            "save_pretrained"
        )
    if own.get("do_image_splitting", True):
        raise TokenizerMissing(
            f"the image processor of {name} cuts images into tiles (do_image_splitting), and this engine takes one "
            "view per image; set \"do_image_splitting\": false in its processor's config"
        )
    vision = config.get("vision_config", {})
    side = int(vision.get("image_size", 224)) // int(vision.get("patch_size", 32))
    count = side**2 // int(config.get("scale_factor", 2)) ** 2
    if processor.get("image_seq_len", count) != count:
        raise TokenizerMissing(
            f"processor_config.json of {name} says image_seq_len {processor['image_seq_len']}, and its config.json "
            f"makes {count} tokens of an image; expected them equal: save the processor that belongs to the model"
        )
    token_id = int(config["image_token_id"])
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    around = "<fake_token_around_image>"
    return ImageTokens(token, token_id, count, f"{around}<global-img>", around)


def image_bytes(url: str) -> bytes:
    """The bytes that a `data:` URL, or the path of a local file, names.

    Raises UnsupportedFragment for an URL that would have to be fetched, ThreadError for what cannot be read.
    """
    if url.startswith("data:"):
        head, comma, body = url.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ThreadError(f"the image's URL begins {head[:60]!r}; expected data:image/png;base64,… with its bytes")
        try:
            data = base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ThreadError(f"the image's data: URL is no base64 ({error}); encode the file's bytes") from error
    elif "://" in url:
        raise UnsupportedFragment(
            f"the image is at {url[:80]!r}, and images are never fetched: a run could not be repeated. Give its bytes "
            "as a data: URL (data:image/png;base64,…), or the path of a local file"
        )
    else:
        path = Path(os.path.expanduser(url))
        try:
            if path.stat().st_size > MAX_IMAGE_BYTES:
                raise _too_large(path.stat().st_size)
            data = path.read_bytes()
        except OSError as error:
            raise ThreadError(f"the image {url[:200]!r} cannot be read ({error}); give an existing file") from error
    if not data:
        raise ThreadError("the image has no bytes; give those of a PNG or JPEG file")
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_large(len(data))
    return data


def embed_images(thread: StringThread) -> StringThread:
    """The thread with every image as a `data:` URL; itself where there is nothing to do. Raises as `image_bytes`."""
    turns, changed = [], False
    for turn in thread.turns:
        content = turn.content
        if not isinstance(content, str) and any(isinstance(part, ImageFragment) for part in content):
            content = tuple(embed_image(part) if isinstance(part, ImageFragment) else part for part in content)
            changed = changed or content != turn.content
        turns.append((turn.role, content))
    return type(thread)(turns, thread.metadata, thread.weights) if changed else thread


def images_in(turns: Iterable[Turn | TokenizedTurn]) -> list[tuple[int, ImageFragment]]:
    """(turn, image) of all images, in order."""
    return [
        (index, part)
        for index, turn in enumerate(turns)
        for part in (() if turn.content is None or isinstance(turn.content, str) else turn.content)
        if isinstance(part, ImageFragment)
    ]


def placed_images(turns: Iterable[TokenizedTurn], kind: ImageTokens | None) -> tuple[PlacedImage, ...]:
    """Where the images of tokenised turns stand. Sampled turns have none, whatever tokens they drew.

    Raises UnsupportedFragment when there are some and `kind` is None; ThreadError when their tokens are not there.
    """
    found, offset = [], 0
    for index, turn in enumerate(turns):
        parts = [part for _, part in images_in([turn])]
        if parts and kind is None:
            raise UnsupportedFragment(f"turn {index} holds an image; this model takes text only: remove it")
        places = [at for at, token in enumerate(turn.token_ids) if parts and kind and token == kind.token_id]
        count = kind.count if kind else 0
        if len(places) != count * len(parts):
            raise ThreadError(
                f"turn {index} has {len(places)} image tokens for {len(parts)} images; expected {count} for each, as "
                "tokenize_thread writes them"
            )
        for number, part in enumerate(parts):
            found.append(PlacedImage(offset + places[number * count], count, image_bytes(part.url)))
        offset += len(turn.token_ids)
    return tuple(found)


def embed_image(part: ImageFragment) -> ImageFragment:
    """The image as a `data:` URL. Raises as `image_bytes`."""
    data = image_bytes(part.url)
    if part.url.startswith("data:"):
        return part
    kind = mimetypes.guess_type(part.url)[0] or "application/octet-stream"
    return ImageFragment(url=f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}")


def _too_large(size: int) -> ThreadError:
    return ThreadError(f"the image has {size} bytes, at most {MAX_IMAGE_BYTES} are taken; scale it down first")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerMissing(f"{path.name} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
