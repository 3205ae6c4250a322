"""The calls of one trajectory: which tokens a request means, and what became of them."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from os.path import commonprefix

import msgspec

from slipstream.generators.engine import Completion, SamplingParams
from slipstream.generators.turns.conversation import Conversation, Experts, TrajectoryLimitError
from slipstream.generators.turns.histories import (
    digests_of,
    encoded,
    next_digest,
    num_characters,
    num_replies,
    numbered,
)
from slipstream.generators.turns.off_loop import LARGE_BYTES, off_loop
from slipstream.generators.turns.rendering import MessageRendering
from slipstream.generators.turns.replies import ParsedReply
from slipstream.generators.turns.requests import (
    BadRequestError,
    ChatRequest,
    FinishReason,
    TextRequest,
    normalized,
)
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.trajectory import Json

Sample = Callable[[list[int], SamplingParams], Awaitable[Completion]]
Parse = Callable[[str, Sequence[Json]], Awaitable[ParsedReply]]
Messages = Sequence[Mapping[str, Json]]
_TOOL_CHARACTERS = 1 << 16  # characters of tools, which a template may leave out
_BYTES_OF_A_CHARACTER = 12  # in JSON at most: two escapes
_VALUES_OF_A_TOKEN = 8  # values in JSON, including commas and brackets in texts
_MOST_COMPARED = 8  # newest replies whose histories are rendered to compare
_SHOWN = 60  # characters of a difference


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A reply of the policy with its tokens. ``keep`` makes it part of the trajectory."""

    prompt_ids: list[int]
    completion: Completion
    text: str
    tool_calls: list[dict[str, Json]]
    thought: str = ""
    rejected: Counter[str] = field(default_factory=Counter)  # calls of no known tool, by reason
    digests: tuple[bytes, ...] = ()
    """Digests of the histories that may continue it, with and without its thought: many clients
    leave the thought out."""
    asked: tuple[Mapping[str, Json], ...] = ()  # messages of the request
    tools: tuple[Json, ...] = ()  # tools of the request, sorted
    text_until: str = ""  # prompt and reply of a text request
    experts_before: tuple[Experts, ...] = ()  # experts of its prompt that were known before

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended, as OpenAI names it."""
        return "tool_calls" if self.tool_calls else self.completion.finish_reason

    @property
    def history(self) -> list[Mapping[str, Json]]:
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


class TrajectoryCalls:
    """The calls of one trajectory. Use it inside one event loop."""

    def __init__(
        self,
        *,
        sample: Sample,
        params: SamplingParams,
        rendering: MessageRendering,
        conversation: Conversation,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        parse: Parse,
        longest_token: int = 0,
        vocab_size: int = 0,
        on_reply: Callable[[RecordedReply], None] | None = None,
    ) -> None:
        """Begin without a call.

        Args:
            sample: Has the engine reply to a prompt.
            params: Parameters of every reply; a request may ask for fewer tokens and for stops.
            rendering: Turns messages into tokens.
            conversation: Takes the tokens.
            encode: Turns a text prompt into tokens.
            decode: Turns tokens into text.
            parse: Separates a reply that may call the given tools into its parts.
            longest_token: Characters of the longest token; 0 is unknown.
            vocab_size: Number of token ids that a prompt may hold; 0 is unknown.
            on_reply: Receives each reply that becomes part of the trajectory.
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
        self._kept: list[RecordedReply] = []
        self.num_abandoned = 0  # replies that did not reach their client
        self.reached_limit = False  # a client was refused for it
        self.engine_error: EngineError | None = None  # the last error that a client got
        self.rejected = Counter[str]()  # calls of no known tool in kept replies, by reason
        self.first_difference = ""  # between a history that began a branch and one before it

    @property
    def newest_history(self) -> list[Mapping[str, Json]]:
        """Messages up to and including the last delivered reply."""
        return self._kept[-1].history if self._kept else []

    async def chat(self, request: ChatRequest, size: int = LARGE_BYTES) -> RecordedReply:
        """Have the policy reply to messages in a request of ``size`` bytes.

        Raises:
            BadRequestError: the request is malformed, or the template refuses its messages.
            TrajectoryLimitError: the trajectory may not continue.
            EngineError: the engine failed.
        """
        tools, digest, prompt_ids = await off_loop(size, self._understood, request)
        with self._params_of(prompt_ids, request.limit, request.stops) as (params, experts):
            completion = await self._sample(prompt_ids, params)
            parsed = await self._parse(self._decode(completion.token_ids), tools)
        known = {tool["function"]["name"] for tool in tools}
        unknown = sum(call["function"]["name"] not in known for call in parsed.tool_calls)
        reply = RecordedReply(
            prompt_ids,
            completion,
            parsed.text,
            parsed.tool_calls,
            thought=parsed.thought,
            rejected=Counter(unknown=unknown, unreadable=parsed.num_unreadable),
            asked=tuple(request.messages),
            tools=tools,
            experts_before=experts,
        )
        (whole,) = numbered([normalized(reply.message)])
        bare = {name: value for name, value in whole.items() if name != "reasoning_content"}
        return replace(reply, digests=(next_digest(digest, whole), next_digest(digest, bare)))

    async def complete(self, request: TextRequest, size: int = LARGE_BYTES) -> RecordedReply:
        """Continue a text prompt, or tokens, in a request of ``size`` bytes.

        Raises:
            BadRequestError: the request is malformed.
            TrajectoryLimitError: the trajectory may not continue.
            EngineError: the engine failed.
        """
        prompt = request.prompt
        ids = await off_loop(size, self._continued, request)
        with self._params_of(ids, request.max_tokens, request.stops) as (params, experts):
            completion = await self._sample(ids, params)
        text = self._decode(completion.token_ids)
        until = prompt + text if isinstance(prompt, str) else ""
        content = prompt if isinstance(prompt, str) else self._decode(ids)
        asked = ({"role": "user", "content": content},)
        return RecordedReply(
            ids, completion, text, [], asked=asked, text_until=until, experts_before=experts
        )

    def keep(self, reply: RecordedReply) -> None:
        """Make a reply part of the trajectory."""
        self.conversation.add(reply.prompt_ids, reply.completion, reply.experts_before)
        self._kept.append(reply)
        self.rejected += reply.rejected
        self.engine_error = None  # another attempt succeeded
        if self._on_reply is not None:
            self._on_reply(reply)

    def abandon(self, reply: RecordedReply) -> None:
        """Take back a reply that did not reach its client."""
        if not self.conversation.withdraw(reply.completion):
            return  # the client continued after it
        self._kept = [known for known in self._kept if known.completion is not reply.completion]
        self.num_abandoned += 1

    @contextmanager
    def _params_of(
        self, prompt_ids: list[int], limit: int | None, stops: tuple[str, ...]
    ) -> Iterator[tuple[SamplingParams, tuple[Experts, ...]]]:
        """Yield a reply's parameters and the known experts of its prompt, which are not recorded.

        Its room in the trajectory is reserved meanwhile.
        """
        longest = self._params.max_new_tokens
        known = self.conversation.known_experts(prompt_ids)
        with self.conversation.room(prompt_ids, min(longest, limit or longest)) as most:
            stop = (*self._params.stop, *stops)
            yield (
                replace(
                    self._params, max_new_tokens=most, stop=stop, experts_from=sum(map(len, known))
                ),
                known,
            )

    # ---- sizes -----------------------------------------------------------------

    def refuse_larger(self, body: bytes) -> None:
        """Refuse a request too large for a trajectory's tokens, before it is decoded.

        A value of JSON takes a hundred bytes of memory and more, whatever its size in the request.

        Raises:
            TrajectoryLimitError: the request is too large.
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

    # ---- prompts ---------------------------------------------------------------

    def _understood(self, request: ChatRequest) -> tuple[tuple[Json, ...], bytes, list[int]]:
        """Return the tools of a request, sorted, the digest of its messages, and its prompt.

        Each message has at least one token, which tells its role; texts of tools count beyond what
        a template may leave out.
        """
        request.check()
        self._refuse(len(request.messages), self.conversation.max_tokens, "messages")
        messages = [normalized(message) for message in request.messages]
        tools = request.tools if request.tools and request.tool_choice != "none" else []
        if self._longest_token:
            size = num_characters(messages)
            size += max(0, num_characters(tools) - _TOOL_CHARACTERS)
            self._refuse(size, self._most_characters, "characters")
        in_order = tuple(map(msgspec.json.decode, sorted(map(encoded, tools))))
        alike = numbered(messages)
        digests = digests_of([{"tools": in_order}, *alike])
        try:
            prompt_ids = self._continuing(digests, messages, alike, in_order)
            if prompt_ids is None:
                self._compare(alike, in_order)
                prompt_ids = self._rendering.first(messages, tools)
            return in_order, digests[-1], prompt_ids
        except (BadRequestError, TrajectoryLimitError):
            raise
        except (ValueError, TypeError) as error:
            raise BadRequestError(f"the chat template refuses it: {error}", "messages") from error

    def _continued(self, request: TextRequest) -> list[int]:
        """Return the tokens of a text prompt; replies in it keep the tokens that were sampled."""
        request.check()
        prompt = request.prompt
        if not isinstance(prompt, str):
            self._refuse(len(prompt), self.conversation.max_tokens, "tokens")
            if self._vocab_size and not all(0 <= token < self._vocab_size for token in prompt):
                last = self._vocab_size - 1
                raise BadRequestError(f"prompt: token ids are 0 to {last}", "prompt")
            return list(prompt)
        if self._longest_token:
            self._refuse(len(prompt), self._most_characters, "characters")
        known = [
            reply
            for reply in reversed(self._kept)
            if reply.text_until and prompt.startswith(reply.text_until)
        ]
        if not known:
            return self._encode(prompt)
        reply = max(known, key=lambda reply: len(reply.text_until))
        rest = prompt[len(reply.text_until) :]
        sampled = [*reply.prompt_ids, *reply.completion.token_ids]
        return [*sampled, *(self._encode(rest) if rest else [])]

    def _continuing(
        self, digests: Sequence[bytes], messages: Messages, alike: Messages, tools: Sequence[Json]
    ) -> list[int] | None:
        """Return the prompt that messages mean; replies in it keep the tokens that were sampled.

        None if they continue no reply. ``alike`` are the messages as they are compared, ``digests``
        their digests.
        """
        by_digest = {digest: reply for reply in self._kept for digest in reply.digests}
        by_length: dict[int, list[RecordedReply]] = {}
        for known in self._newest:
            by_length.setdefault(len(known.history), []).append(known)
        for count in range(len(messages), 0, -1):
            reply = by_digest.get(digests[count])
            if reply is None and count in by_length:
                written = self._written(alike[:count], tools)
                has_thought = "reasoning_content" in alike[count - 1]
                same = (
                    known
                    for known in by_length[count]
                    if self._written_until(known, has_thought=has_thought) == written
                )
                reply = next(same, None)
            if reply is None:
                continue
            new = messages[count:]
            if not new:
                raise BadRequestError("the last message is a reply of the policy", "messages")
            if num_replies(new):
                return None  # it holds a reply that the policy did not give
            sampled = reply.completion.token_ids
            return [*reply.prompt_ids, *sampled, *self._rendering.following(sampled, new)]
        return None

    def _written(self, alike: Messages, tools: Sequence[Json]) -> str | None:
        """Return what the template writes for messages; None if it refuses them."""
        with suppress(ValueError, TypeError):
            return self._rendering.text(alike, tools)
        return None

    def _written_until(self, reply: RecordedReply, *, has_thought: bool) -> str:
        """Return what the template writes up to a reply, with or without its thought."""
        messages = numbered([normalized(message) for message in reply.history])
        if not has_thought:
            messages[-1].pop("reasoning_content", None)
        return self._written(messages, reply.tools) or ""

    def _compare(self, alike: Messages, tools: Sequence[Json]) -> None:
        """Record where the first history that begins a branch differs from an earlier one.

        The earlier history is the one that shares most with it. A history with no more replies
        than some conversation began with is a new one, for another task or role of an agent.
        """
        begun_with = (num_replies(reply.asked) for reply in self._kept)
        if self.first_difference or num_replies(alike) <= min(begun_with, default=0):
            return
        now = self._written(alike, tools) or ""
        shared, before = -1, ""
        for known in self._newest:
            written = self._written_until(known, has_thought=True)
            at = len(commonprefix([written, now]))  # noqa: RUF071 characters, not paths
            if at == len(now):
                return  # the same request again
            if at > shared:
                shared, before = at, written
        if before:
            self.first_difference = (
                f"after {before[max(0, shared - _SHOWN) : shared]!r} came "
                f"{before[shared : shared + _SHOWN]!r}, and now {now[shared : shared + _SHOWN]!r}"
            )

    @property
    def _newest(self) -> list[RecordedReply]:
        """The replies to messages that are compared, newest first."""
        return [reply for reply in reversed(self._kept) if reply.digests][:_MOST_COMPARED]
