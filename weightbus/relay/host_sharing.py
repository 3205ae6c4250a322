"""Waits of engines for the one of their host that fetches a version."""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress

from slipstream.weightbus.relay.host_fetches import HostEngine, HostFetches
from slipstream.wire.messages.versions import PolicyVersion

_log = logging.getLogger(__name__)
_PATIENCE_S = 5.0
# Paths come from engines: others open nothing else.
_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")


class HostSharing:
    """Tells members the file to map. Use it inside one event loop."""

    def __init__(self, *, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Start without engines; one waits at most ``limit_s`` for others, then it fetches."""
        self._fetches = HostFetches(patience_s=_PATIENCE_S)
        self._limit_s = limit_s
        self._now = now
        self._changed: dict[str, asyncio.Event] = {}  # event of each host where engines wait
        self.num_late = 0  # engines that waited in vain

    def join(self, engine: HostEngine) -> None:
        """Add an engine."""
        self._fetches.join(engine)

    def leave(self, engine: HostEngine) -> None:
        """Remove an engine."""
        self._fetches.leave(engine)
        self._wake(engine)

    def begin(self, engine: HostEngine, version: PolicyVersion, *, is_alone: bool) -> None:
        """Record that an engine is to get a version, by itself or with others of its host."""
        self._fetches.begin(engine, version, self._now(), is_alone=is_alone)

    def end(self, engine: HostEngine) -> None:
        """Record that it has the version, or failed to get it."""
        self._fetches.end(engine)
        self._wake(engine)

    def fetches(self, engine: HostEngine) -> bool:
        """True if an engine fetches the version; false if it maps another's, or waits."""
        return self._fetches.source(engine, self._now()) == ""

    def fetched(self, engine: HostEngine, path: str) -> None:
        """Let the others of its host map what an engine fetched."""
        self._fetches.fetched(engine, path if _PATH.fullmatch(path) else "")
        self._wake(engine)

    async def source(self, engine: HostEngine) -> str:
        """Return the file that an engine maps; empty if it fetches.

        Waits for others of its host.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limit_s):
                while (path := self._fetches.source(engine, self._now())) is None:
                    await self._change(engine, self._fetches.wait_s(engine, self._now()))
                return path
        self.num_late += 1
        _log.warning("an engine fetches: its host had no version after %g s", self._limit_s)
        return self._fetches.fetch(engine)

    async def _change(self, engine: HostEngine, wait_s: float) -> None:
        changed = self._changed.setdefault(engine.host, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s if wait_s > 0 else None):
                await changed.wait()

    def _wake(self, engine: HostEngine) -> None:
        """Let those of its host ask again; those of other hosts have no reason to."""
        if (changed := self._changed.pop(engine.host, None)) is not None:
            changed.set()
