"""What engines are compared with in a publish of a version that agents receive."""

import asyncio
from collections.abc import Callable

import pytest

from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.relay import publication as module
from slipstream.weightbus.relay.learner_parts import Parts
from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.relay.transaction import Transaction
from slipstream.weightbus.relay.transports.base import RelayState
from slipstream.weightbus.relay.transports.staged import OverTcp
from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    digest_of,
    expected_checksums,
)
from slipstream.wire.messages.codec import decode_command
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import (
    Adopt,
    BulkDoor,
    Command,
    CommandOutcome,
    Join,
    PublishRecord,
    ReceiveVersion,
)
from tests.support.bus.engine import random_tensors
from tests.support.bus.snapshots import CopiedSnapshot

VERSION = PolicyVersion(1, 3)
TENSORS = random_tensors(seed=1, count=3, size=8)
EXPECTED = expected_checksums(TENSORS)
Answer = Callable[[Adopt], CommandOutcome]


def agrees(command: Adopt) -> CommandOutcome:
    return CommandOutcome(command_id=command.command_id, digest=command.digest)


class Agent:
    """Receives everything, and answers Adopt as it is told."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.commands: list[Command] = []
        self.member: Member | None = None

    def send(self, _peer: bytes, *frames: bytes) -> None:
        command = decode_command(b"".join(frames))
        self.commands.append(command)
        if isinstance(command, Adopt):
            outcome = self.answer(command)
        else:
            outcome = CommandOutcome(command_id=getattr(command, "command_id", 0))
        assert self.member is not None
        asyncio.get_running_loop().call_soon(self.member.take, outcome)

    def sent(self, kind: type[Command]) -> Command:
        (command,) = (one for one in self.commands if isinstance(one, kind))
        return command


class OneOtherPart(Parts):
    """A part that keeps no tensor."""

    async def hold(self, version: PolicyVersion, layout: WeightManifest) -> dict[str, str]:
        del version, layout
        return {}

    def doors(self) -> list[BulkDoor]:
        return []


def publish(*agents: Agent, parts: Parts | None = None, check_every: int = 1) -> PublishRecord:
    async def body() -> PublishRecord:
        publication = Publication(
            CopiedSnapshot.of(VERSION, TENSORS, bucket_bytes=500), parts=parts
        )
        members = []
        for number, agent in enumerate(agents):
            name = f"g{number}"
            join = Join(name=name, incarnation="a", device="cpu", torch_version="2", num_ranks=1)
            agent.member = Member(
                b"peer",
                join,
                agent,  # type: ignore[arg-type]  # the part of a router that is used
                name=name,
                transport="tcp",
                timeout_s=5.0,
            )
            members.append(agent.member)
        transport = OverTcp(WeightBusSection(), RelayState())
        record = await Transaction(publication, members, transport, check_every).run()
        await publication.settled()
        return record

    return asyncio.run(body())


def test_each_engine_is_compared_with_checksums_that_the_relay_computed_once(
    monkeypatch: pytest.MonkeyPatch,
):
    computed: list[EngineLayout | None] = []

    def expected_of_version(tensors: object, of: EngineLayout | None = None) -> dict[str, str]:
        del tensors
        computed.append(of)
        return EXPECTED

    monkeypatch.setattr(module, "expected_of_version", expected_of_version)
    agents = [Agent(agrees) for _ in range(3)]
    record = publish(*agents)
    assert computed == [EngineLayout()]
    assert record.failed == {}
    assert record.engine_digests == dict.fromkeys(["g0", "g1", "g2"], digest_of(EXPECTED))
    assert "expect" in record.phase_seconds
    for agent in agents:
        received, adopted = agent.sent(ReceiveVersion), agent.sent(Adopt)
        assert isinstance(received, ReceiveVersion)
        assert not received.is_checked, "nothing is computed there"
        assert isinstance(adopted, Adopt)
        assert adopted.digest == digest_of(EXPECTED)


def test_agents_compute_what_a_relay_with_a_part_of_the_tensors_cannot():
    agent = Agent(lambda command: CommandOutcome(command_id=command.command_id, digest="theirs"))
    record = publish(agent, parts=OneOtherPart(relay="head", timeout_s=5.0, hash_timeout_s=5.0))
    received, adopted = agent.sent(ReceiveVersion), agent.sent(Adopt)
    assert isinstance(received, ReceiveVersion)
    assert received.is_checked
    assert isinstance(adopted, Adopt)
    assert not adopted.digest
    assert record.engine_digests == {"g0": "theirs"}


def test_a_publish_without_a_check_compares_nothing():
    agent = Agent(agrees)
    record = publish(agent, check_every=0)
    adopted = agent.sent(Adopt)
    assert isinstance(adopted, Adopt)
    assert not adopted.digest
    assert record.engine_digests == {}


@pytest.mark.parametrize(
    ("checksums", "why"),
    [
        (EXPECTED | {min(EXPECTED): "0"}, f"1 tensors differ in the engine: ['{min(EXPECTED)}']"),
        ({"another": "0"}, "4 tensors differ in the engine: "),
        (EXPECTED, "its digest differs, and none of its tensors"),
    ],
)
def test_an_engine_with_other_checksums_is_left_out(checksums: dict[str, str], why: str):
    liar = Agent(lambda command: CommandOutcome(command_id=command.command_id, checksums=checksums))
    record = publish(liar, Agent(agrees))
    assert record.failed["g0"].startswith(why)
    assert list(record.adopted_by) == ["g1"]
    assert list(record.engine_digests) == ["g1"]


def test_a_relay_that_cannot_compute_what_engines_must_hold_leaves_them_out(
    monkeypatch: pytest.MonkeyPatch,
):
    def fails(tensors: object, of: EngineLayout | None = None) -> dict[str, str]:
        del tensors, of
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(module, "expected_of_version", fails)
    record = publish(Agent(agrees))
    assert record.failed["g0"].endswith("cannot be computed: CUDA out of memory")
    assert not record.adopted_by
