"""Anthropic's Messages: ``/v1/messages``, and its count of a prompt's tokens.

A budget of thoughts, effort, and marks for a cache are read and ignored, as temperature is: the run
chooses. That a tool's result is an error is what its text says: templates have no word for it.
"""

import secrets
from collections.abc import Iterator
from functools import partial

import msgspec

from slipstream.generators.capture.wires import (
    CallRefusal,
    Messages,
    Object,
    Question,
    TokenText,
    Wire,
    content_of,
    event,
    fields_of,
    function_of,
    image_part,
    pieces,
    text_of,
)
from slipstream.generators.turns.calls import RecordedReply
from slipstream.generators.turns.requests import BadRequestError, ChatRequest, Positive
from slipstream.wire.messages.trajectory import Json

_TEXTS = ("text",)
_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "api_error",
}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens, as far as it is honoured; other fields are refused."""

    messages: list[dict[str, Json]]
    system: str | list[Json] = ""
    tools: list[dict[str, Json]] = []
    tool_choice: dict[str, Json] = {}
    # Read and refused unless it says what is done anyway.
    output_config: dict[str, Json] = {}
    # Read and ignored: they are the run's, or change no answer.
    cache_control: Json = None
    model: str = ""
    thinking: Json = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """POST /v1/messages, as far as it is honoured; other fields are refused."""

    max_tokens: Positive
    stop_sequences: list[str] = []
    stream: bool = False
    # Read and ignored: they are the run's, or change no answer.
    metadata: Json = None
    service_tier: Json = None
    temperature: Json = None
    top_k: Json = None
    top_p: Json = None


def read(body: bytes) -> Question:
    """Return the question in a body.

    Raises:
        BadRequestError: it asks for what is not offered; the error names the field.
        *UNREADABLE: it is malformed.
    """
    request = fields_of(body, MessagesRequest)
    chat = msgspec.structs.replace(
        _prompt(request),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences or None,
        stream=request.stream,
    )
    return Question(chat, partial(MessageObject, request))


def read_count(body: bytes) -> ChatRequest:
    """Return what is to be counted; raises what ``read`` does."""
    return _prompt(fields_of(body, CountRequest))


def _prompt(request: CountRequest) -> ChatRequest:
    """Return what the prompt is made of, as chat completions have it."""
    for name in request.output_config:
        if name != "effort":
            where = f"output_config.{name[:200]}"
            raise BadRequestError(f"{where} is not offered", where)
    choice = request.tool_choice.get("type", "auto")
    if choice not in ("auto", "any", "tool", "none"):
        raise BadRequestError(f"tool_choice.type is {str(choice)[:200]}", "tool_choice.type")
    return ChatRequest(
        messages=_messages(request),
        tools=[_tool(tool, f"tools[{number}]") for number, tool in enumerate(request.tools)],
        tool_choice="none" if choice == "none" else "auto",
    )


def _tool(tool: Object, where: str) -> Object:
    """Return a tool as chat completions have it; whether it is strict is not honoured."""
    name, kind = tool.get("name"), tool.get("type") or "custom"
    if kind != "custom" or not isinstance(name, str):
        raise BadRequestError(
            f"{where} of type {str(kind)[:200]}: tools of the client alone are offered", where
        )
    return function_of(name, tool.get("description"), tool.get("input_schema"))


def _messages(request: CountRequest) -> list[Object]:
    messages = Messages()
    if request.system:
        messages.add("system", content_of(request.system, _TEXTS, "system"))
    if not request.messages:
        raise BadRequestError("messages is empty", "messages")
    for number, message in enumerate(request.messages):
        where = f"messages[{number}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise BadRequestError(f"{where} has the role {str(role)[:200]}", f"{where}.role")
        where = f"{where}.content"
        if not isinstance(content, list) or not content:
            messages.add(role, content_of(content, _TEXTS, where))
            continue
        for place, block in enumerate(content):
            if not isinstance(block, dict):
                raise BadRequestError(f"{where}[{place}] is no block", f"{where}[{place}]")
            _add(messages, role, block, f"{where}[{place}]", is_first=not place)
    return messages.joined()


def _add(messages: Messages, role: str, block: Object, where: str, *, is_first: bool) -> None:
    """Add a block of a message; texts side by side in one message are one."""
    match role, block.get("type"):
        case _, "text":
            messages.add(role, content_of([block], _TEXTS, where), continues=not is_first)
        case "user", "image" if (url := _image_of(block)) is not None:
            messages.add(role, [image_part(url, where)], continues=not is_first)
        case "user", "tool_result":
            content = block.get("content")
            result = content_of(
                "" if content is None else content, _TEXTS, f"{where}.content", _image_of
            )
            messages.add("tool", result, tool_call_id=block.get("tool_use_id"))
        case "assistant", "thinking":
            messages.think(text_of(block.get("thinking"), (), f"{where}.thinking"))
        case "assistant", "tool_use":
            name, call_id, given = block.get("name"), block.get("id"), block.get("input")
            if not (isinstance(name, str) and isinstance(call_id, str) and isinstance(given, dict)):
                raise BadRequestError(f"{where} is not a call of a tool", where)
            messages.call(call_id, name, given)
        case _, kind:
            raise BadRequestError(f"{where} of type {str(kind)[:200]} is not offered", where)


def _image_of(block: Object) -> str | None:
    """Return the URL of an image."""
    match block:
        case {"type": "image", "source": {"type": "base64", "data": str(encoded)}}:
            return f"data:;base64,{encoded}"
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return url
        case _:
            return None


class MessageObject:
    """The answer to /v1/messages."""

    def __init__(
        self,
        request: MessagesRequest,
        model: str,
        reply: RecordedReply,
        _token_text: TokenText | None = None,
    ) -> None:
        """Answer a request with a reply."""
        self._id = f"msg_{secrets.token_hex(12)}"
        self._content = list(self._blocks(reply))
        self._num_tokens = len(reply.completion.token_ids)
        stops = (text for text in request.stop_sequences if text in reply.text)
        stop = next(stops, None) if reply.finish_reason == "stop" else None
        self._end: Object = {
            "stop_reason": "stop_sequence" if stop else _STOPS[reply.finish_reason],
            "stop_sequence": stop,
        }
        self._head: Object = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._usage: Object = {
            "input_tokens": len(reply.prompt_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }

    def _blocks(self, reply: RecordedReply) -> Iterator[Object]:
        if reply.thought:  # the signature is not looked at when it comes back
            yield {"type": "thinking", "thinking": reply.thought, "signature": self._id}
        if reply.text:
            yield {"type": "text", "text": reply.text, "citations": None}
        for call in reply.tool_calls:
            arguments = msgspec.json.decode(call["function"]["arguments"] or "{}")
            given = arguments if isinstance(arguments, dict) else {"arguments": arguments}
            name = call["function"]["name"]
            yield {"type": "tool_use", "id": call["id"], "name": name, "input": given}

    def whole(self) -> Object:
        """Return the answer."""
        usage = {**self._usage, "output_tokens": self._num_tokens}
        return {**self._head, "content": self._content, **self._end, "usage": usage}

    def stream(self) -> Iterator[bytes]:
        """Yield the answer in events."""
        for data in self._events():
            yield event(data, data["type"])

    def _events(self) -> Iterator[Object]:
        end = {"stop_reason": None, "stop_sequence": None}
        usage = {**self._usage, "output_tokens": 0}
        begun = {**self._head, "content": [], **end, "usage": usage}
        yield {"type": "message_start", "message": begun}
        for index, block in enumerate(self._content):
            yield {"type": "content_block_start", "index": index, "content_block": _empty(block)}
            for delta in _deltas(block):
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        usage = {"output_tokens": self._num_tokens}
        yield {"type": "message_delta", "delta": self._end, "usage": usage}
        yield {"type": "message_stop"}


def _empty(block: Object) -> Object:
    match block["type"]:
        case "thinking":
            return {**block, "thinking": "", "signature": ""}
        case "text":
            return {**block, "text": ""}
        case _:
            return {**block, "input": {}}


def _deltas(block: Object) -> Iterator[Object]:
    match block["type"]:
        case "thinking":
            for piece in pieces(block["thinking"]):
                yield {"type": "thinking_delta", "thinking": piece}
            yield {"type": "signature_delta", "signature": block["signature"]}
        case "text":
            for piece in pieces(block["text"]):
                yield {"type": "text_delta", "text": piece}
        case _:
            for piece in pieces(msgspec.json.encode(block["input"]).decode()):
                yield {"type": "input_json_delta", "partial_json": piece}


def refuse(refusal: CallRefusal) -> Object:
    """Return an error in Anthropic's form, with OpenAI's code and parameter."""
    error = {
        "type": _ERRORS.get(refusal.status, "invalid_request_error"),
        "message": refusal.message,
        "code": refusal.code,
        "param": refusal.param or None,
    }
    return {"type": "error", "error": error}


MESSAGES = Wire("/v1/messages", read, {"stop": "stop_sequences"})
