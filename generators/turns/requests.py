"""Requests of OpenAI's chat and text completion API, as far as they are honoured.

Temperature, top_p and their like are read and ignored: the run chooses the distribution that it
trains, not the client. A tool call that is ``required`` is not forced: it is the policy's choice,
and an agent must handle a reply without one.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from typing_extensions import override

from slipstream.wire.messages.images import Image
from slipstream.wire.messages.trajectory import Json

MAX_REQUEST_BYTES = 32 << 20
_MAX_STOPS = 4  # OpenAI's limit
_LONGEST_STOP = 1_024  # characters: the engine reads as many of a reply again with each token
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
    # Read and ignored: they are the run's, or change no answer.
    frequency_penalty: Json = None
    min_p: Json = None
    presence_penalty: Json = None
    repetition_penalty: Json = None
    seed: Json = None
    temperature: Json = None
    top_k: Json = None
    top_p: Json = None
    user: Json = None

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
        if (longest := max(map(len, self.stops), default=0)) > _LONGEST_STOP:
            raise BadRequestError(f"stop has a text of {longest} characters", "stop")


class ChatRequest(_Completion, frozen=True, kw_only=True):
    """POST /v1/chat/completions, as far as it is honoured; other fields are refused."""

    messages: list[dict[str, Json]]
    tools: list[dict[str, Json]] | None = None
    tool_choice: str | dict[str, Json] | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Read and refused unless they say what is done anyway.
    modalities: list[str] | None = None
    response_format: dict[str, Json] | None = None
    # Read and ignored: they are the run's, or change no answer.
    metadata: Json = None
    parallel_tool_calls: Json = None
    prediction: Json = None
    prompt_cache_key: Json = None
    prompt_cache_options: Json = None
    prompt_cache_retention: Json = None
    reasoning_effort: Json = None
    safety_identifier: Json = None
    service_tier: Json = None
    store: Json = None
    verbosity: Json = None

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
        if self.modalities not in (None, ["text"]):
            raise BadRequestError("modalities: replies are text", "modalities")
        choice = self.tool_choice
        kind = choice.get("type") if isinstance(choice, dict) else choice
        offered = ("function",) if isinstance(choice, dict) else (None, "auto", "none", "required")
        if kind not in offered:
            raise BadRequestError(f"tool_choice: {str(kind)[:200]} is not offered", "tool_choice")
        for tool in self.tools or ():
            function, kind = tool.get("function"), tool.get("type") or "function"
            is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
            if kind != "function" or not is_named:
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
    """POST /v1/completions, as far as it is honoured; other fields are refused."""

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

    Content with an image is a list of parts.

    Raises:
        BadRequestError: the message has something else.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRequestError(f"a message has the role {role!r}", "messages")
    for name in ("function_call", "refusal", "audio"):
        if message.get(name) is not None:
            raise BadRequestError(f"{name} of a message is not offered", "messages")
    normal: dict[str, Json] = {"role": "system" if role == "developer" else role}
    content = message.get("content")
    normal["content"] = _parts(content or ()) if images_of(message) else content_text(content)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise BadRequestError("tool_calls of a message is no list", "messages")
        normal["tool_calls"] = [_call(call) for call in calls]
    for name in ("tool_call_id", "name", "reasoning_content"):
        if (value := message.get(name)) and isinstance(value, str):
            normal[name] = value
    return normal


def images_of(message: Mapping[str, Json]) -> list[Image]:
    """Return the images of a message, in order."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return []
    return [image for part in content if (image := _image(part)) is not None]


def _image(part: Json) -> Image | None:
    match part:
        case {"type": "image", "image": [*facts]}:
            return msgspec.convert(facts, Image)
        case _:
            return None


def _parts(content: Sequence[Json]) -> list[Json]:
    """Return parts of text and images in the one form that templates get."""
    return [
        part if _image(part) is not None else {"type": "text", "text": content_text([part])}
        for part in content
    ]


def content_text(content: Json) -> str:
    """Return the content of a message as text; an image is as a person reads it.

    Raises:
        BadRequestError: the content is neither text nor an image.
    """
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            images = [_image(part) for part in content]
            parts = [
                image.text if image else part.get("text") if isinstance(part, dict) else None
                for part, image in zip(content, images, strict=True)
            ]
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
