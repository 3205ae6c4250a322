"""The seam of replies: a thought, then calls of tools, and the text that is neither.

Every character of a reply ends up in one of them; nothing inside a thought is carried out.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.generators.engine import InferenceEngine
from slipstream.wire.errors import ConfigError, EngineRefusedError
from slipstream.wire.messages.trajectory import Json

_NO_TOOL = {"type": "function", "function": {"name": "none", "parameters": {"type": "object"}}}
_BEGIN, _END = "<think>", "</think>"
_THOUGHT = re.compile(rf"{_BEGIN}(.*?)(?:{_END}|\Z)", re.DOTALL)


class ParsedReply(NamedTuple):
    """The parts of a reply."""

    thought: str
    text: str
    tool_calls: list[dict[str, Json]]  # as of OpenAI's API
    num_unreadable: int = 0  # calls that stay in the text, because their parser cannot read them


class ReplyParser:
    """Parses replies, by the engine's own parsers."""

    def __init__(
        self, engine: InferenceEngine, *, tools: str = "", reasoning: str = "", opening: str = ""
    ) -> None:
        """Use the parsers of these names; none is empty.

        Args:
            engine: has the parsers.
            tools: name of the parser of calls.
            reasoning: name of the parser of thoughts; without one they remain in the text.
            opening: what the template writes before a reply, which may begin a thought.
        """
        self._engine = engine
        self._tools = tools
        self._reasoning = reasoning
        self._opening = opening
        self._begins_inside: bool | None = None  # a thought, to the parser; None: not asked yet
        self._is_inside = opening.rfind(_BEGIN) > opening.rfind(_END)

    async def check(self) -> None:
        """See that the engine knows the parsers.

        Raises:
            ConfigError: it does not.
            EngineError: it does not answer.
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
        thought, said = await self._separated(text) if self._reasoning else ("", text)
        is_inside = self._is_inside and not self._reasoning
        more, outside = without_thoughts(said, is_inside=is_inside)
        if self._reasoning:
            thought, said = thought + "".join(more), outside
        if not tools or not self._tools:
            return ParsedReply(thought, said, [])
        try:
            rest, calls, unreadable = await self._engine.tool_calls(outside, tools, self._tools)
        except EngineRefusedError:
            return ParsedReply(thought, said, [], 1)
        if not calls:
            return ParsedReply(thought, said, [], unreadable)
        begun = ""
        if more and not self._reasoning:
            marked = "".join(f"{_BEGIN}{one}{_END}" for one in more)
            begun = said.removesuffix(outside) if said.endswith(outside) else marked
        return ParsedReply(thought, begun + rest, calls, unreadable)

    async def _separated(self, text: str) -> tuple[str, str]:
        """Return the thought of a reply and the rest."""
        opening = self._opening if await self._opens_a_thought() else ""
        thought, rest = await self._engine.separate_reasoning(opening + text, self._reasoning)
        if not text.endswith(rest):
            rest = rest.strip()
        at = text.rfind(rest) if rest else len(text)
        thought = thought.removeprefix(opening).strip("\n") if opening else thought
        if at < 0 or thought.strip() not in text or (not thought.strip() and text[:at].strip()):
            return "", text  # it says something else than the policy
        return thought, text[at:]

    async def _opens_a_thought(self) -> bool:
        if self._begins_inside is None:
            _, rest = await self._engine.separate_reasoning(self._opening + "x", self._reasoning)
            self._begins_inside = not rest.endswith("x")
        return self._begins_inside


def without_thoughts(text: str, *, is_inside: bool = False) -> tuple[list[str], str]:
    """Return what stands between ``<think>`` and ``</think>``, and the text outside of it.

    A thought that is never closed reaches to the end; ``is_inside`` tells that the text begins in
    one, as does an end without a beginning.
    """
    end, begin = text.find(_END), text.find(_BEGIN)
    if is_inside or (end >= 0 and (begin < 0 or end < begin)):
        text = _BEGIN + text
    return _THOUGHT.findall(text), _THOUGHT.sub("", text)
