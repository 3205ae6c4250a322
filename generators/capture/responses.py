"""OpenAI's Responses: ``/v1/responses``. Nothing is stored: a request brings its whole history.

Effort of reasoning and verbosity are read and ignored, as temperature is: they are the run's. A
thought is an item of reasoning with its text, as open models have it.
"""

import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

import msgspec

from slipstream.generators.capture.wires import (
    Messages,
    Object,
    Question,
    TokenText,
    Wire,
    content_of,
    event,
    fields_of,
    function_of,
    pieces,
    text_of,
)
from slipstream.generators.turns.calls import RecordedReply
from slipstream.generators.turns.requests import BadRequestError, ChatRequest, Positive
from slipstream.wire.messages.trajectory import Json

_TEXTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")
_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]
Metadata = Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)]  # OpenAI's limits


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses, as far as it is honoured; other fields are refused."""

    input: str | list[dict[str, Json]]
    instructions: str | None = None
    tools: list[dict[str, Json]] = []
    tool_choice: Literal["auto", "none", "required"] | dict[str, Json] = "auto"
    max_output_tokens: Positive | None = None
    stream: bool = False
    # Read and refused unless they say what is done anyway.
    background: bool = False
    include: list[str] = []
    text: dict[str, Json] = {}
    top_logprobs: int = 0
    truncation: str = "disabled"
    # Read and ignored: they are the run's, or change no answer.
    client_metadata: Json = None
    metadata: Metadata = {}
    model: str = ""
    parallel_tool_calls: bool = True
    prompt_cache_key: Json = None
    prompt_cache_options: Json = None
    prompt_cache_retention: Json = None
    reasoning: Json = None
    safety_identifier: Json = None
    service_tier: Json = None
    store: Json = None
    stream_options: Json = None
    temperature: Json = None
    top_p: Json = None
    user: Json = None

    def check(self) -> None:
        """Refuse values that change a client's result and are not honoured.

        Raises:
            BadRequestError: there is such a value; the error names its field.
        """
        if self.background:
            raise BadRequestError("background: an answer waits for its client here", "background")
        for name in self.include:
            if name != "reasoning.encrypted_content":  # thoughts are not encrypted
                raise BadRequestError(f"include: {name[:200]} is not offered", "include")
        for name in self.text:
            if name not in ("format", "verbosity"):
                raise BadRequestError(f"text.{name[:200]} is not offered", f"text.{name[:200]}")
        if self.text.get("format") not in (None, {"type": "text"}):
            raise BadRequestError(
                "text.format: a reply that is forced into a form is not the policy's choice",
                "text.format",
            )
        if self.top_logprobs:
            raise BadRequestError("top_logprobs is not offered", "top_logprobs")
        if self.truncation != "disabled":
            raise BadRequestError("truncation: a history is not cut here", "truncation")


def read(body: bytes) -> Question:
    """Return the question in a body.

    Raises:
        BadRequestError: it asks for what is not offered; the error names the field.
        *UNREADABLE: it is malformed.
    """
    request = fields_of(body, ResponsesRequest)
    request.check()
    chat = ChatRequest(
        messages=_messages(request),
        tools=[_tool(tool, f"tools[{number}]") for number, tool in enumerate(request.tools)],
        tool_choice=request.tool_choice,
        max_tokens=request.max_output_tokens,
        stream=request.stream,
    )
    return Question(chat, partial(ResponseObject, request))


def _tool(tool: Object, where: str) -> Object:
    """Return a tool as chat completions have it; whether it is strict is not honoured."""
    name = tool.get("name")
    if tool.get("type") != "function" or not isinstance(name, str):
        kind = str(tool.get("type"))[:200]
        raise BadRequestError(f"{where} of type {kind}: functions alone are offered", where)
    return function_of(name, tool.get("description"), tool.get("parameters"))


def _messages(request: ResponsesRequest) -> list[Object]:
    messages = Messages()
    if request.instructions:
        messages.add("system", [request.instructions])
    if isinstance(request.input, str):
        messages.add("user", [request.input])
        return messages.joined()
    for number, item in enumerate(request.input):
        _add(messages, item, f"input[{number}]")
    if not request.input:
        raise BadRequestError("input is empty", "input")
    return messages.joined()


def _add(messages: Messages, item: Object, where: str) -> None:
    """Add an item of a history to its messages."""
    kind = item.get("type", "message")
    match kind:
        case "message":
            role = item.get("role")
            if role not in _ROLES:
                raise BadRequestError(f"{where} has the role {str(role)[:200]}", f"{where}.role")
            content = content_of(item.get("content"), _TEXTS, f"{where}.content", _image_of)
            messages.add(role, content)
        case "reasoning":
            parts = item.get("content") or []
            messages.think(text_of(parts, ("reasoning_text",), f"{where}.content"))
        case "function_call":
            call_id, name, given = item.get("call_id"), item.get("name"), item.get("arguments")
            if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(given, str)):
                raise BadRequestError(f"{where} is not a call of a function", where)
            messages.call(call_id, name, given)
        case "function_call_output":
            output = content_of(item.get("output"), _TEXTS, f"{where}.output", _image_of)
            messages.add("tool", output, tool_call_id=item.get("call_id"))
        case _:
            raise BadRequestError(f"{where} of type {str(kind)[:200]} is not offered", where)


def _image_of(part: Object) -> str | None:
    """Return the URL of an image; a file that was uploaded before is not one."""
    url = part.get("image_url")
    return url if part.get("type") == "input_image" and isinstance(url, str) else None


class ResponseObject:
    """The answer to /v1/responses."""

    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        reply: RecordedReply,
        _token_text: TokenText | None = None,
    ) -> None:
        """Answer a request with a reply."""
        self._status = "incomplete" if reply.finish_reason == "length" else "completed"
        self._usage = _usage(len(reply.prompt_ids), len(reply.completion.token_ids))
        self._items = list(_items_of(reply))
        self._items[-1]["status"] = self._status
        choice = request.tool_choice
        self._head: Object = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": None,  # large, and no client needs them again
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else "auto",
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
        }

    def whole(self) -> Object:
        """Return the answer."""
        details = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            **self._head,
            "status": self._status,
            "incomplete_details": details,
            "output": self._items,
            "usage": self._usage,
        }

    def stream(self) -> Iterator[bytes]:
        """Yield the answer in events."""
        for number, data in enumerate(self._events()):
            yield event({**data, "sequence_number": number}, data["type"])

    def _events(self) -> Iterator[Object]:
        begun = {**self._head, "status": "in_progress", "incomplete_details": None}
        begun |= {"output": [], "usage": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        for index, item in enumerate(self._items):
            is_call = item["type"] == "function_call"
            empty: Object = {"arguments": ""} if is_call else {"content": []}
            added = {**item, **empty, "status": "in_progress"}
            yield {"type": "response.output_item.added", "output_index": index, "item": added}
            at = {"item_id": item["id"], "output_index": index}
            if is_call:
                yield from _arguments_events(item, at)
            else:
                yield from _text_events(item["content"][0], {**at, "content_index": 0})
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{self._status}", "response": self.whole()}


def _items_of(reply: RecordedReply) -> Iterator[Object]:
    """Yield the items of a reply: a message is among them unless there is something else."""
    if reply.thought:
        content = [{"type": "reasoning_text", "text": reply.thought}]
        yield {**_head_of("reasoning", "rs"), "summary": [], "content": content}
    if reply.text or not (reply.tool_calls or reply.thought):
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        yield {**_head_of("message", "msg"), "role": "assistant", "content": [part]}
    for call in reply.tool_calls:
        named = {"call_id": call["id"], **call["function"]}
        yield {**_head_of("function_call", "fc"), **named}


def _head_of(kind: str, prefix: str) -> Object:
    return {"id": _new_id(prefix), "type": kind, "status": "completed"}


def _arguments_events(item: Object, at: Object) -> Iterator[Object]:
    name = "response.function_call_arguments"
    for piece in pieces(item["arguments"]):
        yield {"type": f"{name}.delta", **at, "delta": piece}
    yield {"type": f"{name}.done", **at, "name": item["name"], "arguments": item["arguments"]}


def _text_events(part: Object, at: Object) -> Iterator[Object]:
    """Yield the events of a text or of a thought, whose only part this is."""
    is_text = part["type"] == "output_text"
    name = f"response.{part['type']}"
    more: Object = {"logprobs": []} if is_text else {}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    for piece in pieces(part["text"]):
        yield {"type": f"{name}.delta", **at, "delta": piece, **more}
    yield {"type": f"{name}.done", **at, "text": part["text"], **more}
    yield {"type": "response.content_part.done", **at, "part": part}


def _usage(prompt: int, reply: int) -> Object:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": reply,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + reply,
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


RESPONSES = Wire("/v1/responses", read, {"messages": "input"})
