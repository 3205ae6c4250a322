"""The calls of one trajectory: which tokens a request means, and what became of them."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import TypeVar

import msgspec

from slipstream.generators.capture.off_loop import LARGE_BYTES, off_loop
from slipstream.generators.capture.requests import (
    BadRequestError,
    ChatRequest,
    FinishReason,
    TextRequest,
    normalized,
)
from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.turns.conversation import Conversation, TrajectoryLimitError
from slipstream.generators.turns.rendering import Rendering
from slipstream.generators.turns.replies import ParsedReply
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.trajectory import Json

Sample = Callable[[list[int], SamplingParams], Awaitable[Completion]]
_TOOL_CHARACTERS = 1 << 16  # of tools, which a template may leave out
_BYTES_OF_A_CHARACTER = 12  # in JSON at most: two escapes
_VALUES_OF_A_TOKEN = 8  # of JSON, commas and brackets of texts among them
_LONG_KEY = 32  # characters; shorter ones count with their values
_DIGEST_BYTES = 20
_MOST_COMPARED = 8  # newest replies whose histories are rendered to compare
_SHOWN = 60  # characters of a difference
Parse = Callable[[str, Sequence[Json]], Awaitable[ParsedReply]]


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to a client, not yet part of the trajectory."""

    prompt_ids: list[int]
    completion: Completion
    text: str
    tool_calls: list[dict[str, Json]]
    thought: str = ""
    rejected: Counter[str] = field(default_factory=Counter)  # its calls of no tool, by why
    histories: tuple[bytes, ...] = ()
    """Digests of the messages that a request which continues it begins with: many clients leave
    out its thought."""
    asked: tuple[Mapping[str, Json], ...] = ()  # messages of the request
    tools: tuple[Json, ...] = ()  # of the request, sorted
    text_until: str = ""  # of a text: prompt and reply

    @property
    def finish_reason(self) -> FinishReason:
        """As OpenAI names it."""
        return "tool_calls" if self.tool_calls else self.completion.finish_reason

    @property
    def said(self) -> list[Mapping[str, Json]]:
        """The messages of its request, and its own."""
        return [*self.asked, self.message]

    @property
    def message(self) -> dict[str, Json]:
        """The message that a client gets."""
        more: dict[str, Json] = {"reasoning_content": self.thought} if self.thought else {}
        if self.tool_calls:
            more["tool_calls"] = self.tool_calls
        content = self.text or (None if self.tool_calls else "")
        return {"role": "assistant", "content": content, **more}


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
        parse: Parse,
        longest_token: int = 0,
        vocab_size: int = 0,
        on_reply: "Callable[[Reply], None] | None" = None,
    ) -> None:
        """Begin without a call.

        Args:
            sample: has the engine reply to a prompt.
            params: of every reply; a client may ask for fewer tokens and for stops.
            rendering: of messages.
            conversation: takes the tokens.
            encode: a text prompt to its tokens.
            decode: tokens to text.
            parse: the parts of a reply that may hold calls of the given tools.
            longest_token: characters of the longest one; 0 is unknown.
            vocab_size: ids that a prompt may hold; 0 is unknown.
            on_reply: is told each reply that becomes part of the trajectory.
        """
        self._sample = sample
        self._params = params
        self._rendering = rendering
        self._encode = encode
        self._decode = decode
        self._parse = parse
        self._longest_token = longest_token
        self._vocab_size = vocab_size
        self._on_reply = on_reply
        self.conversation = conversation
        self._replies: dict[bytes, Reply] = {}
        self._texts: dict[str, Reply] = {}
        self.in_flight: set[asyncio.Task[object]] = set()
        self.num_abandoned = 0  # replies that no client got
        self.reached_limit = False  # a client was told so
        self.engine_error: EngineError | None = None  # the same
        self._kept: list[Reply] = []
        self.rejected = Counter[str]()  # calls of no tool, in kept replies, by why
        self.first_difference = ""  # of a history that began a branch, from what was said before

    @property
    def newest_messages(self) -> list[Mapping[str, Json]]:
        """What was said up to the newest reply that a client got, that one included."""
        return self._kept[-1].said if self._kept else []

    async def chat(self, request: ChatRequest, size: int = LARGE_BYTES) -> Reply:
        """Have the policy reply to messages; ``keep`` makes it part of the trajectory.

        ``size`` is that of the request in bytes.

        Raises:
            BadRequestError: it is no such request, or the template refuses its messages.
            TrajectoryLimitError: the trajectory may not go on.
            EngineError: the engine failed.
        """
        tools, key, prompt_ids = await off_loop(size, self._understood, request)
        with self._params_of(prompt_ids, request.limit, request.stops) as params:
            completion = await self._sample(prompt_ids, params)
            parsed = await self._parse(self._decode(completion.token_ids), tools)
        known = {one["function"]["name"] for one in tools}
        names = [call["function"]["name"] for call in parsed.tool_calls]
        unknown = sum(name not in known for name in names)
        reply = Reply(
            prompt_ids,
            completion,
            parsed.text,
            parsed.tool_calls,
            thought=parsed.thought,
            rejected=Counter(unknown=unknown, unreadable=parsed.num_unreadable),
            asked=tuple(request.messages),
            tools=tools,
        )
        (said,) = numbered([normalized(reply.message)])
        forms = [said, {name: one for name, one in said.items() if name != "reasoning_content"}]
        return replace(reply, histories=tuple(_link(key, one) for one in forms))

    async def complete(self, request: TextRequest, size: int = LARGE_BYTES) -> Reply:
        """Have the policy go on with a text, or with tokens.

        ``size`` is that of the request in bytes.

        Raises:
            BadRequestError: it is no such request.
            TrajectoryLimitError: the trajectory may not go on.
            EngineError: the engine failed.
        """
        prompt = request.prompt
        ids = await off_loop(size, self._continued, request)
        with self._params_of(ids, request.max_tokens, request.stops) as params:
            completion = await self._sample(ids, params)
        text = self._decode(completion.token_ids)
        until = prompt + text if isinstance(prompt, str) else ""
        said = prompt if isinstance(prompt, str) else self._decode(ids)
        asked = ({"role": "user", "content": said},)
        return Reply(ids, completion, text, [], asked=asked, text_until=until)

    def keep(self, reply: Reply) -> None:
        """Make a reply part of the trajectory."""
        self.conversation.add(reply.prompt_ids, reply.completion)
        if reply.histories:
            self._replies |= dict.fromkeys(reply.histories, reply)
        if reply.text_until:
            self._texts[reply.text_until] = reply
        self._kept.append(reply)
        self.rejected += reply.rejected
        self.engine_error = None  # it was tried again
        if self._on_reply is not None:
            self._on_reply(reply)

    def abandon(self, reply: Reply) -> None:
        """Take back a reply that its client did not get."""
        if not self.conversation.withdraw(reply.completion):
            return  # the client went on from it
        self._kept = [one for one in self._kept if one.completion is not reply.completion]
        for history in reply.histories:
            _forget(self._replies, history, reply)
        _forget(self._texts, reply.text_until, reply)
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

    def refuse_larger(self, body: bytes) -> None:
        """Refuse a request that is larger than any of so few tokens, before it is decoded.

        A value of JSON takes a hundred bytes of memory and more, whatever it takes in the request.

        Raises:
            TrajectoryLimitError: it is.
        """
        if self._longest_token:
            most = _BYTES_OF_A_CHARACTER * (self._most_characters + _TOOL_CHARACTERS)
            self._refuse(len(body), most, "bytes")
        num_values = sum(map(body.count, (b",", b"[", b"{")))
        most_values = _VALUES_OF_A_TOKEN * self.conversation.max_tokens + _TOOL_CHARACTERS
        self._refuse(num_values, most_values, "values")

    @property
    def _most_characters(self) -> int:
        return self.conversation.max_tokens * self._longest_token

    def _refuse(self, size: int, most: int, what: str) -> None:
        if size > most:
            raise TrajectoryLimitError(
                f"a request of {size} {what}: a trajectory has {self.conversation.max_tokens} "
                f"tokens at most, which are {most} (environment.max_tokens)"
            )

    def _understood(self, request: ChatRequest) -> tuple[tuple[Json, ...], bytes, list[int]]:
        """Return the tools of a request, sorted, the digest of its messages, and its prompt.

        A message is a token at least in what tells who speaks; texts of tools are counted past
        those that a template may leave out.
        """
        request.check()
        self._refuse(len(request.messages), self.conversation.max_tokens, "messages")
        messages = [normalized(one) for one in request.messages]
        tools = request.tools if request.tools and request.tool_choice != "none" else []
        if self._longest_token:
            size = num_characters(messages)
            size += max(0, num_characters(tools) - _TOOL_CHARACTERS)
            self._refuse(size, self._most_characters, "characters")
        in_order = tuple(map(msgspec.json.decode, sorted(map(_encoded, tools))))
        alike = numbered(messages)
        keys = _chain([{"tools": in_order}, *alike])
        try:
            found = self._continuing(keys, messages, alike, in_order)
            if found is None:
                self._compare(alike, in_order)
                found = self._rendering.first(messages, tools)
            return in_order, keys[-1], found
        except (BadRequestError, TrajectoryLimitError):
            raise
        except (ValueError, TypeError) as error:
            raise BadRequestError(f"the chat template refuses it: {error}", "messages") from error

    def _continued(self, request: TextRequest) -> list[int]:
        """Return the tokens of the prompt of a text."""
        request.check()
        prompt = request.prompt
        if isinstance(prompt, str):
            if self._longest_token:
                self._refuse(len(prompt), self._most_characters, "characters")
            return self._ids_of(prompt)
        self._refuse(len(prompt), self.conversation.max_tokens, "tokens")
        if self._vocab_size and not all(0 <= one < self._vocab_size for one in prompt):
            raise BadRequestError(f"prompt: token ids are 0 to {self._vocab_size - 1}", "prompt")
        return list(prompt)

    def _continuing(
        self,
        keys: Sequence[bytes],
        messages: Sequence[Mapping[str, Json]],
        alike: Sequence[Mapping[str, Json]],
        tools: Sequence[Json],
    ) -> list[int] | None:
        """Return the tokens that messages mean: of replies those that were sampled.

        None if they continue no reply. ``alike`` are the messages as they are compared, ``keys``
        their digests.
        """
        by_length: dict[int, list[Reply]] = {}
        for one in self._newest:
            by_length.setdefault(len(one.said), []).append(one)
        for count in range(len(messages), 0, -1):
            reply = self._replies.get(keys[count])
            if reply is None and count in by_length:
                written = self._written(alike[:count], tools)
                known = by_length[count]
                has_thought = "reasoning_content" in alike[count - 1]
                same = (one for one in known if self._written_of(one, has_thought) == written)
                reply = next(same, None)
            if reply is None:
                continue
            new = messages[count:]
            if not new:
                raise BadRequestError("the last message is a reply of the policy", "messages")
            if any(message["role"] == "assistant" for message in new):
                return None  # a reply that the policy did not give
            said = reply.completion.token_ids
            return [*reply.prompt_ids, *said, *self._rendering.following(said, new)]
        return None

    def _written(self, alike: Sequence[Mapping[str, Json]], tools: Sequence[Json]) -> str | None:
        """Return what the template writes of messages; None if it refuses them."""
        with suppress(ValueError, TypeError):
            return self._rendering.text(alike, tools)
        return None

    def _written_of(self, reply: Reply, has_thought: bool) -> str:
        said = numbered([normalized(one) for one in reply.said])
        if not has_thought:
            said[-1].pop("reasoning_content", None)
        return self._written(said, reply.tools) or ""

    def _compare(self, alike: Sequence[Mapping[str, Json]], tools: Sequence[Json]) -> None:
        """Remember where the first history that begins a branch differs from one before.

        That is the one that shares most with it. A history with no more replies than some
        conversation began with begins another, as of another task or role of an agent.
        """
        begun_with = (_num_replies(one.asked) for one in self._kept)
        if self.first_difference or _num_replies(alike) <= min(begun_with, default=0):
            return
        now = self._written(alike, tools) or ""
        shared, before = -1, ""
        for known in self._newest:
            written = self._written_of(known, True)
            at = len(commonprefix([written, now]))  # noqa: RUF071 characters, not paths
            if at == len(now):
                return  # it is asked again
            if at > shared:
                shared, before = at, written
        if before:
            self.first_difference = (
                f"after {before[max(0, shared - _SHOWN) : shared]!r} came "
                f"{before[shared : shared + _SHOWN]!r}, and now {now[shared : shared + _SHOWN]!r}"
            )

    @property
    def _newest(self) -> list[Reply]:
        """The newest replies to messages that are compared, the newest first."""
        return [one for one in reversed(self._kept) if one.histories][:_MOST_COMPARED]

    def _ids_of(self, prompt: str) -> list[int]:
        """Return the tokens of a text; of what was said in it before, those that were chosen."""
        known = [text for text in tuple(self._texts) if prompt.startswith(text)]
        if not known:
            return self._encode(prompt)
        longest = max(known, key=len)
        reply = self._texts[longest]
        rest = prompt[len(longest) :]
        said = [*reply.prompt_ids, *reply.completion.token_ids]
        return [*said, *(self._encode(rest) if rest else [])]


