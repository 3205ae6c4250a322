"""The calls of one trajectory: which tokens a request means, and what became of them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from slipstream.generators.capture.requests import (
    BadRequestError,
    ChatRequest,
    FinishReason,
    TextRequest,
    normalized,
)
from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.turns.conversation import Conversation
from slipstream.generators.turns.rendering import Rendering
from slipstream.wire.messages.trajectory import Json

Sample = Callable[[list[int], SamplingParams], Awaitable[Completion]]
ParseTools = Callable[[str, Sequence[Json]], Awaitable[tuple[str, list[dict[str, Json]]]]]


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to a client, not yet part of the trajectory."""

    prompt_ids: list[int]
    completion: Completion
    text: str
    tool_calls: list[dict[str, Json]]
    history: tuple[bytes, ...]  # what a later request begins with if it continues this one
    asked: tuple[Mapping[str, Json], ...] = ()  # messages of the request

    @property
    def finish_reason(self) -> FinishReason:
        """As OpenAI names it."""
        return "tool_calls" if self.tool_calls else self.completion.finish_reason

    @property
    def message(self) -> dict[str, Json]:
        """The message that a client gets."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        content = self.text or (None if self.tool_calls else "")
        return {"role": "assistant", "content": content, **calls}


class CaptureSession:
    """One trajectory as a client of OpenAI's API sees it. Use it inside one event loop."""

    def __init__(
        self,
        *,
        sample: Sample,
        params: SamplingParams,
        rendering: Rendering,
        conversation: Conversation,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        parse_tools: ParseTools,
        on_reply: "Callable[[Reply], None] | None" = None,
    ) -> None:
        """Begin without a call.

        Args:
            sample: has the engine reply to a prompt.
            params: of every reply; a client may ask for fewer tokens and for stops.
            rendering: of messages.
            conversation: takes the tokens.
            encode: a text prompt to its tokens.
            decode: tokens to text, without special ones.
            parse_tools: text and calls of a reply that may hold calls of the given tools.
            on_reply: is told each reply that becomes part of the trajectory.
        """
        self._sample = sample
        self._params = params
        self._rendering = rendering
        self._encode = encode
        self._decode = decode
        self._parse_tools = parse_tools
        self._on_reply = on_reply
        self.conversation = conversation
        self._replies: dict[tuple[bytes, ...], Reply] = {}
        self.in_flight: set[asyncio.Task[object]] = set()
        self.num_abandoned = 0  # replies that no client got
        self.reached_limit = False  # a client was told so
        self.newest_messages: list[Mapping[str, Json]] = []  # of a chat, the reply included

    async def chat(self, request: ChatRequest) -> Reply:
        """Have the policy reply to messages; ``keep`` makes it part of the trajectory.

        Raises:
            BadRequestError: it is no such request, or the template refuses its messages.
            TrajectoryLimitError: the trajectory may not go on.
            EngineError: the engine failed.
        """
        request.check()
        messages = [normalized(one) for one in request.messages]
        tools = request.tools if request.tools and request.tool_choice != "none" else None
        keys = (_key({"tools": tools}), *map(_key, messages))
        try:
            prompt_ids = self._prompt(keys, messages, tools)
        except BadRequestError:
            raise
        except ValueError as error:
            raise BadRequestError(f"the chat template refuses it: {error}", "messages") from error
        calls: list[dict[str, Json]] = []
        with self._params_of(prompt_ids, request.limit, request.stops) as params:
            completion = await self._sample(prompt_ids, params)
            text = self._decode(completion.token_ids)
            if tools:
                text, calls = await self._parse_tools(text, tools)
        reply = Reply(prompt_ids, completion, text, calls, (), tuple(request.messages))
        return replace(reply, history=(*keys, _key(normalized(reply.message))))

    async def complete(self, request: TextRequest) -> Reply:
        """Have the policy go on with a text, or with tokens.

        Raises:
            BadRequestError: it is no such request.
            TrajectoryLimitError: the trajectory may not go on.
            EngineError: the engine failed.
        """
        request.check()
        prompt = request.prompt
        ids = self._encode(prompt) if isinstance(prompt, str) else list(prompt)
        if isinstance(prompt, str):
            # What was said before is in the prompt as text: its tokens are those that were chosen.
            ids = self._as_sampled(prompt) or ids
        with self._params_of(ids, request.max_tokens, request.stops) as params:
            completion = await self._sample(ids, params)
        text = self._decode(completion.token_ids)
        history = (_key({"text": (prompt if isinstance(prompt, str) else "") + text}),)
        return Reply(ids, completion, text, [], history if isinstance(prompt, str) else ())

    def keep(self, reply: Reply) -> None:
        """Make a reply part of the trajectory."""
        self.conversation.add(reply.prompt_ids, reply.completion)
        if reply.history:
            self._replies[reply.history] = reply
        if reply.asked:
            self.newest_messages = [*reply.asked, reply.message]
        if self._on_reply is not None:
            self._on_reply(reply)

    def abandon(self, reply: Reply) -> None:
        """Take back a reply that its client did not get."""
        self.conversation.withdraw(reply.completion)
        self._replies.pop(reply.history, None)
        self.num_abandoned += 1

    @contextmanager
    def _params_of(
        self, prompt_ids: list[int], limit: int | None, stops: tuple[str, ...]
    ) -> Iterator[SamplingParams]:
        """Yield those of a reply, whose room in the trajectory is spoken for until it is kept."""
        longest = self._params.max_new_tokens
        with self.conversation.room(prompt_ids, min(longest, limit or longest)) as most:
            stop = (*self._params.stop, *stops)
            yield replace(self._params, max_new_tokens=most, stop=stop)

    def _prompt(
        self,
        keys: tuple[bytes, ...],
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Json] | None,
    ) -> list[int]:
        """Return the tokens that messages mean: of replies those that were sampled."""
        for count in range(len(messages), 0, -1):
            reply = self._replies.get(keys[: count + 1])
            if reply is None:
                continue
            new = messages[count:]
            if not new:
                raise BadRequestError("the last message is a reply of the policy", "messages")
            if any(message["role"] == "assistant" for message in new):
                break  # a reply that the policy did not give
            said = reply.completion.token_ids
            return [*reply.prompt_ids, *said, *self._rendering.following(said, new)]
        return self._rendering.first(messages, tools)

    def _as_sampled(self, prompt: str) -> list[int] | None:
        """Return the tokens of a text that begins with a text and the reply to it; None if none."""
        best: list[int] | None = None
        longest = 0
        for (key, *_), reply in self._replies.items():
            said = msgspec.json.decode(key).get("text")
            if isinstance(said, str) and prompt.startswith(said) and len(said) > longest:
                longest = len(said)
                before = [*reply.prompt_ids, *reply.completion.token_ids]
                rest = prompt[longest:]
                best = [*before, *(self._encode(rest) if rest else [])]
        return best


def _key(message: Mapping[str, Json]) -> bytes:
    """Return what makes two messages the same one."""
    return msgspec.json.encode(message, order="deterministic")
