"""The errors of conversations and tokenizers. All are permanent, and all are also a ValueError.

TextError
  ThreadError               a conversation is malformed: unknown role, wrong content, bad weights
  TokenizerMissing          the folder holds no tokenizer that can be loaded
  ChatTemplateMissing       the tokenizer has no chat template
  TemplateRefused           the chat template raised an error on these messages
  TemplateNotPrefixStable   the text of a longer conversation does not begin with that of a shorter one, so that the
                            tokens of a single turn cannot be told
  UnsupportedFragment       this model, or this part of the engine, cannot take the content
"""

from __future__ import annotations

from engine.errors import PermanentEngineError


class TextError(PermanentEngineError, ValueError):
    """Base class of the errors of conversations and tokenizers."""


class ThreadError(TextError):
    """The conversation is malformed, or does not suit the call."""


class TokenizerMissing(TextError):
    """The folder holds no tokenizer that can be loaded."""


class ChatTemplateMissing(TextError):
    """The tokenizer has no chat template."""


class TemplateRefused(TextError):
    """The chat template raised an error on these messages."""


class TemplateNotPrefixStable(TextError):
    """The text of a longer conversation does not begin with the text of a shorter one."""


class UnsupportedFragment(TextError):
    """This model, or this part of the engine, cannot take the content."""
