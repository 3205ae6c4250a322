"""The connection of a host's first rank to its relay.

A relay outlives the learner and is restarted when it dies. Rank 0's relay is the head; the relays
of other hosts are parts.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import zmq
import zmq.asyncio

from slipstream.learner.publish.relay_process import RelayLaunch, RelayProcess, is_relay
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.wire.errors import PublishError, SupersededError
from slipstream.wire.messages.codec import decode_relay_answer, encode
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.pieces import cut
from slipstream.wire.messages.probe import ProbeLogprobs
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
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import RelayAddress
from slipstream.wire.process.patience import END_AT_MOST, Patience, signs_of

_log = logging.getLogger(__name__)
_ANSWER_S = 5.0  # wait without a sign of life, as all waits below
_FIRST_ANSWER_S = 1.0  # wait for a relay that may exist; doubled while one starts
_MAX_FIRST_ANSWER_S = 16.0
_START_S = 120.0
_WATCH_S = 1.0
_POLL_S = 0.02


class RelayLink:
    """The learner's end of its relay. Use it inside one event loop.

    Training continues while there is no relay: no engine reads then, so the next slot is ours to
    choose, and the new relay serves the newest version written.
    """

    def __init__(
        self,
        endpoint: str,
        launch: RelayLaunch,
        *,
        on_door: Callable[[RelayAddress], None] | None = None,
    ) -> None:
        """Prepare to start a relay, which listens for us at ``endpoint``.

        ``on_door`` receives each relay's address for other hosts, in a thread: it may wait.
        """
        self._endpoint = endpoint
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._one_at_a_time = asyncio.Lock()
        self._process = RelayProcess(launch)
        self._served_by = 0  # pid of the relay that knows our memory; 0: slots are ours to choose
        self._was_shown = False  # True if a relay that may be alive knows our memory
        self._memory: OpenMemory | None = None
        self._is_down = asyncio.Event()
        self._is_ending = False
        self._on_door = on_door
        self._door: RelayAddress | None = None
        self._has_moved = asyncio.Event()  # set when ``on_door`` is due
        self._head: ServeHead | None = None

    # ---- keeping a relay -----------------------------------------------------

    async def run(self) -> None:
        """Keep a relay running until cancelled.

        Raises:
            ChildDiedError: it dies again and again.
            SupersededError: a newer learner uses it.
        """
        telling = asyncio.create_task(self._tell_door())
        try:
            await self._adopt(_FIRST_ANSWER_S)  # an earlier learner may have left a relay
            while not self._is_ending:
                if not self._served_by:
                    may_answer = is_relay(self._process.pid)
                    if not may_answer or not await self._adopt(_FIRST_ANSWER_S):
                        await self._start()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_down.wait(), _WATCH_S)  # noqa: TID251 never cancelled
                if self._served_by and not self._is_ending:
                    await self._check_alive()
            await asyncio.Event().wait()  # the socket is open until we are cancelled: for ``end``
        finally:
            telling.cancel()
            self._close_socket()
            if self._context is not None:
                self._context.term()

    async def _tell_door(self) -> None:
        """Report one address after the other, the newest if several came meanwhile."""
        while self._on_door is not None:
            await self._has_moved.wait()
            self._has_moved.clear()
            if self._door is not None:
                try:
                    await asyncio.to_thread(self._on_door, self._door)
                except PublishError as error:
                    _log.warning("other hosts do not hear where the relay listens: %s", error)

    async def _check_alive(self) -> None:
        with suppress(PublishError):  # a relay that fails no longer serves us
            async with self._one_at_a_time:
                await self._exchange(Alive())
            if self._process.pid != self._served_by:
                await self._adopt(_ANSWER_S)

    async def _adopt(self, timeout_s: float) -> bool:
        """Show our memory to a relay, if one answers; from then on the relay gives out slots."""
        try:
            async with self._one_at_a_time:
                await self._exchange(Alive(), timeout_s=timeout_s)
                while True:
                    memory = self._memory
                    if memory is not None:
                        self._check(await self._exchange(memory))
                        if self._head is not None:
                            self._check(await self._exchange(self._head))
                    if memory is self._memory:  # nothing was written meanwhile
                        break
                if not self._process.has_our_settings:  # it serves no newer learner
                    _log.warning(
                        "the weight relay that an earlier learner left has other settings of "
                        "[weightbus]; it is replaced"
                    )
                    self._kill()
                    return False
                self._is_down.clear()
                self._served_by = self._process.pid
        except PublishError:
            return False
        self._process.kill_surplus()
        return True

    async def _start(self) -> None:
        self._served_by = 0
        process = self._process.start()
        self._was_shown = False  # every other relay has ended
        patience = Patience("the weight relay to answer", _START_S, signs_of(lambda: [process.pid]))
        answer_s = _FIRST_ANSWER_S
        while process.poll() is None and not self._is_ending:
            adopting = asyncio.create_task(self._adopt(answer_s))
            try:
                while not (await asyncio.wait({adopting}, timeout=_WATCH_S))[0]:
                    patience.is_over()  # notes signs of progress
                if adopting.result():
                    return
            finally:
                adopting.cancel()
            answer_s = min(2 * answer_s, _MAX_FIRST_ANSWER_S)  # the relay may only be slow
            if patience.is_over():
                _log.error("the weight relay does not answer: it %s", patience.why)
                self._kill()
                return
        if not self._is_ending:
            _log.error("the weight relay ended with code %s", process.poll())
            await asyncio.sleep(_WATCH_S)

    def _lost(self, why: str) -> None:
        if self._served_by:
            _log.warning("the weight relay %s; another is started", why)
        self._served_by = 0
        self._is_down.set()

    def _kill(self) -> None:
        self._served_by = 0
        self._process.kill()
        self._was_shown = False

    # ---- for the learner -----------------------------------------------------

    async def open(
        self,
        paths: Sequence[str],
        layout: WeightManifest,
        *,
        epoch: int,
        run_id: str = "",
        part: int = 0,
        part_keys: Sequence[str] = (),
    ) -> None:
        """Announce where versions will be written.

        ``paths`` are of the slots for the part's buckets, ``layout`` of the whole version. A head
        names the public keys of parts 1, 2, ...
        """
        memory = OpenMemory(
            epoch=epoch,
            paths=tuple(paths),
            layout=layout,
            run_id=run_id,
            part=part,
            part_keys=tuple(part_keys),
        )
        await self._send(memory, memory)

    async def serve_head(self, head: ServeHead) -> None:
        """Have a part relay report to this head."""
        if head != self._head:
            self._head = head
            await self._send(self._opened(), head)

    async def writing(self, slot: int) -> None:
        """Have a part relay serve nothing from a slot about to be written.

        Raises:
            PublishError: no memory was opened.
            SupersededError: a newer learner publishes.
        """
        memory = self._opened()
        if memory.whole is not None and memory.slot == slot:
            memory = msgspec.structs.replace(memory, whole=None)
        await self._send(memory, Writing(epoch=memory.epoch, slot=slot))
        if not self._served_by and self._was_shown:
            self._kill()  # it must not read the slot now; a new relay knows no slot

    async def reserve(self) -> int:
        """Return the slot to write the next version into.

        Raises:
            PublishError: no memory was opened.
            SupersededError: a newer learner publishes.
        """
        memory = self._opened()
        if self._served_by:
            async with self._one_at_a_time:
                if self._served_by:
                    with suppress(PublishError):
                        answer = await self._exchange(Reserve(epoch=memory.epoch))
                        if isinstance(answer, Reserved):
                            memory = self._opened()
                            if memory.whole is not None and memory.slot == answer.slot:
                                # The version is overwritten now: no new relay may serve it.
                                self._memory = msgspec.structs.replace(memory, whole=None)
                            return answer.slot
                        self._check(answer)
                    self._kill()
        return (self._opened().slot + 1) % NUM_SLOTS

    async def written(
        self, version: PolicyVersion, slot: int, probe: ProbeLogprobs | None = None
    ) -> None:
        """Hand over a version that is whole, with its probe."""
        memory = msgspec.structs.replace(self._opened(), whole=version, slot=slot, probe=probe)
        written = Written(epoch=memory.epoch, version=version, slot=slot, probe=probe)
        await self._send(memory, written)

    async def _send(self, memory: OpenMemory, request: RelayRequest) -> None:
        """Send a request to the relay; a new relay gets ``memory`` as its request instead."""
        self._memory = memory
        if not self._served_by:
            return
        with suppress(PublishError):
            async with self._one_at_a_time:
                if self._served_by:
                    self._check(await self._exchange(request))

    async def end(self) -> None:
        """Stop the relay: no version will follow."""
        self._is_ending = True
        self._is_down.set()
        memory = self._memory
        if self._served_by and memory is not None:
            with suppress(PublishError):
                async with self._one_at_a_time:
                    self._check(await self._exchange(EndRelay(epoch=memory.epoch)))
                    await self._gone(self._process.pid)
                    return
        self._kill()

    async def _gone(self, pid: int) -> None:
        signs = signs_of(lambda: [pid])
        patience = Patience("the weight relay to end", _ANSWER_S, signs, at_most=END_AT_MOST)
        while not patience.is_over():
            if self._process.has_ended(pid):
                return
            await asyncio.sleep(_POLL_S)
        raise PublishError("did not end")

    def _opened(self) -> OpenMemory:
        if self._memory is None:
            raise PublishError("no memory was opened")
        return self._memory

    # ---- the socket ----------------------------------------------------------

    def _check(self, answer: RelayAnswer) -> None:
        """Raise the error in an answer, if any; a relay that refuses does not serve us."""
        if not isinstance(answer, Ok) or not answer.error:
            return
        if answer.superseded:
            raise SupersededError(answer.error)
        self._lost(f"refuses: {answer.error}")
        raise PublishError(answer.error)

    async def _exchange(
        self, request: RelayRequest, *, timeout_s: float = _ANSWER_S
    ) -> RelayAnswer:
        """Return the answer to a request; the caller holds the lock.

        Raises:
            PublishError: no answer came in time; the relay does not serve us any more.
        """
        self._context = self._context or zmq.asyncio.Context()
        if self._socket is None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(self._endpoint)
        socket = self._socket
        self._was_shown |= isinstance(request, OpenMemory)
        await socket.send_multipart(cut([encode(request)]))
        receiving = asyncio.ensure_future(socket.recv())
        signs = signs_of(lambda: [self._served_by]) if self._served_by else None
        patience = Patience("the weight relay to answer", timeout_s, signs)
        while not receiving.done():
            await asyncio.wait({receiving}, timeout=_POLL_S)
            if receiving.done():
                break
            has_ended = self._served_by != 0 and not is_relay(self._served_by)
            if has_ended or patience.is_over():
                receiving.cancel()
                self._close_socket()  # a late answer must not answer the next request
                why = "has ended" if has_ended else f"gives no answer: it {patience.why}"
                was_serving = self._served_by != 0
                self._lost(why)
                if was_serving:
                    self._kill()  # the relay must not read our next write
                raise PublishError(f"{why} ({type(request).__name__})")
        answer = decode_relay_answer(receiving.result())
        if isinstance(answer, Ok):
            self._process.pid = answer.pid or self._process.pid
            if self._on_door is not None and answer.door not in {None, self._door}:
                self._door = answer.door
                self._has_moved.set()
        return answer

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
