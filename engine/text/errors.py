"""The errors of text: all permanent, all ValueError.

TextError
  ThreadError               a conversation that is not one: unknown role, wrong content, bad weights
  TokenizerMissing          the folder holds no tokenizer that can be loaded
  ChatTemplateMissing       the tokenizer has no chat template
  TemplateRefused           the chat template raised on these messages
  TemplateNotPrefixStable   a longer conversation rewrites what a shorter one wrote, so no turn has tokens of its own
  UnsupportedFragment       content that this model, or this part of the engine, cannot take
"""

from __future__ import annotations

from engine.errors import PermanentEngineError


class TextError(PermanentEngineError, ValueError):
    """Base of every error about text."""


class ThreadError(TextError):
    """Not a conversation, or not one that fits the call."""


class TokenizerMissing(TextError):
    """The folder holds no tokenizer that can be loaded."""


class ChatTemplateMissing(TextError):
    """The tokenizer has no chat template."""


class TemplateRefused(TextError):
    """The chat template raised on these messages."""


class TemplateNotPrefixStable(TextError):
    """The rendering of a longer conversation does not begin with that of a shorter one."""


class UnsupportedFragment(TextError):
    """Content that this model, or this part of the engine, cannot take."""
