"""Requests, responses and errors of the OpenAI-compatible routes.

An option that has no effect here is refused by name, unless it has the value that means "none", so that no client
believes that the option works. The only exception is `user`, which is accepted and ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    model_validator,
)

from engine.errors import (
    Fenced,
    OutOfMemory,
    PermanentEngineError,
    SampleTooLong,
    TextError,
    TransientEngineError,
    UnknownPolicy,
)
from engine.http.errors import http_status, wire_name
from engine.protocol import MOST_STOP_STRINGS, SamplingTemperature, StopString
from engine.text.fragments import TextFragment, ToolCallFragment, ToolResponseFragment
from engine.text.threads import StringThread
from engine.text.tool_calls import arguments_of
from engine.text.turns import Content as TurnContent
from engine.validation_messages import describe_errors, field_path
from storage.chain.records import PolicyRef
from storage.errors import InvalidKey, ObjectNotFound, StorageError
from storage.serialization import Frozen

MOST_ANSWERS = 256
"""Most answers to one request: prompts times n."""
MOST_TOOLS = 128
"""Most tools of one request."""


def _check_utf8(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can contain half a surrogate pair
        problem = f"character {error.start} is half a surrogate pair"
        raise ValueError(f"{problem}; give text that UTF-8 can encode") from error
    return text


Text = Annotated[str, AfterValidator(_check_utf8)]
Zero = Annotated[float, Field(ge=0, le=0)]
EmptyDict = Annotated[dict[str, Any], Field(max_length=0)]
StopStrings = Annotated[list[StopString], Field(max_length=MOST_STOP_STRINGS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenPrompt = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


class _RequestModel(Frozen):
    # Python's JSON parser accepts NaN, which is not valid JSON and which no option can use.
    model_config = ConfigDict(allow_inf_nan=False)


class StreamOptions(_RequestModel):
    include_usage: bool | None = None


class TextFormat(_RequestModel):
    type: Literal["text"]


class TextPart(_RequestModel):
    type: Literal["text"]
    text: Text


def _union_tag(value: Any) -> str | None:
    """Returns the tag of a value in a union: "str", or "list of" and the type of the first entry. None: another
    type."""
    if isinstance(value, str):
        return "str"
    if not isinstance(value, list):
        return None
    if not value:
        return "list of str"
    # One entry tells the type of all: validation then refuses an entry of another type.
    return f"list of {type(value[0]).__name__}"


def _union(expected: str) -> Discriminator:
    """Returns the discriminator of a union. `expected` is its error message: what to give."""
    return Discriminator(_union_tag, custom_error_type="form", custom_error_message=f"give {expected}")


Content = Annotated[
    Annotated[Text, Tag("str")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("list of dict")],
    _union('text, or a list of parts {"type": "text", "text": …}'),
]
Stop = Annotated[
    Annotated[StopString, Tag("str")] | Annotated[StopStrings, Tag("list of str")],
    _union("a string, or a list of strings"),
]
Prompt = Annotated[
    Annotated[Text, Tag("str")]
    | Annotated[TokenPrompt, Tag("list of int")]
    | Annotated[list[Text], Field(min_length=1, fail_fast=True), Tag("list of str")]
    | Annotated[list[TokenPrompt], Field(fail_fast=True), Tag("list of list")],
    _union("text, a list of token ids, or a list of either"),
]


class FunctionCall(_RequestModel):
    name: Annotated[Text, Field(min_length=1)]
    arguments: Text
    """JSON text of an object."""


class CallOfMessage(_RequestModel):
    """A tool call in a message of the assistant."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall

    @property
    def fragment(self) -> ToolCallFragment:
        arguments = arguments_of(self.function.arguments)
        return ToolCallFragment(id=self.id, name=self.function.name, arguments=arguments)

    @model_validator(mode="after")
    def _check_arguments(self) -> CallOfMessage:
        arguments_of(self.function.arguments)
        return self


