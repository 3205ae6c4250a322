"""What an agent does with deltas: it holds every byte of the version, or nothing."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.relay.deltas import renewed, shortest
from slipstream.weightbus.version.delta import BucketDelta
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.model_files import WEIGHTS
from tests.support.bus.snapshots import CopiedSnapshot

NAMES = ("a", "b", "c")
NUM_BUCKETS = 3
Sent = Frame | BucketDelta


def snapshot(step: int, *, all_of: str = "") -> CopiedSnapshot:
    """Return a version that differs from the one before in one item, and in all of a tensor."""
    tensors: dict[str, Tensor] = {}
    random = torch.Generator().manual_seed(step)
    for number, name in enumerate(NAMES):
        tensor = (torch.arange(800).reshape(8, 100) + number).to(torch.bfloat16)
        tensor.view(-1)[: step + 1] += 1000.0
        if name in all_of:
            bits = torch.randint(-(1 << 15), 1 << 15, (8, 100), generator=random)
            tensor = bits.to(torch.int16).view(torch.bfloat16)
        tensors[f"{name}.weight"] = tensor
        tensors[f"{name}.scale"] = torch.full((7,), float(step), dtype=torch.bfloat16)
    return CopiedSnapshot.of(PolicyVersion(1, step), tensors, bucket_bytes=1_614)


class Sender:
    """A relay with the steps between some versions; it may damage what it sends."""

    def __init__(self, *versions: CopiedSnapshot) -> None:
        self.newest = versions[-1]
        self.asked: list[tuple[int, object]] = []
        self.damage: dict[int, Callable[[Sent], Sent]] = {}  # once, by bucket
        self._versions = versions
        self._steps = []
        for before, after in pairwise(versions):
            copy = CopiedSnapshot(before.version, before.layout, before.memory.clone())
            self._steps.append([renewed(copy, after, i) for i in range(len(after.layout.buckets))])
            assert torch.equal(copy.memory, after.memory)

    def fetch(self, staging: Staging) -> Callable[[int], Awaitable[Sent]]:
        async def fetched(index: int) -> Sent:
            await asyncio.sleep(0)
            base = staging.base(index)
            self.asked.append((index, base))
            sent: Sent = self.newest.bucket(index).numpy().data
            for place, one in enumerate(self._versions):
                if one.version == base:
                    blocks = [step[index] for step in self._steps[place:]]
                    sent = shortest(self.newest, index, one.version, blocks) or sent
            return self.damage.pop(index, lambda whole: whole)(sent)

        return fetched

    def receive(self, staging: Staging) -> Path:
        return asyncio.run(staging.receive(self.newest.manifest(), self.fetch(staging)))


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    made = Staging(tmp_path, "agent", uses_deltas=True)
    yield made
    made.close()


def check(folder: Path, sent: CopiedSnapshot) -> None:
    loaded = load_file(folder / WEIGHTS)
    assert loaded.keys() == sent.tensors.keys()
    for name, tensor in sent.tensors.items():
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)), name


def bases(staging: Staging) -> list[object]:
    return [staging.base(index) for index in range(NUM_BUCKETS)]


def test_a_chain_is_applied_in_place_and_every_bucket_becomes_a_base(staging: Staging):
    versions = [snapshot(step) for step in range(4)]
    assert len(versions[0].layout.buckets) == NUM_BUCKETS
    assert bases(staging) == [None] * NUM_BUCKETS
    check(Sender(versions[0]).receive(staging), versions[0])
    assert staging.fetched_bytes == versions[0].layout.num_bytes
    assert bases(staging) == [PolicyVersion(1, 0)] * NUM_BUCKETS
    check(Sender(*versions).receive(staging), versions[3])
    assert 0 < staging.fetched_bytes < versions[0].layout.num_bytes / 2
    assert bases(staging) == [PolicyVersion(1, 3)] * NUM_BUCKETS
    check(Sender(*versions).receive(staging), versions[3])  # which it has
    assert staging.fetched_bytes == 0
    assert staging.num_refused_deltas == 0


def test_a_tensor_of_which_all_changed_is_whole_among_deltas(staging: Staging):
    versions = [snapshot(0), snapshot(1, all_of="b")]
    Sender(versions[0]).receive(staging)
    sender = Sender(*versions)
    check(sender.receive(staging), versions[1])
    assert 1600 < staging.fetched_bytes < 2400
    assert staging.num_refused_deltas == 0


def test_memory_that_was_released_is_no_base(staging: Staging):
    versions = [snapshot(0), snapshot(1)]
    Sender(versions[0]).receive(staging)
    staging.free()
    assert bases(staging) == [None] * NUM_BUCKETS
    check(Sender(*versions).receive(staging), versions[1])
    assert staging.fetched_bytes == versions[1].layout.num_bytes


def test_without_deltas_no_base_is_named(tmp_path: Path):
    staging = Staging(tmp_path, "agent")
    Sender(snapshot(0)).receive(staging)
    assert bases(staging) == [msgspec.UNSET] * NUM_BUCKETS
    staging.close()


def replaced(**others: object) -> Callable[[Sent], Sent]:
    def change(sent: Sent) -> Sent:
        assert isinstance(sent, BucketDelta)
        return sent._replace(**others)

    return change


def with_frames(change: Callable[[list[Frame]], list[Frame]]) -> Callable[[Sent], Sent]:
    def changed(sent: Sent) -> Sent:
        assert isinstance(sent, BucketDelta)
        return sent._replace(frames=change(list(sent.frames)))

    return changed


DAMAGES = {
    "another base": replaced(base=PolicyVersion(9, 9)),
    "a step fewer": with_frames(lambda frames: frames[: len(frames) // 2]),
    "too many frames": with_frames(lambda frames: [*frames, b""]),
    "no frames": with_frames(lambda _frames: []),
    "frames in another order": with_frames(lambda frames: frames[::-1]),
    "a frame twice": with_frames(lambda frames: [frames[0], frames[0], *frames[2:]]),
    "a truncated frame": with_frames(lambda frames: [frames[0][:-1], *frames[1:]]),
    "an empty frame": with_frames(lambda frames: [b"", *frames[1:]]),
    "a long frame": with_frames(lambda frames: [*frames[:-1], bytes(frames[-1]) + b"0"]),
    "steps without end": replaced(num_steps=1 << 60),
    "a tensor that is not there": replaced(whole=frozenset({77})),
    "a tensor before the first": replaced(whole=frozenset({-1})),
    "a delta as a tensor": replaced(whole=frozenset({0}), num_steps=1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_answer_is_refused_and_that_bucket_is_fetched_whole(
    staging: Staging, damage: Callable[[Sent], Sent]
):
    versions = [snapshot(step) for step in range(3)]
    Sender(versions[0]).receive(staging)
    sender = Sender(*versions)
    sender.damage[1] = damage
    check(sender.receive(staging), versions[2])
    assert staging.num_refused_deltas == 1
    assert sender.asked.count((1, PolicyVersion(1, 0))) == 1
    assert sender.asked.count((1, None)) == 1
    assert len(sender.asked) == NUM_BUCKETS + 1


def test_a_second_failure_fails_the_version_and_leaves_that_bucket_no_base(staging: Staging):
    versions = [snapshot(step) for step in range(2)]
    Sender(versions[0]).receive(staging)
    sender = Sender(*versions)
    sender.damage[1] = with_frames(lambda frames: frames[:-1])
    fetch = sender.fetch(staging)

    async def fetched(index: int) -> Sent:
        sent = await fetch(index)
        return sent if isinstance(sent, BucketDelta) else bytes(sent)[::-1]

    with pytest.raises(PublishError, match="arrived with digest"):
        asyncio.run(staging.receive(versions[1].manifest(), fetched))
    assert staging.base(1) is None
    check(Sender(*versions).receive(staging), versions[1])  # the repair
    assert 1600 < staging.fetched_bytes < 2 * 1614


def test_a_receive_that_is_cancelled_leaves_bases_that_are_whole_or_none(staging: Staging):
    versions = [snapshot(step) for step in range(3)]
    Sender(versions[0]).receive(staging)
    sender = Sender(*versions)
    fetch = sender.fetch(staging)

    async def cancelled() -> None:
        reached = asyncio.Event()

        async def fetched(index: int) -> Sent:
            if index == 2:
                reached.set()
                await asyncio.Event().wait()
            return await fetch(index)

        receiving = asyncio.ensure_future(staging.receive(versions[2].manifest(), fetched))
        await reached.wait()
        receiving.cancel()
        await asyncio.wait({receiving})

    asyncio.run(cancelled())
    assert set(bases(staging)) <= {None, PolicyVersion(1, 0), PolicyVersion(1, 2)}
    assert staging.base(2) == PolicyVersion(1, 0)  # nothing was written there
    check(Sender(*versions).receive(staging), versions[2])
    assert staging.num_refused_deltas == 0


def test_an_application_that_fails_midway_leaves_no_base_and_no_wrong_byte(staging: Staging):
    versions = [snapshot(step) for step in range(2)]
    Sender(versions[0]).receive(staging)
    sender = Sender(*versions)
    sender.damage[0] = with_frames(lambda frames: [*frames[:-1], b"\1\2\3"])  # the others apply

    async def fetched(index: int, *, times: list[int]) -> Sent:
        times.append(index)
        if times.count(0) == 2:
            raise PublishError("the relay has gone")
        return await sender.fetch(staging)(index)

    seen: list[int] = []
    with pytest.raises(PublishError, match="has gone"):
        asyncio.run(
            staging.receive(versions[1].manifest(), lambda index: fetched(index, times=seen))
        )
    assert staging.base(0) is None
    check(Sender(*versions).receive(staging), versions[1])


def test_an_engine_that_did_not_answer_keeps_the_bytes_that_it_maps(staging: Staging):
    versions = [snapshot(step) for step in range(2)]
    mapped = load_file(Sender(versions[0]).receive(staging) / WEIGHTS)
    staging.may_be_read = True
    check(Sender(*versions).receive(staging), versions[1])
    assert 0 < staging.fetched_bytes < versions[0].layout.num_bytes / 2
    assert not staging.may_be_read
    for name, tensor in versions[0].tensors.items():
        assert torch.equal(mapped[name], tensor), name


def test_a_sender_of_deltas_alone_is_left_after_one_refusal(staging: Staging):
    version = snapshot(0)

    async def fetched(_index: int) -> Sent:
        return BucketDelta(version.version, 1, frozenset(), [b""])

    with pytest.raises(PublishError, match="which is not there"):
        asyncio.run(staging.receive(version.manifest(), fetched))
    assert 0 < staging.num_refused_deltas <= NUM_BUCKETS
