"""The errors of the engine. The two bases tell a task whether it may retry the call.

EngineError
  TransientEngineError      the same call may succeed later
    EngineUnreachable         the engine did not answer
    EngineBusy                the engine has no free memory or no turn for the call now
    WorkerDied                a process of the engine ended during the call
    SamplerOutOfSync          a sampler does not hold the trainer's weights; the next call syncs it again
    CompletionDiverged        a completion was sampled a second time, with other tokens than were already delivered
  PermanentEngineError      the same call will never succeed
    StepConflict              a different request was committed for this step
    Fenced                    a newer epoch of the lease is in use for this run
    UnknownPolicy             the chain does not exist, or it does not have this step
    SampleTooLong             a sequence is longer than one packed forward pass, or than the model's context
    BadSpec                   a request contradicts itself or names something that does not exist
      UnsupportedSchema         a sampler cannot constrain completions to this JSON schema
    BadModelFolder            the folder is not a loadable and safe Hugging Face model folder
    NonFiniteGradient         the gradient of a batch holds NaN or infinity
    ReplayDiverged            redoing a step did not reproduce the committed weights
    OutOfMemory               the device cannot hold even half a micro-batch
    NotAuthenticated          the service requires a token, and the token is missing or wrong
    TextError                 an error of conversations and tokenizers; all of them are a ValueError, too
      ThreadError               a conversation is malformed: unknown role, wrong content, bad weights
      TokenizerMissing          the folder holds no tokenizer that can be loaded
      ChatTemplateMissing       the tokenizer has no chat template
      TemplateRefused           the chat template raised an error on these messages
      TemplateNotPrefixStable   the text of a longer conversation does not begin with that of a shorter one, so that the
                                tokens of a single turn cannot be told
      UnsupportedFragment       this model, or this part of the engine, cannot take the content
"""

from __future__ import annotations


class EngineError(Exception):
    """Base class of all errors that the engine raises on purpose."""


class TransientEngineError(EngineError):
    """Base class of errors after which the same call may succeed later."""


class EngineUnreachable(TransientEngineError):
    """Raised when the engine did not answer."""


class EngineBusy(TransientEngineError):
    """Raised when the engine has no free memory or no turn for this call now."""


class WorkerDied(TransientEngineError):
    """Raised when a process of the engine ended during the call."""


class SamplerOutOfSync(TransientEngineError):
    """Raised when a sampler does not hold the trainer's weights. Nothing that it sampled was kept."""


class CompletionDiverged(TransientEngineError):
    """Raised when a completion was sampled a second time, after a failure, and its tokens differ from those that were
    already delivered. A new call starts from the first token again."""


class PermanentEngineError(EngineError):
    """Base class of errors after which the same call will never succeed."""


class StepConflict(PermanentEngineError):
    """Raised when a different request was committed for this step."""


class Fenced(PermanentEngineError):
    """Raised when a newer epoch of the lease is in use for this run."""


class UnknownPolicy(PermanentEngineError):
    """Raised when the chain does not exist, or does not have this step."""


class SampleTooLong(PermanentEngineError, ValueError):
    """Raised when a sequence is longer than one packed forward pass, or than the model's context."""


class BadSpec(PermanentEngineError, ValueError):
    """Raised when a request contradicts itself or names something that does not exist."""


class UnsupportedSchema(BadSpec):
    """Raised when a sampler cannot constrain completions to the JSON schema of a request."""


class BadModelFolder(PermanentEngineError, ValueError):
    """Raised when a folder is not a loadable and safe Hugging Face model folder."""


class NonFiniteGradient(PermanentEngineError):
    """Raised when the gradient of a batch holds NaN or infinity."""


class ReplayDiverged(PermanentEngineError):
    """Raised when redoing a step did not reproduce the committed weights."""


class OutOfMemory(PermanentEngineError):
    """Raised when the device cannot hold even half a micro-batch."""


class NotAuthenticated(PermanentEngineError):
    """Raised when the service requires a token, and the token is missing or wrong."""


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
