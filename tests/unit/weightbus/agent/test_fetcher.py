"""Doors are asked in order, parts in turns, and a cancelled fetch stays cancelled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from slipstream.weightbus.agent import fetcher as fetcher_module
from slipstream.weightbus.agent.fetcher import BucketFetcher, fetch_order
from slipstream.wire.errors import PublishError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.codec import decode_fetch, encode
from slipstream.wire.messages.manifest import Bucket, WeightManifest
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import BucketAnswer, BulkDoor, RelayAddress
from tests.support.waiting import until_async

VERSION = PolicyVersion(1, 1)
MANIFEST = WeightManifest(version=VERSION, buckets=(Bucket((), 8), Bucket((), 8, 1)))


@asynccontextmanager
async def fetcher_at(
    folder: Path, timeout_s: float = 600.0, key: ClientKey | None = None
) -> AsyncIterator[BucketFetcher]:
    context = zmq.asyncio.Context()
    fetcher = BucketFetcher(context, timeout_s=timeout_s)
    endpoint = f"ipc://{folder}/relay"
    fetcher.connect(RelayAddress(endpoint=endpoint, bulk_endpoint=endpoint), key)
    yield fetcher
    fetcher.close()
    context.destroy(linger=0)


@asynccontextmanager
async def door(path: Path, *, error: str = "", is_silent: bool = False) -> AsyncIterator[BulkDoor]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{path}")

    async def serve() -> None:
        while True:
            peer, request = await socket.recv_multipart()
            asked = decode_fetch(request)
            answer = encode(BucketAnswer(version=asked.version, index=asked.index, error=error))
            if not is_silent:
                await socket.send_multipart([peer, answer, path.name.encode()][: 2 + (not error)])

    task = asyncio.create_task(serve())
    yield BulkDoor(endpoint=f"ipc://{path}")
    task.cancel()
    context.destroy(linger=0)


def test_a_fetch_that_is_cancelled_as_its_bucket_arrives_is_cancelled(tmp_path: Path):
    async def scenario() -> bool:
        async with fetcher_at(tmp_path) as fetcher:
            fetching = asyncio.create_task(fetcher.receiving(MANIFEST).fetch(0))
            assert fetcher._relay is not None
            waiting = fetcher._relay._connections[0].waiting
            await until_async(lambda: len(waiting) == 1)
            (future,) = waiting.values()
            await asyncio.sleep(0)
            future.set_result(b"bytes")
            fetching.cancel()
            await asyncio.wait({fetching})
            return fetching.cancelled()

    assert asyncio.run(scenario())


@pytest.mark.parametrize("first", ["refuses", "is silent", "is not there"])
async def test_a_door_that_fails_is_left_for_the_next_of_its_part(tmp_path: Path, first: str):
    async with (
        door(tmp_path / "a", error="no", is_silent=first == "is silent") as a,
        door(tmp_path / "b") as b,
        door(tmp_path / "c") as c,
        fetcher_at(tmp_path, timeout_s=1.0 if first == "is silent" else 600.0) as fetcher,
    ):
        if first == "is not there":
            a = BulkDoor(endpoint=f"ipc://{tmp_path}/nowhere")
        receiving = fetcher.receiving(MANIFEST, ((a, b), (c,)))
        for _ in range(2):
            assert bytes(memoryview(await receiving.fetch(0))) == b"b"
            assert bytes(memoryview(await receiving.fetch(1))) == b"c"
        assert fetcher.traffic.left_doors == 1
        assert receiving.rejected(0, "wrong") is False, "it has no other door"


async def test_wrong_bytes_are_fetched_from_the_next_door(tmp_path: Path):
    async with (
        door(tmp_path / "a") as a,
        door(tmp_path / "b") as b,
        fetcher_at(tmp_path) as fetcher,
    ):
        receiving = fetcher.receiving(MANIFEST, ((a, b), (a, b)))
        assert bytes(memoryview(await receiving.fetch(0))) == b"a"
        assert bytes(memoryview(await receiving.fetch(1))) == b"a"
        assert receiving.rejected(0, "wrong")
        assert bytes(memoryview(await receiving.fetch(0))) == b"b"
        assert receiving.rejected(1, "also wrong"), "it came from the door that was left"
        assert fetcher.traffic.left_doors == 1
        assert fetcher.traffic.rejected_buckets == 2
        assert receiving.rejected(0, "wrong, too") is False


async def test_the_last_door_has_the_last_word(tmp_path: Path):
    async with door(tmp_path / "a", error="gone") as a, fetcher_at(tmp_path) as fetcher:
        with pytest.raises(PublishError, match=r"bucket 0 of v1\.1: gone"):
            await fetcher.receiving(MANIFEST, ((a,), (a,))).fetch(0)


async def test_a_part_without_a_door_and_a_door_without_a_key_are_refused(tmp_path: Path):
    far = BulkDoor(endpoint="tcp://127.0.0.1:9")
    async with fetcher_at(tmp_path) as fetcher:
        with pytest.raises(PublishError, match="has no door"):
            fetcher.receiving(MANIFEST, ((far,),))
        with pytest.raises(PublishError, match="proves no key"):
            fetcher.receiving(MANIFEST, ((far,), (far,)))
        keyed = BulkDoor(endpoint="tcp://127.0.0.1:9", key="k" * 40)
        with pytest.raises(PublishError, match=r"run\.key_file"):
            await fetcher.receiving(MANIFEST, ((keyed,), (keyed,))).fetch(0)


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize(
    ("endpoint", "key"),
    [
        ("tcp://127.0.0.1:99999999", "k" * 40),
        ("tcp://127.0.0.1:9", "\0" * 40),
        ("tcp://127.0.0.1:9", "\u00e9" * 40),
        ("ipc://\0", "k" * 40),
        ("anything", "k" * 40),
    ],
)
async def test_a_door_to_which_nothing_can_connect_is_left_for_the_next(
    tmp_path: Path, endpoint: str, key: str, is_plain: bool
):
    bad = BulkDoor(endpoint=endpoint, key=key, is_plain=is_plain)
    public, secret = (half.decode() for half in zmq.curve_keypair())
    own = ClientKey(name="own", role="generator", public=public, secret=secret, broker="")
    async with door(tmp_path / "a") as a, fetcher_at(tmp_path, key=own) as fetcher:
        receiving = fetcher.receiving(MANIFEST, ((bad, a), (a,)))
        for _ in range(2):
            assert bytes(memoryview(await receiving.fetch(0))) == b"a"
        assert fetcher.traffic.left_doors == 1
        with pytest.raises(PublishError):
            await fetcher.receiving(MANIFEST, ((bad,), (a,))).fetch(0)


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 9))
def test_parts_take_turns_and_every_bucket_comes_once(parts: list[int], first: int):
    order = fetch_order(parts, first)
    assert sorted(order) == list(range(len(parts)))
    numbers = sorted(set(parts))
    if numbers:
        turn = [parts[index] for index in order[: len(numbers)]]
        at = first % len(numbers)
        assert turn == numbers[at:] + numbers[:at]
    for part in numbers:
        assert [i for i in order if parts[i] == part] == [
            i for i, one in enumerate(parts) if one == part
        ]


@pytest.mark.parametrize(("configured", "numbers"), [(0, [3, 12]), (5, [5, 5])])
async def test_doors_of_a_part_alone_share_the_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: int, numbers: list[int]
):
    """Otherwise an agent of a learner on 16 hosts would run out of descriptors."""
    monkeypatch.setattr(fetcher_module, "num_connections", lambda wanted, **_: wanted or 12)
    buckets = tuple(Bucket((), 8, part) for part in range(4))
    manifest = WeightManifest(version=VERSION, buckets=buckets)
    context = zmq.asyncio.Context()
    fetcher = BucketFetcher(context, timeout_s=1.0, connections=configured)
    endpoint = f"ipc://{tmp_path}/relay"
    fetcher.connect(RelayAddress(endpoint=endpoint, bulk_endpoint=endpoint), None)
    one, every = (BulkDoor(endpoint=f"ipc://{tmp_path}/{name}") for name in ("one", "every"))
    fetcher.receiving(manifest, [[every, one], *([[every]] * 3)])
    opened = fetcher._others
    assert [len(opened[door]._connections) for door in (one, every)] == numbers
    fetcher.close()
    context.destroy(linger=0)
