"""Images of one trajectory: those of its prompt, and those that messages bring.

A message of OpenAI's chat API has an image as a data URL; an environment may have bytes in its
place. Both become a part ``{"type": "image", "image": [digest, width, height, bytes]}``, which
histories, templates and transcripts share; bytes are stored once.
"""

import base64
import binascii
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from msgspec import to_builtins

from slipstream.generators.text.images import Encoded, ImageMarks
from slipstream.generators.turns.requests import BadRequestError, images_of
from slipstream.wire.errors import ImageError
from slipstream.wire.messages.images import MOST_IMAGE_BYTES, Image, digest_of
from slipstream.wire.messages.trajectory import Json
from slipstream.wire.models.pixels import BadImageError, checked_image

Store: TypeAlias = Callable[[bytes], Awaitable[object]]
MOST_IMAGES = 256  # different ones of a trajectory
_DATA = "data:"


class TrajectoryImages:
    """Images that a trajectory may show."""

    def __init__(
        self,
        marks: ImageMarks | None = None,
        known: Iterable[Image] = (),
        store: Store | None = None,
    ) -> None:
        """Know the images of a prompt.

        Args:
            marks: Marks among token ids; None: the model sees no images.
            known: Images of the prompt.
            store: Keeps the bytes of further ones for the learner; None: there are no others.
        """
        self._marks = marks
        self._known = {image.digest: image for image in known}
        self._store = store
        self._most = len(self._known) + MOST_IMAGES
        self._unstored: dict[str, bytes] = {}

    @property
    def are_seen(self) -> bool:
        """True if the model sees images."""
        return self._marks is not None

    def taken(self, message: Mapping[str, Json]) -> Mapping[str, Json]:
        """Return a message whose images are named by their digests.

        Raises:
            BadRequestError: an image cannot be used, or there are too many.
        """
        content = message.get("content")
        if not isinstance(content, list | tuple):
            return message
        return {**message, "content": [self._part(part) for part in content]}

    def _part(self, part: Json) -> Json:
        match part:
            case {"type": "image", "image": bytes(content)}:
                image = self._image(content)
            case {"type": "image", "image": [str(digest), *_]} if digest in self._known:
                image = self._known[digest]
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                image = self._image(content_of(url))
            case {"type": "image" | "image_url"}:
                raise BadRequestError(
                    "an image of a message is no data URL, and no bytes", "messages"
                )
            case _:
                return part
        return {"type": "image", "image": to_builtins(image)}

    def _image(self, content: bytes) -> Image:
        digest = digest_of(content)
        if digest in self._known:
            return self._known[digest]
        if self._marks is None or self._store is None:
            why = "run.model sees no images" if self._marks is None else "nothing stores them here"
            raise BadRequestError(f"a message has an image: {why}", "messages")
        if len(self._known) >= self._most:
            raise BadRequestError(
                f"messages have more than {MOST_IMAGES} different images", "messages"
            )
        try:
            image = checked_image(content)
        except BadImageError as error:
            raise BadRequestError(f"an image of a message: {error}", "messages") from error
        self._unstored[digest] = content
        self._known[digest] = image
        return image

    async def stored(self) -> None:
        """Store the images that are new.

        Raises:
            BadRequestError: there is no room for one.
        """
        for digest, content in list(self._unstored.items()):
            if self._store is not None:
                try:
                    await self._store(content)
                except ImageError as error:  # a call without it may go on
                    self._known.pop(digest, None)
                    self._unstored.pop(digest, None)
                    raise BadRequestError(f"an image of a message: {error}", "messages") from error
            self._unstored.pop(digest, None)

    def marked(self, ids: list[int], messages: Sequence[Mapping[str, Json]]) -> list[int]:
        """Return ids of messages with marks in place of their placeholders.

        Raises:
            ValueError: there are not as many placeholders as images.
        """
        if self._marks is None:
            return ids
        return self._marks.marked(
            ids, [image for message in messages for image in images_of(message)]
        )

    def refuse_places(self, ids: list[int], name: str) -> None:
        """Refuse tokens of a client that stand for an image: they come with none.

        Raises:
            BadRequestError: there are some; the error names the field.
        """
        if self._marks is not None:
            try:
                self._marks.marked(ids, ())
            except ValueError as error:
                raise BadRequestError(f"{name}: {error}", name) from error

    def encoded(self, marked: list[int]) -> Encoded:
        """Return ids as the model reads them, and the places of images."""
        return Encoded(marked) if self._marks is None else self._marks.encoded(marked)


def content_of(url: str) -> bytes:
    """Return the bytes in a data URL.

    Raises:
        BadRequestError: it is another URL, too large, or malformed.
    """
    head, comma, encoded = url.partition(",")
    if not head.startswith(_DATA):
        raise BadRequestError(
            f"an image at {url[:80]!r}: nothing is fetched here, send its bytes", "messages"
        )
    return decoded(encoded if comma and head.endswith(";base64") else "?")


def decoded(encoded: str) -> bytes:
    """Return the bytes of an image in base64.

    Raises:
        BadRequestError: it is too large, or malformed.
    """
    if len(encoded) > MOST_IMAGE_BYTES * 4 // 3 + 4:
        raise BadRequestError(
            f"an image of {len(encoded) * 3 // 4:,} bytes, {MOST_IMAGE_BYTES:,} are the most",
            "messages",
        )
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequestError(
            f"an image of a message is not base64: {error}", "messages"
        ) from error
