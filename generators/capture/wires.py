"""Pure: what the wires of the endpoint have in common: how they read, answer, stream and refuse."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from slipstream.generators.turns.calls import RecordedReply
from slipstream.generators.turns.requests import BadRequestError, ChatRequest, TextRequest
from slipstream.wire.messages.trajectory import Json

_PIECE = 16  # characters of a piece of a stream
_IN_PARTS = {"content", "reasoning_content"}
Object = dict[str, Json]
TokenText = Callable[[int], str]
ImageOf = Callable[[Object], str | None]
T = TypeVar("T", bound=msgspec.Struct)


class Answer(Protocol):
    """A reply in the form of one wire."""

    def whole(self) -> Object:
        """Return the answer."""
        ...

    def stream(self) -> Iterator[bytes]:
        """Yield the server-sent events of the answer."""
        ...


class Question(NamedTuple):
    """A request as the calls of a trajectory take it."""

    request: ChatRequest | TextRequest
    answer: Callable[[str, RecordedReply, TokenText], Answer]
    """Forms the answer, of the name of the model, the reply, and what returns a token's text."""


class CallRefusal(NamedTuple):
    """A refusal, before a wire puts it into words."""

    status: int
    message: str
    code: str
    param: str = ""  # field at fault


@dataclass(frozen=True, slots=True)
class Wire:
    """One kind of requests and answers."""

    path: str
    read: Callable[[bytes], Question]
    """Reads a body; raises BadRequestError, or what an unreadable one raises."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of fields that chat completions call otherwise, by their names there."""


def event(data: Object, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def pieces(text: str) -> list[str]:
    """Return a text in the pieces of a stream; of an empty one there are none."""
    return [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]


def fields_of(body: bytes, kind: type[T]) -> T:
    """Return the fields of a request that are not null.

    Raises:
        BadRequestError: a field is not in ``kind``; the error names it.
        *UNREADABLE: it is malformed.
    """
    given = msgspec.json.decode(body, type=dict[str, Json])
    given = {name: value for name, value in given.items() if value is not None}
    offered = {entry.encode_name for entry in msgspec.structs.fields(kind)}
    other = next((name[:200] for name in given if name not in offered), None)
    if other is not None:
        raise BadRequestError(f"{other} is not offered", other)
    return msgspec.convert(given, kind)


def text_of(content: Json, kinds: Sequence[str], where: str) -> str:
    """Return the text of a message's content, which is a text or a list of parts of these kinds.

    Raises:
        BadRequestError: another part; the error names it.
    """
    return "".join(map(str, content_of(content, kinds, where)))


def content_of(
    content: Json, kinds: Sequence[str], where: str, image_of: ImageOf = lambda _part: None
) -> list[str | Object]:
    """Return the texts of a message's content, and its images as chat completions have them.

    Args:
        content: Text, or a list of parts.
        kinds: Types of parts that are text.
        where: Name of the field.
        image_of: Returns the URL of a part that is an image; None of others.

    Raises:
        BadRequestError: another part; the error names it.
    """
    if isinstance(content, str):
        return [content] if content else []
    if not isinstance(content, list):
        raise BadRequestError(f"{where} is not text", where)
    found: list[str | Object] = []
    for number, part in enumerate(content):
        at = f"{where}[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        url = image_of(part) if isinstance(part, dict) else None
        if url is not None:
            found.append(image_part(url, at))
        elif kind not in kinds or not isinstance(text, str):
            raise BadRequestError(f"{at} of type {str(kind)[:200]} is not text", at)
        else:
            found.append(text)
    return found


def image_part(url: str, where: str) -> Object:
    """Return an image as chat completions have it.

    Raises:
        BadRequestError: its bytes are not in the URL.
    """
    if not url.startswith("data:"):
        raise BadRequestError(f"{where} is an image elsewhere: send its bytes", where)
    return {"type": "image_url", "image_url": {"url": url}}


def function_of(name: str, description: Json, parameters: Json) -> Object:
    """Return a tool as chat completions have it, without what is absent."""
    more = {"description": description, "parameters": parameters}
    present = {key: value for key, value in more.items() if value is not None}
    return {"type": "function", "function": {"name": name, **present}}


class Messages:
    """Messages of chat completions, as they are put together from smaller parts.

    What an assistant says in several parts side by side is one message: a thought, text, calls.
    """

    def __init__(self) -> None:
        """Begin without a message."""
        self._all: list[Object] = []  # texts are in parts, which are joined once

    def joined(self) -> list[Object]:
        """Return the messages; add nothing afterwards."""
        for message in self._all:
            for name in _IN_PARTS & message.keys():
                parts = message[name]
                if all(isinstance(part, str) for part in parts):
                    message[name] = "".join(parts)
                else:
                    message[name] = [
                        {"type": "text", "text": part} if isinstance(part, str) else part
                        for part in parts
                    ]
        return self._all

    def add(
        self, role: str, content: Sequence[str | Object], *, continues: bool = False, **more: Json
    ) -> None:
        """Add a message; content of an assistant, or what ``continues``, goes to that before."""
        last = self._last(role) if continues or role == "assistant" else None
        if last is None or "tool_calls" in last:
            last = self._begun(role, **more)
        last["content"] += content

    def think(self, thought: str) -> None:
        """Add a thought, which begins a message or continues its thought."""
        last = self._last("assistant")
        if last is None or last["content"] or "tool_calls" in last:
            last = self._begun("assistant")
        last.setdefault("reasoning_content", []).append(thought)

    def call(self, call_id: str, name: str, arguments: Json) -> None:
        """Add a call of a tool to the assistant's message before, or begin one."""
        last = self._last("assistant") or self._begun("assistant")
        function = {"name": name, "arguments": arguments}
        last.setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": function}
        )

    def _begun(self, role: str, **more: Json) -> Object:
        self._all.append({"role": role, "content": [], **more})
        return self._all[-1]

    def _last(self, role: str) -> Object | None:
        last = self._all[-1] if self._all else None
        return last if last is not None and last["role"] == role else None