class ChatMessage(_RequestModel):
    """One message of a conversation. `developer` is the newer name of `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Text | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[CallOfMessage] | None = None
    tool_call_id: Text | None = None
    """The call that a message of a tool answers."""

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())

    @property
    def length(self) -> int:
        """Number of characters of the message."""
        return len(self.text) + sum(len(call.function.arguments) for call in self.tool_calls or ())

    @property
    def turn(self) -> tuple[str, TurnContent]:
        """(role, content)."""
        if self.role == "tool":
            return "tool", (ToolResponseFragment(id=self.tool_call_id or "", text=self.text, name=self.name),)
        if self.tool_calls:
            text = [TextFragment(text=self.text)] if self.text else []
            return "assistant", (*text, *[call.fragment for call in self.tool_calls])
        # Chat templates of models know only the older name.
        role = "system" if self.role == "developer" else self.role
        return role, self.text

    @model_validator(mode="after")
    def _check_fields_of_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls in a message of {self.role}: only the assistant calls tools")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a message of a tool needs the tool_call_id of its call, and no other message has one")
        if self.name is not None and self.role != "tool":
            raise ValueError("the name of a sender has no effect here: leave it out")
        if self.content is None and not self.tool_calls:
            raise ValueError(f"a message of {self.role} without content: only tool_calls can take its place")
        return self


class FunctionDescription(_RequestModel):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: dict[str, JsonValue] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Ignored: decoding is constrained to the schema only by a `tool_choice` that forces a call."""


class ToolDescription(_RequestModel):
    type: Literal["function"]
    function: FunctionDescription


class NamedFunction(_RequestModel):
    name: Text


class NamedTool(_RequestModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[NamedTool, Tag("dict")],
    Discriminator(
        lambda value: "dict" if isinstance(value, dict | NamedTool) else "str",
        custom_error_type="form",
        custom_error_message="give none, auto, required or a named function",
    ),
]


