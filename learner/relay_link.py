"""Rank 0's relay: started here, outlives the learner, is started again when it dies."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio

from weightbus.slots import NUM_SLOTS
from wire.codec import decode_relay_answer, encode
from wire.errors import ChildDiedError, PublishError
from wire.manifest import WeightManifest
from wire.relay import (
    Alive,
    EndRelay,
    Ok,
    OpenMemory,
    RelayAnswer,
    RelayRequest,
    Reserve,
    Reserved,
    Written,
)
from wire.versions import PolicyVersion

_log = logging.getLogger(__name__)
_PROGRAM = "learner.relay"
_ANSWER_S = 5.0
_FIRST_ANSWER_S = 1.0  # of a relay that an earlier learner left
_START_S = 120.0
_WATCH_S = 1.0
_POLL_S = 0.02
_MAX_STARTS_IN_A_ROW = 5


@dataclass(frozen=True, slots=True)
class RelayLaunch:
    """How a relay is started.

    ``lifeline`` is a descriptor whose end of file ends it; without one it ends by itself some time
    after the learner.
    """

    argv: Sequence[str] = ()  # settings on the command line
    lifeline: int | None = None


class RelayLink:
    """The learner's end of its relay. Use it inside one event loop.

    While there is no relay the learner goes on: nobody reads then, so the next slot is ours to
    choose, and the new relay serves the newest version that was written.
    """

    def __init__(self, endpoint: str, launch: RelayLaunch) -> None:
        """Prepare to start a relay.

        Args:
            endpoint: where the relay listens for us.
            launch: how it is started.
        """
        self._endpoint = endpoint
        self._launch = launch
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._one_at_a_time = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0  # of the relay that answers; a former learner may have started it
        self._memory: OpenMemory | None = None
        self._is_up = False
        self._is_down = asyncio.Event()
        self._is_ending = False
        self._starts_in_a_row = 0

    async def run(self) -> None:
        """Keep a relay running until cancelled.

        Raises:
            ChildDiedError: it dies again and again.
        """
        try:
            with suppress(PublishError):
                await self._ask(Alive(), timeout_s=_FIRST_ANSWER_S)
                _log.info("process %d, a relay of an earlier learner, goes on", self._pid)
                await self._bring_up()
            while not self._is_ending:
                if not self._is_up:
                    await self._start()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_down.wait(), _WATCH_S)
                if self._is_up and not self._is_ending:
                    await self._look()
        finally:
            self._close_socket()
            if self._context is not None:
                self._context.term()

    async def _look(self) -> None:
        try:
            await self._ask(Alive())
            self._starts_in_a_row = 0
        except PublishError as error:
            self._lost(str(error))

    async def _start(self) -> None:
        self._kill()
        self._starts_in_a_row += 1
        if self._starts_in_a_row > _MAX_STARTS_IN_A_ROW:
            raise ChildDiedError(
                f"the weight relay ended {_MAX_STARTS_IN_A_ROW} times in a row; its reason stands "
                "above in this log"
            )
        launch = self._launch
        extra = [] if launch.lifeline is None else ["--lifeline", str(launch.lifeline)]
        self._process = subprocess.Popen(  # noqa: S603, ASYNC220 our own program; a fork takes no time
            [sys.executable, "-m", _PROGRAM, *launch.argv, *extra],
            stdin=subprocess.DEVNULL,
            pass_fds=[] if launch.lifeline is None else [launch.lifeline],
            start_new_session=True,
        )
        _log.info("the weight relay is process %d", self._process.pid)
        deadline = asyncio.get_running_loop().time() + _START_S
        while self._process.poll() is None:
            with suppress(PublishError):
                await self._ask(Alive(), timeout_s=_FIRST_ANSWER_S)
                await self._bring_up()
                return
            if asyncio.get_running_loop().time() > deadline:
                _log.error("the weight relay did not answer in %.0f s", _START_S)
                self._kill()
                return
        _log.error("the weight relay ended with code %d", self._process.returncode)

    async def _bring_up(self) -> None:
        """Show a relay the memory, if there is one yet; from then on it decides about slots."""
        while True:
            memory = self._memory
            if memory is not None:
                await self._tell(memory)
            if memory is self._memory:  # nothing was written while we said it
                break
        self._is_down.clear()
        self._is_up = True

    def _lost(self, why: str) -> None:
        _log.warning("the weight relay %s; another is started", why)
        self._is_up = False
        self._is_down.set()

    def _kill(self) -> None:
        """End a relay that does not answer: what we write next, it must not read."""
        self._is_up = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        elif self._pid and not self._has_ended():
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._process, self._pid = None, 0

    # ---- for the learner -----------------------------------------------------

    async def open(self, path: str, layout: WeightManifest) -> None:
        """Say where versions will be written."""
        self._memory = OpenMemory(path=path, layout=layout, num_slots=NUM_SLOTS)
        if self._is_up:
            await self._try(self._memory)

    async def reserve(self, version: PolicyVersion) -> int:
        """Return the slot to write a version into."""
        if self._is_up:
            try:
                answer = await self._ask(Reserve(version=version))
            except PublishError as error:
                self._lost(str(error))
                self._kill()
            else:
                if isinstance(answer, Reserved):
                    return answer.slot
                raise PublishError(f"the weight relay: {answer}")
        memory = self._memory
        return (memory.slot + 1) % NUM_SLOTS if memory is not None else 0

    async def written(self, version: PolicyVersion, slot: int) -> None:
        """Hand over a version that is whole."""
        memory = self._memory
        if memory is None:
            raise PublishError("no memory was opened")
        self._memory = OpenMemory(
            path=memory.path,
            layout=memory.layout,
            num_slots=memory.num_slots,
            whole=version,
            slot=slot,
        )
        if self._is_up:
            await self._try(Written(version=version, slot=slot))

    async def end(self) -> None:
        """End the relay in order: no version will follow."""
        self._is_ending = True
        if not self._is_up:
            self._kill()
            return
        with suppress(PublishError):
            await self._tell(EndRelay())
        for _ in range(int(_ANSWER_S / _POLL_S)):
            if self._process is None or self._process.poll() is not None:
                return
            await asyncio.sleep(_POLL_S)
        self._kill()

    async def _try(self, request: RelayRequest) -> None:
        """Say something that a new relay is told as well, should this one be gone."""
        try:
            await self._tell(request)
        except PublishError as error:
            self._lost(str(error))

    # ---- the socket ----------------------------------------------------------

    async def _tell(self, request: RelayRequest) -> None:
        answer = await self._ask(request)
        if isinstance(answer, Ok) and answer.error:
            raise PublishError(f"the weight relay: {answer.error}")

    async def _ask(self, request: RelayRequest, *, timeout_s: float = _ANSWER_S) -> RelayAnswer:
        """Return the answer to a request.

        Raises:
            PublishError: there is none in time.
        """
        async with self._one_at_a_time:
            socket = self._socket or self._connect()
            await socket.send(encode(request))
            receiving = asyncio.ensure_future(socket.recv())
            deadline_s = time.monotonic() + timeout_s
            while not receiving.done():
                await asyncio.wait({receiving}, timeout=_POLL_S)
                if not receiving.done() and (self._has_ended() or time.monotonic() > deadline_s):
                    receiving.cancel()
                    self._close_socket()  # a late answer must not answer the next request
                    how = "has ended" if self._has_ended() else f"gave no answer in {timeout_s:g} s"
                    raise PublishError(f"{how} ({type(request).__name__})")
            answer = decode_relay_answer(receiving.result())
            if isinstance(answer, Ok) and answer.pid:
                self._pid = answer.pid
            return answer

    def _has_ended(self) -> bool:
        """Tell whether the process of the relay is gone."""
        if self._process is not None:
            return self._process.poll() is not None
        if not self._pid:
            return False
        with suppress(OSError):
            return _PROGRAM not in Path(f"/proc/{self._pid}/cmdline").read_text().split("\0")
        return True

    def _connect(self) -> zmq.asyncio.Socket:
        self._context = self._context or zmq.asyncio.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        return socket

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
