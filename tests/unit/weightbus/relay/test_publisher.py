"""When a relay serves a member again, without another event."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import Libraries
from slipstream.weightbus.relay.learner_parts import Parts
from slipstream.weightbus.relay.publisher import MessageOrigin, Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import TensorSpec, WeightManifest
from slipstream.wire.messages.part_relays import PartState
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import BulkDoor, Join, Leave, PublishRecord
from tests.support.waiting import NEVER_S, until_async

LAYOUT = plan_layout([TensorSpec("w", "float32", (4,))], bucket_bytes=64)
VERSION = PolicyVersion(1, 3)


class LosingParts(Parts):
    """Parts that do not have what they reported."""

    num_holds = 0

    async def hold(self, version: PolicyVersion, _layout: WeightManifest) -> dict[str, str]:
        self.num_holds += 1
        raise PublishError(f"{version.label} is not whole there")


class NoRouter:
    """Sends nothing."""

    def send(self, _peer: bytes, *_frames: object) -> None:
        raise AssertionError("no engine is touched before every part keeps the version")


async def forget(_record: PublishRecord) -> None:
    pass


async def test_a_version_that_a_part_did_not_keep_is_tried_again_without_another_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    parts = LosingParts(relay="head", timeout_s=NEVER_S, hash_timeout_s=NEVER_S)
    versions = Versions(tmp_path, parts=parts)
    memory = SharedSlots.make(LAYOUT, num_slots=3)
    versions.open(
        OpenMemory(epoch=1, paths=memory.paths, layout=LAYOUT, whole=VERSION, part_keys=("a-key",))
    )
    door = BulkDoor(endpoint="tcp://10.0.0.2:5600", key="k")
    versions.heard(
        PartState(part=1, epoch=1, incarnation="first", door=door, whole=(VERSION,)), 0.0
    )
    publisher = Publisher(
        WeightBusSection(fanout=1),
        versions,
        on_record=forget,
        libraries=Libraries("2"),
        parts=parts,
    )
    join = Join(
        name="g",
        incarnation="one",
        device="cpu",
        torch_version="2",
        transport="tcp",
        forward=BulkDoor(endpoint="tcp://10.0.0.7:5700", key="k" * 40),
    )
    publisher._joined(MessageOrigin(b"peer", NoRouter(), "", "its-key"), join)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(publisher._serve_due(group))
        await until_async(lambda: parts.num_holds == 2)
        serving.cancel()
    (state,) = publisher.states()
    assert (state.state, state.reason) == ("behind", "")
    assert publisher._chains.place(VERSION, "other") is None, "behind one that was not served"
    waits = [one for one in caplog.messages if "waits" in one]
    assert waits == ["v1.3 waits: v1.3 is not whole there"], "once per reason"


class Swallowing:
    """Sends to nobody."""

    def send(self, _peer: bytes, *_frames: object) -> None:
        pass


MESSAGES = st.tuples(
    st.sampled_from([b"one", b"two"]),
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["first", "second", "leaves"]),
)


@given(st.lists(MESSAGES, max_size=30))
def test_a_connection_is_one_members_however_many_names_come_over_it(
    messages: list[tuple[bytes, str, str]],
):
    async def body() -> None:
        publisher = Publisher(
            WeightBusSection(),
            Versions(Path("nowhere")),
            on_record=forget,
            libraries=Libraries("2"),
        )
        router = Swallowing()
        for peer, name, what in messages:
            sender = MessageOrigin(peer, router, "", "its-key")  # type: ignore[arg-type]
            if what == "leaves":
                publisher._take(sender, Leave(name=name))
                continue
            join = Join(name=name, incarnation=what, device="cpu", torch_version="2")
            publisher._take(sender, join)
            assert publisher._members[name].peer == peer
            members = publisher._members.values()
            assert publisher._by_place == {one.place: one for one in members}
            assert len(publisher._by_place) == len(members)
        for member in list(publisher._members.values()):
            publisher._forget(member, "is left")
        assert publisher._by_place == {}

    asyncio.run(body())
