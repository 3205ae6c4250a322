"""Parts of replies: a thought, tool calls, and the text that is neither.

Every character of a reply ends up in one of them; tool calls inside a thought are not carried out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.generators.engine import InferenceEngine
from slipstream.wire.errors import ConfigError, EngineRefusedError
from slipstream.wire.messages.trajectory import Json
from slipstream.wire.thoughts import THINK, THINK_ENDS, TextPart, split_thoughts

_NO_TOOL = {"type": "function", "function": {"name": "none", "parameters": {"type": "object"}}}
_REPLY = "a reply 4c5d"  # words that no template or parser writes itself


class ParsedReply(NamedTuple):
    """The parts of a reply."""

    thought: str
    text: str
    tool_calls: list[dict[str, Json]]  # tool calls of OpenAI's API
    num_unreadable: int = 0  # calls that stay in the text, because they cannot be read


class _Before(NamedTuple):
    text: str  # end of the prompt that a parser must see before a reply
    thought: str  # part of it that comes back as a thought
    rest: str
    is_closed: bool  # True if its thought is closed


class ReplyParser:
    """Parses replies, by the engine's own parsers."""

    def __init__(
        self, engine: InferenceEngine, *, tools: str = "", reasoning: str = "", opening: str = ""
    ) -> None:
        """Use the parsers with these names.

        Args:
            engine: Engine that has the parsers.
            tools: Name of the parser of calls; empty for none.
            reasoning: Name of the parser of thoughts; empty leaves thoughts in the text.
            opening: Text that the template writes before a reply, which may begin a thought.
        """
        self._engine = engine
        self._tools = tools
        self._reasoning = reasoning
        self._opening = opening
        self._before: _Before | None = None  # None: not asked yet
        self._is_inside = opening.rfind(THINK) > opening.rfind(THINK_ENDS)

    async def check(self) -> None:
        """Check that the engine knows the parsers.

        Raises:
            ConfigError: a parser is unknown.
            EngineError: the engine does not answer.
        """
        setting = f"{self._tools!r} (environment.tool_call_parser)"
        try:
            if self._tools:
                await self._engine.tool_calls("no call", [_NO_TOOL], self._tools)
            setting = f"{self._reasoning!r} (environment.reasoning_parser)"
            if self._reasoning:
                await self._engine.separate_reasoning("no thought", self._reasoning)
        except EngineRefusedError as error:
            raise ConfigError(f"SGLang has no parser {setting}: {error}") from error

    async def __call__(self, text: str, tools: Sequence[Json]) -> ParsedReply:
        """Return the parts of a reply that may call these tools.

        Raises:
            EngineError: the engine does not answer.
        """
        thought, rest = await self._separated(text) if self._reasoning else ("", text)
        parts = split_thoughts(rest, is_inside=self._is_inside and not self._reasoning)
        if self._reasoning:
            thoughts = [thought, *(part.thought for part in parts if part.thought is not None)]
            thought = "\n".join(filter(None, thoughts))
            parts = [TextPart("".join(part.text for part in parts if part.thought is None))]
        texts, calls, num_unreadable = list[str](), list[dict[str, Json]](), 0
        for part in parts:
            rest, part_calls, unreadable = part.text, list[dict[str, Json]](), 0
            if tools and self._tools and part.thought is None and rest.strip():
                rest, part_calls, unreadable = await self._called(rest, tools)
            texts.append(rest)
            calls += part_calls
            num_unreadable += unreadable
        return ParsedReply(thought, "".join(texts), calls, num_unreadable)

    async def _called(
        self, text: str, tools: Sequence[Json]
    ) -> tuple[str, list[dict[str, Json]], int]:
        """Return a text without its calls, the calls, and the number of unreadable ones."""
        try:
            rest, calls, num_unreadable = await self._engine.tool_calls(text, tools, self._tools)
        except EngineRefusedError:
            return text, [], 1
        return rest if calls else text, calls, num_unreadable

    async def _separated(self, text: str) -> tuple[str, str]:
        """Return the thought of a reply and the rest."""
        if self._before is None:
            self._before = await self._marks_before()
        before = self._before
        thought, rest = await self._separate(before.text + text)
        own_thought = thought.removeprefix(before.thought)
        if before.is_closed and thought != before.thought:  # the reply has marks of its own
            _, outside = await self._separate(before.text + _REPLY + text)
            if _REPLY not in outside:  # its first mark closes, and was taken for the opening's
                return await self._separate(text)
            own_thought = own_thought.removeprefix("\n")  # between two thoughts
        return own_thought, rest.removeprefix(before.rest)

    async def _marks_before(self) -> _Before:
        """Return the end of the prompt that a parser must see before a reply.

        It is empty unless the template opens a thought, or has closed it.
        """
        known = self._opening + _REPLY
        separated = await self._separate(known)
        if known in separated:
            return _Before("", "", "", is_closed=False)
        text, is_closed = self._opening, separated[1].endswith(_REPLY)
        for start in range(len(self._opening), -1, -1):  # find the shortest end with this effect
            text = self._opening[start:]
            separated = await self._separate(text + _REPLY)
            is_marked = (text + _REPLY).strip() not in map(str.strip, separated)
            if is_marked and separated[1].endswith(_REPLY) is is_closed:
                break
        thought, rest = (part.removesuffix(_REPLY) for part in separated)
        return _Before(text, thought, rest, is_closed)

    async def _separate(self, text: str) -> tuple[str, str]:
        return await self._engine.separate_reasoning(text, self._reasoning)
