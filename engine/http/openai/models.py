"""What the OpenAI-compatible routes take and give, and their errors.

An option that could have no effect here is refused by name unless it is left at the value that means "none": a
client must not believe that it was heeded. `user` is the one exception; it is accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from engine.errors import Fenced, OutOfMemory, PermanentEngineError, SampleTooLong, TransientEngineError, UnknownPolicy
from engine.http.errors import name_of, status_of
from engine.protocol import SamplingTemperature
from engine.text.errors import TextError
from engine.validation_messages import describe_errors, field_path
from storage.chain.records import PolicyRef
from storage.errors import InvalidKey, ObjectNotFound, StorageError
from storage.serialization import Frozen

MOST_ANSWERS = 256
"""Answers of one request: prompts times n."""


def _says_utf8(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can say half a surrogate pair
        raise ValueError(f"character {error.start} is half a surrogate pair; give text that UTF-8 can say") from error
    return text


Text = Annotated[str, AfterValidator(_says_utf8)]
Zero = Annotated[float, Field(ge=0, le=0)]
EmptyList = Annotated[list[Any], Field(max_length=0)]
EmptyDict = Annotated[dict[str, Any], Field(max_length=0)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
StopStrings = Annotated[list[StopString], Field(max_length=16)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenPrompt = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


class _Given(Frozen):
    # NaN is JSON to Python's parser
    model_config = ConfigDict(allow_inf_nan=False)


class StreamOptions(_Given):
    include_usage: bool | None = None


class TextFormat(_Given):
    type: Literal["text"]


class TextPart(_Given):
    type: Literal["text"]
    text: Text


def _form_of(value: Any) -> str | None:
    """Which form of a union a value has: a string, or a list by its first entry. None: neither."""
    if isinstance(value, list):
        return f"list of {type(value[0]).__name__}" if value else "list of str"
    return "str" if isinstance(value, str) else None


def _form(expected: str) -> Discriminator:
    return Discriminator(_form_of, custom_error_type="form", custom_error_message=f"give {expected}")


Content = Annotated[
    Annotated[Text, Tag("str")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("list of dict")],
    _form('text, or a list of parts {"type": "text", "text": …}'),
]
Stop = Annotated[
    Annotated[StopString, Tag("str")] | Annotated[StopStrings, Tag("list of str")],
    _form("a string, or a list of strings"),
]
Prompt = Annotated[
    Annotated[Text, Tag("str")]
    | Annotated[TokenPrompt, Tag("list of int")]
    | Annotated[list[Text], Field(min_length=1, fail_fast=True), Tag("list of str")]
    | Annotated[list[TokenPrompt], Field(fail_fast=True), Tag("list of list")],
    _form("text, a list of token ids, or a list of either"),
]


class Message(_Given):
    """One turn. `developer` is `system` by its newer name."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: EmptyList | None = None

    @property
    def turn(self) -> tuple[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return ("system" if self.role == "developer" else self.role), text


class _Sampled(_Given):
    """What both kinds of request share."""

    model: Annotated[str, Field(min_length=1, max_length=600)]
    """`run`, `run@step`, `run/stage/model`, `run/stage/model@step`, or a registered `name` or `name@version`."""
    temperature: Annotated[SamplingTemperature, Field(le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Keep the k most probable tokens; 0 keeps all."""
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """No end and no stop string before this many tokens."""
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Seed | None = None
    """Equal seeds on equal policies and prompts give equal answers."""
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Adds `prompt_token_ids` and, per choice, `token_ids`: a rollout that need not be tokenised again."""
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
    def _streams(self) -> _Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for stream=true")
        return self


class ChatRequest(_Sampled):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    """Of each sampled token, the end-of-turn token included."""
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    tools: EmptyList | None = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: TextFormat | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self


class TextRequest(_Sampled):
    prompt: Prompt
    """Text is encoded as it stands; token ids are taken as they are."""
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    """0 gives the logprobs of the sampled tokens."""
    best_of: int | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        given = self.prompt
        if isinstance(given, str) or isinstance(given[0], int):
            return [given]  # type: ignore[list-item]
        return list(given)  # type: ignore[arg-type]

    @model_validator(mode="after")
    def _all_are_returned(self) -> TextRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must equal n: every answer is returned")
        return self


# -- answers -------------------------------------------------------------------------------------------------


class Usage(BaseModel):
    prompt_tokens: int
    """Of each prompt once, however many answers it has."""
    completion_tokens: int
    """Of all answers, up to and including the token that ended each."""
    total_tokens: int


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["run", "registry"]
    policy: PolicyRef | None = None
    """The policy that answers now; None in a listing and for a registered model."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Completed(BaseModel):
    """A chat.completion or text_completion."""

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    model: str
    """run/stage/model@step of the policy that answered; itself a valid `model`."""
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
    """A refusal, as OpenAI's clients expect it."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        # what the client sent may be quoted, and need not be text
        message = str(self).encode("utf-8", "replace").decode("utf-8")
        return OpenAIErrorBody(
            error=OpenAIErrorDetail(message=message, type=kind, param=self.param, code=self.code)
        ).model_dump()

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status == 503 else None
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


class _Meaning(NamedTuple):
    kind: type[Exception]
    status: int
    code: str | None


_MEANINGS = (
    _Meaning(SampleTooLong, 400, "context_length_exceeded"),
    _Meaning(TextError, 400, "invalid_prompt"),
    _Meaning(InvalidKey, 400, "invalid_model"),
    _Meaning(UnknownPolicy, 404, "model_not_found"),
    _Meaning(ObjectNotFound, 404, "model_not_found"),
    _Meaning(Fenced, 409, "fenced"),
    _Meaning(OutOfMemory, 400, "out_of_memory"),
    _Meaning(TransientEngineError, 503, "engine_unavailable"),
)


def as_api_error(error: Exception) -> ApiError | None:
    """What an error of the engine or of storage says to a client; None for one that nobody raised on purpose."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    for meaning in _MEANINGS:
        if isinstance(error, meaning.kind):
            param = "model" if meaning.code in ("invalid_model", "model_not_found") else None
            return ApiError(meaning.status, str(error), param=param, code=meaning.code)
    if isinstance(error, PermanentEngineError | StorageError):
        status = status_of(name_of(error))
        code = "storage_error" if isinstance(error, StorageError) else "engine_error"
        return ApiError(400 if status == 422 else status, str(error), code=code)
    return None


_WITHOUT_EFFECT = frozenset(
    {
        "presence_penalty", "frequency_penalty", "logit_bias", "store", "top_logprobs", "tools", "tool_choice",
        "response_format", "echo", "suffix", "name", "tool_calls", "function_call", "audio", "refusal",
    }
)  # fmt: skip


def _invalid(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    first["loc"] = first["loc"][1:]  # without "body"
    name = field_path(first, error.body)
    where = name.split(".")
    last = next((part for part in reversed(where) if part in _WITHOUT_EFFECT), None)
    if first["type"] == "extra_forbidden":
        message = f"the option {name!r} is not supported: leave it out"
    elif last is not None:
        message = f"the option {name!r} could have no effect at this value, so it is refused: leave it out"
    elif where[0] == "logprobs" and first["type"] == "less_than_equal":
        message = "only the logprobs of the sampled tokens are there: give logprobs=0"
    else:
        message = describe_errors([first], error.body)
    return ApiError(400, message, param=name or None, code="invalid_value")
