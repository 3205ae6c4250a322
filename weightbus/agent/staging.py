"""An agent's memory for a version that it received and its engine has not loaded.

The bytes lie in memory without a name, as a safetensors file that the engine finds through a link
to this process's descriptor: they go with the process, however it ends.
"""

import asyncio
import contextlib
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from slipstream.weightbus.agent.held import HeldBuckets
from slipstream.weightbus.net.curve import FETCH_AHEAD
from slipstream.weightbus.version.disk import check_digest
from slipstream.weightbus.version.layout import bucket_offsets, safetensors_header
from slipstream.wire.errors import PublishError
from slipstream.wire.files.model_files import WEIGHTS
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.manifest import WeightManifest

_STEP_BYTES = 64 << 20  # allocated at a time: bounds how long receiving waits


class Staging:
    """Room for one version. Use it inside one event loop."""

    def __init__(self, folder: Path, name: str) -> None:
        """Make a folder in ``folder``, in which the engine will find the version."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{name}-weights-", dir=folder))
        self._lock = threading.Lock()
        self._descriptor = -1
        self.held = HeldBuckets()  # what other agents may fetch from here
        self._open()

    def _open(self) -> None:
        self._descriptor = os.memfd_create("slipstream-received")
        self._size = 0
        link = self._folder / WEIGHTS
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

        It is replaced, not truncated: an engine that still maps it must not crash.
        """
        self.held.end()
        with self._lock:
            if self._descriptor >= 0 and self._size:
                os.close(self._descriptor)
                self._open()

    def close(self) -> None:
        """Free the memory and remove the folder."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
        (self._folder / WEIGHTS).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def read_into(self, data: memoryview, start: int) -> None:
        """Copy bytes that were received, as they are in this moment. Blocks; any thread."""
        with self._lock:
            while data and self._descriptor >= 0:
                if not (count := os.preadv(self._descriptor, [data], start)):
                    return  # it was freed: ``held`` says so
                data, start = data[count:], start + count

    async def receive(
        self,
        manifest: WeightManifest,
        fetch: Callable[[int], Awaitable[Frame]],
        *,
        order: Sequence[int] | None = None,
        ahead: int = FETCH_AHEAD,
        rejected: Callable[[int, str], bool] = lambda _index, _why: False,
    ) -> Path:
        """Fetch every bucket by its index and check every digest; return the folder to load.

        Args:
            manifest: what to fetch.
            fetch: returns the bytes of a bucket.
            order: of the indices; theirs if None.
            ahead: buckets fetched at a time.
            rejected: is told of wrong bytes; True if others may be fetched in their place.

        Raises:
            PublishError: bytes are missing, too many, or not those of the manifest.
        """
        header = safetensors_header(manifest)
        total = len(header) + manifest.num_bytes
        with self._lock:
            if total != self._size:
                os.ftruncate(self._descriptor, total)
                self._size = total
        os.pwrite(self._descriptor, header, 0)
        gate = asyncio.Semaphore(ahead)
        starts = [len(header) + at for at in bucket_offsets(manifest)]

        self.held.begin(manifest, starts)
        keeping: list[asyncio.Future[None]] = []

        async def get(index: int) -> None:
            async with gate:
                while True:
                    data = memoryview(await fetch(index))
                    keep = asyncio.to_thread(self._keep, manifest, index, data, starts[index])
                    keeping.append(asyncio.ensure_future(keep))
                    try:
                        await asyncio.shield(keeping[-1])
                    except PublishError as error:
                        if rejected(index, str(error)):
                            continue
                        raise
                    self.held.add(index)
                    return

        try:
            async with asyncio.TaskGroup() as group:
                for index in order if order is not None else range(len(manifest.buckets)):
                    group.create_task(get(index))
        except* PublishError as errors:
            self.held.end()
            raise PublishError(str(errors.exceptions[0])) from errors
        finally:  # no write may be left when the next version arrives
            await asyncio.gather(*keeping, return_exceptions=True)
        return self._folder

    def _keep(self, manifest: WeightManifest, index: int, data: memoryview, start: int) -> None:
        bucket = manifest.buckets[index]
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
