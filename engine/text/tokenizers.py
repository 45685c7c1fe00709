"""`Tokenizer`, and loading one from a local folder. Nothing is downloaded. For stored models see `stored_models`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.text.errors import ChatTemplateMissing, TemplateRefused, TokenizerMissing
from engine.text.images import PROCESSOR_FILES, ImageTokens, image_tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES: tuple[str, ...] = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    *PROCESSOR_FILES,
)
"""The files of a model folder that a tokenizer needs. generation_config.json lists the ids that end a turn, and the
processor's files give the number of tokens per image."""


class EncodedText(Protocol):
    """The tokens of a text, as the tokenizers library returns them."""

    @property
    def ids(self) -> list[int]: ...

    def char_to_token(self, char_pos: int) -> int | None:
        """Index of the first token that the character is part of; None if it is part of none."""
        ...


class Tokenizer:
    """A Hugging Face tokenizer, reduced to the calls that the engine makes."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        eos_token_ids: Sequence[int],
        images: ImageTokens | None = None,
    ) -> None:
        self._tokenizer: Any = tokenizer
        self.name = name
        self.images = images
        """How prompts represent images. None: the model takes text only."""
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        """The ids that end a turn, at least one."""
        self.vocab_size: int = len(tokenizer)
        """Number of ids, including added tokens."""
        self._is_plain_fast = _is_plain_fast(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of the text. Nothing is added. Text that spells a special token becomes that token."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_all(self, texts: Sequence[str]) -> list[EncodedText] | None:
        """Returns `encode` of each text, with the characters of each token. None if the tokenizer does not tell them.

        It calls the tokenizers library directly: for a batch of eight texts, transformers' own call takes twice as
        long."""
        if not self._is_plain_fast:
            return None
        return self._tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)  # type: ignore[no-any-return]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def apply_chat_template(self, messages: list[dict[str, Any]], *, generation_prompt: bool) -> str:
        """Returns the template's text of the messages. Raises ChatTemplateMissing, TemplateRefused."""
        if not self.has_chat_template:
            raise ChatTemplateMissing(
                f"the tokenizer of {self.name} has no chat template; expected one in chat_template.jinja or under "
                "'chat_template' in tokenizer_config.json: add it, or take an instruction-tuned model"
            )
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # boundary to the template, a program of the model, which may raise any type
            roles = [message["role"] for message in messages]
            raise TemplateRefused(
                f"the chat template of {self.name} refused messages of the roles {roles}: "
                f"{type(error).__name__}: {error}; give it the roles and order it takes, or correct the template"
            ) from error


def _is_plain_fast(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `encode` of the tokenizer only calls the tokenizers library, without truncation and padding."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    # A few models have an `encode` of their own.
    if type(tokenizer)._encode_plus is not PreTrainedTokenizerFast._encode_plus:
        return False
    backend = tokenizer.backend_tokenizer
    return backend.truncation is None and backend.padding is None


def load_tokenizer(folder: Path, *, name: str | None = None) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face folder. Code in the folder is never run. `name` names the folder in errors.

    Raises TokenizerMissing when there is no folder, no tokenizer in it, or a tokenizer without an end-of-sequence
    token.
    """
    from transformers import AutoTokenizer

    name = name or str(folder)
    if not folder.is_dir():
        raise TokenizerMissing(f"{name} is not a folder; expected a Hugging Face folder with tokenizer.json")
    # Without one of these files transformers would fail with a message about the network.
    present = sorted(path.name for path in folder.iterdir())
    if not {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"} & set(present):
        raise TokenizerMissing(
            f"{name} holds {present}, but no tokenizer; expected tokenizer.json: save it there with save_pretrained"
        )
    # trust_remote_code=False: a folder must not run code of its own.
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # boundary to transformers, which may raise any type on a broken file
        raise TokenizerMissing(
            f"the tokenizer of {name} cannot be loaded ({type(error).__name__}: {error}); expected the files "
            "save_pretrained writes: save them again"
        ) from error
    images = image_tokens_of(folder, tokenizer, name)
    return Tokenizer(tokenizer, name=name, eos_token_ids=_eos_token_ids(tokenizer, folder, name), images=images)


def _eos_token_ids(tokenizer: Any, folder: Path, name: str) -> list[int]:
    """Returns the tokenizer's own end-of-sequence id, then those that generation_config.json adds."""
    ids = []
    if tokenizer.eos_token_id is not None:
        ids.append(int(tokenizer.eos_token_id))

    # Chat models often end a turn with another token than the tokenizer's own, and name it only in this file.
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            values = value if isinstance(value, list) else [value]  # one id, or a list of ids
            ids += [int(eos_id) for eos_id in values if eos_id is not None]
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise TokenizerMissing(
                f"generation_config.json of {name} is no JSON object with token ids in eos_token_id: {error}"
            ) from error
    if not ids:
        raise TokenizerMissing(
            f"the tokenizer of {name} has no end-of-sequence token; expected 'eos_token' in tokenizer_config.json"
        )
    return list(dict.fromkeys(ids))
