"""What a head asks of the parts of a learner, and what it tells them."""

import asyncio

import pytest

from slipstream.weightbus.relay.parts import Parts
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.parts import (
    HeadCommand,
    Hold,
    PartHeard,
    PartHeld,
    PartState,
    Release,
)
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import BulkDoor
from tests.support.waiting import NEVER_S

VERSION = PolicyVersion(1, 3)
KEYS = {"a-key": "gpu-7"}


def state(part: int, incarnation: str = "first") -> PartState:
    door = BulkDoor(endpoint=f"tcp://10.0.0.{part}:5600", key="k")
    return PartState(part=part, epoch=1, incarnation=incarnation, door=door, whole=(VERSION,))


class Head:
    """A head of two parts, and what it sent to each."""

    def __init__(self) -> None:
        self.parts = Parts(relay="head", timeout_s=NEVER_S)
        self.parts.expected = 2
        self.sent: dict[int, list[HeadCommand]] = {1: [], 2: []}

    def take(self, part: int, report: PartState | PartHeld) -> None:
        self.parts.take(
            part, report, self.sent[part].append, generator_keys=KEYS, heard=lambda _: None
        )

    def holds_of(self, part: int) -> list[Hold]:
        return [one for one in self.sent[part] if isinstance(one, Hold)]


def test_a_version_is_held_once_every_part_has_answered_with_its_digests():
    async def body() -> None:
        head = Head()
        for part in (2, 1):
            head.take(part, state(part))
        holding = asyncio.create_task(head.parts.hold(VERSION))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for part in (1, 2):
            (hold,) = head.holds_of(part)
            assert not holding.done()
            head.take(part, PartHeld(command_id=hold.command_id, digests={f"w{part}": "d"}))
        assert await holding == {"w1": "d", "w2": "d"}
        assert [door.endpoint for door in head.parts.doors()] == [
            "tcp://10.0.0.1:5600",
            "tcp://10.0.0.2:5600",
        ]

    asyncio.run(body())


def test_a_part_that_is_restarted_fails_a_hold_at_once_and_the_others_are_released():
    async def body() -> None:
        head = Head()
        for part in (1, 2):
            head.take(part, state(part))
        holding = asyncio.create_task(head.parts.hold(VERSION))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        (hold,) = head.holds_of(1)
        head.take(1, PartHeld(command_id=hold.command_id))
        head.take(2, state(2, "second"))
        with pytest.raises(PublishError, match="part 2 was restarted"):
            await holding
        assert head.sent[1][-1] == Release(epoch=1, version=VERSION)

    asyncio.run(body())


def test_no_part_takes_the_place_of_one_that_is_missing():
    head = Head()
    head.take(2, state(2))
    with pytest.raises(PublishError, match=r"parts \[1\] of the learner are not there"):
        head.parts.doors()
    head.take(1, state(2))  # it proved the key of part 1
    with pytest.raises(PublishError, match=r"parts \[1\]"):
        head.parts.doors()


def test_parts_hear_of_new_keys_before_their_next_report_and_once():
    head = Head()
    head.take(1, state(1))
    head.parts.tell(KEYS)
    assert head.sent[1] == [PartHeard(relay="head", generator_keys=KEYS)]
    more = {**KEYS, "another": "gpu-8"}
    head.parts.tell(more)
    head.parts.tell(more)
    assert head.sent[1][1:] == [PartHeard(relay="head", generator_keys=more)]
