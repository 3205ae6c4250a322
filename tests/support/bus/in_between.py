"""A link between two hosts that stands for a network: it swallows, changes and is cut."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from slipstream.wire.messages.weightbus import RelayAddress


def unchanged(data: bytes) -> bytes:
    return data


class Link:
    """A port that leads to a relay's, for commands or for buckets. Use it as a context."""

    def __init__(
        self,
        relay: RelayAddress,
        *,
        to_bulk: bool = False,
        change: Callable[[bytes], bytes] = unchanged,
    ) -> None:
        """``change`` is done to what the relay sends."""
        endpoint = relay.bulk_endpoint if to_bulk else relay.endpoint
        self._host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._port = int(port)
        self._change = change
        self._swallows = {"to": False, "from": False}
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.endpoint = ""
        self.num_swallowed = 0  # pieces

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self._host, 0)
        self.endpoint = f"tcp://{self._host}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        self.cut()
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def swallow(self, *, to_head: bool, from_head: bool) -> None:
        """Lose what is sent from now on, without a sign of it."""
        self._swallows = {"to": to_head, "from": from_head}

    def cut(self) -> None:
        """Break every connection; the next ones lose nothing."""
        self.swallow(to_head=False, from_head=False)
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, far_writer}
        for pump in (
            self._pump(reader, far_writer, "to", unchanged),
            self._pump(far_reader, writer, "from", self._change),
        ):
            task = asyncio.create_task(pump)
            self._pumps.add(task)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        way: str,
        change: Callable[[bytes], bytes],
    ) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if self._swallows[way]:
                    self.num_swallowed += 1
                    continue
                sink.write(change(data))
                await sink.drain()
        sink.close()
