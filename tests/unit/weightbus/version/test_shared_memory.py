"""Memory of versions, pinned and unpinned; a driver that notes what it is asked stands for CUDA."""

import pytest

from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.wire.errors import PublishError


class Driver:
    """Refuses to pin what is pinned, as CUDA does."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.num_asked = 0

    def register(self, address: int, num_bytes: int) -> int:
        self.num_asked += 1
        if address in self.pinned:
            return 712
        self.pinned[address] = num_bytes
        return 0

    def pin(self, slots: SharedSlots) -> None:
        slots.pin(self.register, self.pinned.pop)


def test_memory_is_pinned_once_and_unpinned_when_its_mapping_ends():
    driver = Driver()
    slots = SharedSlots.make(slot_bytes=100, num_slots=3)
    driver.pin(slots)
    driver.pin(slots)
    assert driver.num_asked == 1
    ((address, num_bytes),) = driver.pinned.items()
    assert address == slots.slot(0).data_ptr()
    assert num_bytes >= 3 * 100
    read = slots.slot(1)  # by a transaction that outlives the learner
    slots.close()
    del slots
    assert driver.pinned, "a GPU may still copy from it"
    del read
    assert not driver.pinned


def test_the_next_memory_at_the_same_address_is_pinned_anew():
    driver = Driver()
    addresses = set()
    for _ in range(4):
        slots = SharedSlots.make(slot_bytes=100, num_slots=3)
        driver.pin(slots)
        addresses.add(slots.slot(0).data_ptr())
        slots.close()
        del slots
    assert driver.num_asked == 4
    assert len(addresses) < 4, "the kernel gives the same address again"


def test_a_driver_that_refuses_is_reported():
    asked: list[int] = []

    def refuse(address: int, _num_bytes: int) -> int:
        asked.append(address)
        return 2

    slots = SharedSlots.make(slot_bytes=100, num_slots=1)
    with pytest.raises(PublishError, match="cannot be pinned: CUDA error 2"):
        slots.pin(refuse)
    slots.pin(refuse)
    assert len(asked) == 1, "it is tried again"
