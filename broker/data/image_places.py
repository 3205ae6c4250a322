"""Pure: images of a row go to their places in its turns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from slipstream.broker.data.plain import BadRowError, kind_of, plain
from slipstream.wire.messages.images import Image
from slipstream.wire.messages.trajectory import ChatMessage, ContentPart

PLACEHOLDER = "<image>"  # place of an image in text, as verl's files have it
_IMAGES = frozenset({"image", "image_url", "input_image"})  # types of parts
_TEXTS = frozenset({"text", "input_text"})
_OWN = ("image", "image_url", "base64", "bytes", "path", "url")  # keys of a part's own image
TakeImage: TypeAlias = Callable[[Any], Image]


def no_image(_value: object) -> Image:
    """Refuse an image where rows are read without any."""
    raise BadRowError("images cannot be used here")


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of an image in a turn: its own, or the next one of the row's column."""

    own: Any = None


def place_images(
    turns: Sequence[tuple[str, Any]],
    images: Sequence[Any],
    column: str,
    take: TakeImage,
    *,
    most: int,
) -> tuple[ChatMessage, ...]:
    """Return turns of (role, content) with images in their places.

    A content is text or a list of parts. In a row with images ``<image>`` in text is the place of
    one, as a part of type image is that has none of its own. Images without any place come before
    the first turn of a user.

    Args:
        turns: Turns of a row; at least one.
        images: Images in the row's column.
        column: Name of that column, for messages.
        take: Keeps an image and returns its facts.
        most: Limit of images.

    Raises:
        BadRowError: an image cannot be used, or has no place.
    """
    parts = [list(_parts(number, turn[1], bool(images))) for number, turn in enumerate(turns)]
    places = [part for contents in parts for part in contents if isinstance(part, _Place)]
    if images and not places:
        first = next((number for number, (role, _) in enumerate(turns) if role == "user"), 0)
        places = [_Place() for _ in images]
        parts[first][:0] = places
    free = sum(place.own is None for place in places)
    if free != len(images):
        raise BadRowError(f"{free} places for images, and {len(images)} images in {column}")
    if len(places) > most:
        raise BadRowError(f"{len(places)} images, a prompt may have {most} (data.max_images)")
    left = iter(images)

    def part_of(part: str | _Place) -> ContentPart:
        if isinstance(part, str):
            return ContentPart(text=part)
        return ContentPart(image=take(next(left) if part.own is None else part.own))

    return tuple(
        ChatMessage(
            role,
            tuple(part_of(part) for part in contents)
            if any(isinstance(part, _Place) for part in contents)
            else "".join(part for part in contents if isinstance(part, str)),
        )
        for (role, _), contents in zip(turns, parts, strict=True)
    )


def _parts(number: int, content: Any, has_images: bool) -> Iterator[str | _Place]:  # noqa: ANN401
    """Yield the texts and the places of images of a turn's content."""
    if isinstance(content, str):
        yield from _pieces(content, has_images)
        return
    for part in content:
        if isinstance(part, str):
            yield from _pieces(part, has_images)
            continue
        if not isinstance(part, Mapping):
            raise BadRowError(f"a part of turn {number} is {kind_of(part)}")
        kind = part.get("type")
        if is_image(part):
            yield _Place(next((part[key] for key in _OWN if part.get(key) is not None), None))
        elif kind in _TEXTS or kind is None:
            text = plain(part.get("text"), "text")
            if not isinstance(text, str):
                raise BadRowError(f"text in turn {number} must be text, got {kind_of(text)}")
            yield from _pieces(text, has_images)
        else:
            raise BadRowError(f"turn {number} has a part of type {kind!r}, not text or image")


def is_image(part: object) -> bool:
    """Return True of a part of a turn's content that is an image."""
    if not isinstance(part, Mapping):
        return False
    return part.get("type") in _IMAGES or (part.get("type") is None and part.get("text") is None)


def _pieces(text: str, has_images: bool) -> Iterator[str | _Place]:
    """Yield a text, divided at the places of images if the row has any."""
    pieces = text.split(PLACEHOLDER) if has_images else [text]
    for number, piece in enumerate(pieces):
        if number:
            yield _Place()
        if piece:
            yield piece