def _num_replies(messages: Sequence[Mapping[str, Json]]) -> int:
    return sum(one["role"] == "assistant" for one in messages)


def num_characters(value: Json) -> int:
    """Return how many characters the texts of a value have; any other value is one.

    Of the keys of objects long ones count.
    """
    found, waiting = 0, [value]
    while waiting:
        found += 1
        match waiting.pop():
            case str(text):
                found += max(0, len(text) - 1)
            case list(parts) | tuple(parts):
                waiting += parts
            case dict(parts):
                found += sum(len(key) for key in parts if len(key) > _LONG_KEY)
                waiting += parts.values()
            case _:
                pass
    return found


def _chain(messages: Sequence[Mapping[str, Json]]) -> list[bytes]:
    """Return the digests of the first message, of the first two, and so on."""
    links = [b""]
    for message in messages:
        links.append(_link(links[-1], message))
    return links[1:]


def _link(before: bytes, message: Mapping[str, Json]) -> bytes:
    return hashlib.blake2b(before + _encoded(message), digest_size=_DIGEST_BYTES).digest()


def _encoded(value: Json) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def numbered(messages: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """Return messages in a form that is the same whatever ids their calls have, to compare them.

    Ids of calls are numbers of nine characters, which templates of Mistral ask for; a result has
    that of its call, or of the call in its place. Objects have their keys in order.
    """
    found: list[dict[str, Json]] = []
    numbers: dict[Json, int] = {}
    num_results = 0
    for message in messages:
        one: dict[str, Json] = msgspec.json.decode(_encoded(message))
        if "tool_calls" in one:
            calls = one["tool_calls"]
            numbers = {call["id"]: number for number, call in enumerate(calls) if call["id"]}
            num_results = 0
            for number, call in enumerate(calls):
                call["id"] = f"{number:09d}"
        elif one["role"] == "tool":
            one["tool_call_id"] = f"{numbers.get(one.get('tool_call_id'), num_results):09d}"
            num_results += 1
        found.append(one)
    return found


T = TypeVar("T", str, bytes)


def _forget(known: dict[T, Reply], key: T, reply: Reply) -> None:
    found = known.get(key)
    if found is not None and found.completion is reply.completion:
        del known[key]
