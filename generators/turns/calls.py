"""The calls of one trajectory: which tokens a request means, and what became of them."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import NamedTuple

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
from slipstream.generators.turns.images import TrajectoryImages
from slipstream.generators.turns.off_loop import LARGE_BYTES, off_loop
from slipstream.generators.turns.rendering import MessageRendering
from slipstream.generators.turns.replies import ParsedReply
from slipstream.generators.turns.requests import (
    BadRequestError,
    ChatRequest,
    FinishReason,
    TextRequest,
    images_of,
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
_MOST_IDS = 1 << 31  # token ids of a model whose number of them is unknown
_MOST_COMPARED = 8  # newest replies whose histories are rendered to compare
_SHOWN = 60  # characters of a difference


class Beginning(NamedTuple):
    """What a client has of a reply before it is asked for: an assistant's turn to be continued."""

    token_ids: list[int]
    text: str
    thought: str = ""


_NOTHING = Beginning([], "")


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
    beginning: Beginning = _NOTHING
    experts_before: tuple[Experts, ...] = ()  # experts of its prompt that were known before

    @property
    def token_ids(self) -> list[int]:
        """Its prompt and what was sampled."""
        return [*self.prompt_ids, *self.completion.token_ids]

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended, as OpenAI names it."""
        return "tool_calls" if self.tool_calls else self.completion.finish_reason

    @property
    def history(self) -> list[Mapping[str, Json]]:
        """The messages of its request, and its own."""
        text, thought = self.beginning.text + self.text, self.beginning.thought + self.thought
        return [*self.asked, self._message(text, thought)]

    @property
    def message(self) -> dict[str, Json]:
        """The message that a client gets."""
        return self._message(self.text, self.thought)

    def _message(self, text: str, thought: str) -> dict[str, Json]:
        more: dict[str, Json] = {"reasoning_content": thought} if thought else {}
        if self.tool_calls:
            more["tool_calls"] = self.tool_calls
        content = text or (None if self.tool_calls else "")
        return {"role": "assistant", "content": content, **more}


class _History(NamedTuple):
    """The messages of a request."""

    messages: Messages  # normalized, for templates
    alike: Messages  # numbered, to compare
    digests: Sequence[bytes]  # digests of the tools, and of ``alike`` up to each message
    tools: Sequence[Json]  # client's order
    sorted_tools: tuple[Json, ...]
    is_counted: bool  # True if it is not asked: its length is wanted

    def without_last(self) -> "_History":
        """Return it without its last message."""
        before = (self.messages[:-1], self.alike[:-1], self.digests[:-1])
        return _History(*before, self.tools, self.sorted_tools, self.is_counted)


class _Understood(NamedTuple):
    """What the messages of a request mean."""

    tools: tuple[Json, ...]  # sorted
    asked: tuple[Mapping[str, Json], ...]  # messages before the reply
    digest: bytes  # digest of these
    prompt_ids: list[int]
    beginning: Beginning
    is_foreign: bool = False  # True if the policy did not write the beginning


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
        images: TrajectoryImages | None = None,
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
            images: Images that messages may show; None: none.
        """
        self.images = images or TrajectoryImages()
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
        tools, asked, digest, prompt_ids, beginning, is_foreign = await off_loop(
            size, self._understood, request
        )
        await self.images.stored()
        if is_foreign:
            await self._refuse_unless_text(beginning, tools)
        with self._params_of(prompt_ids, request.limit, request.stops) as (params, experts):
            completion = await self._sample(prompt_ids, params)
            text = self._decode([*beginning.token_ids, *completion.token_ids])
            parsed = await self._parse(text, tools)
        known = {tool["function"]["name"] for tool in tools}
        unknown = sum(call["function"]["name"] not in known for call in parsed.tool_calls)
        reply = RecordedReply(
            prompt_ids,
            completion,
            _rest(parsed.text, beginning.text),
            parsed.tool_calls,
            thought=_rest(parsed.thought, beginning.thought),
            rejected=Counter(unknown=unknown, unreadable=parsed.num_unreadable),
            asked=asked,
            tools=tools,
            beginning=beginning,
            experts_before=experts,
        )
        (whole,) = numbered([normalized(reply.history[-1])])
        bare = {name: value for name, value in whole.items() if name != "reasoning_content"}
        return replace(reply, digests=(next_digest(digest, whole), next_digest(digest, bare)))

    async def num_prompt_tokens(self, request: ChatRequest, size: int = LARGE_BYTES) -> int:
        """Return the number of tokens of the prompt that a request of ``size`` bytes means.

        The trajectory stays as it is.

        Raises:
            BadRequestError: the request is malformed, or the template refuses its messages.
            TrajectoryLimitError: it is larger than any trajectory.
        """
        understood = await off_loop(size, self._understood, request, is_counted=True)
        return len(understood.prompt_ids)

    async def _refuse_unless_text(self, beginning: Beginning, tools: Sequence[Json]) -> None:
        """Refuse the beginning of a reply that a parser takes for a thought or a call.

        Raises:
            BadRequestError: a client's text would come back as something else.
        """
        parsed = await self._parse(self._decode(beginning.token_ids), tools)
        if (parsed.thought, parsed.tool_calls) != ("", []) or (
            parsed.text.strip() != beginning.text.strip()
        ):
            raise BadRequestError(
                "the last message, an assistant's, would be read as a thought, a call or marks of "
                "the chat template: text alone is continued",
                "messages",
            )

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
        if self._longest_token and not self.images.are_seen:
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

    def _understood(self, request: ChatRequest, *, is_counted: bool = False) -> _Understood:
        """Return what a request means; ``is_counted`` if its length alone is wanted.

        Each message has at least one token, which tells its role; texts of tools count beyond what
        a template may leave out.
        """
        request.check()
        self._refuse(len(request.messages), self.conversation.max_tokens, "messages")
        asked = tuple(map(self.images.taken, request.messages))
        messages = [normalized(message) for message in asked]
        tools = request.tools if request.tools and request.tool_choice != "none" else []
        if self._longest_token:
            size = num_characters(messages)
            size += max(0, num_characters(tools) - _TOOL_CHARACTERS)
            self._refuse(size, self._most_characters, "characters")
        in_order = tuple(map(msgspec.json.decode, sorted(map(encoded, tools))))
        alike = numbered(messages)
        digests = digests_of([{"tools": in_order}, *alike])
        history = _History(messages, alike, digests, tools, in_order, is_counted)
        try:
            if messages[-1]["role"] == "assistant":
                begun = self._begun(history)
                return _Understood(in_order, asked[:-1], digests[-2], *begun)
            prompt_ids = self._prompt(history)
            return _Understood(in_order, asked, digests[-1], prompt_ids, _NOTHING)
        except (BadRequestError, TrajectoryLimitError):
            raise
        except (ValueError, TypeError) as error:
            raise BadRequestError(f"the chat template refuses it: {error}", "messages") from error

    def _begun(self, history: _History) -> tuple[list[int], Beginning, bool]:
        """Return the prompt, the beginning of the reply, and whether the client wrote it.

        The last message is an assistant's: a reply that was cut off keeps its tokens.

        Raises:
            BadRequestError: it cannot be continued.
        """
        last, num_messages = history.messages[-1], len(history.messages)
        count, reply = next(self._replies_in(history), (0, None))
        before = reply if count == num_messages else None
        if "tool_calls" in last:
            why = "calls tools, whose results are missing"
        elif before is not None and before.finish_reason != "length":
            why = "is a reply of the policy that has ended"
        elif before is None and "reasoning_content" in last:
            why = "is an assistant's with a thought: text alone is continued"
        elif before is None and num_messages == 1:
            why = "is an assistant's and the only one"
        elif before is not None:
            sampled, begun = before.completion.token_ids, before.beginning
            message = before.history[-1]
            thought = message.get("reasoning_content", "")
            own = Beginning([*begun.token_ids, *sampled], message["content"], thought)
            return [*before.prompt_ids, *sampled], own, False
        else:
            prompt_ids = self._prompt(history.without_last())
            written = self._encode(last["content"])
            self.images.refuse_places(written, "messages")
            return [*prompt_ids, *written], Beginning(written, last["content"]), bool(written)
        raise BadRequestError(f"the last message {why}", "messages")

    def _prompt(self, history: _History) -> list[int]:
        """Return the prompt for a reply to messages."""
        prompt_ids = self._continuing(history)
        if prompt_ids is None:
            if not history.is_counted:
                self._compare(history.alike, history.sorted_tools)
            ids = self._rendering.first(history.messages, history.tools)
            prompt_ids = self.images.marked(ids, history.messages)
        return prompt_ids

    def _continued(self, request: TextRequest) -> list[int]:
        """Return the tokens of a text prompt; replies in it keep the tokens that were sampled."""
        request.check()
        prompt = request.prompt
        if not isinstance(prompt, str):
            self._refuse(len(prompt), self.conversation.max_tokens, "tokens")
            last = (self._vocab_size or _MOST_IDS) - 1
            if not all(0 <= token <= last for token in prompt):
                raise BadRequestError(f"prompt: token ids are 0 to {last}", "prompt")
            if self.images.are_seen:
                self.images.refuse_places(prompt[self._num_known(prompt) :], "prompt")
            return list(prompt)
        if self._longest_token:
            self._refuse(len(prompt), self._most_characters, "characters")
        known = [
            reply
            for reply in reversed(self._kept)
            if reply.text_until and prompt.startswith(reply.text_until)
        ]
        reply = max(known, key=lambda reply: len(reply.text_until), default=None)
        rest = prompt[len(reply.text_until) :] if reply is not None else prompt
        written = self._encode(rest) if rest else []
        self.images.refuse_places(written, "prompt")
        return [*(reply.token_ids if reply is not None else ()), *written]

    def _num_known(self, prompt: list[int]) -> int:
        """Return how many tokens a prompt begins with that are a reply's and its prompt's."""
        known = (reply.token_ids for reply in self._kept)
        return max((len(ids) for ids in known if prompt[: len(ids)] == ids), default=0)

    def _continuing(self, history: _History) -> list[int] | None:
        """Return the prompt that messages mean; replies in it keep the tokens that were sampled.

        None if they continue no reply.
        """
        for count, reply in self._replies_in(history):
            new = history.messages[count:]
            if num_replies(new):
                return None  # it holds a reply that the policy did not give
            sampled = reply.completion.token_ids
            following = self.images.marked(self._rendering.following(sampled, new), new)
            return [*reply.prompt_ids, *sampled, *following]
        return None

    def _replies_in(self, history: _History) -> Iterator[tuple[int, RecordedReply]]:
        """Yield the replies that messages hold, last first, and how many messages end with each."""
        by_digest = {digest: reply for reply in self._kept for digest in reply.digests}
        by_length: dict[int, list[RecordedReply]] = {}
        for known in self._newest:
            by_length.setdefault(len(known.history), []).append(known)
        alike = history.alike
        for count in range(len(alike), 0, -1):
            reply = by_digest.get(history.digests[count])
            if reply is None and count in by_length:
                written = self._written(alike[:count], history.sorted_tools)
                has_thought = "reasoning_content" in alike[count - 1]
                same = (
                    known
                    for known in by_length[count]
                    if self._written_until(known, has_thought=has_thought) == written
                )
                reply = next(same, None)
            if reply is not None:
                yield count, reply

    def _written(self, alike: Messages, tools: Sequence[Json]) -> str | None:
        """Return what messages look like to the policy; None if the template refuses them."""
        images = [image.digest for message in alike for image in images_of(message)]
        with suppress(ValueError, TypeError):
            return " ".join([self._rendering.text(alike, tools), *images])
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


def _rest(whole: str, before: str) -> str:
    """Return a text without what a client has of it; parsers may have trimmed its front."""
    if not before:
        return whole
    whole, before = whole.lstrip(), before.lstrip()
    return whole[len(commonprefix([whole, before])) :]  # noqa: RUF071 characters, not paths
