"""The decorator of every flow. If the config is invalid, or an error explains itself, the flow run fails with only that
message as its state.

Plain Prefect puts its own words before the message and a traceback into the log, and does not log the message of an
invalid config.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from prefect.flows import Flow
from prefect.logging.loggers import get_run_logger
from prefect.states import Failed
from prefect.utilities.hashing import file_hash
from pydantic import BaseModel, ValidationError

from flows.configs.overrides import WHOLE, ConfigError, validation_lines
from flows.ops.attempts import TooManyAttempts
from flows.ops.hooks import ON_END
from flows.runs.expected_errors import EXPECTED_ERRORS
from flows.runs.program import print_expected_errors, with_log_file, with_server

Config = TypeVar("Config")
R = TypeVar("R")
Function = Callable[[Config], Coroutine[Any, Any, R]]


class InvalidConfig:
    """Takes the place of an invalid config, until the flow run has begun and can fail with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattr__(self, name: str) -> str:
        # the name of the flow run is made of fields of the config; copy and pickle look for methods
        if name.startswith("__"):
            raise AttributeError(name)
        return "(config refused)"


class CheckedFlow(Flow[[Config], Coroutine[Any, Any, R]]):
    """A flow with one parameter, `config`, whose errors name the field."""

    @property
    def is_of_program(self) -> bool:
        """Whether the flow is defined in the program that this process runs."""
        return self.fn.__module__ == "__main__"

    if not TYPE_CHECKING:  # the types of the call are those of Flow

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            call = super().__call__(*args, **kwargs)
            return with_server(with_log_file(call, self.name) if self.is_of_program else call)

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        config_type: type[BaseModel] = get_type_hints(self.fn)["config"]
        config = parameters.get("config")
        if not isinstance(config, config_type):
            try:
                config = config_type.model_validate(config)
            except ValidationError as error:
                lines = validation_lines(error, config_type, config, remedy="give it")
                reasons = [line.removeprefix(f"{WHOLE}: ") for line in lines]
                return {"config": InvalidConfig("the config does not fit: " + "\n".join(reasons))}
        return super().validate_parameters(parameters | {"config": config})


def checked_flow(
    *, name: str, flow_run_name: str | Callable[[], str] | None = None
) -> Callable[[Function[Config, R]], CheckedFlow[Config, R]]:
    """Makes a flow of an async function with one parameter, `config`, a pydantic model.

    A caller of the flow gets the error itself, as from any other flow.
    """

    def decorate(function: Function[Config, R]) -> CheckedFlow[Config, R]:
        async def run(config: Any) -> Any:
            try:
                if isinstance(config, InvalidConfig):
                    raise ConfigError(config.reason)
                return await function(config)
            except (*EXPECTED_ERRORS, TooManyAttempts) as error:
                logger = get_run_logger()
                logger.error(str(error))
                logger.debug("the error in full", exc_info=error)
                return Failed(message=str(error), data=error)

        # Prefect shows the name, the docstring and the parameter of the function, and takes the version from its file
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(run, attribute, getattr(function, attribute))
        run.__annotations__ = get_type_hints(function)
        source = inspect.getsourcefile(function)
        version = file_hash(source) if source else None
        flow = CheckedFlow(run, name=name, flow_run_name=flow_run_name, version=version, **ON_END)
        if flow.is_of_program:
            print_expected_errors()
        return flow

    return decorate
