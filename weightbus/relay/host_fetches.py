"""Pure: has one engine of a host fetch a version; the others there map what it fetched.

The engine with the version before fetches the next, as its deltas are few; the others wait for it a
while if it is busy. One that failed fetches by itself, and no other waits for it. Nothing here
keeps an engine from its next version: one whose memory is still read leaves it to its readers.
"""

from dataclasses import dataclass

from slipstream.wire.messages.versions import PolicyVersion

_NOTHING = PolicyVersion(-1, 0)
_MOST_UNOPENED = 3  # files in a row that an engine did not open: then it asks for none


@dataclass(eq=False, slots=True)
class HostEngine:
    """One engine on its host, and the memory of its agent."""

    host: str = ""  # engines of the same host can map each other's memory; empty: with no other
    receiving: PolicyVersion | None = None
    is_alone: bool = False  # waits for no other, and no other for it
    is_fetching: bool = False
    waits_since_s: float = 0.0
    fetched: PolicyVersion | None = None  # version that its memory has or had: base of deltas
    path: str = ""  # file of its memory while that holds ``fetched`` whole
    reads: "HostEngine | None" = None  # owner of the file that it maps
    num_readers: int = 0  # engines that map its file, or one that it had
    num_unopened: int = 0  # files in a row that it could not open


class HostFetches:
    """The engines by host: each fetches, maps or waits. Times are monotonic seconds."""

    def __init__(self, *, patience_s: float) -> None:
        """Start without engines; one that has the version before is awaited ``patience_s``."""
        self._patience_s = patience_s
        self._hosts: dict[str, list[HostEngine]] = {}

    def join(self, engine: HostEngine) -> None:
        """Add an engine."""
        if engine.host:
            self._hosts.setdefault(engine.host, []).append(engine)

    def leave(self, engine: HostEngine) -> None:
        """Remove an engine, and what it fetched."""
        self.end(engine)
        engine.path = ""
        if engine in (present := self._hosts.get(engine.host, [])):
            present.remove(engine)
            if not present:
                del self._hosts[engine.host]

    def begin(
        self, engine: HostEngine, version: PolicyVersion, now_s: float, *, is_alone: bool
    ) -> None:
        """Record that an engine is to get a version; ``source`` says from where.

        One that failed is served alone, and one that never opens a file.
        """
        cannot_map = engine.num_unopened >= _MOST_UNOPENED
        engine.receiving, engine.is_alone = version, is_alone or cannot_map
        engine.waits_since_s = now_s

    def source(self, engine: HostEngine, now_s: float) -> str | None:
        """Return the file that an engine maps; empty if it fetches, None if it waits.

        Ask again after every change, and after ``wait_s``.
        """
        owner = engine.reads
        if owner is not None and owner.path and owner.fetched == engine.receiving:
            return owner.path
        self._stop_reading(engine)
        if engine.is_fetching or engine.is_alone or not engine.host:
            return self.fetch(engine)
        others = [other for other in self._hosts.get(engine.host, []) if other is not engine]
        for other in others:
            if other.path and other.fetched == engine.receiving:
                engine.reads, engine.fetched, engine.path = other, None, ""
                other.num_readers += 1
                return other.path
        alike = [other for other in others if other.receiving == engine.receiving]
        if any(other.is_fetching and not other.is_alone for other in alike):
            return None
        latest = max((engine, *others), key=lambda it: it.fetched or _NOTHING)
        its, wanted = latest.receiving, engine.receiving
        is_coming = its is not None and wanted is not None and latest.fetched != wanted >= its
        is_awaited = is_coming and latest is not engine and not latest.is_alone
        return None if is_awaited and self.wait_s(engine, now_s) > 0 else self.fetch(engine)

    def fetch(self, engine: HostEngine) -> str:
        """Have an engine fetch: its memory is about to change."""
        engine.is_fetching, engine.path = True, ""
        return ""

    def wait_s(self, engine: HostEngine, now_s: float) -> float:
        """Return the seconds for which an engine waits for one that is busy."""
        return engine.waits_since_s + self._patience_s - now_s

    def fetched(self, engine: HostEngine, path: str) -> None:
        """Record that an engine's memory holds the version whole; ``path`` is its file."""
        if engine.reads is not None:  # it was to map that one's
            engine.num_unopened += 1
        self._stop_reading(engine)
        engine.is_fetching = False
        engine.fetched, engine.path = engine.receiving, path

    def end(self, engine: HostEngine) -> None:
        """Record that an engine has the version, or failed to get it: it reads no other's file."""
        if engine.reads is not None:
            engine.num_unopened = 0
        self._stop_reading(engine)
        engine.receiving, engine.is_fetching = None, False

    def _stop_reading(self, engine: HostEngine) -> None:
        owner, engine.reads = engine.reads, None
        if owner is not None:
            owner.num_readers -= 1
