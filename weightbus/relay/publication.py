"""A version with everything that transfers of it need; each part is computed once, on demand."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from slipstream.weightbus.relay.buckets_on_gpu import BucketsOnGpu
from slipstream.weightbus.version.adapter_checksums import expected_of_version
from slipstream.weightbus.version.digests import DigestKind
from slipstream.weightbus.version.engine_checksums import Holder, digest_of
from slipstream.weightbus.version.snapshot import WeightSnapshot
from slipstream.wire.messages.codec import encode_manifest
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion

T = TypeVar("T")


class Publication:
    """One version on its way to the engines. Use it inside one event loop.

    A caller that is cancelled does not cancel a part for the others.
    """

    def __init__(
        self,
        snapshot: WeightSnapshot,
        *,
        pin: Callable[[], None] = lambda: None,
        digests: DigestKind = "xxh3",
    ) -> None:
        """Compute nothing yet; ``pin`` pins the memory of the snapshot, once.

        ``digests`` are those of the manifest.
        """
        self._digest_kind: DigestKind = digests
        self.pin = pin
        self.snapshot = snapshot
        self.on_gpu = BucketsOnGpu(snapshot)
        self._manifest: asyncio.Future[WeightManifest] | None = None
        self._expected: dict[Holder, asyncio.Future[dict[str, str]]] = {}
        self._digest = ""
        self._digests: dict[Holder, str] = {}  # of the expected checksums
        self._encoded: msgspec.Raw | None = None
        self._begun: list[asyncio.Future[Any]] = []

    @property
    def version(self) -> PolicyVersion:
        """The version."""
        return self.snapshot.version

    @property
    def undigested(self) -> WeightManifest:
        """The manifest without digests."""
        return msgspec.structs.replace(self.snapshot.layout, version=self.version)

    def begin_digests(self) -> asyncio.Future[WeightManifest]:
        """Start to compute the result of ``manifest``."""
        self._manifest = self._manifest or self.in_thread(
            lambda: self.snapshot.manifest(self._digest_kind)
        )
        return self._manifest

    async def manifest(self) -> WeightManifest:
        """Return the manifest with a digest per tensor."""
        return await asyncio.shield(self.begin_digests())

    async def digest(self) -> str:
        """Return the digest of all that is sent."""
        manifest = await self.manifest()
        self._digest = self._digest or manifest.digest
        return self._digest

    async def encoded_manifest(self) -> msgspec.Raw:
        """Return the manifest as it travels, encoded once for all members."""
        manifest = await self.manifest()
        self._encoded = self._encoded or encode_manifest(manifest)
        return self._encoded

    def begin_checksums(self, of: Holder) -> asyncio.Future[dict[str, str]]:
        """Start to compute the result of ``expected``."""
        tensors = self.snapshot.tensors
        if of not in self._expected:
            self._expected[of] = self.in_thread(lambda: expected_of_version(tensors, of))
        return self._expected[of]

    def digest_expected(self, of: Holder) -> str:
        """Return the digest of ``expected`` if that is computed already, else an empty string."""
        if of not in self._digests:
            future = self._expected.get(of)
            if future is None or not future.done():
                return ""
            self._digests[of] = digest_of(future.result())
        return self._digests[of]

    async def expected(self, of: Holder) -> dict[str, str]:
        """Return the checksums of an engine that holds this version."""
        return await asyncio.shield(self.begin_checksums(of))

    def in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Start to compute something from the memory, which stays as it is until that is done."""
        future = asyncio.ensure_future(asyncio.to_thread(work))
        self._begun.append(future)
        return future

    async def settled(self) -> None:
        """Wait until no computation that was started here reads the memory any more."""
        await asyncio.gather(*self._begun, return_exceptions=True)
