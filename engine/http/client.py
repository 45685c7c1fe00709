"""`EngineClient`: calls an engine server that works on the same store. Without torch and without server code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from engine.errors import BadSpec, EngineUnreachable, PermanentEngineError
from engine.http import wire
from engine.http.bodies import (
    STORE_HEADER,
    VERSION,
    Acknowledged,
    CreatePolicyBody,
    ExportModelBody,
    ImportModelBody,
    MeasureBody,
    ReleaseBody,
    SaveCheckpointBody,
    ScaleSamplersBody,
    ServerInfo,
    StagePolicyBody,
    StepBody,
    stage_upload,
)
from engine.http.transport import CallRequest, Transport, TransportFactory
from engine.models.folder import ModelFolder, local_folder, split_key
from engine.models.hub import hub_repo_of_key, import_from_hub
from engine.models.samples import FloatArray
from engine.protocol import (
    Completion,
    EngineInfo,
    GenerateRequest,
    LogprobsRequest,
    Measurement,
    MeasureRequest,
    PolicySpec,
    PublishDtype,
    RowsRequest,
    SamplerScale,
    TopLogprobs,
    TopRowsRequest,
)
from engine.specs.engine import HttpEngineSpec
from engine.validation_messages import describe_errors
from storage.chain.records import CommitRecord, PolicyRef, StepRequest
from storage.errors import ObjectNotFound
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.objects import find_store_id, open_store

CHAT_CONNECT_SECONDS = 5.0
CHAT_TOKEN_SECONDS = 600.0
"""Longest wait for the next token of a chat. The first request for a model loads it."""

M = TypeVar("M", bound=BaseModel)
B = TypeVar("B", bound=BaseModel)


class EngineClient:
    """Implements engine.protocol.Engine over HTTP. It may be used from several event loops and threads."""

    def __init__(self, store_url: str, spec: HttpEngineSpec, *, transport: TransportFactory | None = None) -> None:
        self.spec = spec
        self.store = open_store(store_url)
        self._transport = Transport(spec, transport=transport)
        self._server: ServerInfo | None = None

    def __repr__(self) -> str:
        return f"EngineClient({self.store.url!r}, {self.spec.url!r})"

    # -- models and policies -----------------------------------------------------------------------------------

    async def import_model(self, source: str, *, provenance: Provenance) -> ArtifactRef:
        repo = hub_repo_of_key(source)
        if repo is not None:
            # The download is made here: the token and the cache of the hub are this machine's.
            return await import_from_hub(self.store, repo, partial(self._import_folder, provenance=provenance))
        path = local_folder(source)
        if path is None:
            # Raise for a path that is not a folder here: the server may be on another machine and would not see it.
            split_key(source)
            body = _body(ImportModelBody, source=source, provenance=provenance)
            return await self._post_json("import_model", body, ArtifactRef)
        return await self._import_folder(await asyncio.to_thread(ModelFolder.of, path), provenance=provenance)

    async def _import_folder(self, folder: ModelFolder, *, provenance: Provenance) -> ArtifactRef:
        """Registers a folder of this machine."""
        # Ask with the digest first: the model may be registered already, and uploading it takes minutes.
        digest = await asyncio.to_thread(folder.digest)
        body = _body(ImportModelBody, source=folder.name, provenance=provenance, upload=digest)
        try:
            return await self._post_json("import_model", body, ArtifactRef)
        except ObjectNotFound:
            # The server has neither the model nor its files. Upload them and call again.
            await asyncio.to_thread(stage_upload, self.store, folder, digest, provenance=provenance)
        return await self._post_json("import_model", body, ArtifactRef)

    async def create_policy(self, spec: PolicySpec) -> PolicyRef:
        return await self._post_json("create_policy", _body(CreatePolicyBody, spec=spec), PolicyRef)

    # -- reading -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, *, epoch: int = 0) -> list[Completion]:
        encode = partial(wire.encode_generate, request, epoch=epoch)
        return wire.decode_completions(await self._call("generate", encode, wire.MEDIA_TYPE))

    async def logprobs(self, request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]:
        encode = partial(wire.encode_logprobs_request, request, epoch=epoch)
        return wire.decode_logprobs(await self._call("logprobs", encode, wire.MEDIA_TYPE))

    async def values(self, request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]:
        encode = partial(wire.encode_logprobs_request, request, epoch=epoch)
        return wire.decode_values(await self._call("values", encode, wire.MEDIA_TYPE))

    async def logprobs_of_rows(self, request: RowsRequest, *, epoch: int = 0) -> FloatArray:
        encode = partial(wire.encode_rows_request, request, epoch=epoch)
        return wire.decode_scores(await self._call("logprobs_of_rows", encode, wire.MEDIA_TYPE))

    async def top_logprobs_of_rows(self, request: TopRowsRequest, *, epoch: int = 0) -> TopLogprobs:
        encode = partial(wire.encode_rows_request, request, epoch=epoch)
        answer = await self._call("top_logprobs_of_rows", encode, wire.MEDIA_TYPE)
        return wire.decode_top_logprobs(answer, request.top)

    async def values_of_rows(self, request: RowsRequest, *, epoch: int = 0) -> FloatArray:
        encode = partial(wire.encode_rows_request, request, epoch=epoch)
        return wire.decode_scores(await self._call("values_of_rows", encode, wire.MEDIA_TYPE))

    async def measure(self, request: MeasureRequest, *, epoch: int = 0) -> Measurement:
        return await self._post_json("measure", _body(MeasureBody, request=request, epoch=epoch), Measurement)

    # -- the step and what is written --------------------------------------------------------------------------

    async def take_gradient_step(self, request: StepRequest, *, epoch: int = 0) -> CommitRecord:
        return await self._post_json("take_gradient_step", _body(StepBody, request=request, epoch=epoch), CommitRecord)

    async def begin_checkpoint(
        self, policy: PolicyRef, *, provenance: Provenance, name: str | None = None, epoch: int = 0
    ) -> None:
        body = _body(SaveCheckpointBody, policy=policy, provenance=provenance, name=name, epoch=epoch)
        await self._post_json("begin_checkpoint", body, Acknowledged)

    async def save_checkpoint(
        self, policy: PolicyRef, *, provenance: Provenance, name: str | None = None, epoch: int = 0
    ) -> ArtifactRef:
        body = _body(SaveCheckpointBody, policy=policy, provenance=provenance, name=name, epoch=epoch)
        return await self._post_json("save_checkpoint", body, ArtifactRef)

    async def export_model(
        self,
        policy: PolicyRef,
        model_name: str,
        *,
        provenance: Provenance,
        dtype: PublishDtype = "base",
        epoch: int = 0,
    ) -> ArtifactRef:
        body = _body(
            ExportModelBody, policy=policy, model_name=model_name, provenance=provenance, dtype=dtype, epoch=epoch
        )
        return await self._post_json("export_model", body, ArtifactRef)

    async def stage_policy(self, policy: PolicyRef, *, epoch: int = 0) -> None:
        await self._post_json("stage_policy", _body(StagePolicyBody, policy=policy, epoch=epoch), Acknowledged)

    # -- runs --------------------------------------------------------------------------------------------------

    async def release(self, run: str, *, epoch: int = 0) -> None:
        body = _body(ReleaseBody, run=run, epoch=epoch)
        await self._post_json("release", body, Acknowledged)

    async def info(self) -> EngineInfo:
        return _parse(EngineInfo, await self._call("info", bytes, method="GET"))

    async def close(self) -> None:
        """Closes the connections. The server keeps running."""
        await self._transport.close()

    # -- connection --------------------------------------------------------------------------------------------

    async def _post_json(self, verb: str, body: BaseModel, result: type[M]) -> M:
        return _parse(result, await self._call(verb, lambda: body.model_dump_json().encode()))

    async def _call(
        self, verb: str, encode: Callable[[], bytes], media_type: str = "application/json", method: str = "POST"
    ) -> bytes:
        """Returns the result of a call. No more calls of a verb are made at once than the engine admits, and the body
        of a call that waits for that is not encoded yet."""
        server = await self._checked_server()
        async with self._transport.place(verb, server.max_calls):
            body = encode()
            if len(body) > server.max_body_bytes:
                raise BadSpec(
                    f"the batch of this {verb} call has {len(body)} bytes, the engine at {self.spec.url} takes "
                    f"{server.max_body_bytes}; make shards smaller, or serve with a larger --max-body-mib"
                )
            # A server that was restarted over another store refuses a call with this header.
            headers = {STORE_HEADER: server.store_id}
            return await self._transport.call(CallRequest(f"/v1/{verb}", body, media_type, method, headers))

    async def _checked_server(self) -> ServerInfo:
        """Returns the server's properties. Before the first call, checks that server and client have the same version
        of the interface and the same store. Raises BadSpec if not, or if this process finds no store."""
        if self._server is None:
            # With two stores, the commits of the server would not be seen here.
            server = _parse(ServerInfo, await self._transport.get("/v1/server"))
            own_store_id = await asyncio.to_thread(find_store_id, self.store)
            if server.version != VERSION:
                raise BadSpec(
                    f"the engine at {self.spec.url} has version {server.version} of the interface, this client "
                    f"{VERSION}: upgrade the older of the two"
                )
            if own_store_id is None:
                raise BadSpec(
                    f"the engine at {self.spec.url} works on store {server.store_id}, and this process finds no store "
                    f"at {self.store.url}; mount its disk here, or give the storage.url of the engine's store"
                )
            if server.store_id != own_store_id:
                raise BadSpec(
                    f"the engine at {self.spec.url} works on store {server.store_id}, this process on {own_store_id} "
                    f"({self.store.url}); give storage.url and 'engine serve --storage' the same store"
                )
            self._server = server
        return self._server


async def scale_samplers(
    spec: HttpEngineSpec, count: int, *, transport: TransportFactory | None = None
) -> SamplerScale:
    """Asks the server for `count` vLLM replicas. The caller needs no access to the engine's store.

    Raises BadSpec if the engine's samplers are no replicas, or if its cluster can never run so many."""
    body = _body(ScaleSamplersBody, samplers=count).model_dump_json().encode()
    connection = Transport(spec, transport=transport)
    try:
        return _parse(SamplerScale, await connection.call(CallRequest("/v1/scale_samplers", body)))
    finally:
        await connection.close()


