"""Tools of MCP servers.

    [environment]
    function = "slipstream.generators.environments.adapters.mcp:WithServers"
    options.servers.files = { command = ["mcp-server-filesystem", "/data"] }
    options.servers.search = { url = "http://127.0.0.1:8000/mcp" }

A server with a command is started for each trajectory, in its processes, and ends with it. The
policy gets the prompt, a reply without calls ends the trajectory, and the reward function scores
the transcript; a subclass may answer in ``step``.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from typing_extensions import override

from slipstream.generators.environments.sdk import (
    DescribedTool,
    Environment,
    Messages,
    Prompt,
    Unavailable,
    schema_of,
)
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Json

try:
    import jsonschema
    import mcp_types as types
    from mcp import MCPError, StdioServerParameters
    from mcp.client.client import Client
except ImportError as error:
    raise ConfigError(
        f"mcp cannot be imported ({error}): pip install 'slipstream[env-mcp]'"
    ) from error

_MOST_PAGES = 100  # limit of a server's list of tools
_CLOSE_S = 10.0
_LONGEST_REASON = 500


class Server:
    """One connection to a server, which a task of its own holds. Open it with ``connect``."""

    def __init__(self, name: str, table: Json, *, start_s: float, call_s: float) -> None:
        """Take the table of its options.

        Raises:
            ValueError: the table has other keys than command, env and cwd, or url.
        """
        self.name = name
        self.tools: list[Any] = []
        self._start_s, self._call_s = start_s, call_s
        self._client = Client(target_of(name, table), read_timeout_seconds=start_s)
        self._release = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Start it, or connect to it, and ask for its tools.

        Raises:
            Unavailable: the server does not start, or gives no list of tools.
        """
        ready = asyncio.Event()
        self._holding = asyncio.create_task(self._hold(ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait(
            {self._holding, waiting}, timeout=self._start_s, return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()
        if not ready.is_set():
            reason = f"it does not answer within {self._start_s:g} s"
            if self._holding.done() and (failure := self._holding.exception()) is not None:
                reason = reason_of(failure)
            self._holding.cancel()
            await self.close()
            raise Unavailable(f"MCP server {self.name!r}: {reason}")

    async def _hold(self, ready: asyncio.Event) -> None:
        async with self._client:
            cursor: str | None = None
            for _ in range(_MOST_PAGES):
                page = await self._client.list_tools(cursor=cursor)
                self.tools += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
            ready.set()
            await self._release.wait()

    async def call(self, name: str, max_result: int, arguments: dict[str, Json]) -> str:
        """Call a tool; return its result, or an error for the policy, as text.

        Raises:
            Unavailable: the server is gone.
        """
        if self._holding is None or self._holding.done():
            raise Unavailable(f"MCP server {self.name!r} is gone")
        try:
            result = await self._client.call_tool(
                name, arguments, read_timeout_seconds=self._call_s
            )
        except MCPError as error:
            if error.code == types.REQUEST_TIMEOUT:
                return f"error: {name} gave no result within {self._call_s:g} s"
            if error.code == types.CONNECTION_CLOSED:
                raise Unavailable(f"MCP server {self.name!r} is gone: {error}") from error
            return f"error: {error}"
        return shortened(result_text(result), max_result)

    async def close(self) -> None:
        """Disconnect; a server that was started is ended."""
        self._release.set()
        if self._holding is None:
            return
        _, left = await asyncio.wait({self._holding}, timeout=_CLOSE_S)
        for task in left:
            task.cancel()
        with suppress(BaseException):  # already reported, or irrelevant now
            await self._holding


class WithServers(Environment):
    """The prompt's question, and the tools of servers."""

    def __init__(
        self,
        *,
        servers: Mapping[str, Json],
        only: Sequence[str] = (),
        start_s: float = 60.0,
        call_s: float = 60.0,
        max_result: int = 20_000,
    ) -> None:
        """Prepare.

        Args:
            servers: Servers by name: ``command`` with ``env`` and ``cwd``, or ``url``.
            only: Names of the tools that the policy gets; all tools without any.
            start_s: Limit for a server to start and list its tools.
            call_s: Limit of one call; then the policy reads that there is no result.
            max_result: Characters of a result that the policy reads, from its beginning and end.

        Raises:
            ValueError: an option is wrong.
        """
        if not servers:
            raise ValueError("servers: expected at least one")
        self._only, self._max_result = tuple(only), max_result
        make = partial(Server, start_s=start_s, call_s=call_s)
        self._servers = [make(name, table) for name, table in servers.items()]

    @classmethod
    @override
    def prepare(cls, **options: Any) -> None:
        """Start the servers once, and check the schemas of their tools."""

        async def check() -> None:
            environment = cls(**options)
            try:
                await environment.open()
            except Unavailable as error:
                raise ConfigError(str(error)) from error
            finally:
                await environment.close()

        asyncio.run(check())

    async def open(self) -> None:
        """Connect to all servers; their tools are then ``tools``.

        Raises:
            Unavailable: a server does not start.
            ValueError: a schema is malformed, two tools have a name, or one of ``only`` is missing.
        """
        await asyncio.gather(*(server.connect() for server in self._servers))
        self.tools = tools_of(self._servers, self._only, self._max_result)

    @override
    async def reset(self, prompt: Prompt) -> Messages:
        """Start the servers and ask the prompt's question."""
        await self.open()
        return await super().reset(prompt)

    @override
    async def close(self) -> None:
        """End the servers."""
        await asyncio.gather(*(server.close() for server in self._servers))


def target_of(name: str, table: Json) -> "StdioServerParameters | str":
    """Return what a client connects to.

    Raises:
        ValueError: the table does not describe a server.
    """
    where = f"servers.{name}"
    if not isinstance(table, Mapping) or ("command" in table) == ("url" in table):
        raise ValueError(f"{where}: expected a table with command or url, got {table!r}")
    allowed = {"url"} if "url" in table else {"command", "env", "cwd"}
    if unknown := set(table) - allowed:
        raise ValueError(f"{where}: unknown {', '.join(sorted(unknown))}")
    if "url" in table:
        return str(table["url"])
    command = table["command"]
    if not isinstance(command, list) or not command:
        raise ValueError(f"{where}.command: expected a list of words, got {command!r}")
    program, *arguments = map(str, command)
    return StdioServerParameters(
        command=program, args=arguments, env=table.get("env"), cwd=table.get("cwd")
    )


def tools_of(
    servers: Sequence[Server], only: Sequence[str], max_result: int
) -> list[DescribedTool]:
    """Return the tools of servers as an environment has them.

    Raises:
        ValueError: a schema is malformed, two tools have one name, or one of ``only`` is missing.
    """
    tools: dict[str, DescribedTool] = {}
    for server in servers:
        for tool in server.tools:
            if only and tool.name not in only:
                continue
            where = f"MCP server {server.name!r}, tool {tool.name!r}"
            if tool.name in tools:
                raise ValueError(f"{where}: another server has a tool of this name (option only)")
            check_schema(tool.input_schema, where)
            described = DescribedTool(
                tool.name,
                tool.description or "",
                tool.input_schema,
                _caller(server, tool.name, max_result),
            )
            schema_of(described)
            tools[tool.name] = described
    if missing := [name for name in only if name not in tools]:
        raise ValueError(f"only: no server has a tool {', '.join(missing)}")
    return list(tools.values())


def _caller(server: Server, name: str, max_result: int) -> Callable[..., Any]:
    return lambda **arguments: server.call(name, max_result, arguments)


def check_schema(schema: Json, where: str) -> None:
    """Check that a tool's input is described by a JSON schema.

    Raises:
        ValueError: the schema is malformed.
    """
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"{where}: its schema is malformed: {error.message}") from error


def result_text(result: Any) -> str:  # noqa: ANN401 foreign
    """Return the result of a call as text for the policy."""
    parts = [_content_text(content) for content in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts) or "(no result)"
    return f"error: {text}" if result.is_error else text


def _content_text(content: Any) -> str:  # noqa: ANN401 foreign
    if content.type == "text":
        return str(content.text)
    if content.type == "resource_link":
        return str(content.uri)
    inner = getattr(content, "resource", content)
    if (text := getattr(inner, "text", None)) is not None:
        return str(text)
    encoded = getattr(inner, "data", None) or getattr(inner, "blob", None) or ""
    kind = getattr(inner, "mime_type", None) or content.type
    return f"(error: {kind} of {len(encoded) * 3 // 4} bytes; only text can be read)"


def shortened(text: str, most: int) -> str:
    """Return the beginning and the end of a long text."""
    if len(text) <= most:
        return text
    half = most // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n... {left_out} characters are left out ...\n{text[len(text) - half :]}"


def reason_of(error: BaseException) -> str:
    """Return the first error of a group in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
