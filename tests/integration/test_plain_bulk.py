"""Buckets without encryption: who gets them, and what others on the way can do with them.

That versions reach engines so, also in chains, parts and as deltas, is in test_forwarding.py,
test_remote_listener.py and test_deltas_of_parts.py.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from slipstream.weightbus.net.proofs import Proof, proof_of_member
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.codec import decode_bucket_answer, encode
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import FetchBucket, RelayAddress
from tests.support.bus.engine import digest_of
from tests.support.bus.in_between import Link
from tests.support.bus.remote import (
    EPOCH,
    TENSORS,
    Digests,
    Relay,
    adopts,
    agent,
    client_key,
    running,
    running_relay,
)
from tests.support.waiting import until_async

pytestmark = pytest.mark.integration
VERSION = PolicyVersion(EPOCH, 0)


@asynccontextmanager
async def plain_relay(
    folder: Path, key: ClientKey, *, digests: Digests = "auto"
) -> AsyncIterator[Relay]:
    async with running_relay(folder, bulk="plain", digests=digests) as relay:
        relay.listener.admit({key.public: key.name})
        relay.publish(0)
        await relay.place()
        yield relay


class Client:
    """What anyone can make who reaches the port: frames, under a name and a password."""

    def __init__(self, context: zmq.asyncio.Context, place: RelayAddress) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._place = place

    def connect(self, username: str, password: str) -> None:
        self.socket.plain_username = username.encode()
        self.socket.plain_password = password.encode()
        self.socket.connect(self._place.bulk_endpoint)

    async def send(self, *frames: bytes) -> None:
        await self.socket.send_multipart(frames)

    async def received(self) -> tuple[int, bytes]:
        """Return the number and the bytes of the next bucket that comes."""
        head, data = await self.socket.recv_multipart()
        return decode_bucket_answer(head).index, data


@asynccontextmanager
async def client(place: RelayAddress) -> AsyncIterator[Client]:
    context = zmq.asyncio.Context()
    try:
        yield Client(context, place)
    finally:
        context.destroy(linger=0)


def request(index: int) -> bytes:
    return encode(FetchBucket(version=VERSION, index=index))


def proof_to(place: RelayAddress, key: ClientKey) -> Proof:
    return proof_of_member(public=key.public, secret=key.secret, door=place.key)


def through(place: RelayAddress, link: Link) -> RelayAddress:
    return msgspec.structs.replace(place, bulk_endpoint=link.endpoint)


def unproved(relay: Relay) -> int:
    return relay.listener.traffic.unproved_requests


async def test_a_request_that_its_key_did_not_make_gets_no_answer_and_is_counted(folder: Path):
    key = client_key("gpu-7")
    async with plain_relay(folder, key) as relay:
        place = await relay.place()
        proof, thief = proof_to(place, key), proof_to(place, client_key("thief"))
        forged: Sequence[tuple[bytes, ...]] = (
            (request(0),),
            (b"", request(0)),
            (thief.of(request(0)), request(0)),
            (proof.of(request(1)), request(0)),
            (proof.of(request(0)), request(0), b""),
            (proof.of(request(0)) + b"0", request(0)),
        )
        async with client(place) as one:
            one.connect(key.public, proof.password)
            for frames in forged:
                await one.send(*frames)
            await one.send(proof.of(request(2)), request(2))
            index, data = await one.received()
            assert index == 2
            assert len(data) == 4 * 4096
        assert unproved(relay) == len(forged)


async def test_nobody_connects_without_the_proof_of_an_admitted_key(folder: Path):
    key, stranger = client_key("gpu-7"), client_key("stranger")
    async with plain_relay(folder, key) as relay:
        place = await relay.place()
        tries = (
            (key.public, "0"),
            (key.public, "0" * 64),
            (key.public, proof_to(place, stranger).password),
            (stranger.public, proof_to(place, stranger).password),
            ("nobody", "nothing"),
        )
        for number, (username, password) in enumerate(tries):
            async with client(place) as one:
                one.connect(username, password)
                await one.send(proof_to(place, key).of(request(0)), request(0))
                await until_async(lambda: unproved(relay) > number)  # noqa: B023
        async with client(place) as one:  # without any mechanism
            events = one.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
            one.socket.connect(place.bulk_endpoint)
            await events.recv_multipart()
            one.socket.disable_monitor()
        assert relay.publisher.traffic.sent_bytes == 0


async def test_a_revoked_key_gets_nothing_over_a_connection_that_is_open(folder: Path):
    key, other = client_key("gpu-7"), client_key("gpu-8")
    async with plain_relay(folder, key) as relay:
        place = await relay.place()
        proof = proof_to(place, key)
        async with client(place) as one:
            one.connect(key.public, proof.password)
            await one.send(proof.of(request(0)), request(0))
            assert (await one.received())[0] == 0
            relay.listener.admit({other.public: other.name})
            await one.send(proof.of(request(0)), request(0))
            await until_async(lambda: unproved(relay) == 1)
            relay.listener.admit({key.public: key.name})
            await one.send(proof.of(request(1)), request(1))
            assert (await one.received())[0] == 1


async def test_what_was_proved_to_one_door_is_worth_nothing_at_another(folder: Path):
    key = client_key("gpu-7")
    (folder / "other").mkdir()
    async with plain_relay(folder, key) as relay, plain_relay(folder / "other", key) as other:
        place, elsewhere = await relay.place(), await other.place()
        proof = proof_to(place, key)
        seen = proof.password, (proof.of(request(0)), request(0))
        async with client(elsewhere) as thief:
            thief.connect(key.public, seen[0])
            await until_async(lambda: unproved(other) >= 1)
        async with client(elsewhere) as thief:  # with a connection of its own making
            thief.connect(key.public, proof_to(elsewhere, key).password)
            await thief.send(*seen[1])
            before = unproved(other)
            await until_async(lambda: unproved(other) > before)
        assert other.publisher.traffic.sent_bytes == 0
        async with client(place) as thief:
            thief.connect(key.public, seen[0])
            await thief.send(*seen[1])  # once more: it shows what could be seen before
            assert (await thief.received())[0] == 0
            await thief.send(seen[1][0], request(1))
            await until_async(lambda: unproved(relay) == 1)


@pytest.mark.parametrize(
    ("digests", "what"), [("auto", "keyed digest"), ("blake2b", "expected blake2b:")]
)
async def test_bytes_that_were_changed_on_the_way_reach_no_engine(
    folder: Path, digests: Digests, what: str, caplog: pytest.LogCaptureFixture
):
    key, is_changing = client_key("gpu-7"), [True]

    def change(data: bytes) -> bytes:
        if len(data) < 4096 or not is_changing[0]:
            return data  # handshakes
        return data[:-7] + bytes([data[-7] ^ 1]) + data[-6:]

    async with plain_relay(folder, key, digests=digests) as relay:
        place = await relay.place()
        async with Link(place, to_bulk=True, change=change) as link:
            with agent(folder, key, transport="tcp") as subscriber:
                async with running(subscriber.run(through(place, link))):
                    await until_async(lambda: "arrived with" in caplog.text)
                    assert subscriber.adopted is None
                    is_changing[0] = False
                    await adopts(subscriber, 0)
                    engine = subscriber._updates._engine
                    assert digest_of(engine.tensors) == digest_of(TENSORS)  # type: ignore[attr-defined]
        assert what in caplog.text


async def test_digests_that_others_can_fit_are_not_taken_from_a_plain_door(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    key = client_key("gpu-7")
    async with plain_relay(folder, key, digests="xxh3") as relay:
        with agent(folder, key, transport="tcp") as subscriber:
            async with running(subscriber.run(await relay.place())):
                await until_async(lambda: "weightbus.digests" in caplog.text)
                assert relay.publisher.traffic.sent_bytes == 0


async def test_a_frame_that_is_longer_than_any_bucket_is_not_gathered(folder: Path):
    key, sent = client_key("gpu-7"), []

    def change(data: bytes) -> bytes:
        if len(data) < 4096:
            return data
        sent.append(len(data))
        return b"\x02" + (1 << 40).to_bytes(8, "big") + data  # a frame of a terabyte

    async with plain_relay(folder, key) as relay:
        place = await relay.place()
        async with Link(place, to_bulk=True, change=change) as link:
            with agent(folder, key, transport="tcp", fetch_timeout_s=2.0) as subscriber:
                async with running(subscriber.run(through(place, link))):
                    await until_async(lambda: any(r.failed for r in relay.records))
                    assert subscriber.adopted is None
        assert sent


def test_a_plain_door_without_a_key_of_ones_own_is_an_error(folder: Path):
    place = RelayAddress(
        endpoint="tcp://127.0.0.1:1",
        bulk_endpoint="tcp://127.0.0.1:2",
        key="k" * 40,
        is_bulk_plain=True,
    )
    with agent(folder, None) as subscriber, pytest.raises(ConfigError, match=r"run\.key_file"):
        asyncio.run(subscriber.run(place))
