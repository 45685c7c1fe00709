"""The models behind judges: the interface that a judge needs, spawning a model by its key, and answers in JSON."""

from __future__ import annotations

import inspect
import logging
from functools import lru_cache
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from pydantic import BaseModel

from engine.errors import EngineError, SampleTooLong
from engine.handles import InferenceModel, Model, OpenAIModel
from engine.protocol import SamplingParams
from engine.text.answers import MalformedAnswer, answer_in_prose, parse_answer
from engine.text.stored_models import renderer_of, served_policy
from engine.text.threads import StringThread
from engine.workspace import Workspace, derive_seed
from tasks.graders.base import GraderError, IgnoreGradeException
from tasks.graders.setting import WorkspaceContext

logger = logging.getLogger("ostinato.graders")

Answer = TypeVar("Answer", bound=BaseModel)

ENDPOINT = "openai://"
"""Prefix of the key of a model behind an OpenAI-compatible endpoint."""


@runtime_checkable
class JudgeModel(Protocol):
    """A model that answers a thread: `InferenceModel`, `TrainingModel`, or any object with these methods."""

    def temperature(self, value: float) -> Self: ...

    def seed(self, value: int) -> Self: ...

    async def generate(self, thread: StringThread) -> StringThread: ...


@runtime_checkable
class ScoringText(Protocol):
    """A model that computes the log-probability of a given text."""

    async def logprobs(self, thread: StringThread) -> float: ...


class UnusableAnswer(IgnoreGradeException):
    """Neither the judge's first answer nor its repaired answer has the requested form."""


async def spawn_judge(key: str, workspace: Workspace, *, max_new_tokens: int) -> JudgeModel:
    """Spawn a frozen model, given by registry key, local folder, name on the hub, or `openai://…`.

    A registered model is read through the chain under which it is served to clients. All graders, runs and clients that
    name it thus share one copy of its weights, and the chains of the run are not touched.
    """
    # A model behind an endpoint needs no engine.
    if key.startswith(ENDPOINT):
        builder = await Model(key).to_builder(WorkspaceContext(workspace), tokens_to_generate=max_new_tokens)
        return await builder.spawn_inference("judge")

    # Any other model is imported, and read as it is served to clients.
    engine, store = workspace.connect(), workspace.open_store()
    base = await engine.import_model(workspace.pinned_model(key), provenance=workspace.provenance)
    spec = served_policy(base)
    policy = await engine.create_policy(spec)
    served = workspace.model_copy(update={"run": spec.run, "epoch": 0})
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    return InferenceModel(served, policy.model, renderer_of(store, base), sampling, base, policy)


def seeded(model: JudgeModel, thread: StringThread) -> JudgeModel:
    """A view of the model whose seed is derived from the question, so that a retry gets the same answer."""
    return model.seed(derive_seed(0, "judge", thread.to_json()))


async def ask(
    model: JudgeModel, thread: StringThread, schema: type[Answer], *, lenient: bool = False
) -> tuple[Answer, bool]:
    """Ask the model for an answer in the form of `schema`. Returns the answer and whether it had to be repaired.

    A model that can (`generate(thread, schema)`) generates under the constraint of the schema; of others the answer is
    parsed from the text. With `lenient`, a number or a verdict in prose is an answer, too
    (engine.text.answers.answer_in_prose). An answer in another form is shown to the model once, with the error, to be
    repaired. Raises UnusableAnswer, and the errors of the engine.
    """
    # The first answer.
    try:
        return await _answer(model, thread, schema, lenient=lenient), False
    except MalformedAnswer as first:
        again = thread.assistant(first.text or "(no answer)").user(
            f"That answer cannot be used: {first}. Answer again, with one JSON object and nothing else."
        )

    # The repaired answer.
    try:
        return await _answer(model, again, schema, lenient=lenient), True
    except MalformedAnswer as second:
        raise UnusableAnswer(f"the judge gave no usable {schema.__name__}, even shown its error: {second}") from second
    except SampleTooLong as second:
        raise UnusableAnswer(
            f"the judge gave no usable {schema.__name__}, and its context has no room to show it its error: {second}"
        ) from second


async def _answer(model: JudgeModel, thread: StringThread, schema: type[Answer], *, lenient: bool) -> Answer:
    """Ask once. Raises MalformedAnswer."""
    try:
        return await _answer_in_json(model, thread, schema)
    except MalformedAnswer as error:
        if not lenient:
            raise
        try:
            return answer_in_prose(error.text, schema)
        except MalformedAnswer:
            raise error from None


async def _answer_in_json(model: JudgeModel, thread: StringThread, schema: type[Answer]) -> Answer:
    """Ask once for an answer in JSON. Raises MalformedAnswer."""
    view = seeded(model, thread)
    if isinstance(view, InferenceModel):
        view = _fitted(view, thread)
    # The project's own models answer in the form of a schema. `answer` tries once; `ask` repairs.
    if isinstance(view, InferenceModel | OpenAIModel):
        return await view.answer(thread, schema)

    # Another model may take the schema as a second argument of `generate`.
    reply: Any
    if len(inspect.signature(view.generate).parameters) > 1:
        constrained: Any = view.generate
        try:
            reply = await constrained(thread, schema)
        except EngineError:
            raise
        except ValueError as error:  # the answer was cut short, or does not fit the schema
            raise MalformedAnswer("", str(error)) from error
    else:
        reply = await view.generate(thread)
    if isinstance(reply, schema):
        return reply
    return parse_answer(reply.last_content(), schema)


def _fitted(judge: InferenceModel, thread: StringThread) -> InferenceModel:
    """A view of the judge whose answer is limited to the room that its context has after the question."""
    fitted = judge.fitted(thread)
    if fitted.sampling != judge.sampling:
        _warn_of_cut_answers(judge.name, judge.sampling.max_new_tokens)
    return fitted


@lru_cache(maxsize=64)
def _warn_of_cut_answers(name: str, max_new_tokens: int) -> None:
    """Log a warning, once per process, since a judge is asked thousands of times."""
    logger.warning(
        "the judge %r may answer with %d tokens, and its context has no room for them after the question: longer "
        "answers are cut at the end of its context. Set max_gen_len or tokens_to_generate of the judge",
        name, max_new_tokens,
    )  # fmt: skip


def handle_of(model: JudgeModel | str, key: str) -> JudgeModel:
    """Return the model. Raises GraderError if it is still a key that `setup` has not spawned."""
    if isinstance(model, str):
        raise GraderError(f"grader {key!r}: its model {model!r} is not spawned; await setup() before the first grade")
    return model
