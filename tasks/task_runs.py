"""Turns a function into a Prefect task, with retries, a tag, and edges in the graph of the flow run.

Prefect draws an edge from task A to task B when an argument of B contains an object that A returned, and it looks into
fields. It recognises objects by their address. Refs share strings such as "policy", and an address is used again after
its object is gone, so Prefect would draw edges between tasks that have nothing to do with each other. Its API also
lists an edge once per parameter of the two tasks. Therefore Prefect sees neither arguments nor results here. Each task
gets one parameter: a list of its `_Call` and the `_Result` objects of the tasks whose artifacts it reads.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.runtime import flow_run
from prefect.tasks import Task, exponential_backoff
from pydantic import BaseModel

from engine.errors import TransientEngineError
from storage.chain.records import PolicyRef
from storage.errors import TransientStorageError
from storage.store.artifacts import ArtifactRef

TRANSIENT = (TransientEngineError, TransientStorageError, ConnectionError, TimeoutError)


def is_transient(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether the task failed with an error that a retry may not meet again. Other errors fail the run at once."""
    result = state.data if isinstance(state.data, BaseException) else None
    return isinstance(result, TRANSIENT)


DURABLE: dict[str, Any] = {
    "retries": 4,
    "retry_delay_seconds": exponential_backoff(1),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": is_transient,
    # A task looks for its committed artifact itself. Prefect's cache could return a ref that the store no longer has.
    "cache_policy": NO_CACHE,
    "persist_result": False,
}
"""Options of every task of a run."""


P = ParamSpec("P")
R = TypeVar("R")

MAX_REFS = 2_000
"""Most refs whose task run is remembered. The ref that was not used for the longest time is forgotten first, and a task
that reads it later has no edge to the task that returned it."""


class _Result:
    """The value that a task run returned, until the caller has it, and the results that the run read (`inputs`).

    A plain class: Prefect looks into collections, dataclasses and models only."""

    _ids = count()

    def __init__(self, value: Any, inputs: list[_Result]) -> None:
        self.value, self.id = value, next(self._ids)
        origins: set[int] = set()
        for result in inputs:
            # A result without origins is one itself.
            origins |= result.origins or {result.id}
        self.origins: frozenset[int] = frozenset(origins)
        """Ids of the tasks that precede this one and read nothing from other tasks, such as loading a dataset."""
        self.predecessors = self.origins | {result.id for result in inputs}
        """Ids of the tasks that are known to precede this one: the origins, and those whose results it read itself."""


class _Call:
    """A function with its arguments, and the name and tag that Prefect shows. A plain class, as `_Result`."""

    def __init__(self, run_function: Callable[[], Any], kind: str, name: str, after: list[_Result]) -> None:
        self.run_function, self.kind, self.name, self.after = run_function, kind, name, after

    def add_tag(self) -> None:
        """Tags the task run that executes this call.

        Not by Prefect's option `tags`: before every run of a tagged task Prefect asks the server for a concurrency
        limit of that name. That costs a request, and the task fails while the server is away.
        """
        context = TaskRunContext.get()
        if context is not None and self.kind not in context.task_run.tags:
            context.task_run.tags.append(self.kind)


_results: OrderedDict[tuple[str, str], _Result] = OrderedDict()
"""(id of the flow run, uri of a ref) -> the result of the task run that returned the ref."""


