"""The file by which a command asks a run for another number of generators."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from slipstream.wire.files.replace import replace_file
from slipstream.wire.unreadable import UNREADABLE

MOST_GENERATORS = 10_000  # limit of generators.count
_REQUEST, _ANSWER = "scale.json", "scaled.json"


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked for."""

    id: str  # id, repeated in the answer
    generators: Annotated[int, msgspec.Meta(ge=1, le=MOST_GENERATORS)]


class ScaleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What was done about it."""

    id: str
    generators: int  # how many there are to be from now on
    refused: str = ""  # why it stays as it is


def write_request(folder: Path, request: ScaleRequest) -> None:
    """Ask the run of a folder; a request that was not seen yet is replaced."""
    replace_file(folder / _REQUEST, msgspec.json.encode(request))


def take_request(folder: Path) -> ScaleRequest | None:
    """Return the request, or None if none can be read, and remove it."""
    path = folder / _REQUEST
    try:
        text = path.read_bytes()
    except OSError:
        return None
    with suppress(OSError):
        path.unlink()
    try:
        return msgspec.json.decode(text, type=ScaleRequest)
    except UNREADABLE:
        return None


def write_answer(folder: Path, answer: ScaleAnswer) -> None:
    """Answer the newest request."""
    replace_file(folder / _ANSWER, msgspec.json.encode(answer))


def read_answer(folder: Path, request_id: str) -> ScaleAnswer | None:
    """Return the answer to a request, or None until it is written."""
    try:
        answer = msgspec.json.decode((folder / _ANSWER).read_bytes(), type=ScaleAnswer)
    except (OSError, *UNREADABLE):
        return None
    return answer if answer.id == request_id else None