def _body(cls: type[B], **fields: object) -> B:
    """Returns the body of a call. Raises BadSpec for values that the server would refuse."""
    try:
        return cls(**fields)
    except ValidationError as error:
        raise BadSpec(describe_errors(error.errors(), fields)) from error


def _parse(cls: type[M], data: bytes) -> M:
    try:
        return cls.model_validate_json(data)
    except ValidationError as error:
        raise PermanentEngineError(
            f"the engine's answer is not a valid {cls.__name__} ({error.error_count()} problems); "
            "perhaps server and client have different versions: then upgrade the older"
        ) from error


class ChatPiece(NamedTuple):
    """A part of an answer of a chat, as it was sampled."""

    policy: str
    """URI of the policy that answers."""
    text: str


async def stream_chat(url: str, token: str | None, body: dict[str, Any]) -> AsyncIterator[ChatPiece]:
    """Yields the pieces of an answer to a conversation, from the OpenAI routes of an engine server.

    Args:
        url: Address of the server, without a path.
        token: Its bearer token. None: it has none.
        body: Request of /v1/chat/completions.

    Raises EngineUnreachable, and PermanentEngineError with the words in which the server refused, or if the stream is
    not that of a chat or ends before its last event, `data: [DONE]`.
    """
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    timeout = httpx.Timeout(CHAT_TOKEN_SECONDS, connect=CHAT_CONNECT_SECONDS)
    address = f"{url.rstrip('/')}/v1/chat/completions"
    try:
        async with (
            httpx.AsyncClient(timeout=timeout, trust_env=False) as client,
            client.stream("POST", address, json={**body, "stream": True}, headers=headers) as reply,
        ):
            if reply.status_code != 200:
                raise _chat_refusal(await reply.aread())
            policy = reply.headers.get("x-ostinato-policy", "")
            async for line in reply.aiter_lines():
                # comments and other fields of an event stream say nothing of the answer
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                for text in _chat_texts(data):
                    yield ChatPiece(policy, text)
        raise PermanentEngineError("the engine's answer is cut off: it ended before its last event; ask again")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineUnreachable(
            f"the engine at {url} does not answer ({type(error).__name__}); look whether it runs: ostinato up "
            "--status, or ostinato engine serve"
        ) from error


def _chat_texts(data: str) -> list[str]:
    """The texts of an event of a chat. Raises PermanentEngineError if it is a refusal, or no such event."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise _chat_refusal(data.encode())
        return [choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ())]
    except (ValueError, AttributeError, TypeError) as error:
        raise PermanentEngineError(f"the engine sent {data[:100]!r}; expected an event of a chat as JSON") from error


def lacks_model(url: str, token: str | None, model: str) -> bool:
    """Whether an engine server says that it has no model of this name. False if it does not answer. The arguments are
    those of `stream_chat`."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    address = f"{url.rstrip('/')}/v1/models/{quote(model)}"
    try:
        reply = httpx.get(address, headers=headers, timeout=CHAT_CONNECT_SECONDS, trust_env=False)
        return reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        # something else than an engine server
        return False


def _chat_refusal(body: bytes) -> PermanentEngineError:
    """The server's refusal in its own words."""
    try:
        reply: Any = json.loads(body)
        # OpenAI's form, or that of the engine's other routes
        message = reply["error"]["message"] if isinstance(reply["error"], dict) else reply["message"]
    except (ValueError, KeyError, TypeError):
        message = "its reply is not in the form of the engine's errors"
    return PermanentEngineError(f"the engine refused: {message}")
