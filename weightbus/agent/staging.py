"""An agent's memory for a version that it received and its engine has not loaded.

The bytes are a safetensors file in memory without a name, which the engine finds through a link to
this process's descriptor: the kernel frees them when the process ends, however it ends. The link is
in a folder named for the version. The folder exists while the memory holds that version, whole and
verified: an engine that carries out an order late finds no other version in its place.

Other engines of the host may map the file, too. So its header has a label, which is taken out
before a byte changes, and its size is sealed: memory of another size takes its place.

With deltas the memory is kept from one version to the next, and the next version's deltas are
applied to its buckets in place. A bucket has no valid version while a delta is applied to it, and
after that fails.
"""

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from slipstream.weightbus.agent.bucket_holdings import HeldBuckets
from slipstream.weightbus.net.curve import FETCH_AHEAD
from slipstream.weightbus.version.delta import BucketDelta, apply_delta, num_bytes_of
from slipstream.weightbus.version.disk import check_digest
from slipstream.weightbus.version.layout import bucket_offsets, safetensors_header
from slipstream.weightbus.version.mapped_file import SEALS, write_label
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.manifest import ITEM_BYTES, Bucket, WeightManifest
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.model_files import WEIGHTS

_log = logging.getLogger(__name__)
_MEMORY = "memory"  # link to the descriptor
_STEP_BYTES = 64 << 20  # allocated at a time: bounds the wait of receiving


