"""Custom recipes: makes a flow of a typed async function.

    class Config(InputConfig):
        model: Model
        prompts: Dataset[dataset_kinds.Prompt]
        steps: int = 100

    @recipe_main
    async def mine(config: Config, ctx: RecipeContext) -> str: ...

The fields of the config are the form in Prefect. `ctx` is the run (flows.runs.recipe_context). Graders that are set up
in the function use the run's engine and store.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, get_type_hints

from prefect import Flow
from prefect.runtime import flow_run
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from engine.specs.engine import EngineSpec, LocalEngineSpec
from flows.configs.common import StorageConfig
from flows.configs.forms import FormConfig
from flows.configs.overrides import ConfigError, describe_validation
from flows.display.terminal import TerminalProgress
from flows.ops.deployment_settings import with_deployment_settings
from flows.ops.run_names import current_run_key, title_unless_named
from flows.ops.termination import check_attempts, reraise_termination
from flows.runs.checked_flow import checked_flow
from flows.runs.input_checks import check_inputs, hub_commits
from flows.runs.recipe_context import RecipeContext
from flows.runs.session import announce_ranks, announce_stored_result, read_result, release_run
from flows.training.finish import finish_recipe
from storage.serialization import canonical_json
from storage.store.objects import open_store
from tasks.graders.setting import grading_in

__all__ = ["InputConfig", "RecipeContext", "recipe_main"]


class _RefusedByName(type(BaseModel)):  # type: ignore[misc]
    """Makes `Config(…)` raise ConfigError, whose message names the keys as the program wrote them."""

    def __call__(cls, **values: Any) -> Any:
        try:
            return super().__call__(**values)
        except ValidationError as error:
            raise ConfigError(describe_validation(error, cls, values, remedy="give it")) from None


class InputConfig(FormConfig, metaclass=_RefusedByName):
    """Fields that the config of every recipe has. Subclass it and add those of your recipe."""

    run: str = ""
    """Key of the run. The same key resumes the run. Empty: derived from the id of the flow run."""
    seed: int = 0
    """Seed of all random numbers."""
    engine: EngineSpec = LocalEngineSpec()
    """Engine that trains and samples: in this process, or a server. In a deployment, the default means the deployment's
    engine."""
    storage: StorageConfig = StorageConfig()

    def semantic(self) -> dict[str, Any]:
        """The part of the config that decides the result: the fields that the recipe added, and the seed."""
        body = self.model_dump(mode="json", exclude={"run", "engine", "storage"})
        for name, value in self:
            # sort: the order of a set differs between processes
            if isinstance(value, set | frozenset):
                body[name] = sorted(body[name], key=canonical_json)
        return body


Recipe = Callable[..., Awaitable[Any]]


def recipe_main(function: Recipe) -> Flow[..., Any]:
    """Makes a flow of an async function whose parameters are annotated: an InputConfig and, optionally, a
    RecipeContext.

    The function returns a value that JSON can represent. Under the key of a finished run, the flow returns that run's
    value without running the function. Raises TypeError for a function with other parameters.
    """
    config_name, config_type, ctx_name = _parameters(function)
    name = function.__name__

    async def run(config: InputConfig) -> Any:
        with reraise_termination() as ending:
            config = with_deployment_settings(config)
            key = config.run or current_run_key(name)
            check_attempts(key)
            semantic, store = {"config": config.semantic()}, config.storage.url
            hub = hub_commits(config, open_store(store), key)
            ctx = RecipeContext.open(
                key, store=store, seed=config.seed, engine=config.engine, semantic=semantic, hub=hub
            )
            ending.workspace = ctx.workspace
            try:
                # a finished run returns what it returned
                result = read_result(ctx.workspace)
                if result is not None:
                    announce_stored_result(ctx.workspace, TerminalProgress())
                    return result["returned"]
                check_inputs(config, ctx.workspace.open_store(), hub)
                announce_ranks(ctx.workspace, TerminalProgress())
                with grading_in(ctx):
                    returned = await function(**{config_name: config} | ({ctx_name: ctx} if ctx_name else {}))
                result = {"run": key, "returned": _as_json(name, returned)}
                return (await finish_recipe(ctx.workspace, result, TerminalProgress()))["returned"]
            finally:
                await release_run(ctx.workspace)

    # Prefect shows the name, the docstring and the parameters of the recipe
    run.__name__, run.__qualname__, run.__module__ = name, function.__qualname__, function.__module__
    run.__doc__ = function.__doc__
    run.__annotations__ = {"config": config_type, "return": Any}
    return checked_flow(name=name, flow_run_name=partial(_flow_run_name, name))(run)


def _flow_run_name(recipe: str) -> str:
    """Returns the name of the current flow run: the one that a person gave it, or else the key of the run."""
    config = flow_run.parameters["config"]
    return title_unless_named(flow_run.name or "", config.run or current_run_key(recipe))


def _parameters(function: Recipe) -> tuple[str, type[InputConfig], str | None]:
    """The name and the type of the config's parameter, and the name of the context's parameter, if any."""
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{function!r} is no async function; write 'async def' before a recipe")
    # annotations may be text, which get_type_hints evaluates
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
