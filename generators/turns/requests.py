"""Requests of OpenAI's chat and text completion API, as far as they are honoured.

Temperature, top_p and their like are read and ignored: the run chooses the distribution that it
trains, not the client. A tool call that is ``required`` is not forced: it is the policy's choice,
and an agent must handle a reply without one.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from typing_extensions import override

from slipstream.wire.messages.trajectory import Json

MAX_REQUEST_BYTES = 32 << 20
_MAX_STOPS = 4  # OpenAI's limit
Stop = str | list[str] | None
Positive = Annotated[int, msgspec.Meta(ge=1)]


class BadRequestError(ValueError):
    """A request cannot be answered; ``param`` is the field at fault."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class _Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both kinds of requests."""

    model: str = ""
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Json] | None = None
    stop: Stop = None
    max_tokens: Positive | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts after which a reply ends."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def counts_usage(self) -> bool:
        """True if a stream should end with its token counts."""
        return bool((self.stream_options or {}).get("include_usage"))

    def check(self) -> None:
        """Refuse fields that change a client's result and are not honoured.

        Raises:
            BadRequestError: such a field is set; the error names it.
        """
        if self.n not in {None, 1}:
            raise BadRequestError(f"n is {self.n}: a call has one reply here", "n")
        if len(self.stops) > _MAX_STOPS or not all(self.stops):
            raise BadRequestError(f"stop has {len(self.stops)} texts, or empty ones", "stop")


class ChatRequest(_Completion, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Json]]
    tools: list[dict[str, Json]] | None = None
    tool_choice: str | dict[str, Json] | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Json] | None = None
    # Refused if they are set.
    audio: Json = None
    function_call: Json = None
    functions: Json = None
    web_search_options: Json = None

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer should have logprobs of its tokens."""
        return bool(self.logprobs)

    @property
    def limit(self) -> int | None:
        """Most tokens of the reply; None is as many as the run allows."""
        return self.max_completion_tokens or self.max_tokens

    @override
    def check(self) -> None:
        """Refuse fields that change a client's result and are not honoured.

        Raises:
            BadRequestError: such a field is set; the error names it.
        """
        super().check()
        if not self.messages:
            raise BadRequestError("messages is empty", "messages")
        for name in ("audio", "function_call", "functions", "web_search_options"):
            if getattr(self, name) is not None:
                raise BadRequestError(f"{name} is not offered", name)
        choice = self.tool_choice
        if isinstance(choice, dict) and (kind := choice.get("type")) != "function":
            raise BadRequestError(
                f"tool_choice of type {str(kind)[:200]} is not offered", "tool_choice"
            )
        for tool in self.tools or ():
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise BadRequestError(
                    f"{str(tool)[:200]} is no tool: expected {{'type': 'function', 'function': "
                    "{'name': ..., 'parameters': ...}}",
                    "tools",
                )
        if self.top_logprobs:
            raise BadRequestError("top_logprobs: only chosen tokens have any here", "top_logprobs")
        if self.response_format not in (None, {"type": "text"}):
            raise BadRequestError(
                "response_format: a reply that is forced into a form is not the policy's choice",
                "response_format",
            )


class TextRequest(_Completion, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[int]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer should have logprobs of its tokens."""
        return self.logprobs is not None

    @override
    def check(self) -> None:
        """Refuse fields that change a client's result and are not honoured.

        Raises:
            BadRequestError: such a field is set; the error names it.
        """
        super().check()
        if not self.prompt:
            raise BadRequestError("prompt is empty", "prompt")
        for name, is_asked in (
            ("echo", self.echo),
            ("best_of", self.best_of not in {None, 1}),
            ("suffix", self.suffix),
        ):
            if is_asked:
                raise BadRequestError(f"{name} is not offered", name)
        if self.logprobs not in {None, 0, 1}:
            raise BadRequestError("logprobs: only chosen tokens have any here", "logprobs")


def normalized(message: Mapping[str, Json]) -> dict[str, Json]:
    """Return a message as templates take it: content is text, arguments are objects.

    Raises:
        BadRequestError: the message is not text.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRequestError(f"a message has the role {role!r}", "messages")
    normal: dict[str, Json] = {"role": "system" if role == "developer" else role}
    normal["content"] = content_text(message.get("content"))
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise BadRequestError("tool_calls of a message is no list", "messages")
        normal["tool_calls"] = [_call(call) for call in calls]
    for name in ("tool_call_id", "name", "reasoning_content"):
        if (value := message.get(name)) and isinstance(value, str):
            normal[name] = value
    return normal


def content_text(content: Json) -> str:
    """Return the content of a message as text.

    Raises:
        BadRequestError: the content is not text.
    """
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            texts = [part for part in parts if isinstance(part, str)]
            if len(texts) == len(content):
                return "".join(texts)
    raise BadRequestError("content of a message is not text", "messages")


def _call(call: Any) -> dict[str, Json]:  # noqa: ANN401 JSON
    try:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            arguments = msgspec.json.decode(arguments)
        named = {"name": str(function["name"]), "arguments": arguments}
        return {"id": str(call.get("id", "")), "type": "function", "function": named}
    except (AttributeError, KeyError, TypeError, msgspec.DecodeError):
        raise BadRequestError(f"{str(call)[:200]} is not a call of a tool", "messages") from None


FinishReason = Literal["stop", "length", "tool_calls"]