class _SamplingRequest(_RequestModel):
    """The options that both kinds of request share."""

    model: Annotated[str, Field(min_length=1, max_length=600)]
    """`run`, `run@step`, `run/stage/model`, `run/stage/model@step`, or a registered `name`, `name@version` or
    `name@champion`."""
    temperature: Annotated[SamplingTemperature, Field(le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Number of the most probable tokens to sample from; 0 samples from all."""
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Least number of tokens. The end of turn and stop strings have no effect before it."""
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Seed | None = None
    """Seed of the sampling. Equal seeds give equal answers for equal policies and prompts."""
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Whether the response has `prompt_token_ids` and, per choice, `token_ids`, so that a rollout need not be tokenised
    again."""
    user: Text | None = None
    """Ignored."""
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: EmptyDict | None = None
    store: Literal[False] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _check_stream_options(self) -> _SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for stream=true")
        return self


class ChatRequest(_SamplingRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    """Whether the response has the logprob of each sampled token, including the end-of-turn token."""
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    tools: Annotated[list[ToolDescription], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    """none: the tools are in the prompt, and calls in the answer are not read. required, or a named tool: the answer is
    constrained to a call."""
    parallel_tool_calls: bool | None = None
    """False: only the first call of an answer is returned."""
    response_format: TextFormat | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def reads_calls(self) -> bool:
        """Whether calls in the answers are returned as `tool_calls`."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The descriptions of the tools of which the answer must call one. Empty: it need not call any."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.descriptions if tool["function"]["name"] == name]
        return self.descriptions if self.tool_choice == "required" else []

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        """The descriptions of the tools for the chat template."""
        left_out = {"function": {"strict"}}
        return [tool.model_dump(exclude_none=True, exclude=left_out) for tool in self.tools or ()]

    @property
    def thread(self) -> StringThread:
        """The conversation. Consecutive messages of tools, which answer the calls of one turn, are one turn."""
        turns: list[tuple[str, TurnContent]] = []
        for message in self.messages:
            role, content = message.turn
            if role == "tool" and turns and turns[-1][0] == "tool":
                content = (*turns.pop()[1], *content)  # type: ignore[assignment]
            turns.append((role, content))
        return StringThread(turns, tools=self.descriptions)

    @model_validator(mode="after")
    def _check_tool_choice(self) -> ChatRequest:
        forces = self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
        if forces and not self.forced_tools:
            names = ", ".join(tool.function.name for tool in self.tools or ()) or "none"
            raise ValueError(f"tool_choice asks for a call of a tool that is not in tools, which has: {names}")
        if forces and self.min_tokens:
            raise ValueError("min_tokens with a tool_choice that forces a call, which ends where its JSON is complete")
        return self

    @model_validator(mode="after")
    def _check_limits(self) -> ChatRequest:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self


class TextRequest(_SamplingRequest):
    prompt: Prompt
    """Text, which is encoded without a chat template, or token ids."""
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """0, with `echo` and `logprobs`: nothing is sampled."""
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    """0: the response has the logprobs of the sampled tokens. More, with `echo`: also the logprobs of this number of
    most probable tokens at each place of the prompt."""
    best_of: int | None = None
    echo: bool | None = None
    """Whether the text of the answer begins with the prompt, and the logprobs with those of its tokens."""
    suffix: Literal[""] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list: each is text or token ids."""
        prompt = self.prompt
        # Text, or the token ids of a single prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)  # type: ignore[arg-type]

    @model_validator(mode="after")
    def _check_best_of(self) -> TextRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must equal n: every answer is returned")
        return self


# -- responses -----------------------------------------------------------------------------------------------


class Usage(BaseModel):
    prompt_tokens: int
    """Tokens of the prompts. Each prompt counts once, however many answers it has."""
    completion_tokens: int
    """Tokens of all answers, each up to and including the token that ended it."""
    total_tokens: int


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["run", "registry"]
    policy: PolicyRef | None = None
    """The policy that would answer now. None in a listing and for a registered model."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class CompletionResponse(BaseModel):
    """The response to a chat completion or a text completion."""

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    model: str
    """run/stage/model@step of the policy that answered. It is itself a valid `model`."""
    system_fingerprint: str
    """The first 12 characters of the policy's state."""
    policy: PolicyRef
    choices: list[dict[str, Any]]
    usage: Usage
    prompt_token_ids: list[list[int]] | None = None


# -- errors --------------------------------------------------------------------------------------------------


class OpenAIErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIErrorBody(BaseModel):
    error: OpenAIErrorDetail


class ApiError(Exception):
    """An error in the format that OpenAI's clients expect."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        error_type = "invalid_request_error" if self.status < 500 else "server_error"
        # The message may quote the request, which may contain half a surrogate pair. JSON cannot encode that.
        message = str(self).encode("utf-8", "replace").decode("utf-8")
        return OpenAIErrorBody(
            error=OpenAIErrorDetail(message=message, type=error_type, param=self.param, code=self.code)
        ).model_dump()

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status == 503 else None
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


class _ErrorMapping(NamedTuple):
    """The status and the code of an error class."""

    error_class: type[Exception]
    status: int
    code: str | None


_ERROR_MAPPINGS = (
    _ErrorMapping(SampleTooLong, 400, "context_length_exceeded"),
    _ErrorMapping(TextError, 400, "invalid_prompt"),
    _ErrorMapping(InvalidKey, 400, "invalid_model"),
    _ErrorMapping(UnknownPolicy, 404, "model_not_found"),
    _ErrorMapping(ObjectNotFound, 404, "model_not_found"),
    _ErrorMapping(Fenced, 409, "fenced"),
    _ErrorMapping(OutOfMemory, 400, "out_of_memory"),
    _ErrorMapping(TransientEngineError, 503, "engine_unavailable"),
)


def as_api_error(error: Exception) -> ApiError | None:
    """Returns an error of the engine, of storage or of validation as an ApiError; None for a defect."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    for mapping in _ERROR_MAPPINGS:
        if isinstance(error, mapping.error_class):
            is_about_model = mapping.code in ("invalid_model", "model_not_found")
            param = "model" if is_about_model else None
            return ApiError(mapping.status, str(error), param=param, code=mapping.code)
    if isinstance(error, PermanentEngineError | StorageError):
        # OpenAI's API has no status 422; its clients expect 400 for a request that cannot succeed.
        status = http_status(wire_name(error))
        if status == 422:
            status = 400
        code = "storage_error" if isinstance(error, StorageError) else "engine_error"
        return ApiError(status, str(error), code=code)
    return None


_OPTIONS_WITHOUT_EFFECT = frozenset(
    {
        "presence_penalty", "frequency_penalty", "logit_bias", "store", "top_logprobs",
        "response_format", "suffix", "function_call", "audio", "refusal",
    }
)  # fmt: skip


def _validation_error(error: RequestValidationError) -> ApiError:
    """Returns the first validation error of a request, with a message that names the option."""
    # the option, as a path such as messages.0.name
    first = error.errors()[0]
    first["loc"] = first["loc"][1:]  # without "body"
    name = field_path(first, error.body)
    path = name.split(".")
    ineffective = any(part in _OPTIONS_WITHOUT_EFFECT for part in path)

    # what to do about it
    if first["type"] == "extra_forbidden":
        message = f"the option {name!r} is not supported: leave it out"
    elif ineffective:
        message = f"the option {name!r} has no effect here, so this value is refused: leave it out"
    else:
        message = describe_errors([first], error.body)
    return ApiError(400, message, param=name or None, code="invalid_value")
