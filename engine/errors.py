"""The errors of the engine, split by the one question a task asks: may I retry?

EngineError
  TransientEngineError      the same call may succeed later
    EngineUnreachable         no answer
    EngineBusy                no room or no turn now
    WorkerDied                a process of the engine ended during the call
    SamplerOutOfSync          a sampler does not hold the trainer's weights; it is synced anew
  PermanentEngineError      it never will
    StepConflict              another request was committed for this step
    Fenced                    a newer epoch acts for this run
    UnknownPolicy             no chain, or no such step in it
    SampleTooLong             a sequence does not fit one packed forward, or the model's context
    BadSpec                   a request contradicts itself or names what does not exist
    BadModelFolder            not a loadable, safe Hugging Face folder
    NonFiniteGradient         NaN or Inf in the gradient of a batch
    ReplayDiverged            a redo did not reproduce the committed weights
    OutOfMemory               the device cannot hold even half a micro-batch
    NotAuthenticated          a service that wants a token got none, or another
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class TransientEngineError(EngineError):
    """The same call may succeed later."""


class EngineUnreachable(TransientEngineError):
    """The engine did not answer."""


class EngineBusy(TransientEngineError):
    """The engine has no room or no turn for this call now."""


class WorkerDied(TransientEngineError):
    """A process of the engine ended during the call."""


class SamplerOutOfSync(TransientEngineError):
    """A sampler does not hold the trainer's weights, or no longer: nothing that it drew was kept."""


class PermanentEngineError(EngineError):
    """The same call will never succeed."""


class StepConflict(PermanentEngineError):
    """Another request was committed for this step."""


class Fenced(PermanentEngineError):
    """A newer epoch acts for this run."""


class UnknownPolicy(PermanentEngineError):
    """There is no such chain, or no such step in it."""


class SampleTooLong(PermanentEngineError, ValueError):
    """A sequence does not fit one packed forward, or the model's context."""


class BadSpec(PermanentEngineError, ValueError):
    """The request contradicts itself or names what does not exist."""


class BadModelFolder(PermanentEngineError, ValueError):
    """Not a loadable, safe Hugging Face model folder."""


class NonFiniteGradient(PermanentEngineError):
    """NaN or Inf in the gradient of a batch."""


class ReplayDiverged(PermanentEngineError):
    """A redo did not reproduce the committed weights."""


class OutOfMemory(PermanentEngineError):
    """The device cannot hold even half a micro-batch of this spec."""


class NotAuthenticated(PermanentEngineError):
    """The engine is a service that wants a token, and got none or another."""
