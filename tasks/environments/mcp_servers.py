"""Environments whose tools are those of an MCP server (Model Context Protocol), over stdio or HTTP.

Every episode has its own connection: a server over stdio is a process of the episode. A call that the server refuses is
reported to the assistant. A server that cannot be reached, or does not answer, is a failure of the environment: the
episode is tried once more and then masked. Needs the `mcp` package.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.text.threads import StringThread
from storage.serialization import Frozen
from tasks.environments.spec import EnvironmentSpecError
from tasks.environments.tools import Tool, ToolEnvironment, ToolFailed

REFUSALS = (-32600, -32601, -32602)
"""JSON-RPC's codes of a call that the server received and refused: what is wrong is the call, not the server. An
internal error (-32603) is a failure of the server."""
MOST_PAGES = 100
"""Most pages of a list of tools."""


class StdioServer(Frozen):
    """An MCP server that is started as a process and read over its standard output."""

    command: str
    """The program."""
    args: tuple[str, ...] = ()
    """The arguments of the program."""
    env: dict[str, str] | None = None
    """Environment variables in addition to those that the mcp package passes on."""
    cwd: Path | None = None
    """The folder in which the program runs. None: that of the worker."""


class MCPTool(Tool):
    """A tool of an MCP server, which checks the arguments itself."""

    def __init__(self, connection: _Connection, tool: Any) -> None:
        self.connection, self.name = connection, str(tool.name)
        parameters = {key: value for key, value in tool.input_schema.items() if key not in ("$schema", "title")}
        self._function = {"name": self.name, "description": tool.description or "", "parameters": parameters}

    def description(self) -> dict[str, Any]:
        return {"type": "function", "function": self._function}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Returns the result as text. Raises ToolFailed when the server does not answer, RuntimeError with the server's
        message when it refuses the call or the tool fails."""
        result = await self.connection.call(self.name, dict(arguments))
        text = "\n".join(_text_of(part) for part in result.content)
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise RuntimeError(text)
        return text


def _text_of(part: Any) -> str:
    """The text of a part of a result. Images, sounds and links have none."""
    if part.type == "text":
        return str(part.text)
    text = getattr(getattr(part, "resource", None), "text", None)
    return text if isinstance(text, str) else f"({part.type})"


class MCPEnvironment(ToolEnvironment):
    """An environment with the tools of an MCP server. A subclass sets `server` and defines `finish`. It may also have
    `tools` of its own."""

    server: StdioServer | str
    """A server that is started as a process, or the URL of a server over HTTP."""
    _connection: _Connection | None = None
    _server_tools: dict[str, Tool] | None = None

    async def initialize_state(self, thread: StringThread) -> StringThread:
        """Connect to the server, and return the prompt with its tools."""
        self._connection = _Connection(self.server)
        listed = await self._connection.start()
        self._server_tools = {}
        for tool in listed:
            self._server_tools[str(tool.name)] = MCPTool(self._connection, tool)
        return await super().initialize_state(thread)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    def _tools(self) -> dict[str, Tool]:
        return (self._server_tools or {}) | super()._tools()


class _Connection:
    """A client of an MCP server. The client must be opened and closed in the same task, so it has a task of its own."""

    def __init__(self, server: StdioServer | str) -> None:
        self._server = _server_parameters(server)
        self._name = server if isinstance(server, str) else server.command
        self._client: Any = None
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> list[Any]:
        """Connects and returns the server's tools. Raises ToolFailed."""
        listed: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(listed))
        self._task.add_done_callback(lambda task: _end_of(task, listed))
        try:
            return await asyncio.shield(listed)
        except Exception as error:  # the boundary to the server: a process or a network that may fail in any way
            raise ToolFailed(f"the MCP server {self._name!r} cannot be used: {_cause(error)}") from error

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Raises ToolFailed, or RuntimeError with the server's message when it refuses the call."""
        from mcp import MCPError

        if self._client is None:
            raise ToolFailed(f"the MCP server {self._name!r} ended the connection")
        try:
            return await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.code in REFUSALS:
                raise RuntimeError(error.message) from error
            raise ToolFailed(f"the MCP server {self._name!r} failed in a call of {name}: {error.message}") from error
        except Exception as error:  # the boundary to the server, as above
            raise ToolFailed(f"the MCP server {self._name!r} failed in a call of {name}: {_cause(error)}") from error

    async def close(self) -> None:
        if self._task is None:
            return
        self._end.set()
        if self._client is None:
            self._task.cancel()  # still connecting
        await asyncio.wait({self._task})

    async def _run(self, listed: asyncio.Future[list[Any]]) -> None:
        from mcp import Client

        async with Client(self._server) as client:
            tools = await _all_tools(client)
            self._client = client
            if not listed.done():
                listed.set_result(tools)
            try:
                await self._end.wait()
            finally:
                self._client = None


def _server_parameters(server: StdioServer | str) -> Any:
    try:
        from mcp import StdioServerParameters
    except ImportError as error:
        raise EnvironmentSpecError(
            f"an environment with the tools of an MCP server needs the mcp package, which cannot be imported "
            f"({error}): pip install 'mcp>=2.3,<3'"
        ) from error
    if isinstance(server, str):
        return server
    return StdioServerParameters(command=server.command, args=list(server.args), env=server.env, cwd=server.cwd)


async def _all_tools(client: Any) -> list[Any]:
    """Raises ToolFailed if the list is too long."""
    tools: list[Any] = []
    cursor = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools
    raise ToolFailed(
        f"its list of tools does not end after {MOST_PAGES} pages ({len(tools)} tools); serve fewer tools, or more on "
        "each page"
    )


def _end_of(task: asyncio.Task[None], listed: asyncio.Future[list[Any]]) -> None:
    """Passes the failure of a connection to `start`, which waits for the list of tools."""
    error = None if task.cancelled() else task.exception()
    if not listed.done():
        listed.set_exception(error or ConnectionError("the connection was closed"))
        listed.exception()  # `start` may have been cancelled


def _cause(error: BaseException) -> str:
    """The first error in a group of errors, which task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
