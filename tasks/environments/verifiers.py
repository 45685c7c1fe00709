"""Environments of the `verifiers` library (0.1, with `load_environment` and MultiTurnEnv), played turn by turn.

The library's own loop calls a model over HTTP. Here the engine samples the policy, so this module calls the parts of
that loop: set-up, stop conditions, responses, clean-up and rubric. The rubric's reward is the grade of the last turn.
Group rewards, which need all rollouts at once, are refused by the rubric. The client in the state cannot be used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from engine.text.fragments import ToolResponseFragment
from engine.text.threads import StringThread
from engine.text.tool_calls import parse_tool_calls
from tasks.environments.base import Environment, EnvironmentFactory, Grades, Limit, Reaction
from tasks.environments.spec import EnvironmentSpecError
from tasks.environments.tools import listed_tools
from tasks.graders.base import Grade

COLUMNS = ("answer", "info", "task", "example_id")
"""Columns of a dataset row that are stored in the metadata of its thread."""


class VerifiersMissing(EnvironmentSpecError):
    """The library is not installed, or its version is not supported."""


def _library() -> Any:
    try:
        import verifiers
        from verifiers import types
    except ImportError as error:
        raise VerifiersMissing(
            f"environments of verifiers need the library, which is not usable here ({error}): pip install "
            "'verifiers>=0.1.12,<0.2'"
        ) from error
    if not hasattr(verifiers, "load_environment") or not hasattr(types, "ClientConfig"):
        raise VerifiersMissing(
            f"verifiers {getattr(verifiers, '__version__', '')} has no load_environment; expected 0.1.12 up to 0.2: "
            "pip install 'verifiers>=0.1.12,<0.2'"
        )
    return verifiers


def load(name: str, arguments: Mapping[str, Any]) -> Any:
    """Load an environment of the library by its id. Raises VerifiersMissing, EnvironmentSpecError."""
    library = _library()
    try:
        environment = library.load_environment(name, **arguments)
    except Exception as error:  # the boundary to the environment's code
        raise EnvironmentSpecError(f"verifiers could not load the environment {name!r}: {error!r}") from error
    if not isinstance(environment, library.MultiTurnEnv):
        raise EnvironmentSpecError(
            f"the environment {name!r} of verifiers is a {type(environment).__name__}; expected a MultiTurnEnv, whose "
            "turns can be played one by one"
        )
    return environment


def verifiers_threads(name: str, arguments: Mapping[str, Any] | None = None, *, rows: int = -1) -> list[StringThread]:
    """The prompts of the environment's dataset, for `ENVGRPO(dataset=…)`. `rows`: number of rows; -1: all."""
    threads = []
    for row in load(name, arguments or {}).get_dataset(rows):
        metadata = {key: row[key] for key in COLUMNS if row.get(key) is not None}
        threads.append(StringThread([_turn(message) for message in row["prompt"]], metadata))
    return threads


class VerifiersEnvironment(Environment):
    """One episode of an environment of verifiers."""

    def __init__(self, environment: Any, metadata: Mapping[str, JsonValue]) -> None:
        self.environment, self.metadata = environment, metadata
        self.state: Any = None
        self.prompt: list[Any] = []
        """Messages that the assistant answers next."""

    async def initialize_state(self, thread: StringThread) -> StringThread:
        from verifiers.types import ClientConfig

        row: dict[str, Any] = {"prompt": thread.messages(), "example_id": 0}
        row |= {key: self.metadata[key] for key in COLUMNS if key in self.metadata}
        # The library requires a client, but the engine samples: nothing listens at this address.
        unused_client = ClientConfig(api_base_url="http://127.0.0.1:9", api_key_var="OSTINATO_NO_KEY", max_retries=0)
        self.state = await self.environment.init_state(row, unused_client, "policy")
        await self.environment.setup_state(self.state)
        self.prompt = await self._normalized(await self.environment.get_prompt_messages(self.state))
        first = StringThread([_turn(message) for message in self.prompt], thread.metadata)
        # The calls are read from the text of an answer, so the tools are listed in the system turn.
        tools = self.state.get("tool_defs")
        if not tools:
            return first
        return listed_tools(first, [_description(tool) for tool in tools])

    async def react_to(self, thread: StringThread) -> Reaction:
        from verifiers.types import TrajectoryStep

        # Report the answer to the library.
        answered = [*self.prompt, self._answer(thread.last_content())]
        step = TrajectoryStep(
            prompt=self.prompt, completion=answered[-1:], response=None, tokens=None, reward=None,  # type: ignore[typeddict-item]
            advantage=None, is_truncated=False, trajectory_id=self.state["trajectory_id"], extras={},
        )  # fmt: skip
        await self.environment.add_trajectory_step(self.state, step)

        # Let the environment respond, unless the rollout is complete.
        if await self.environment.is_completed(self.state):
            return None, await self._reward()
        following = await self._normalized(await self.environment.get_prompt_messages(self.state))
        if self.state.get("final_env_response") is not None or await self.environment.is_completed(self.state):
            return None, await self._reward()

        # Continue the conversation, or begin another one if the environment rewrote it.
        extends_conversation = following[: len(answered)] == answered
        self.prompt = following
        if not extends_conversation:
            return StringThread([_turn(message) for message in following], thread.metadata), None
        for message in following[len(answered) :]:
            thread = thread.append(*_turn(message))
        return thread, None

    async def on_limit(self, thread: StringThread, limit: Limit) -> Grades | None:
        return await self._reward()

    async def _reward(self) -> Grade:
        await self.environment.cleanup(self.state)
        await self.environment.rubric.score_rollout(self.state)
        return Grade(value=float(self.state["reward"]), grader_key="verifiers")

    async def _normalized(self, messages: Any) -> list[Any]:
        from verifiers.utils.message_utils import normalize_messages

        return list(normalize_messages(messages))

    def _answer(self, text: str) -> Any:
        """The assistant's message. Tool calls in its text become tool calls of the message, too."""
        from verifiers.types import AssistantMessage, ToolCall

        calls = []
        for number, call in enumerate(parse_tool_calls(text)):
            if call.problem is None:
                calls.append(ToolCall(id=f"call_{number}", name=call.name, arguments=json.dumps(call.arguments)))
        return AssistantMessage(content=text, tool_calls=calls or None)


class VerifiersFactory(EnvironmentFactory):
    """Creates episodes of the environment with this id. `arguments` are passed to `verifiers.load_environment`."""

    def __init__(self, environment: str, arguments: Mapping[str, Any] | None = None) -> None:
        self.environment = load(environment, arguments or {})

    def create_environment(self, metadata: Mapping[str, JsonValue]) -> Environment:
        return VerifiersEnvironment(self.environment, metadata)


def _turn(message: Any) -> tuple[str, Any]:
    """(role, content) of a message, which is a dict or a record of the library."""
    content = _field(message, "content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [part["text"] if isinstance(part, Mapping) else part.text for part in content]
        content = "".join(texts)
    role = str(_field(message, "role"))
    if role == "text":
        role = "user"
    if role == "tool":
        return role, [ToolResponseFragment(id=str(_field(message, "tool_call_id")), text=content or "")]
    return role, content or ""


def _description(tool: Any) -> dict[str, Any]:
    """The description of a tool in the format of OpenAI's API."""
    function = {name: _field(tool, name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": function}


def _field(record: Any, name: str) -> Any:
    """A field of a dict or of a record of the library; None if it is absent."""
    return record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)
