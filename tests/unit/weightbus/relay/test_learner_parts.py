"""What a head asks of the parts of a learner, and what it tells them."""

import asyncio

import pytest

from slipstream.weightbus.relay.learner_parts import Parts
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.part_book import digest_of_keys
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.messages.part_relays import (
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
LAYOUT = plan_layout(
    [TensorSpec(f"w{part}", "float32", (4,)) for part in range(3)],
    bucket_bytes=16,
    part_of={f"w{part}": part for part in range(3)},
)


def state(
    part: int,
    incarnation: str = "first",
    keys: dict[str, str] | None = None,
    held: tuple[PolicyVersion, ...] = (),
) -> PartState:
    return PartState(
        part=part,
        epoch=1,
        incarnation=incarnation,
        door=BulkDoor(endpoint=f"tcp://10.0.0.{part}:5600", key="k"),
        whole=(VERSION,),
        keys_digest="" if keys is None else digest_of_keys(keys),
        held=held,
    )


class Head:
    """A head of two parts, and what it sent to each."""

    def __init__(self) -> None:
        self.parts = Parts(relay="head", timeout_s=NEVER_S, hash_timeout_s=NEVER_S)
        self.parts.expected = 2
        self.sent: dict[int, list[HeadCommand]] = {1: [], 2: []}

    def take(self, part: int, report: PartState | PartHeld, peer: bytes = b"first") -> None:
        self.parts.take(
            part,
            report,
            self.sent[part].append,
            peer=peer,
            generator_keys=KEYS,
            heard=lambda _: None,
        )

    def holds_of(self, part: int) -> list[Hold]:
        return [one for one in self.sent[part] if isinstance(one, Hold)]

    async def holding(self) -> "asyncio.Task[dict[str, str]]":
        """Begin to hold the version at both parts."""
        for part in (2, 1):
            self.take(part, state(part))
        task = asyncio.create_task(self.parts.hold(VERSION, LAYOUT))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    def answer(self, part: int, **digests: str) -> None:
        (hold, *_) = self.holds_of(part)
        self.take(part, PartHeld(command_id=hold.command_id, digests=digests))


async def test_a_version_is_held_once_every_part_has_answered_with_its_digests():
    head = Head()
    holding = await head.holding()
    for part in (1, 2):
        assert not holding.done()
        head.answer(part, **{f"w{part}": "d"})
    assert await holding == {"w1": "d", "w2": "d"}
    assert [door.endpoint for door in head.parts.doors()] == [
        "tcp://10.0.0.1:5600",
        "tcp://10.0.0.2:5600",
    ]


async def test_a_part_that_is_restarted_fails_a_hold_at_once_and_the_others_are_released():
    head = Head()
    holding = await head.holding()
    head.answer(1, w1="d")
    head.take(2, state(2, "second"))
    with pytest.raises(PublishError, match="part 2 was restarted"):
        await holding
    assert head.sent[1][-1] == Release(epoch=1, version=VERSION)


def test_no_part_takes_the_place_of_one_that_is_missing():
    head = Head()
    head.take(2, state(2))
    with pytest.raises(PublishError, match=r"parts \[1\] of the learner are not there"):
        head.parts.doors()
    head.take(1, state(2))  # it proved the key of part 1
    with pytest.raises(PublishError, match=r"parts \[1\]"):
        head.parts.doors()


def heard(keys: dict[str, str], *, sent: bool) -> PartHeard:
    return PartHeard(
        relay="head", keys_digest=digest_of_keys(keys), generator_keys=keys if sent else None
    )


def test_parts_hear_of_new_keys_before_their_next_report_and_once():
    head = Head()
    head.take(1, state(1))
    head.parts.tell(dict(KEYS))
    assert head.sent[1] == [heard(KEYS, sent=True)]
    more = {**KEYS, "another": "gpu-8"}
    head.parts.tell(more)
    head.parts.tell(dict(more))
    assert head.sent[1][1:] == [heard(more, sent=True)]


def test_keys_are_sent_to_a_part_that_has_others_and_to_no_part_that_has_them():
    head = Head()
    for _ in range(3):
        head.take(1, state(1, keys=KEYS))
    assert head.sent[1] == [heard(KEYS, sent=False)] * 3
    head.take(1, state(1, keys={"revoked": "gpu-9"}))  # what was sent to it was lost
    assert head.sent[1][3:] == [heard(KEYS, sent=True)]


def test_a_head_without_a_broker_sends_no_keys_and_confirms_none():
    sent: list[HeadCommand] = []
    parts = Parts(relay="head", timeout_s=NEVER_S, hash_timeout_s=NEVER_S)
    parts.take(
        1, state(1, keys=KEYS), sent.append, peer=b"", generator_keys=None, heard=lambda _: None
    )
    assert sent == [PartHeard(relay="head")]


async def test_a_part_that_connects_again_is_asked_again_and_its_late_answer_counts():
    head = Head()
    holding = await head.holding()
    head.answer(1, w1="d")
    (asked,) = head.holds_of(2)
    head.take(2, state(2), peer=b"second")  # its answer went into the first connection
    assert head.holds_of(2) == [asked, asked]
    assert len(head.holds_of(1)) == 1
    head.take(2, state(2), peer=b"second")
    assert head.holds_of(2) == [asked, asked], "asked at every report"
    head.answer(2, w2="d")
    head.answer(2, w2="d")  # both came
    assert await holding == {"w1": "d", "w2": "d"}
    head.take(2, state(2), peer=b"third")
    assert head.holds_of(2) == [asked, asked], "asked for what was answered"


@pytest.mark.parametrize(
    ("digests", "why"),
    [
        ({"w2": "d", "w1": "e"}, "part 2 of the learner has a digest of w1, which is not one"),
        ({"w2": "d", "other": "e"}, "part 2 of the learner has a digest of other, which is not"),
        ({}, "part 2 of the learner has no digest of its tensor w2"),
    ],
)
async def test_a_part_speaks_for_its_own_tensors_alone(digests: dict[str, str], why: str):
    head = Head()
    holding = await head.holding()
    head.answer(1, w1="d")
    head.answer(2, **digests)
    with pytest.raises(PublishError, match=why):
        await holding
    assert head.sent[1][-1] == Release(epoch=1, version=VERSION)


async def test_a_version_whose_release_was_lost_is_released_at_the_next_report():
    head = Head()
    holding = await head.holding()
    head.take(1, state(1, held=(VERSION,)))
    assert Release(epoch=1, version=VERSION) not in head.sent[1], "while it is being held"
    for part in (1, 2):
        head.answer(part, **{f"w{part}": "d"})
    await holding
    head.take(1, state(1, held=(VERSION,)))
    assert Release(epoch=1, version=VERSION) not in head.sent[1]
    head.parts.release(VERSION)
    for _ in range(2):
        head.take(2, state(2, held=(VERSION,)))
        assert head.sent[2][-1] == Release(epoch=1, version=VERSION)
    head.take(2, state(2))
    assert isinstance(head.sent[2][-1], PartHeard)
