"""How a verb of a run becomes a task in Prefect: its retries, its tag, and its place in the graph of the flow run.

Prefect draws an edge from task A to task B when an argument of B contains an object that A returned, and it looks into
fields. It recognises objects by their address. Refs share strings such as "policy", and an address is used again after
its object is gone, so Prefect would draw edges between tasks that have nothing to do with each other. Its API also
lists an edge once per parameter of the two tasks. Therefore Prefect sees neither arguments nor results here. Each task
gets one parameter: the `_Result` objects of the tasks whose artifacts it reads.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, ParamSpec, TypeVar

from prefect import task
from prefect.context import TaskRunContext
from prefect.runtime import flow_run
from pydantic import BaseModel

from storage.artifacts import ArtifactRef
from storage.chain import PolicyRef
from tasks.retries import DURABLE

P = ParamSpec("P")
R = TypeVar("R")

RESULTS_KEPT = 10_000
"""Refs whose task run is remembered. A ref that was not used for longer has no edges any more."""


class _Result:
    """The result of a task run. A plain class: Prefect looks into collections, dataclasses and models only."""

    _ids = count()

    def __init__(self, value: Any, after: list[_Result]) -> None:
        self.value, self.id = value, next(self._ids)
        self.origins: frozenset[int] = frozenset(
            origin for result in after for origin in (result.origins or {result.id})
        )
        """Tasks that read nothing of other tasks, such as loading a dataset, and precede this one."""
        self.before = self.origins | {result.id for result in after}


class _Call:
    """A verb with its arguments, and what Prefect shows of it. A plain class, as `_Result`."""

    def __init__(self, begin: Callable[[], Any], kind: str, name: str, after: list[_Result]) -> None:
        self.begin, self.kind, self.name, self.after = begin, kind, name, after

    def add_tag(self) -> None:
        """Tags the task run that executes this call.

        Not by Prefect's option `tags`: before every run of a tagged task Prefect asks the server for a concurrency
        limit of that name. That costs a request, and the task fails while the server is away.
        """
        context = TaskRunContext.get()
        if context is not None and self.kind not in context.task_run.tags:
            context.task_run.tags.append(self.kind)


_results: OrderedDict[tuple[str, str], _Result] = OrderedDict()
"""(flow run, uri of a ref) -> the task run that returned the ref."""


def durable_task(kind: str, name: str, **options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function, plain or async, a Prefect task that is retried as `DURABLE` says and tagged with `kind`.

    `name` is the name of its task runs, a format string over the arguments. `options` replace those of DURABLE.
    """

    def decorate(verb: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(verb)

        def call_of(args: Any, kwargs: Any) -> list[Any]:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            after = _makers(bound.arguments)
            call = _Call(lambda: verb(*args, **kwargs), kind, name.format(**bound.arguments), after)
            return [call, *_last(after)]

        if inspect.iscoroutinefunction(verb):

            async def run_async(inputs: list[Any]) -> _Result:
                call: _Call = inputs[0]
                call.add_tag()
                return _Result(await call.begin(), call.after)

            begin_async = _as_task(run_async, verb, options)

            @functools.wraps(verb)
            async def called_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                return _remembered(await begin_async(call_of(args, kwargs)))

            return called_async  # type: ignore[return-value]

        def run(inputs: list[Any]) -> _Result:
            call: _Call = inputs[0]
            call.add_tag()
            return _Result(call.begin(), call.after)

        begin = _as_task(run, verb, options)

        @functools.wraps(verb)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            return _remembered(begin(call_of(args, kwargs)))  # type: ignore[no-any-return]

        return called

    return decorate


def continues(policy: PolicyRef, earlier: PolicyRef) -> None:
    """Places `policy`, the start of a stage, in the graph where the last policy of an earlier stage is."""
    result = _results.get((_flow_run(), earlier.uri))
    if result is not None:
        _remember(policy, result)


def _as_task(run: Callable[[list[Any]], Any], verb: Callable[..., Any], options: dict[str, Any]) -> Any:
    """`run` as a task that has the name and the description of `verb`."""
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(run, attribute, getattr(verb, attribute))
    return task(**DURABLE | options, task_run_name="{inputs[0].name}")(run)


def _remembered(result: _Result) -> Any:
    """The value of the result, whose refs lead to it from now on."""
    for ref in _refs(result.value):
        _remember(ref, result)
    return result.value


def _remember(ref: ArtifactRef | PolicyRef, result: _Result) -> None:
    _results[_flow_run(), ref.uri] = result
    while len(_results) > RESULTS_KEPT:
        _results.popitem(last=False)


def _makers(arguments: Any) -> list[_Result]:
    """The results of this flow run that the arguments contain refs of, each once."""
    makers: dict[int, _Result] = {}
    for ref in _refs(arguments):
        place = (_flow_run(), ref.uri)
        result = _results.get(place)
        if result is not None:
            _results.move_to_end(place)
            makers[result.id] = result
    return list(makers.values())


def _last(results: list[_Result]) -> list[_Result]:
    """Those of the results that no other one of them comes after: the edges that say it all."""
    return [result for result in results if not any(result.id in other.before for other in results)]


def _refs(value: Any) -> Iterator[ArtifactRef | PolicyRef]:
    """All refs in a value, in fields and collections too."""
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


def _flow_run() -> str:
    """The id of the flow run; "" outside of one."""
    return str(flow_run.id or "")
