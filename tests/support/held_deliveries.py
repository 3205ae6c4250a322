"""A way to an HTTP endpoint on which some answers stay under way until their client leaves."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import yarl

_FEW_BYTES = 4_096  # of an answer that gets through, its head among them
_SEGMENT_BYTES = 536  # of TCP: a kernel keeps more for larger ones
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@asynccontextmanager
async def held_deliveries(url: str, mark: bytes) -> AsyncIterator[str]:
    """Yield a URL that leads to an endpoint. A connection carries one request, which has a body.

    An answer to a request with the mark comes as far as its head. It must be larger than what a
    kernel keeps for a reader, which is 0.3 MB here.
    """
    target = yarl.URL(url)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        assert length is not None
        body = await reader.readexactly(int(length[1]))
        link = socket.socket()
        if mark in body:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _FEW_BYTES)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
        link.connect((str(target.host), int(target.port or 0)))
        answer, request = await asyncio.open_connection(sock=link, limit=_FEW_BYTES)
        request.write(head + body)
        leaving = asyncio.create_task(reader.read())
        leaving.add_done_callback(lambda _: request.close())
        with suppress(ConnectionError):
            while part := await answer.read(_FEW_BYTES):
                writer.write(part)
                await writer.drain()
                if mark in body:
                    await leaving
        leaving.cancel()
        request.close()
        writer.close()

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield str(target.with_port(port))
    finally:
        server.close()
