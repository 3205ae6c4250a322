"""Memory of versions, pinned and unpinned; a driver that notes what it is asked stands for CUDA."""

import pytest

from slipstream.weightbus.version import shared_memory
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.wire.errors import PublishError


class Driver:
    """Refuses to pin what is pinned, as CUDA does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned: dict[int, int] = {}
        self.num_asked = 0
        monkeypatch.setattr(shared_memory, "register", self.register)
        monkeypatch.setattr(shared_memory, "unregister", self.pinned.pop)

    def register(self, address: int, num_bytes: int) -> int:
        self.num_asked += 1
        if address in self.pinned:
            return 712
        self.pinned[address] = num_bytes
        return 0


def test_memory_is_pinned_once_and_unpinned_when_its_mapping_ends(monkeypatch: pytest.MonkeyPatch):
    driver = Driver(monkeypatch)
    slots = SharedSlots.make(slot_bytes=100, num_slots=3)
    slots.pin()
    slots.pin()
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


def test_the_next_memory_at_the_same_address_is_pinned_anew(monkeypatch: pytest.MonkeyPatch):
    driver = Driver(monkeypatch)
    addresses = set()
    for _ in range(4):
        slots = SharedSlots.make(slot_bytes=100, num_slots=3)
        slots.pin()
        addresses.add(slots.slot(0).data_ptr())
        slots.close()
        del slots
    assert driver.num_asked == 4
    assert len(addresses) < 4, "the kernel gives the same address again"


def test_a_driver_that_refuses_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_memory, "register", lambda *_: 2)
    slots = SharedSlots.make(slot_bytes=100, num_slots=1)
    with pytest.raises(PublishError, match="cannot be pinned: CUDA error 2"):
        slots.pin()
    slots.pin()  # not tried again