def durable_task(kind: str, name: str, **options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Turns a plain or async function into a Prefect task. `DURABLE` sets its retries, and `kind` is its tag.

    `name` is the name of its task runs, a format string over the arguments. Its `{step}` counts from 1, while the
    argument `step` counts from 0. `options` replace those of DURABLE.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        def task_inputs(args: Any, kwargs: Any) -> list[Any]:
            """The only argument of the Prefect task. Prefect draws edges from the results in it."""
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            after = _results_read_by(bound.arguments)
            call = _Call(lambda: function(*args, **kwargs), kind, _run_name(name, bound.arguments), after)
            return [call, *_without_earlier(after)]

        # The two variants differ only in `async` and `await`.
        if inspect.iscoroutinefunction(function):

            async def run_async(inputs: list[Any]) -> _Result:
                call: _Call = inputs[0]
                call.add_tag()
                return _Result(await call.run_function(), call.after)

            prefect_task = _as_task(run_async, function, options)

            @functools.wraps(function)
            async def called_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                return _remember_refs(await prefect_task(task_inputs(args, kwargs)))

            return called_async  # type: ignore[return-value]

        def run(inputs: list[Any]) -> _Result:
            call: _Call = inputs[0]
            call.add_tag()
            return _Result(call.run_function(), call.after)

        prefect_task = _as_task(run, function, options)

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            return _remember_refs(prefect_task(task_inputs(args, kwargs)))  # type: ignore[no-any-return]

        return called

    return decorate


def work_of(durable: Callable[P, R]) -> Callable[P, R]:
    """The function that a durable task runs, for callers that want no task run of it, such as benchmarks."""
    return durable.__wrapped__  # type: ignore[attr-defined, no-any-return]


def link_stage_start(start: PolicyRef, earlier: PolicyRef) -> None:
    """Draws an edge from the task that returned `earlier` to each task that reads `start`. `start` is the first policy
    of a stage, and was made from `earlier`, a policy of an earlier stage."""
    result = _results.get((_flow_run_id(), earlier.uri))
    if result is not None:
        _remember(start, result)


def _run_name(name: str, arguments: Mapping[str, Any]) -> str:
    """The name that Prefect shows for a task run. People count steps from 1."""
    if "step" in arguments:
        arguments = {**arguments, "step": arguments["step"] + 1}
    return name.format(**arguments)


def _as_task(run: Callable[[list[Any]], Any], function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """`run` as a task that has the name and the description of `function`."""
    # Not `functools.wraps`: it would also copy the signature, and Prefect would look for those parameters.
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(run, attribute, getattr(function, attribute))
    return task(**DURABLE | options, task_run_name="{inputs[0].name}")(run)


def _remember_refs(result: _Result) -> Any:
    """Remembers that each ref in the value of the result comes from this result. Returns the value."""
    # The result is remembered for its edges only, and thousands of values would take tens of MB.
    value, result.value = result.value, None
    for ref in _refs(value):
        _remember(ref, result)
    return value


def _remember(ref: ArtifactRef | PolicyRef, result: _Result) -> None:
    key = (_flow_run_id(), ref.uri)
    _results[key] = result
    # Otherwise an overwritten ref keeps its old place and is forgotten too early.
    _results.move_to_end(key)
    # A worker process runs many flow runs, so the memory must be bounded.
    while len(_results) > MAX_REFS:
        _results.popitem(last=False)


def _results_read_by(arguments: Any) -> list[_Result]:
    """The results of this flow run whose refs the arguments contain, each once."""
    results: dict[int, _Result] = {}
    for ref in _refs(arguments):
        key = (_flow_run_id(), ref.uri)
        result = _results.get(key)
        if result is not None:
            # The least recently used refs are forgotten first.
            _results.move_to_end(key)
            results[result.id] = result
    return list(results.values())


def _without_earlier(results: list[_Result]) -> list[_Result]:
    """Removes each result that precedes another result in the list: it needs no edge of its own."""
    earlier: set[int] = set()
    for result in results:
        earlier |= result.predecessors
    return [result for result in results if result.id not in earlier]


def _refs(value: Any) -> Iterator[ArtifactRef | PolicyRef]:
    """All refs in a value, also in pydantic models, mappings, lists and tuples."""
    if isinstance(value, ArtifactRef | PolicyRef):
        yield value
    elif isinstance(value, BaseModel):
        yield from _refs(dict(value))
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _refs(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _refs(part)


def _flow_run_id() -> str:
    """The id of the flow run; "" outside of one."""
    return str(flow_run.id or "")
