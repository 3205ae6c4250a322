"""Images of a run for roles that ask the broker for them, by digest."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from slipstream.broker.client import BrokerClient
from slipstream.wire.errors import HostRoomError, ImageError, ProtocolError, RefusedError
from slipstream.wire.files.replace import replace_file
from slipstream.wire.messages.broker import Done, FetchImage, ImageBytes, StoreImage
from slipstream.wire.messages.images import digest_of
from slipstream.wire.messages.trajectory import Transcript
from slipstream.wire.models.pixels import BadImageError, checked_image

_CACHE_BYTES = 1 << 28
_DISK_BYTES = 1 << 30


class ImageFetcher:
    """Fetches each image once while the cache has room for it, and proves it by its digest."""

    def __init__(self, client: BrokerClient, *, cache_bytes: int = _CACHE_BYTES) -> None:
        """Ask through a client; up to ``cache_bytes`` of images are kept in memory."""
        self._client = client
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[str, bytes] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._locks: dict[str, asyncio.Lock] = {}

    async def fetch(self, digest: str) -> bytes:
        """Return the bytes of an image of the run.

        Raises:
            ImageError: the broker has it no more, or its file changed on disk.
            ProtocolError: other bytes came.
            PeerLostError: no answer in time.
        """
        lock = self._locks.setdefault(digest, asyncio.Lock())
        try:
            async with lock:
                if digest not in self._cache:
                    self._remember(digest, await self._ask(digest))
                self._cache.move_to_end(digest)
                return self._cache[digest]
        finally:
            if not lock.locked():
                self._locks.pop(digest, None)

    async def fetch_readable(self, digest: str) -> bytes:
        """Return the bytes of an image whose pixels can all be read; raises as ``fetch`` does.

        Raises:
            ImageError: they cannot be read, too.
        """
        content = await self.fetch(digest)
        try:
            await asyncio.to_thread(checked_image, content)
        except BadImageError as error:
            raise ImageError(f"image {digest[:8]}: {error}") from error
        return content

    async def store(self, content: bytes) -> str:
        """Have the broker keep an image that was checked; once this returns, it is on disk.

        Returns:
            Its digest.

        Raises:
            ImageError: the broker has no room for it.
            PeerLostError: no answer in time.
        """
        digest = digest_of(content)
        if digest not in self._cache:
            try:
                await self._client.ask(StoreImage(digest=digest), Done, frames=[content])
            except RefusedError as error:
                raise ImageError(str(error)) from error
            self._remember(digest, content)
        return digest

    async def _ask(self, digest: str) -> bytes:
        try:
            _, frames = await self._client.ask(FetchImage(digest=digest), ImageBytes)
        except RefusedError as error:
            raise ImageError(str(error)) from error
        content = bytes(frames[0]) if len(frames) == 1 else b""
        if digest_of(content) != digest:
            raise ProtocolError(f"the broker sent other bytes than those of image {digest[:8]}")
        return content

    def _remember(self, digest: str, content: bytes) -> None:
        """Keep an image; the newest one is kept even if it is larger than the cache."""
        self._num_bytes += len(content) - len(self._cache.pop(digest, b""))
        self._cache[digest] = content
        while self._num_bytes > self._cache_bytes and len(self._cache) > 1:
            self._num_bytes -= len(self._cache.popitem(last=False)[1])


class LocalImages:
    """Files of images on this host, for as long as somebody uses them and there is room."""

    def __init__(
        self,
        fetch: Callable[[str], Awaitable[bytes]],
        folder: Path,
        *,
        most_bytes: int = _DISK_BYTES,
        store: Callable[[bytes], Awaitable[object]] | None = None,
    ) -> None:
        """Write into a folder of this process.

        Args:
            fetch: Returns the bytes of a digest.
            folder: Folder for the files.
            most_bytes: Most bytes of files without a user.
            store: Keeps an image of an observation; None: there are none.
        """
        self.store = store
        self._fetch = fetch
        self._folder = folder
        self._most_bytes = most_bytes
        self._files: OrderedDict[str, _File] = OrderedDict()  # least recently used first
        self._num_bytes = 0

    @asynccontextmanager
    async def files(self, digests: Sequence[str]) -> AsyncIterator[list[Path]]:
        """Yield the file of each image; they stay until the block ends.

        Raises:
            ImageError: an image is missing, changed on disk, or cannot be written.
            PeerLostError: no answer in time.
        """
        used: list[_File] = []
        try:
            for digest in digests:
                file = self._files.setdefault(digest, _File(self._folder / digest))
                self._files.move_to_end(digest)
                file.num_users += 1
                used.append(file)
                async with file.writing:
                    if not file.num_bytes:
                        await self._write(file, digest)
            yield [file.path for file in used]
        finally:
            for file in used:
                file.num_users -= 1
            self._make_room()

    async def _write(self, file: "_File", digest: str) -> None:
        content = await self._fetch(digest)
        try:
            await asyncio.to_thread(replace_file, file.path, content, durable=False)
        except OSError as error:
            raise HostRoomError(f"cannot write {file.path}: {error.strerror or error}") from error
        file.num_bytes = len(content)
        self._num_bytes += file.num_bytes

    def _make_room(self) -> None:
        """Remove files without users: those that failed, and the oldest past the limit."""
        for digest, file in list(self._files.items()):
            is_failed = not file.num_bytes
            if not file.num_users and (is_failed or self._num_bytes > self._most_bytes):
                with suppress(OSError):
                    file.path.unlink()
                self._num_bytes -= file.num_bytes
                del self._files[digest]

    async def shown(self, transcript: Transcript, stack: AsyncExitStack) -> Transcript:
        """Return a transcript whose ``extra_info["images"]`` are files of the prompt's images.

        They stay until the stack is closed.

        Raises:
            ImageError: an image is missing, changed on disk, or cannot be written.
            PeerLostError: no answer in time.
        """
        digests = [image.digest for image in transcript.prompt.images]
        if not digests:
            return transcript
        return with_files(transcript, await stack.enter_async_context(self.files(digests)))


def with_files(transcript: Transcript, files: Sequence[Path]) -> Transcript:
    """Return a transcript whose ``extra_info["images"]`` are these files, if there are any."""
    if not files:
        return transcript
    extra_info = transcript.prompt.extra_info | {"images": [str(file) for file in files]}
    return replace(transcript, prompt=replace(transcript.prompt, extra_info=extra_info))


@dataclass(slots=True)
class _File:
    path: Path
    num_bytes: int = 0  # 0: not written
    num_users: int = 0
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
