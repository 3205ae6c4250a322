"""Thoughts, text and calls of replies, before an engine whose parsers do what SGLang's do."""

from collections.abc import Sequence

import pytest
from typing_extensions import override

from slipstream.generators.turns.replies import ParsedReply, ReplyParser, without_thoughts
from slipstream.wire.errors import ConfigError, EngineRefusedError
from slipstream.wire.messages.trajectory import Json
from tests.support.canned_engine import CannedEngine

LOOK = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOLS: list[Json] = [{"type": "function", "function": {"name": "look"}}]


class Parsing(CannedEngine):
    """Knows the parsers ``known``; a call is CALL."""

    forces = False  # a thought that nobody began

    @override
    async def tool_calls(
        self, text: str, tools: Sequence[Json], parser: str
    ) -> tuple[str, list[dict[str, Json]], int]:
        if parser != "known" or text == "refused":
            raise EngineRefusedError("SGLang /parse_function_call: 500")
        return text.replace("CALL", ""), [LOOK] * text.count("CALL"), text.count("BAD")

    @override
    async def separate_reasoning(self, text: str, parser: str) -> tuple[str, str]:
        if parser != "known":
            raise EngineRefusedError("SGLang /separate_reasoning: 500")
        if self.forces or "<think>" in text:
            thought, _, rest = text.removeprefix("<think>").partition("</think>")
            return thought, rest
        return "", text


@pytest.mark.parametrize(
    ("text", "is_inside", "thoughts", "rest"),
    [
        ("so", False, [], "so"),
        ("<think>a</think>b", False, ["a"], "b"),
        ("a</think>b", False, ["a"], "b"),
        ("a</think>b", True, ["a"], "b"),
        ("a <think>b", False, ["b"], "a "),
        ("a", True, ["a"], ""),
        ("<think>a</think>b<think>c</think>d", False, ["a", "c"], "bd"),
        ("a</think>b<think>c", False, ["a", "c"], "b"),
    ],
)
def test_a_thought_ends_where_it_is_closed(
    text: str, is_inside: bool, thoughts: list[str], rest: str
):
    assert without_thoughts(text, is_inside=is_inside) == (thoughts, rest)


async def test_nothing_inside_a_thought_is_carried_out_and_without_a_parser_it_stays_in_the_text():
    parse = ReplyParser(Parsing(), tools="known")
    for text, rest in (
        ("<think>CALL</think>so", "<think>CALL</think>so"),
        ("<think>CALL", "<think>CALL"),
        ("CALL</think>so", "CALL</think>so"),
    ):
        assert await parse(text, TOOLS) == ParsedReply("", rest, [])
    found = await parse("<think>CALL</think>so CALL", TOOLS)
    assert found == ParsedReply("", "<think>CALL</think>so ", [LOOK])
    found = await parse("a CALL<think>CALL</think>b BAD", TOOLS)
    assert found == ParsedReply("", "<think>CALL</think>a b BAD", [LOOK], 1)
    inside = ReplyParser(Parsing(), tools="known", opening="<|assistant|><think>\n")
    assert await inside("CALL", TOOLS) == ParsedReply("", "CALL", [])


async def test_a_parser_of_thoughts_hands_them_over_apart():
    parse = ReplyParser(Parsing(), tools="known", reasoning="known", opening="<|assistant|>")
    found = await parse("<think>a CALL</think>so CALL", TOOLS)
    assert found == ParsedReply("a CALL", "so ", [LOOK])
    assert await parse("<think>a</think>so", []) == ParsedReply("a", "so", [])
    assert await parse("so", TOOLS) == ParsedReply("", "so", [])
    begun = ReplyParser(
        Parsing(), tools="known", reasoning="known", opening="<|assistant|><think>\n"
    )
    assert await begun("a CALL</think>so", TOOLS) == ParsedReply("a CALL", "so", [])
    assert await begun("a CALL", TOOLS) == ParsedReply("a CALL", "", [])


async def test_what_the_engine_refuses_is_text_and_unknown_parsers_are_named():
    parse = ReplyParser(Parsing(), tools="known", reasoning="known")
    await parse.check()
    assert await parse("refused", TOOLS) == ParsedReply("", "refused", [], 1)
    with pytest.raises(ConfigError, match=r"no parser 'other' \(environment.tool_call_parser"):
        await ReplyParser(Parsing(), tools="other").check()
    with pytest.raises(ConfigError, match=r"no parser 'other' \(environment.reasoning_parser"):
        await ReplyParser(Parsing(), reasoning="other").check()
