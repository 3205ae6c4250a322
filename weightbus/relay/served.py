"""The versions that a relay can serve: the learner's memory, and the readers of its slots."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from slipstream.weightbus.relay.learner_parts import Parts
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.version.digests import DigestKind
from slipstream.weightbus.version.layout import part_layout
from slipstream.weightbus.version.part_book import PartBook
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import Slots
from slipstream.weightbus.version.snapshot import WeightSnapshot
from slipstream.wire.errors import PublishError, SupersededError
from slipstream.wire.messages.part_relays import PartState
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion

_log = logging.getLogger(__name__)


class _LearnerMemory:
    """One learner's memory."""

    def __init__(self, memory: SharedSlots, message: OpenMemory, *, silence_s: float) -> None:
        self.memory = memory
        self.epoch = message.epoch
        self.layout = message.layout
        self.part = message.part
        self.slots = Slots(len(message.paths))
        self.publications: dict[int, Publication] = {}
        self.others: PartBook | None = None
        if message.part_keys:
            numbers = range(1, len(message.part_keys) + 1)
            self.others = PartBook(numbers, silence_s=silence_s)

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest version that every part has whole."""
        others = self.others
        return next((v for v in self.slots.whole if others is None or others.is_complete(v)), None)


class VersionReading:
    """A version that is not overwritten until ``end``."""

    def __init__(self, publication: Publication, on_end: Callable[[], None]) -> None:
        self.publication = publication
        self._on_end = on_end
        self._end: asyncio.Future[None] | None = None

    def end(self) -> asyncio.Future[None]:
        """Release the version once no thread of this process reads it; waiting is optional."""
        if self._end is None:
            self._end = asyncio.ensure_future(self.publication.settled())
            self._end.add_done_callback(lambda _: self._on_end())
        return self._end


class Versions:
    """Whole versions; the newest is served. Use it inside one event loop."""

    def __init__(
        self,
        folder: Path,
        *,
        digests: DigestKind = "xxh3",
        parts: Parts | None = None,
        silence_s: float = math.inf,
    ) -> None:
        """Start without a version.

        ``folder`` is for files of transports. ``parts`` are on other hosts of the learner; one is
        lost after ``silence_s`` without a report.
        """
        self.folder = folder
        self._digests: DigestKind = digests
        self._parts = parts
        self._silence_s = silence_s
        self._run_id = ""  # run of the first learner
        self.part_keys: tuple[str, ...] = ()  # public keys of the newest learner's parts 1, 2, ...
        self._sources: list[_LearnerMemory] = []  # the newest learner last; old ones until idle
        self._reading: Counter[Publication] = Counter()
        self.changed = asyncio.Event()  # set when decisions may change
        self.held: Callable[[], Collection[PolicyVersion]] = frozenset
        """Returns the versions that another relay's engines fetch here, at a part."""

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest whole version."""
        source = self._serving()
        return source.newest if source is not None else None

    @property
    def epoch(self) -> int | None:
        """Epoch of the newest learner."""
        return self._sources[-1].epoch if self._sources else None

    def whole(self) -> tuple[PolicyVersion, ...]:
        """Return the versions of the newest learner that are whole in this memory."""
        return tuple(self._sources[-1].slots.whole) if self._sources else ()

    def open(self, message: OpenMemory) -> None:
        """Serve this memory as soon as it holds a whole version.

        Raises:
            PublishError: the memory cannot be mapped, belongs to another run, has parts although
                this relay is for one host, or its epoch is known with another memory: two learners
                would publish different weights under one label.
        """
        layout = message.layout
        run_id = message.run_id
        if self._run_id and run_id and run_id != self._run_id:
            raise PublishError(
                f"this relay serves the run with the id {self._run_id}, not {run_id}"
            )
        if message.part_keys and self._parts is None:
            raise PublishError("this relay was started for a learner on one host")
        self._run_id = self._run_id or run_id
        self.refuse_older(message.epoch)
        if self._sources and self._sources[-1].epoch == message.epoch:
            if not self._sources[-1].memory.is_at(message.paths):
                raise PublishError(
                    f"epoch {message.epoch} was granted twice: {', '.join(message.paths[:1])} is "
                    "another memory than the one that it publishes from"
                )
            if message.whole is not None:
                self.written(message.epoch, message.slot, message.whole, message.probe)
            return
        memory = SharedSlots.open(message.paths, part_layout(layout, message.part))
        self.part_keys = message.part_keys
        self._sources.append(_LearnerMemory(memory, message, silence_s=self._silence_s))
        self.wake()
        if message.whole is not None:
            self.written(message.epoch, message.slot, message.whole, message.probe)

    def reserve(self, epoch: int) -> int:
        """Return the slot that the learner of an epoch may write next.

        Raises:
            PublishError: it has opened no memory.
            SupersededError: a newer learner has opened one.
        """
        source = self._writing(epoch)
        slot = source.slots.reserve(source.newest)
        source.publications.pop(slot, None)
        return slot

    def writing(self, epoch: int, slot: int) -> None:
        """Serve nothing from a slot that the learner is about to write, at a part.

        Raises:
            PublishError: it has opened no memory, or there is no such slot.
            SupersededError: a newer learner has opened one.
        """
        source = self._writing(epoch)
        try:
            source.slots.clear(slot)
        except ValueError as error:
            raise PublishError(str(error)) from error
        source.publications.pop(slot, None)
        self.wake()

    def heard(self, state: PartState, now_s: float) -> None:
        """Record the report of a part."""
        for source in self._sources:
            if source.epoch == state.epoch and source.others is not None:
                if source.others.heard(state.part, state.incarnation, state.whole, now_s):
                    _log.warning("another relay serves part %d now", state.part)
                self.wake()

    def lost_parts(self, now_s: float) -> list[int]:
        """Return the silent parts of the newest learner; their versions are gone."""
        others = self._sources[-1].others if self._sources else None
        return others.lost(now_s) if others is not None else []

    def written(
        self, epoch: int, slot: int, version: PolicyVersion, probe: ProbeLogprobs | None = None
    ) -> None:
        """Serve a version that the learner of an epoch has completed, with its probe.

        Raises:
            PublishError: it has opened no memory, or the slot cannot have been written.
            SupersededError: a newer learner has opened its memory.
        """
        source = self._writing(epoch)
        if source.slots.version(slot) == version:
            return
        try:
            source.slots.written(slot, version)
        except ValueError as error:
            raise PublishError(str(error)) from error
        snapshot = WeightSnapshot(version, source.layout, source.memory.slot(slot), source.part)
        parts = self._parts if source.others is not None else None
        publication = Publication(
            snapshot,
            path=source.memory.paths[slot],  # lives as long as this relay, not the learner
            pin=source.memory.pin,
            digests=self._digests,
            parts=parts,
            probe=probe,
        )
        source.publications[slot] = publication
        self.let_go()
        self.wake()

    def let_go(self) -> None:
        """Drop the memories of former learners, once the newest has written a version.

        Transactions of this relay keep their source; a memory with a held version stays.
        """
        former = self._sources[:-1]
        if not former or not self._sources[-1].publications:
            return
        held = self.held()
        for old in former:
            if not any(publication.version in held for publication in old.publications.values()):
                old.memory.close()
                self._sources.remove(old)

    def read(self) -> "VersionReading | None":
        """Return the newest version, which is not overwritten until its ``end``.

        None while no version is whole, or while two others are being read.
        """
        source = self._serving()
        newest = source.newest if source is not None else None
        if source is None or newest is None or (slot := source.slots.begin(newest)) is None:
            return None
        publication = source.publications[slot]
        self._reading[publication] += 1
        return VersionReading(publication, lambda: self._ended(source, slot, publication))

    def glance(self) -> "VersionReading | None":
        """Return the newest version, which may be overwritten while it is read; None without one.

        If ``find`` still returns the same publication afterwards, it was not overwritten.
        """
        version = self.newest
        publication = self.find(version) if version is not None else None
        return VersionReading(publication, self.wake) if publication is not None else None

    def _ended(self, source: _LearnerMemory, slot: int, publication: Publication) -> None:
        source.slots.end(slot)
        self._reading[publication] -= 1
        if not self._reading[publication]:
            del self._reading[publication]
            publication.on_gpu.clear()
            publication.released()
        self.wake()

    def find(self, version: PolicyVersion) -> Publication | None:
        """Return a version that is being read, or the newest."""
        for source in reversed(self._sources):
            for slot, publication in source.publications.items():
                if publication.version == version and source.slots.version(slot) == version:
                    return publication
        return None

    def wanted(self) -> set[Publication]:
        """Return the versions that an engine may need: those being read, and those in a slot."""
        return set(self._reading).union(*(memory.publications.values() for memory in self._sources))

    def _serving(self) -> _LearnerMemory | None:
        return next((s for s in reversed(self._sources) if s.newest is not None), None)

    def refuse_older(self, epoch: int) -> None:
        """Refuse messages of an earlier learner.

        Raises:
            SupersededError: a newer one has opened its memory.
        """
        if self._sources and epoch < self._sources[-1].epoch:
            raise SupersededError("a newer learner publishes now")

    def _writing(self, epoch: int) -> _LearnerMemory:
        self.refuse_older(epoch)
        if not self._sources or self._sources[-1].epoch != epoch:
            raise PublishError("this learner has not opened a memory")
        return self._sources[-1]

    def wake(self) -> None:
        """Wake everything that waits on ``changed``."""
        self.changed.set()
        self.changed = asyncio.Event()
