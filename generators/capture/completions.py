"""OpenAI's chat and text completions: ``/v1/chat/completions`` and ``/v1/completions``."""

import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

from typing_extensions import override

from slipstream.generators.capture.wires import (
    CallRefusal,
    Object,
    Question,
    TokenText,
    Wire,
    event,
    fields_of,
    pieces,
)
from slipstream.generators.turns.calls import RecordedReply
from slipstream.generators.turns.requests import ChatRequest, TextRequest
from slipstream.wire.messages.trajectory import Json


class ReplyObject:
    """A reply as the answer to one kind of request."""

    name: ClassVar[str]
    name_of_chunk: ClassVar[str]
    prefix: ClassVar[str]  # beginning of the id
    last: ClassVar[Object]  # fields of the last choice, which has no text

    def __init__(
        self,
        request: ChatRequest | TextRequest,
        model: str,
        reply: RecordedReply,
        token_text: TokenText,
    ) -> None:
        """Answer a request with a reply; ``token_text`` returns the text of one token."""
        self._request = request
        self._reply = reply
        completion = reply.completion
        self._head: Object = {
            "id": self.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs: Json = None
        if request.wants_logprobs:
            texts = [token_text(token_id) for token_id in completion.token_ids]
            self._logprobs = self._written(texts, completion.logprobs)

    def _written(self, texts: list[str], logprobs: list[float]) -> Object:
        raise NotImplementedError

    def _whole(self) -> Object:
        """Return the fields of the choice of a whole answer."""
        raise NotImplementedError

    def _pieces(self) -> Iterator[Object]:
        """Yield the fields of the choices of a stream."""
        raise NotImplementedError

    def whole(self) -> Object:
        """Return the answer."""
        choice = self._choice(finish_reason=self._reply.finish_reason, **self._whole())
        choice["logprobs"] = self._logprobs
        return {**self._head, "object": self.name, "choices": [choice], "usage": self._usage}

    def stream(self) -> Iterator[bytes]:
        """Yield the answer in chunks."""
        yield from map(event, self._chunks())
        yield b"data: [DONE]\n\n"

    def _chunks(self) -> Iterator[Object]:
        head = {**self._head, "object": self.name_of_chunk}
        logprobs = self._logprobs
        for piece in self._pieces():
            yield {**head, "choices": [{**self._choice(**piece), "logprobs": logprobs}]}
            logprobs = None
        end = self._choice(finish_reason=self._reply.finish_reason, **self.last)
        yield {**head, "choices": [end]}
        if self._request.counts_usage:
            yield {**head, "choices": [], "usage": self._usage}

    def _choice(self, **fields: Json) -> Object:
        return {"index": 0, "logprobs": None, "finish_reason": None, **fields}

    @property
    def _usage(self) -> Object:
        prompt, reply = len(self._reply.prompt_ids), len(self._reply.completion.token_ids)
        counts = {"prompt_tokens": prompt, "completion_tokens": reply}
        return {**counts, "total_tokens": prompt + reply}


class ChatCompletion(ReplyObject):
    """The answer to /v1/chat/completions."""

    name, name_of_chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    last: ClassVar[Object] = {"delta": {}}

    @override
    def _written(self, texts: list[str], logprobs: list[float]) -> Object:
        rows = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, logprobs, strict=True)
        ]
        return {"content": rows, "refusal": None}

    @override
    def _whole(self) -> Object:
        return {"message": {"refusal": None, **self._reply.message}}

    @override
    def _pieces(self) -> Iterator[Object]:
        yield {"delta": {"role": "assistant", "content": ""}}
        for name, text in (
            ("reasoning_content", self._reply.thought),
            ("content", self._reply.text),
        ):
            for piece in pieces(text):
                yield {"delta": {name: piece}}
        for index, call in enumerate(self._reply.tool_calls):
            yield {"delta": {"tool_calls": [{"index": index, **call}]}}


class TextCompletion(ReplyObject):
    """The answer to /v1/completions."""

    name, name_of_chunk, prefix = "text_completion", "text_completion", "cmpl-"
    last: ClassVar[Object] = {"text": ""}

    @override
    def _written(self, texts: list[str], logprobs: list[float]) -> Object:
        starts = [0]
        for text in texts[:-1]:
            starts.append(starts[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": starts,
        }

    @override
    def _whole(self) -> Object:
        return {"text": self._reply.text}

    @override
    def _pieces(self) -> Iterator[Object]:
        for piece in pieces(self._reply.text) or [""]:
            yield {"text": piece}


def _read_chat(body: bytes) -> Question:
    request = fields_of(body, ChatRequest)
    return Question(request, partial(ChatCompletion, request))


def _read_text(body: bytes) -> Question:
    request = fields_of(body, TextRequest)
    return Question(request, partial(TextCompletion, request))


def refuse(refusal: CallRefusal) -> Object:
    """Return an error in OpenAI's form."""
    error = {
        "message": refusal.message,
        "type": "invalid_request_error" if refusal.status < 500 else "server_error",
        "code": refusal.code,
        "param": refusal.param or None,
    }
    return {"error": error}


CHAT = Wire("/v1/chat/completions", _read_chat)
TEXT = Wire("/v1/completions", _read_text)