class Staging:
    """Room for one version. Use it inside one event loop."""

    def __init__(self, folder: Path, name: str, *, uses_deltas: bool = False) -> None:
        """Make a folder in ``folder``, in which the engine will find each version by its label.

        ``uses_deltas`` keeps each version as the base of the next.
        """
        self.fetched_bytes = 0  # count of the version that came last
        self.num_refused_deltas = 0
        self.may_be_read = False  # an engine may read it: the next version gets other memory
        self._uses_deltas = uses_deltas
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{name}-weights-", dir=folder))
        self._shown: Path | None = None  # folder of the version that the engine may load
        self._elsewhere = -1  # descriptor of another process's file that it is in
        self._lock = threading.Lock()
        self._descriptor = -1
        self.held = HeldBuckets()  # buckets that other agents may fetch from here
        self._open()

    @property
    def folder(self) -> Path:
        """Parent of the folder of a version, for the engine."""
        return self._folder

    @property
    def path(self) -> str:
        """Path of the memory for other processes of this user; empty while it is not shown."""
        is_own = self._shown is not None and self._elsewhere < 0
        return f"/proc/{os.getpid()}/fd/{self._descriptor}" if is_own else ""

    def show_mapped(self, version: PolicyVersion, descriptor: int) -> Path:
        """Show the engine a version in another process's file; return its folder.

        Memory of this process is freed. The descriptor is closed when the version is hidden:
        whatever happens to that process, the link leads to the file.
        """
        self.free()
        self.fetched_bytes = 0
        self._elsewhere = descriptor
        return self._show(version, Path(f"/proc/{os.getpid()}/fd/{descriptor}"))

    def _show(self, version: PolicyVersion, file: Path = Path("..") / _MEMORY) -> Path:
        """Show a whole version to the engine; return its folder."""
        folder = self._folder / version.label
        folder.mkdir(exist_ok=True)
        self._shown = folder
        (folder / WEIGHTS).symlink_to(file)
        return folder

    def _hide(self) -> None:
        """Hide the version from the engine before its memory changes."""
        shown, self._shown = self._shown, None
        if shown is not None:
            (shown / WEIGHTS).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                shown.rmdir()
        if self._elsewhere >= 0:
            os.close(self._elsewhere)
            self._elsewhere = -1

    def _open(self) -> None:
        self._hide()
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._descriptor = os.memfd_create("slipstream-received", flags)
        self._size = 0
        self._mapped: mmap.mmap | None = None
        self._layout: tuple[object, ...] = ()  # layout of the memory's contents
        self._bases: list[PolicyVersion | None] = []  # version of each bucket, once verified
        link = self._folder / _MEMORY
        link.unlink(missing_ok=True)
        link.symlink_to(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def reserve(self, num_bytes: int) -> None:
        """Allocate the memory of a version before one arrives. Blocks; any thread.

        Returns early if a version arrives meanwhile, or after ``close``.
        """
        size = 0
        while size < num_bytes:
            with self._lock:
                if self._descriptor < 0 or self._size != size:
                    return
                step = min(_STEP_BYTES, num_bytes - size)
                os.posix_fallocate(self._descriptor, size, step)
                self._size = size = size + step

    def free(self) -> None:
        """Release the memory until a version is received again.

        The memory is replaced, not truncated: an engine that still maps it must not crash.
        """
        self.held.end()
        self._hide()
        with self._lock:
            if self._descriptor >= 0 and self._size:
                os.close(self._descriptor)
                self._open()

    def close(self) -> None:
        """Free the memory and remove the folder."""
        self._hide()
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
            self._mapped = None
        (self._folder / _MEMORY).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _leave_to_reader(self) -> None:
        """Change to other memory: an engine may still read this one, and keeps it alive."""
        with self._lock:
            if self._descriptor < 0:
                return
            left, size, layout, bases = self._descriptor, self._size, self._layout, self._bases
            self._open()
            try:
                if self._uses_deltas and any(bases):
                    at = 0
                    while at < size and (n := os.sendfile(self._descriptor, left, at, size - at)):
                        at += n
                    self._size, self._layout, self._bases = size, layout, bases
            finally:
                os.close(left)

    def base(self, index: int) -> PolicyVersion | msgspec.UnsetType | None:
        """Return the version of a bucket's bytes; None if they have no valid version.

        Unset without deltas.
        """
        if not self._uses_deltas:
            return msgspec.UNSET
        return self._bases[index] if index < len(self._bases) else None

    def read_into(self, data: memoryview, start: int) -> None:
        """Copy received bytes as they are now. Blocks; any thread."""
        with self._lock:
            while data and self._descriptor >= 0:
                if not (count := os.preadv(self._descriptor, [data], start)):
                    return  # freed meanwhile: ``held`` has ended
                data, start = data[count:], start + count

    async def receive(
        self,
        manifest: WeightManifest,
        fetch: Callable[[int], Awaitable[Frame | BucketDelta]],
        *,
        order: Sequence[int] | None = None,
        ahead: int = FETCH_AHEAD,
        rejected: Callable[[int, str], bool] = lambda _index, _why: False,
    ) -> Path:
        """Fetch every bucket by its index and check every digest; return the folder to load.

        Args:
            manifest: Description of the version to fetch.
            fetch: Returns the bytes of a bucket, or deltas from its ``base``. If the deltas do not
                make the manifest's bucket, it is called again, when the bucket has no base.
            order: Indices in the order of fetching; None is ascending.
            ahead: Buckets fetched at a time.
            rejected: Called with wrong bytes; True if they may be fetched again.

        Raises:
            PublishError: bytes are missing, too many, or not those of the manifest; or no memory is
                left for it, as others read the last one.
        """
        self._hide()
        if self.may_be_read:
            self.held.end()
            try:
                await asyncio.to_thread(self._leave_to_reader)
            except OSError as error:
                raise PublishError(f"no memory for a version: {error.strerror}") from error
            self.may_be_read = False
        header = safetensors_header(manifest, label="")
        self._make_room(header, manifest)
        self._label("")
        self.fetched_bytes = 0
        gate = asyncio.Semaphore(ahead)
        starts = [len(header) + at for at in bucket_offsets(manifest)]
        self.held.begin(manifest, starts)
        keeping: list[asyncio.Future[None]] = []

        def keep(index: int, data: Frame | BucketDelta) -> asyncio.Future[None]:
            kept = asyncio.to_thread(self._keep, manifest, index, data, starts[index])
            keeping.append(asyncio.ensure_future(kept))
            return keeping[-1]

        async def get(index: int) -> None:
            async with gate:
                await self._get(index, fetch, keep, rejected)

        try:
            async with asyncio.TaskGroup() as group:
                for index in order if order is not None else range(len(manifest.buckets)):
                    group.create_task(get(index))
        except* PublishError as errors:
            self.held.end()
            raise PublishError(str(errors.exceptions[0])) from errors
        finally:  # no write may be pending when the next version arrives
            await asyncio.gather(*keeping, return_exceptions=True)
        self._label(manifest.version.label)
        return self._show(manifest.version)

    def _label(self, label: str) -> None:
        """Say which version the memory holds whole; empty before a byte of it changes."""
        with self._lock:
            if self._descriptor >= 0:
                write_label(self._descriptor, label)

    async def _get(
        self,
        index: int,
        fetch: Callable[[int], Awaitable[Frame | BucketDelta]],
        keep: Callable[[int, Frame | BucketDelta], asyncio.Future[None]],
        rejected: Callable[[int, str], bool],
    ) -> None:
        """Fetch one bucket until its bytes are those of the manifest."""
        takes_deltas = True
        while True:
            data = await fetch(index)
            self.fetched_bytes += num_bytes_of(data)
            try:
                await asyncio.shield(keep(index, data))
            except PublishError as error:
                if takes_deltas and isinstance(data, BucketDelta):
                    takes_deltas = False
                    self.num_refused_deltas += 1
                    _log.warning("bucket %d is fetched whole: %s", index, error)
                elif not rejected(index, str(error)):
                    raise
            else:
                self.held.add(index)
                return

    def _make_room(self, header: bytes, manifest: WeightManifest) -> None:
        """Lay the memory out for a version; contents of another layout are dropped."""
        layout = (header, *(bucket.num_bytes for bucket in manifest.buckets))
        total = len(header) + manifest.num_bytes
        with self._lock:
            if layout != self._layout:
                if total != self._size:
                    if self._layout:
                        os.close(self._descriptor)
                        self._open()
                    os.ftruncate(self._descriptor, total)
                os.pwrite(self._descriptor, header, 0)
                self._size, self._layout, self._mapped = total, layout, None
                self._bases = [None] * len(manifest.buckets)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
            if self._uses_deltas and self._mapped is None:
                self._mapped = mmap.mmap(self._descriptor, total)

    def _keep(
        self, manifest: WeightManifest, index: int, data: Frame | BucketDelta, start: int
    ) -> None:
        bucket, bases = manifest.buckets[index], self._bases
        base, bases[index] = bases[index], None
        if isinstance(data, BucketDelta):
            self._apply(bucket, base, data, start)
        else:
            self._write(bucket, index, memoryview(data), start)
        bases[index] = manifest.version

    def _write(self, bucket: Bucket, index: int, data: memoryview, start: int) -> None:
        if data.nbytes != bucket.num_bytes:
            raise PublishError(
                f"bucket {index} has {data.nbytes} bytes, expected {bucket.num_bytes}"
            )
        at = 0
        for spec in bucket.tensors:
            check_digest(spec.name, spec.digest, data[at : at + spec.num_bytes])
            at += spec.num_bytes
        while data:
            written = os.pwrite(self._descriptor, data, start)
            data, start = data[written:], start + written

    def _apply(
        self, bucket: Bucket, base: PolicyVersion | None, delta: BucketDelta, start: int
    ) -> None:
        if base is None or delta.base != base or self._mapped is None:
            raise PublishError(f"deltas from {delta.base.label}, which is not there")
        num_deltas = len(bucket.tensors) - len(delta.whole)
        expected = len(delta.whole) + num_deltas * delta.num_steps
        if not delta.whole <= set(range(len(bucket.tensors))) or len(delta.frames) != expected:
            raise PublishError(f"{len(delta.frames)} frames of deltas, expected {expected}")
        frames = iter(delta.frames)
        memory = memoryview(self._mapped)
        for place, spec in enumerate(bucket.tensors):
            tensor, start = memory[start : start + spec.num_bytes], start + spec.num_bytes
            if place in delta.whole:
                whole = memoryview(next(frames))
                if whole.nbytes != spec.num_bytes:
                    raise PublishError(
                        f"{spec.name} has {whole.nbytes} bytes, expected {spec.num_bytes}"
                    )
                tensor[:] = whole
            else:
                for _ in range(delta.num_steps):
                    apply_delta(memoryview(next(frames)), tensor, ITEM_BYTES[spec.dtype])
            check_digest(spec.name, spec.digest, tensor)
