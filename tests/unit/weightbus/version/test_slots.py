import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.weightbus.version.slots import NUM_SLOTS, Slots
from slipstream.wire.messages.versions import PolicyVersion


def version(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


class SlotsMachine(RuleBasedStateMachine):
    """One learner writes, any number of engines read; none reads what is being written."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()
        self.step = 0
        self.writing: int | None = None
        self.content: dict[int, int] = {}  # slot -> step that its bytes belong to; absent: torn
        self.readers: list[tuple[int, int]] = []  # slot, step

    @rule()
    def reserve(self) -> None:
        self.writing = self.slots.reserve()
        self.content.pop(self.writing, None)
        assert all(slot != self.writing for slot, _ in self.readers), "written while it is read"

    @precondition(lambda self: self.writing is not None)
    @rule()
    def write(self) -> None:
        self.step += 1
        assert self.writing is not None
        self.content[self.writing] = self.step
        self.slots.written(self.writing, version(self.step))
        self.writing = None

    @rule()
    def begin(self) -> None:
        slot = self.slots.begin()
        if slot is None:
            busy = {slot for slot, _ in self.readers}
            assert not self.content or len(busy) == NUM_SLOTS - 1, "somebody waits for nothing"
            return
        assert self.content[slot] == max(self.content.values()), "not the newest"
        self.readers.append((slot, self.content[slot]))

    @precondition(lambda self: bool(self.readers))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        slot, _ = self.readers.pop(index)
        self.slots.end(slot)

    @invariant()
    def what_is_read_stays_as_it_was(self) -> None:
        assert all(self.content.get(slot) == step for slot, step in self.readers)

    @invariant()
    def at_most_two_versions_are_read(self) -> None:
        assert len({slot for slot, _ in self.readers}) < NUM_SLOTS


SlotsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestSlots = SlotsMachine.TestCase


def test_the_newest_version_is_given_up_only_when_nothing_else_is_free():
    slots = Slots()
    first = slots.reserve()
    slots.written(first, version(1))
    assert slots.begin() == first
    second = slots.reserve()
    slots.written(second, version(2))
    third = slots.reserve()
    assert third not in {first, second}
    slots.written(third, version(3))
    assert slots.reserve() == second, "version 2 was skipped, version 3 is the newest"


def test_of_the_newest_version_and_the_one_to_keep_the_newest_is_given_up():
    slots = Slots()
    for step in (1, 2, 3):
        slots.written(slots.reserve(keep=version(1)), version(step))
    assert slots.version(slots.begin(version(2)) or 0) == version(2)
    slots.reserve(keep=version(1))
    assert slots.whole == [version(2), version(1)], "version 3 can be published again"


def test_a_version_to_keep_outlasts_all_others():
    slots = Slots()
    for step in range(1, 9):
        slots.written(slots.reserve(keep=version(1)), version(step))
        assert {version(1), version(step)} <= set(slots.whole)


def test_what_was_not_reserved_cannot_have_been_written():
    slots = Slots()
    slot = slots.reserve()
    slots.written(slot, version(1))
    slots.begin()
    with pytest.raises(ValueError, match="cannot have been written"):
        slots.written(slot, version(2))
    with pytest.raises(ValueError, match="cannot have been written"):
        slots.written(NUM_SLOTS, version(2))


def test_what_is_being_written_is_no_version_although_it_was_the_newest():
    slots = Slots()
    written = []
    for step in range(1, NUM_SLOTS + 1):
        written.append(slots.reserve())
        slots.written(written[-1], version(step))
        if step < NUM_SLOTS:
            assert slots.begin() == written[-1]
    again = slots.reserve()
    assert again == written[-1], "all others are being read"
    assert slots.version(again) is None
    assert slots.newest != version(NUM_SLOTS)
    assert slots.begin() != again
