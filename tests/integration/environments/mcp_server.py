"""A toy MCP server: python mcp_server.py [PORT]; without a port it talks over its own streams."""

import os
import subprocess
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("toy")
notes: list[str] = []


@server.tool()
def note(text: str, times: int = 1) -> int:
    """Keep a note; return how many there are."""
    notes.extend([text] * times)
    return len(notes)


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


@server.tool()
def draw() -> Image:
    """Draw."""
    return Image(data=b"\x89PNG..", format="png")


@server.tool()
def long(size: int) -> str:
    """Say much."""
    return "a" * size + "end"


@server.tool()
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


@server.tool()
def leave() -> str:
    """Start a process of its own session, then end the server."""
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
