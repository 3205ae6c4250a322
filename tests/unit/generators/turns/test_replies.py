"""Thoughts, text and calls of replies, before an engine whose parsers do what SGLang's do."""

from collections.abc import Sequence

import pytest
from typing_extensions import override

from slipstream.generators.turns.replies import ParsedReply, ReplyParser
from slipstream.wire.errors import ConfigError, EngineRefusedError
from slipstream.wire.messages.trajectory import Json
from slipstream.wire.thoughts import split_thoughts
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
        parts = split_thoughts(text, "[T]", "[/T]", is_inside=self.forces)
        outside = "".join(part.text for part in parts if part.thought is None)
        return "\n".join(part.thought for part in parts if part.thought is not None), outside


@pytest.mark.parametrize(
    ("text", "rest", "num_calls"),
    [
        ("<think>CALL</think>so", "<think>CALL</think>so", 0),
        ("<think>CALL", "<think>CALL", 0),
        ("CALL</think>so", "CALL</think>so", 0),
        ("<think>CALL</think>so CALL", "<think>CALL</think>so ", 1),
        ("a CALL<think>CALL</think>b", "a <think>CALL</think>b", 1),
        ("a CALL <think>un", "a  <think>un", 1),
        ("<think>a<think>b</think>CALL</think>so", "<think>a<think>b</think>CALL</think>so", 0),
        ("<think>a</think>CALL</think>so CALL", "<think>a</think>CALL</think>so ", 1),
    ],
)
async def test_nothing_inside_a_thought_is_carried_out_and_without_a_parser_it_stays_in_the_text(
    text: str, rest: str, num_calls: int
):
    parse = ReplyParser(Parsing(), tools="known")
    assert await parse(text, TOOLS) == ParsedReply("", rest, [LOOK] * num_calls)
    found = await parse(f"{text} BAD", TOOLS)
    assert found.num_unreadable == (0 if text.endswith(("<think>CALL", "un")) else 1)
    inside = ReplyParser(Parsing(), tools="known", opening="<|assistant|><think>\n")
    assert await inside("CALL", TOOLS) == ParsedReply("", "CALL", [])


@pytest.mark.parametrize(
    ("opening", "forces", "text", "found"),
    [
        ("", False, "[T]a CALL[/T]so CALL", ("a CALL", "so ", 1)),
        ("", False, "so", ("", "so", 0)),
        ("", False, "[T]a CALL", ("a CALL", "", 0)),
        ("", False, "[T]a[/T]b<think>CALL</think>c", ("a\nCALL", "bc", 0)),
        ("[T]\n", False, "a CALL[/T]so", ("a CALL", "so", 0)),
        ("[T]\n", False, "a CALL", ("a CALL", "", 0)),
        ("", True, "a CALL", ("a CALL", "", 0)),
        ("[T]\n", True, "a[/T]so CALL", ("a", "so ", 1)),
        ("[T][/T]\n", True, "so CALL", ("", "so ", 1)),
        *(
            (opening, forces, text, found)
            for opening in ("[T][/T]", "[T]\n\n[/T]\n\n")
            for forces in (False, True)
            for text, found in [
                ("h[/T]so CALL", ("h", "so ", 1)),
                ("[/T]", ("", "", 0)),
                ("[T]h CALL[/T]so CALL", ("h CALL", "so ", 1)),
                ("so CALL[T]\nh[/T]", ("\nh", "so ", 1)),
                ("h[/T]so[T]again CALL", ("h\nagain CALL", "so", 0)),
            ]
        ),
    ],
)
async def test_a_parser_of_thoughts_hands_them_over_apart(
    opening: str, forces: bool, text: str, found: tuple[str, str, int]
):
    engine = Parsing()
    engine.forces = forces
    parse = ReplyParser(engine, tools="known", reasoning="known", opening=f"<|assistant|>{opening}")
    thought, rest, num_calls = found
    assert await parse(text, TOOLS) == ParsedReply(thought, rest, [LOOK] * num_calls)
    assert await parse(text.replace("CALL", "x"), []) == ParsedReply(
        thought.replace("CALL", "x"), rest + "x" * num_calls, []
    )


async def test_what_the_engine_refuses_is_text_and_unknown_parsers_are_named():
    parse = ReplyParser(Parsing(), tools="known", reasoning="known")
    await parse.check()
    assert await parse("refused", TOOLS) == ParsedReply("", "refused", [], 1)
    with pytest.raises(ConfigError, match=r"no parser 'other' \(environment.tool_call_parser"):
        await ReplyParser(Parsing(), tools="other").check()
    with pytest.raises(ConfigError, match=r"no parser 'other' \(environment.reasoning_parser"):
        await ReplyParser(Parsing(), reasoning="other").check()
