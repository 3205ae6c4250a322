"""Pure: chooses the slot of the weights' memory to write next, and the slot to read.

There are three slots. At most two versions are being transferred at a time, so one slot can always
be written: the learner never waits for an engine, however slow. A whole version without a reader
may be overwritten: the newest version wins.
"""

from slipstream.wire.messages.versions import PolicyVersion

NUM_SLOTS = 3


class Slots:
    """The writer and the readers of each slot. Not thread-safe."""

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self._versions: list[PolicyVersion | None] = [None] * num_slots
        self._readers = [0] * num_slots

    @property
    def newest(self) -> int | None:
        """The slot of the newest whole version."""
        whole = [(v, slot) for slot, v in enumerate(self._versions) if v is not None]
        return max(whole)[1] if whole else None

    def version(self, slot: int) -> PolicyVersion | None:
        """Return the whole version in a slot."""
        return self._versions[slot]

    @property
    def whole(self) -> list[PolicyVersion]:
        """All whole versions, the newest first."""
        return sorted((v for v in self._versions if v is not None), reverse=True)

    def reserve(self, keep: PolicyVersion | None = None) -> int:
        """Return a slot without readers; it holds no whole version any more.

        The newest version, and ``keep``, are given up only if no other slot is free. Reserving
        again before ``written`` gives up the version that was being written.
        """
        free = [slot for slot, readers in enumerate(self._readers) if not readers]
        kept = (None if keep is None else self.slot_of(keep), self.newest)
        slot = min(
            free,
            key=lambda slot: (slot == kept[0], slot == kept[1], self._versions[slot] is not None),
        )
        self.clear(slot)
        return slot

    def clear(self, slot: int) -> None:
        """Record that a slot holds no whole version any more.

        Raises:
            ValueError: there is no such slot.
        """
        if not 0 <= slot < len(self._versions):
            raise ValueError(f"there is no slot {slot}")
        self._versions[slot] = None

    def slot_of(self, version: PolicyVersion) -> int | None:
        """Return the slot of a whole version."""
        return self._versions.index(version) if version in self._versions else None

    def written(self, slot: int, version: PolicyVersion) -> None:
        """Record that a slot holds a whole version.

        Raises:
            ValueError: the slot is being read, or there is no such slot.
        """
        if not 0 <= slot < len(self._versions) or self._readers[slot]:
            raise ValueError(f"slot {slot} cannot have been written")
        self._versions[slot] = version

    def begin(self, version: PolicyVersion | None = None) -> int | None:
        """Return the slot of a version, to be read until ``end``; without one, of the newest.

        None while that version is missing, or while two others are being read.
        """
        slot = self.newest if version is None else self.slot_of(version)
        if slot is None:
            return None
        busy = sum(readers > 0 for readers in self._readers)
        if not self._readers[slot] and busy >= len(self._readers) - 1:
            return None
        self._readers[slot] += 1
        return slot

    def end(self, slot: int) -> None:
        """Record that one reader has finished."""
        self._readers[slot] -= 1
