"""`Tokenizer`, and loading one from a local folder. Nothing is downloaded. For stored models see `stored_models`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import ChatTemplateMissing, TemplateRefused, TokenizerMissing
from engine.models.folder import read_folder_config
from engine.text.images import PROCESSOR_FILES, ImageTokens, image_tokens_of
from engine.text.tool_calls import HERMES_TEXT, ToolFormat, tool_format_of

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


BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are not a complete character."""


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

    def decode_with_calls(self, token_ids: Sequence[int]) -> str:
        """Returns `decode`, with the special tokens that are part of tool calls."""
        kept = self._ids_in_calls
        if not kept:
            return self.decode(token_ids)
        special = self._special_ids
        ids = [token_id for token_id in token_ids if token_id in kept or token_id not in special]
        return self.decode(ids, skip_special=False)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder
        special = [token_id for token_id, token in added.items() if token.special]
        return frozenset([*special, *self._tokenizer.all_special_ids])

    @cached_property
    def _ids_in_calls(self) -> frozenset[int]:
        """The special tokens that are part of tool calls in the model's format."""
        vocabulary = self._tokenizer.get_vocab()
        ids = [vocabulary[marker] for marker in self.tool_format.markers if marker in vocabulary]
        return self._special_ids & frozenset(ids)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls, by its chat template."""
        if not self.has_chat_template:
            return HERMES_TEXT
        try:
            template = self._tokenizer.get_chat_template(tools=[{}])
        except ValueError:  # several templates and none of them is the default: rendering reports it
            return HERMES_TEXT
        return tool_format_of(template, _template_variables(template))

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes in UTF-8 that each id adds to a text; b"" for an id without text. Special tokens have theirs.

        A token may hold a part of a character."""
        # Some tokenizers decode the first token of a text differently, so each token is decoded after another one.
        first = self.encode("a")[-1:]
        text_before = self.decode(first, skip_special=False)
        ids = range(max(self._tokenizer.get_vocab().values()) + 1)
        texts = self._tokenizer.batch_decode(
            [[*first, token_id] for token_id in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        token_bytes = []
        for token_id, text in zip(ids, texts, strict=True):
            added = text.removeprefix(text_before)
            if BROKEN in added:
                token_bytes.append(_bytes_of_part(self._tokenizer.convert_ids_to_tokens(token_id)))
            else:
                token_bytes.append(added.encode())
        return token_bytes

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def save(self, folder: Path) -> None:
        """Writes the files of the tokenizer into a folder, for a library that loads it from there."""
        self._tokenizer.save_pretrained(folder)

    @cached_property
    def digest(self) -> str:
        """Digest of the tokens and of how text becomes tokens; not of the chat template."""
        return hashlib.sha256((self.to_json() or self.name).encode()).hexdigest()

    def to_json(self) -> str | None:
        """Returns the contents of tokenizer.json with all added tokens, without truncation and padding. None if the
        tokenizer is not one of the tokenizers library."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        return backend.to_str()  # type: ignore[no-any-return]

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, generation_prompt: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Returns the template's text of the messages. Raises ChatTemplateMissing, TemplateRefused."""
        if not self.has_chat_template:
            raise ChatTemplateMissing(
                f"the tokenizer of {self.name} has no chat template; expected one in chat_template.jinja or under "
                "'chat_template' in tokenizer_config.json: add it, or take an instruction-tuned model"
            )
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # boundary to the template, a program of the model, which may raise any type
            roles = [message["role"] for message in messages]
            raise TemplateRefused(
                f"the chat template of {self.name} refused messages of the roles {roles}: "
                f"{type(error).__name__}: {error}; give it the roles and order it takes, or correct the template"
            ) from error


def _template_variables(template: str) -> set[str]:
    """Returns the names that a chat template reads; none for a template that is not valid."""
    import jinja2
    from jinja2 import meta

    try:
        # "generation" is a tag of transformers, which marks the answers.
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        return meta.find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", template)))
    except jinja2.TemplateError:
        return set()  # the first conversation that is rendered gets the error


_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def _bytes_of_part(token: str) -> bytes:
    """The bytes of a token that holds a part of a character: `<0xE2>`, or one character per byte as in GPT-2."""
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    if set(token) <= _BYTE_OF_CHARACTER.keys():
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    return token.encode()


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for. A printable byte of Latin-1 stands for
    itself, and the others, in their order, have the characters from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


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
    wrapped = Tokenizer(tokenizer, name=name, eos_token_ids=(), images=images)
    wrapped.eos_token_ids = _eos_token_ids(wrapped, folder)
    return wrapped


def check_can_end_turns(folder: Path) -> None:
    """Raises TokenizerMissing unless a model folder has a tokenizer, and its model can sample an end of turn."""
    tokenizer, config = load_tokenizer(folder), read_folder_config(folder)
    vocab_size = (config.get("text_config") or config).get("vocab_size")
    if isinstance(vocab_size, int) and min(tokenizer.eos_token_ids) >= vocab_size:
        raise TokenizerMissing(
            f"the ids that end a turn of {folder} are {list(tokenizer.eos_token_ids)}, and its model has the ids 0 to "
            f"{vocab_size - 1}: no completion could end; expected an id of the model in eos_token_id of "
            "generation_config.json, or the tokenizer that the model was trained with"
        )


def _eos_token_ids(tokenizer: Tokenizer, folder: Path) -> tuple[int, ...]:
    """Returns the ids that end a turn: the tokenizer's own, those that generation_config.json names (or else
    config.json), and the one that the chat template writes after an answer.

    Samplers, prompts and loss masks all use these ids: where the files of a model differ, each of them ends a turn."""
    # Chat models often end a turn with another token than the tokenizer's own, and name it only in their configs.
    name = tokenizer.name
    ids: list[int | None] = [tokenizer._tokenizer.eos_token_id]
    ids += _eos_of_config(folder / "generation_config.json", name) or _eos_of_config(folder / "config.json", name)
    ids.append(_end_of_templates_turn(tokenizer))
    known_ids = tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    if not known_ids:
        raise TokenizerMissing(
            f"the tokenizer of {name} has no end-of-sequence token; expected 'eos_token' in tokenizer_config.json"
        )
    return known_ids


def _eos_of_config(path: Path, name: str) -> list[int]:
    """Returns the end-of-sequence ids in a config, or in the config of the language model inside it."""
    if not path.is_file():
        return []
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        value = config.get("eos_token_id")
        if value is None:
            value = (config.get("text_config") or {}).get("eos_token_id")
        values = value if isinstance(value, list) else [value]  # one id, or a list of ids
        return [int(eos_id) for eos_id in values if eos_id is not None]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TokenizerMissing(
            f"{path.name} of {name} is no JSON object with token ids in eos_token_id: {error}"
        ) from error


def _end_of_templates_turn(tokenizer: Tokenizer) -> int | None:
    """Returns the first added token that the chat template writes after an answer. None if it writes none."""
    if not tokenizer.has_chat_template:
        return None
    answer = "answer"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}]
    if tokenizer.images is not None:
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
    try:
        text = tokenizer.apply_chat_template(messages, generation_prompt=False)
    except TemplateRefused:
        return None  # the first conversation that is rendered gets this error, with its own roles
    _, _, after_answer = text.rpartition(answer)
    added_ids = {*tokenizer._tokenizer.added_tokens_decoder, *tokenizer._tokenizer.all_special_ids}
    return next((token_id for token_id in tokenizer.encode(after_answer) if token_id in added_ids), None)
