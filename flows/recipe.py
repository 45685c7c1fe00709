"""Recipes of one's own: a typed async function becomes a flow.

    class Config(InputConfig):
        model: Model
        prompts: Dataset[dataset_kinds.Prompt]
        steps: int = 100

    @recipe_main
    async def mine(config: Config, ctx: RecipeContext) -> str: ...

The config's fields are the form; `ctx` is the run (flows.runs.recipe_context). Graders set up in the function work on
the run's engine and store.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

from prefect import Flow, flow
from pydantic import GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticSerializationError

from engine.specs.engine import EngineSpec, LocalEngineSpec
from flows.configs.common import StorageConfig
from flows.ops.attempts import check_attempts
from flows.ops.deployment_settings import with_deployment_settings
from flows.ops.hooks import ON_END
from flows.ops.run_keys import current_run_key
from flows.ops.termination import reraise_termination
from flows.runs.recipe_context import RecipeContext
from flows.runs.session import read_result, release_run, write_result
from storage.serialization import Frozen, canonical_json
from tasks.graders.running.workspace import grading_in

__all__ = ["InputConfig", "RecipeContext", "recipe_main"]


class InputConfig(Frozen):
    """What every recipe's config has; subclass it and add what yours takes."""

    run: str = ""
    """The run's key: the same key resumes the run. Empty: made from the flow run's id."""
    seed: int = 0
    """Of everything that is drawn."""
    engine: EngineSpec = LocalEngineSpec()
    """Who trains and samples: this process, or a server. In a deployment, the default stands for the deployment's."""
    storage: StorageConfig = StorageConfig()

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """A recipe's own fields come first in a form."""
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        schema = handler.resolve_ref_schema(reference)
        fields = schema.get("properties", {})
        own = [name for name in fields if name not in InputConfig.model_fields]
        schema["properties"] = {name: fields[name] for name in [*own, *(n for n in fields if n not in own)]}
        return reference

    def semantic(self) -> dict[str, Any]:
        """What decides the result: all that the recipe added, and the seed."""
        body = self.model_dump(mode="json", exclude={"run", "engine", "storage"})
        for name, value in self:
            if isinstance(value, set | frozenset):  # has another order in every process
                body[name] = sorted(body[name], key=canonical_json)
        return body


Recipe = Callable[..., Awaitable[Any]]


def recipe_main(function: Recipe) -> Flow[..., Any]:
    """The flow of an async function that takes an InputConfig and, if it likes, a RecipeContext, told by annotation.

    Same key, finished: what it returned is returned as it was. It returns what JSON can say. Raises TypeError for a
    function that takes anything else.
    """
    config_name, config_type, ctx_name = _parameters(function)
    name = function.__name__

    async def run(config: InputConfig) -> Any:
        with reraise_termination():
            config = with_deployment_settings(config)
            key = config.run or current_run_key(name)
            check_attempts(key)
            semantic, store = {"config": config.semantic()}, config.storage.url
            ctx = RecipeContext.open(key, store=store, seed=config.seed, engine=config.engine, semantic=semantic)
            try:
                known = read_result(ctx.workspace)
                if known is not None:
                    return known["returned"]
                with grading_in(ctx):
                    returned = await function(**{config_name: config} | ({ctx_name: ctx} if ctx_name else {}))
                return write_result(ctx.workspace, {"run": key, "returned": _as_json(name, returned)})["returned"]
            finally:
                await release_run(ctx.workspace)

    run.__name__, run.__qualname__, run.__module__ = name, function.__qualname__, function.__module__
    run.__doc__ = function.__doc__
    run.__annotations__ = {"config": config_type, "return": Any}
    return flow(name=name, **ON_END)(run)


def _parameters(function: Recipe) -> tuple[str, type[InputConfig], str | None]:
    """(name and type of the config's parameter, name of the context's)."""
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{function!r} is no async function; write `async def` before a recipe")
    hints = get_type_hints(function)
    config: tuple[str, type[InputConfig]] | None = None
    ctx = None
    for name in inspect.signature(function).parameters:
        hint = hints.get(name)
        if inspect.isclass(hint) and issubclass(hint, InputConfig) and config is None:
            config = name, hint
        elif inspect.isclass(hint) and issubclass(hint, RecipeContext) and ctx is None:
            ctx = name
        else:
            raise TypeError(
                f"{function.__name__}({name}: {hint}): a recipe takes one config, annotated with a subclass of "
                "InputConfig, and one RecipeContext"
            )
    if config is None:
        raise TypeError(f"{function.__name__} takes no config; annotate a parameter with a subclass of InputConfig")
    return *config, ctx


def _as_json(name: str, returned: Any) -> Any:
    try:
        return TypeAdapter(Any).dump_python(returned, mode="json")
    except PydanticSerializationError as error:
        raise TypeError(f"the recipe {name} returned {returned!r:.80}; return what JSON can say: {error}") from error
