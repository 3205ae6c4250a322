"""Requests for images of the run: their bytes, and those of observations."""

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from slipstream.broker.server.reply import BrokerReply, Later
from slipstream.wire.errors import ImageError, ProtocolError, RefusedError
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.messages.broker import Done, FetchImage, ImageBytes, StoreImage
from slipstream.wire.messages.codec import Frame, expect_frames
from slipstream.wire.messages.images import MOST_IMAGE_BYTES, digest_of

ImageRequest: TypeAlias = FetchImage | StoreImage


class ImageHandler:
    """Reads and writes the run's images in threads."""

    def __init__(self, images: ImageFolder) -> None:
        self._images = images
        self._writing = asyncio.Lock()

    def handle(self, request: ImageRequest, frames: Sequence[Frame]) -> Later:
        """Carry out a request.

        Raises:
            ProtocolError: the attached bytes are not those of the image that is named.
        """
        if isinstance(request, FetchImage):
            return Later(self._fetch(request.digest))
        expect_frames(frames, 1, "StoreImage")
        if len(frames[0]) > MOST_IMAGE_BYTES:
            raise ProtocolError(
                f"an image of {len(frames[0]):,} bytes; it may have {MOST_IMAGE_BYTES:,}"
            )
        return Later(self._store(request.digest, bytes(frames[0])))

    async def _fetch(self, digest: str) -> BrokerReply:
        try:
            content = await asyncio.to_thread(self._images.read, digest)
        except ImageError as error:
            raise RefusedError(str(error)) from error
        return BrokerReply(ImageBytes(), [content])

    async def _store(self, digest: str, content: bytes) -> BrokerReply:
        if await asyncio.to_thread(digest_of, content) != digest:
            raise ProtocolError(f"other bytes came than those of image {digest[:8]}")
        try:
            async with self._writing:
                await asyncio.to_thread(self._images.keep, content, durable=True)
        except ImageError as error:
            raise RefusedError(str(error)) from error
        return BrokerReply(Done())
