"""A version with everything that its transfers need; each part is computed once, on demand."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from slipstream.weightbus.relay.buckets_on_gpu import BucketsOnGpu
from slipstream.weightbus.relay.learner_parts import Parts
from slipstream.weightbus.version.adapter_checksums import are_adapters, expected_of_version
from slipstream.weightbus.version.digests import DigestKind
from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    digest_of,
    hash_parts,
    joined_checksums,
)
from slipstream.weightbus.version.snapshot import WeightSnapshot, with_digests
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.codec import encode_manifest
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.part_relays import HashPart
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import BulkDoor

T = TypeVar("T")


class Publication:
    """One version on its way to the engines. Use it inside one event loop.

    A cancelled caller does not cancel a computation for the others.
    """

    def __init__(
        self,
        snapshot: WeightSnapshot,
        *,
        path: str = "",
        pin: Callable[[], None] = lambda: None,
        digests: DigestKind = "xxh3",
        parts: Parts | None = None,
        probe: ProbeLogprobs | None = None,
    ) -> None:
        """Compute nothing yet.

        ``path`` leads to the snapshot's file on this host. ``pin`` pins its memory, once. ``parts``
        have the rest of the version; None if it is whole.
        """
        self._digest_kind: DigestKind = digests
        self.path = path
        self.pin = pin
        self.parts = parts
        self.probe = probe
        self.snapshot = snapshot
        self.on_gpu = BucketsOnGpu(snapshot)
        self._manifest: asyncio.Future[WeightManifest] | None = None
        self._own: asyncio.Future[dict[str, str]] | None = None
        self._expected: dict[EngineLayout, asyncio.Future[dict[str, str]]] = {}
        self._shares: dict[EngineLayout, asyncio.Future[dict[str, tuple[HashPart, ...]]]] = {}
        self._digest = ""
        self._digests: dict[EngineLayout, str] = {}  # digests of the expected checksums
        self._encoded: msgspec.Raw | None = None
        self._begun: set[asyncio.Future[Any]] = set()  # computations that are not done

    @property
    def version(self) -> PolicyVersion:
        """The version."""
        return self.snapshot.version

    @property
    def is_whole(self) -> bool:
        """True if all tensors are in this relay's memory."""
        return self.parts is None

    @property
    def has_adapters(self) -> bool:
        """True if the version is adapters alone."""
        return are_adapters(self.snapshot.tensors)

    @property
    def undigested(self) -> WeightManifest:
        """The manifest without digests."""
        return msgspec.structs.replace(self.snapshot.layout, version=self.version)

    def begin_digests(self) -> asyncio.Future[WeightManifest]:
        """Start to compute the result of ``manifest``."""
        if self._manifest is None or _has_failed(self._manifest):  # a part may have the version now
            self._manifest = self._begin(asyncio.ensure_future(self._held_and_digested()))
        return self._manifest

    async def _held_and_digested(self) -> WeightManifest:
        own = self._begin_own()
        layout = self.snapshot.layout
        others = await self.parts.hold(self.version, layout) if self.parts is not None else {}
        digests = {**others, **await own}
        if missing := [spec.name for spec in layout.tensors if spec.name not in digests]:
            raise PublishError(f"no part has a digest of {missing[0]}")
        return with_digests(layout, self.version, digests)

    async def digests(self) -> dict[str, str]:
        """Return the digests of this relay's tensors of the version."""
        return await asyncio.shield(self._begin_own())

    def _begin_own(self) -> asyncio.Future[dict[str, str]]:
        self._own = self._own or self.in_thread(lambda: self.snapshot.digests(self._digest_kind))
        return self._own

    def doors(self, own: BulkDoor) -> list[tuple[BulkDoor, ...]]:
        """Return an engine's doors for each part; empty if all is in this relay's memory.

        ``own`` is this relay's door for it.

        Raises:
            PublishError: a part is missing.
        """
        if self.parts is None:
            return []
        return [(own,), *((door,) for door in self.parts.doors())]

    def released(self) -> None:
        """Record that no engine fetches the version now: other parts need not keep it."""
        if self.parts is not None and self._manifest is not None:
            self._manifest = None
            self.parts.release(self.version)

    async def manifest(self) -> WeightManifest:
        """Return the manifest with a digest per tensor.

        Raises:
            PublishError: another part does not have the version.
        """
        return await asyncio.shield(self.begin_digests())

    async def digest(self) -> str:
        """Return the digest of the whole version."""
        manifest = await self.manifest()
        self._digest = self._digest or manifest.digest
        return self._digest

    async def encoded_manifest(self) -> msgspec.Raw:
        """Return the manifest as it travels, encoded once for all members."""
        manifest = await self.manifest()
        self._encoded = self._encoded or encode_manifest(manifest)
        return self._encoded

    def knows(self, of: EngineLayout) -> bool:
        """True if relays can compute ``expected``: a CPU's checksums need whole tensors."""
        return self.is_whole or of.device != "cpu"

    def begin_checksums(self, of: EngineLayout) -> asyncio.Future[dict[str, str]]:
        """Start to compute the result of ``expected``, of a version that other parts hold."""
        if of not in self._expected or _has_failed(self._expected[of]):
            tensors = self.snapshot.tensors
            if self.parts is None:
                expected = self._computed(lambda: expected_of_version(tensors, of))
            else:
                expected = asyncio.ensure_future(self._joined(self.parts, of))
                expected.add_done_callback(self._ended)
            self._expected[of] = expected
        return self._expected[of]

    async def _joined(self, parts: Parts, of: EngineLayout) -> dict[str, str]:
        own, others = await asyncio.gather(self.hash_parts(of), parts.hashes(self.version, of))
        return joined_checksums([own, *others])

    async def hash_parts(self, of: EngineLayout) -> dict[str, tuple[HashPart, ...]]:
        """Return the share of this relay's tensors in the checksums of engines on GPUs.

        Raises:
            PublishError: it cannot be computed.
        """
        snapshot = self.snapshot
        if of not in self._shares or _has_failed(self._shares[of]):
            self._shares[of] = self._computed(
                lambda: hash_parts(snapshot.tensors, snapshot.layout, of)
            )
        return await asyncio.shield(self._shares[of])

    def _computed(self, compute: Callable[[], T]) -> asyncio.Future[T]:
        def computed() -> T:
            try:
                return compute()
            except (RuntimeError, MemoryError, OSError) as error:  # a GPU or disk without room
                what = f"what engines must hold of {self.version.label} cannot be computed"
                raise PublishError(f"{what}: {error}") from error

        return self.in_thread(computed)

    def digest_expected(self, of: EngineLayout) -> str:
        """Return the digest of ``expected`` if it is computed already, else an empty string."""
        if of not in self._digests:
            future = self._expected.get(of)
            if future is None or not future.done() or _has_failed(future):
                return ""
            self._digests[of] = digest_of(future.result())
        return self._digests[of]

    async def expected(self, of: EngineLayout) -> dict[str, str]:
        """Return the checksums of an engine that holds this version."""
        return await asyncio.shield(self.begin_checksums(of))

    def in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Start a computation on the memory, which does not change until it is done."""
        return self._begin(asyncio.ensure_future(asyncio.to_thread(work)))

    def _begin(self, future: asyncio.Future[T]) -> asyncio.Future[T]:
        """Let ``settled`` wait for a computation; only its caller keeps the result."""
        self._begun.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._begun.discard(future)
        if not future.cancelled():
            future.exception()  # retrieved, as the caller may be gone

    async def settled(self) -> None:
        """Wait until no computation that was started here still reads the memory."""
        await asyncio.gather(*self._begun, return_exceptions=True)


def _has_failed(future: "asyncio.Future[Any]") -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
