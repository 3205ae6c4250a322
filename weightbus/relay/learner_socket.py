"""The relay's socket for the learner on its host, and the end of a relay without a learner."""

import asyncio
import logging
import os
import time
from collections.abc import Callable

import zmq.asyncio

from slipstream.broker.listening.gate import Limit
from slipstream.broker.listening.router import ListeningRouter
from slipstream.weightbus.relay.served import Versions
from slipstream.wire.errors import ConfigError, ProtocolError, PublishError, SupersededError
from slipstream.wire.messages.bounds import shortened
from slipstream.wire.messages.codec import decode_relay_request, encode
from slipstream.wire.messages.pieces import joined_message
from slipstream.wire.messages.relay import (
    Alive,
    EndRelay,
    Ok,
    OpenMemory,
    RelayAnswer,
    RelayRequest,
    Reserve,
    Reserved,
    ServeHead,
    Writing,
    Written,
)
from slipstream.wire.messages.weightbus import RelayAddress

_log = logging.getLogger(__name__)
_LINGER_MS = 200
_MOST = 16  # connections: one learner, and earlier ones
_MAX_BYTES = 256 << 20  # largest request: shapes of all tensors


class LearnerSocket:
    """Answers a learner. Use it inside one event loop."""

    def __init__(
        self,
        versions: Versions,
        *,
        stop: asyncio.Event,
        linger_s: float,
        door: Callable[[], RelayAddress | None] = lambda: None,
        on_head: Callable[[ServeHead], None] | None = None,
    ) -> None:
        """Serve no learner yet.

        ``stop`` is set when no version will follow, and after ``linger_s`` without a message of a
        learner. ``on_head`` is called with the head, at a part.
        """
        self._versions = versions
        self._stop = stop
        self._linger_s = linger_s
        self._door = door
        self._on_head = on_head
        self._last_message_s = time.monotonic()

    async def serve(self, endpoint: str) -> None:
        """Answer until cancelled."""
        context = zmq.asyncio.Context()
        try:
            router = ListeningRouter(
                context, endpoint, setting="run.socket_dir", limit=Limit(_MOST, "a learner")
            )
        except ConfigError:
            context.term()
            raise
        try:
            while True:
                peer, *frames = await router.socket.recv_multipart()
                try:
                    data = joined_message(frames, most_bytes=_MAX_BYTES)
                    answer = self._answer(decode_relay_request(data))
                except SupersededError as error:
                    _log.warning("refused: %s", error)
                    answer = Ok(error=shortened(str(error)), superseded=True)
                except (ProtocolError, PublishError) as error:
                    _log.warning("refused: %s", error)
                    answer = Ok(error=shortened(str(error)), pid=os.getpid())
                await router.socket.send_multipart([peer, encode(answer)])
        finally:
            router.close(_LINGER_MS)
            context.term()

    def _answer(self, request: RelayRequest) -> RelayAnswer:
        self._last_message_s = time.monotonic()
        versions = self._versions
        match request:
            case OpenMemory():
                versions.open(request)
            case ServeHead(epoch=epoch):
                versions.refuse_older(epoch)
                if self._on_head is None:
                    raise PublishError("this relay is the head, and has none")
                self._on_head(request)
            case Reserve(epoch=epoch):
                return Reserved(slot=versions.reserve(epoch))
            case Writing(epoch=epoch, slot=slot):
                versions.writing(epoch, slot)
            case Written(epoch=epoch, version=written, slot=slot, probe=probe):
                versions.written(epoch, slot, written, probe)
            case EndRelay(epoch=epoch):
                versions.refuse_older(epoch)
                _log.info("the learner stopped the relay")
                self._stop.set()
            case Alive():
                pass
        return Ok(pid=os.getpid(), door=self._door())

    async def watch(self) -> None:
        """End the relay when no learner has sent anything for weightbus.linger_s."""
        while (left_s := self._last_message_s + self._linger_s - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)
        _log.warning("no learner for %g s (weightbus.linger_s): the relay ends", self._linger_s)
        self._stop.set()
