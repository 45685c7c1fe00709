"""The models that judge: what a judge needs of one, how one is spawned by name, and answers in JSON."""

from __future__ import annotations

import inspect
import logging
from functools import lru_cache
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from pydantic import BaseModel

from engine.errors import EngineError, SampleTooLong
from engine.handles import InferenceModel, Model, OpenAIModel
from engine.models.served_policy import served_policy
from engine.protocol import SamplingParams
from engine.text.answers import MalformedAnswer, parse_answer
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.workspace import Workspace, derive_seed
from tasks.graders.base import GraderError, IgnoreGradeException

logger = logging.getLogger("ostinato.graders")

Answer = TypeVar("Answer", bound=BaseModel)

ENDPOINT = "openai://"
"""How the key of a model behind an OpenAI-compatible endpoint begins."""


@runtime_checkable
class JudgeModel(Protocol):
    """A model that answers. `InferenceModel` and `TrainingModel` are; so is anything with these three."""

    def temperature(self, value: float) -> Self: ...

    def seed(self, value: int) -> Self: ...

    async def generate(self, thread: StringThread) -> StringThread: ...


@runtime_checkable
class ScoringText(Protocol):
    """A model that says how probable a given text is."""

    async def logprobs(self, thread: StringThread) -> float: ...


class UnusableAnswer(IgnoreGradeException):
    """The judge's answer was not what was asked for, nor was the repaired one."""


async def spawn_judge(key: str, workspace: Workspace, *, max_new_tokens: int) -> JudgeModel:
    """A frozen model by registry key, local folder, or `openai://…`.

    A registered model is read at the chain under which it is served to clients, so that all graders, runs and clients
    that name it share one copy of its weights, and none of the run's own chains is touched.
    """
    if key.startswith(ENDPOINT):
        ctx = _Context(workspace)
        builder = await Model(key).to_builder(ctx, tokens_to_generate=max_new_tokens)
        return await builder.spawn_inference("judge")
    engine, store = workspace.connect(), workspace.open_store()
    base = await engine.import_model(key, provenance=workspace.provenance)
    spec = served_policy(base)
    policy = await engine.create_policy(spec)
    served = workspace.model_copy(update={"run": spec.run, "epoch": 0})
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    return InferenceModel(served, policy.model, renderer_of(store, base), sampling, base, policy)


class _Context:
    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace


def seeded(model: JudgeModel, thread: StringThread) -> JudgeModel:
    """A view whose draws follow from what it is asked, so that a retry is answered alike."""
    return model.seed(derive_seed(0, "judge", thread.to_json()))


async def ask(model: JudgeModel, thread: StringThread, schema: type[Answer]) -> tuple[Answer, bool]:
    """The model's answer as `schema`, and whether it had to be repaired: it is constrained where the model can
    (`generate(thread, schema)`), else parsed out of its text; one that does not fit is shown to the model once.

    Raises UnusableAnswer, and the engine's own errors.
    """
    try:
        return await _answer(model, thread, schema), False
    except MalformedAnswer as first:
        again = thread.assistant(first.text or "(no answer)").user(
            f"That answer cannot be used: {first}. Answer again, with one JSON object and nothing else."
        )
    try:
        return await _answer(model, again, schema), True
    except MalformedAnswer as second:
        raise UnusableAnswer(f"the judge gave no usable {schema.__name__}, even shown its error: {second}") from second
    except SampleTooLong as second:
        raise UnusableAnswer(
            f"the judge gave no usable {schema.__name__}, and its context has no room to show it its error: {second}"
        ) from second


async def _answer(model: JudgeModel, thread: StringThread, schema: type[Answer]) -> Answer:
    view = seeded(model, thread)
    if isinstance(view, InferenceModel):
        view = _fitted(view, thread)
    if isinstance(view, InferenceModel | OpenAIModel):  # one try: `ask` shows what was wrong, and counts it
        return await view.answer(thread, schema)
    given: Any
    if len(inspect.signature(view.generate).parameters) > 1:
        constrained: Any = view.generate
        try:
            given = await constrained(thread, schema)
        except EngineError:
            raise
        except ValueError as error:  # cut short, or not what the schema says
            raise MalformedAnswer("", str(error)) from error
    else:
        given = await view.generate(thread)
    if isinstance(given, schema):
        return given
    return parse_answer(given.last_content(), schema)


def _fitted(judge: InferenceModel, thread: StringThread) -> InferenceModel:
    """The judge with as much room for its answer as its context has after the question."""
    fitted = judge.fitted(thread)
    if fitted.sampling != judge.sampling:
        _say_fitted(judge.name, judge.sampling.max_new_tokens)
    return fitted


@lru_cache(maxsize=64)
def _say_fitted(name: str, max_new_tokens: int) -> None:
    """Once in a process: a judge is asked thousands of times."""
    logger.warning(
        "the judge %r was given %d tokens for its answer, and its context has no room for them after the question: "
        "longer answers are cut at its context. Set max_gen_len or tokens_to_generate of the judge",
        name, max_new_tokens,
    )  # fmt: skip


def handle_of(model: JudgeModel | str, key: str) -> JudgeModel:
    """The model itself; GraderError for one that is only named as yet."""
    if isinstance(model, str):
        raise GraderError(f"grader {key!r}: its model {model!r} is not spawned; await setup() before the first grade")
    return model
