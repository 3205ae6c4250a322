"""Changes between the versions that a relay has served, for agents that have one of them.

The changes are a chain of steps, each from one version to the next that was encoded. The chain is
computed in parallel to the transactions, and only while agents ask for it. The relay keeps a copy
of the bytes that a step starts from. A slot would not do: with the newest version and one that a
slow engine is reading, all three slots would be taken, and the learner would wait.

A relay of one part has the steps of that part's buckets. The head assigns its slots and does not
know what is read here: a version that is overwritten meanwhile ends the chain.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from torch import Tensor

from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.version.delta import BucketDelta, encode_delta
from slipstream.weightbus.version.snapshot import WeightSnapshot
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.manifest import ITEM_BYTES, Bucket
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import FetchBucket

_log = logging.getLogger(__name__)
_Blocks = tuple[bytes | None, ...]  # deltas by tensor of a bucket; None: it is sent whole


@dataclass(slots=True)
class _Step:
    """Changes from one version to another, by bucket; the last buckets may still be missing."""

    base: PolicyVersion
    version: PolicyVersion
    buckets: list[_Blocks] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, blocks: _Blocks, most_bytes: int) -> None:
        """Add the next bucket; it is sent whole if the step would exceed ``most_bytes``."""
        num_bytes = sum(len(block or b"") for block in blocks)
        fits = self.num_bytes + num_bytes <= most_bytes
        self.buckets.append(blocks if fits else (None,) * len(blocks))
        self.num_bytes += num_bytes if fits else 0


class Deltas:
    """The newest steps of one relay. Use it inside one event loop."""

    def __init__(
        self, versions: Versions, settings: WeightBusSection, *, holds: bool = True
    ) -> None:
        """Encode nothing until an agent asks.

        ``holds`` is True if a version is not overwritten while it is read here; False at a part's
        relay.
        """
        self.whole_because: Counter[str] = Counter()  # buckets sent to agents that wanted deltas
        self.num_sent = 0  # buckets sent as deltas
        self._versions = versions
        self._most_steps = settings.delta_versions
        self._most_bytes = settings.delta_bytes
        self._wait_s = settings.timeout_s / 2  # limit of the wait for a step under computation
        self._holds = holds
        self._left = 0  # versions to encode unless an agent asks again
        self._steps: deque[_Step] = deque()
        self._head: PolicyVersion | None = None  # base of the next step
        self._copy: Tensor | None = None  # bytes of the base, [num_bytes], uint8
        self._buckets: tuple[Bucket, ...] = ()
        self._progress = asyncio.Event()
        self._logged: tuple[PolicyVersion, str] | None = None

    async def run(self) -> None:
        """Encode each version while agents ask for deltas, until cancelled."""
        while True:
            changed = self._versions.changed
            if self._left and self._versions.newest not in {None, self._head}:
                try:
                    await self._encode_newest()
                except (ImportError, MemoryError, RuntimeError) as error:  # no zstandard, no memory
                    _log.error("every bucket is sent whole from now on: %s", error)
                    self._most_steps = self._left = 0
            self._wake()
            await changed.wait()

    async def delta(self, request: FetchBucket, publication: Publication) -> BucketDelta | None:
        """Return the deltas that a request asks for; None if the bucket is to be sent whole."""
        base = request.base
        if isinstance(base, msgspec.UnsetType):
            return None
        found = await self._found(base, publication, request.index)
        if isinstance(found, BucketDelta):
            self.num_sent += 1
            return found
        self.whole_because[found] += 1
        if base is not None and self._logged != (publication.version, found):
            self._logged = (publication.version, found)
            _log.info("%s is sent whole: %s", publication.version.label, found)
        return None

    async def _found(
        self, base: PolicyVersion | None, publication: Publication, index: int
    ) -> BucketDelta | str:
        """Return the deltas, or why the bucket is sent whole."""
        if not self._most_steps:
            return "deltas are disabled"
        if not self._left:
            self._versions.wake()
        self._left = 2 * self._most_steps
        if base is None:
            return "the agent has no version"
        version = publication.version
        try:
            async with asyncio.timeout(self._wait_s):
                while (blocks := self._chain(base, version, index)) is None:
                    if not self._may_come(base, version):
                        return "what changed since the agent's version is not kept"
                    await self._progress.wait()
        except TimeoutError:
            return "what changed was not computed in half of weightbus.timeout_s"
        shorter = shortest(publication.snapshot, index, base, blocks)
        return shorter if shorter is not None else "the deltas are no shorter"

    # ---- the chain -----------------------------------------------------------

    def _chain(
        self, base: PolicyVersion, version: PolicyVersion, index: int
    ) -> list[_Blocks] | None:
        """Return a bucket's blocks of each step between two versions; None while one is missing."""
        found: list[_Blocks] = []
        at = base
        for step in self._steps:
            if at == version:
                break
            if step.base == at:
                if len(step.buckets) <= index:
                    return None
                found.append(step.buckets[index])
                at = step.version
        return found if at == version else None

    def _may_come(self, base: PolicyVersion, version: PolicyVersion) -> bool:
        """True if the step to a version is being computed, or will be."""
        is_base = base == self._head or any(base in {s.base, s.version} for s in self._steps)
        building = self._steps[-1].version if self._steps else None
        return is_base and version in {building, self._versions.newest} and version != self._head

    async def _encode_newest(self) -> None:
        reading = self._versions.read() if self._holds else self._versions.glance()
        if reading is None:
            return  # two others are being read; the end of one wakes this loop
        self._left -= 1
        try:
            await self._encode(reading.publication)
        except BaseException:
            self._forget()  # the copy may be a mixture
            raise
        finally:
            await asyncio.shield(reading.end())
        if not self._left:
            _log.info("no agent asks for deltas any more")
            self._forget()

    async def _encode(self, publication: Publication) -> None:
        snapshot, buckets = publication.snapshot, publication.snapshot.layout.buckets
        copy, base = self._copy, self._head
        if copy is None or base is None or buckets != self._buckets:
            self._forget()
            self._copy = await asyncio.shield(publication.in_thread(snapshot.memory.clone))
            if self._is_overwritten(publication):
                self._forget()
                return
            self._head, self._buckets = publication.version, buckets
            return
        step = _Step(base, publication.version)
        self._steps.append(step)
        self._head = None  # the copy is neither version
        before = WeightSnapshot(base, snapshot.layout, copy, snapshot.part)
        for index in range(len(buckets)):
            if not snapshot.has(index):
                step.add((), self._most_bytes)
                continue
            computed = publication.in_thread(partial(renewed, before, snapshot, index))
            blocks = await asyncio.shield(computed)
            if self._is_overwritten(publication):
                self._forget()  # the copy is a mixture
                return
            step.add(blocks, self._most_bytes)
            self._bound()
            self._wake()
        self._head = publication.version

    def _is_overwritten(self, publication: Publication) -> bool:
        found = self._versions.find(publication.version)
        return not self._holds and found is not publication

    def _bound(self) -> None:
        while (
            len(self._steps) > self._most_steps
            or sum(step.num_bytes for step in self._steps) > self._most_bytes
        ):
            self._steps.popleft()

    def _forget(self) -> None:
        self._steps.clear()
        self._head, self._copy, self._buckets = None, None, ()
        self._wake()

    def _wake(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()


def renewed(before: WeightSnapshot, after: WeightSnapshot, index: int) -> _Blocks:
    """Return a bucket's changes by tensor, and copy its bytes. Blocks; as fast as the memory.

    None replaces a delta that is not shorter than its tensor.
    """
    old, new = before.bucket(index).numpy(), after.bucket(index).numpy()
    blocks: list[bytes | None] = []
    at = 0
    for spec in after.layout.buckets[index].tensors:
        part = slice(at, at + spec.num_bytes)
        block = encode_delta(old[part].data, new[part].data, ITEM_BYTES[spec.dtype])
        blocks.append(block if len(block) < spec.num_bytes else None)
        old[part] = new[part]
        at += spec.num_bytes
    return tuple(blocks)


def shortest(
    snapshot: WeightSnapshot, index: int, base: PolicyVersion, steps: Sequence[_Blocks]
) -> BucketDelta | None:
    """Choose the shorter for each tensor of a bucket: its deltas of all steps, or its bytes.

    None if the whole bucket is not longer than the choice.
    """
    bucket, data = snapshot.layout.buckets[index], snapshot.bucket(index).numpy().data
    whole: set[int] = set()
    frames: list[Frame] = []
    at = num_bytes = 0
    for place, spec in enumerate(bucket.tensors):
        blocks = [step[place] for step in steps]
        deltas = [block for block in blocks if block is not None]
        size = sum(map(len, deltas))
        if len(deltas) < len(blocks) or size >= spec.num_bytes:
            whole.add(place)
            frames.append(data[at : at + spec.num_bytes])
            size = spec.num_bytes
        else:
            frames += deltas
        num_bytes += size
        at += spec.num_bytes
    if num_bytes >= bucket.num_bytes:
        return None
    return BucketDelta(base, len(steps), frozenset(whole), frames)
