"""No character of a reply is lost, whichever of SGLang's parsers of thoughts and calls reads it."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from types import ModuleType

import pytest
from typing_extensions import override

from slipstream.generators.sglang.patches import cut_at_marks, keep_every_character
from slipstream.generators.turns.replies import ReplyParser
from slipstream.wire.messages.trajectory import Json
from tests.support.canned_engine import CannedEngine
from tests.support.reply_formats import CHANNELS, FORCED, FORMATS, PROSE, THOUGHTS

pytestmark = pytest.mark.integration
_NEED_A_TEMPLATE = {"response_template"}  # of the model's tokenizer
_PROPERTIES = {"type": "object", "properties": {"at": {"type": "string"}}}


@pytest.fixture(scope="module")
def parsers() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_FORWARD_UNKNOWN_TOOLS", "1")  # as an engine has it
        import sglang.srt.function_call.function_call_parser as module

        original = module.FunctionCallParser.parse_non_stream
        keep_every_character(module)
        yield module
        module.FunctionCallParser.parse_non_stream = original


def read(parsers: ModuleType, name: str, text: str) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Return text, calls, and what looks like a call and is none."""
    tools = [parsers.Tool(function={"name": "look", "parameters": _PROPERTIES})]
    rest, items = parsers.FunctionCallParser(tools, name).parse_non_stream(text)
    calls = [(one.name, one.parameters) for one in items if one.name]
    return rest, calls, [one.parameters for one in items if not one.name]


def written(name: str, prose: str, *calls: str) -> str:
    text = PROSE.get(name, "{}").format(prose) if prose else ""
    return text + "".join(calls)


def test_every_parser_has_its_format_here(parsers: ModuleType):
    assert set(FORMATS) | _NEED_A_TEMPLATE == set(parsers.FunctionCallParser.ToolCallParserEnum)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tool", ["look", "Look"])
def test_a_call_is_one_whether_its_name_is_known_or_not(parsers: ModuleType, name: str, tool: str):
    for prose in ("", "I look. "):
        text = written(name, prose, FORMATS[name].format(name=tool, value="a tree"))
        rest, calls, unread = read(parsers, name, text)
        assert [(one, json.loads(given)) for one, given in calls] == [(tool, {"at": "a tree"})]
        assert unread == []
        assert rest.strip() == written(name, prose).strip()


def pieces(text: str) -> Counter[str]:
    """Return words and symbols, but those that every format writes: brackets, quotes and such."""
    return Counter(re.findall(r"\w+|[^\w\s{}\[\]()<>\"',:=/|\\]", text))


BESIDE = [
    "42",
    "7.5",
    "true",
    "null",
    "to",
    "name",
    "arguments",
    "json",
    "!!",
    "€",
    "tree0q",
    "<b>",
]
"""Words that formats have too, or that stand in a call, and what is no word."""


@pytest.mark.parametrize("name", FORMATS)
def test_no_character_is_lost(parsers: ModuleType, name: str):
    """Each is in text or in a call, but for what a format writes of each call."""
    rng = random.Random(name)
    for _ in range(30):
        values = iter(f"tree{i}q" for i in range(99))
        parts: list[str] = []
        num_written = 0
        for _ in range(rng.randint(1, 4)):
            value = next(values)
            call = FORMATS[name].format(name=rng.choice(["look", "Look"]), value=value)
            beside = f" {rng.choice(BESIDE)} "
            at = rng.randrange(len(call))
            num_written += 1
            match rng.choice(["call", "cut", "spoilt", "prose", "within", "within", "beside"]):
                case "cut":
                    call = call[: at + 1]
                case "spoilt":
                    call = call[:at] + rng.choice('{}"<>[]x') + call[at + 1 :]
                case "prose":
                    call = f" prose{value} "
                    num_written -= 1
                case "within":
                    call = call[:at] + beside + call[at:]
                case "beside":
                    call = f"{beside}{call} {rng.choice(BESIDE)} "
                case _:
                    pass
            parts.append(f" {call}")
        text = "".join(parts)
        rest, calls, unread = read(parsers, name, text)
        lost = pieces(text) - pieces(rest)
        for tool, arguments in calls:
            given = json.loads(arguments or "{}")
            lost -= pieces(" ".join([tool, *map(str, given), *map(str, given.values())]))
            lost -= pieces(FORMATS[name].format(name=tool, value=""))
        empty = FORMATS[name].format(name="", value="")
        lost -= pieces(f" {empty}" * (num_written - len(calls)))  # beside those that are read
        assert not lost, (text, rest, calls)
        assert all(one in rest for one in unread)
        if not calls:
            assert rest == text


ONE_CALL = {"gigachat3"}  # all that its parser reads of a reply
TAGS_IN_BRACKETS = {"minimax-m3"}  # its marks begin with a bracket, and end within the next one


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *product(sorted(set(FORMATS) - ONE_CALL - TAGS_IN_BRACKETS), ["bracket", "quote"]),
        # Where values stand between tags, one that is cut off reaches to the next closing tag.
        *product(["deepseekv3", "hermes", "lfm2", "mistral", "pythonic", "qwen25"], ["cut"]),
    ],
)
def test_good_calls_beside_a_broken_one_are_read(parsers: ModuleType, name: str, how: str):
    first, broken, last = (FORMATS[name].format(name="look", value=one) for one in "acb")
    cut, bracket = broken[: len(broken) // 2], broken.replace("c", 'x"}<y', 1)
    broken = {"cut": cut, "bracket": bracket, "quote": broken.replace('"}', '"', 1)}[how]
    rest, calls, _ = read(parsers, name, f"{first}\n{broken}\n{last}")
    found = [json.loads(given).get("at") for _, given in calls]
    assert [one for one in found if one in ("a", "b")] == ["a", "b"], (rest, calls)


def test_a_parser_logs_what_it_cannot_read_once(
    parsers: ModuleType, caplog: pytest.LogCaptureFixture
):
    good = FORMATS["hermes"].format(name="look", value="a")
    for _ in range(2):
        caplog.clear()
        read(parsers, "hermes", good + good.replace("}}", "}"))
        assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["qwen25", "hermes", "mistral", "llama3"])
def test_a_call_with_half_of_a_pair_of_unicode_is_text_and_the_others_are_read(
    parsers: ModuleType, name: str
):
    good, bad = (FORMATS[name].format(name="look", value=one) for one in ("a", "\\ud83d"))
    rest, calls, _ = read(parsers, name, f"{good}\n{bad}")
    assert calls == [("look", '{"at": "a"}')]
    assert '{"at": "\\ud83d"}' in rest


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("deepseekv3", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # noqa: RUF001 marks
        ("deepseekv31", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # noqa: RUF001 marks
        ("kimi_k2", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ],
)
def test_good_calls_of_a_section_with_a_broken_one_are_read(
    parsers: ModuleType, name: str, begin: str, end: str
):
    first, broken, last = (
        FORMATS[name].format(name="look", value=one).removeprefix(begin).removesuffix(end)
        for one in "acb"
    )
    text = begin + first + broken.replace('"}', '"') + last + end
    rest, calls, unread = read(parsers, name, text)
    assert [json.loads(given) for _, given in calls] == [{"at": "a"}, {"at": "b"}]
    assert broken.replace('"}', '"') in rest
    assert len(unread) == 1


@pytest.mark.parametrize(
    ("name", "begin", "between", "end"),
    [
        ("kimi_k2", "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        ("deepseekv31", "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),  # noqa: RUF001 marks
        ("qwen3_coder", "<tool_call>\n", "", "</tool_call>"),
        ("llama3", "<|python_tag|>", ";", ""),
    ],
)
def test_a_broken_call_is_counted_beside_a_good_one_of_its_section_and_without_one(
    parsers: ModuleType, name: str, begin: str, between: str, end: str
):
    good, broken = (
        FORMATS[name].format(name="look", value=one).removeprefix(begin).removesuffix(end)
        for one in "ac"
    )
    broken = broken[: broken.index("look") + 2]
    rest, calls, unread = read(parsers, name, f"{begin}{good}{between}{broken}{end}")
    assert [json.loads(given) for _, given in calls] == [{"at": "a"}]
    assert (broken in rest, len(unread)) == (True, 1)
    assert read(parsers, name, broken) == (broken, [], [broken])


@pytest.mark.parametrize("name", ["qwen25", "hermes", "glm45", "qwen3_coder", "deepseekv31"])
def test_what_is_beside_a_call_and_what_cannot_be_read_is_text(parsers: ModuleType, name: str):
    good = FORMATS[name].format(name="look", value="a tree")
    found = [("look", '{"at": "a tree"}')]
    for after in (" and then I am done!", ", and 2; done"):
        rest, calls, unread = read(parsers, name, f"One: {good}{after}")
        assert (rest, calls, unread) == (f"One: {after}", found, [])
    assert read(parsers, name, f"{good}\n{good}")[:2] == ("", found * 2)
    if name == "qwen25":
        for bad in (
            good.replace("}}", "}"),
            good.replace('{"at"', "{at"),
            good.replace('{"at": "a tree"}', "[1, 2]"),
            good.replace('{"at": "a tree"}', '"a tree"'),
            good.replace('"name"', '"nome"'),
            good.replace("\n", ""),
        ):
            rest, calls, unread = read(parsers, name, f"Two: {good}\n{bad}")
            assert calls == found
            assert rest.startswith("Two: ")
            assert bad.strip() in rest, (bad, rest)
            assert len(unread) == 1
            assert read(parsers, name, f"Let me see. {bad}")[0] == f"Let me see. {bad}"
        extra = good.replace('{"name"', '{"reason": "because", "name"')
        assert "because" in read(parsers, name, extra)[0]
        assert "7" in read(parsers, name, good.replace("}}", '}, "count": 7}'))[0]
        for unsaid in ('"id": "call_1", "name"', '"type": "function", "name"'):
            assert read(parsers, name, good.replace('"name"', unsaid))[0] == ""
        assert read(parsers, name, f"{good}\n<tool_call>\n")[2] == ["\n<tool_call>\n"]


# ---- thoughts ------------------------------------------------------------------


class InProcess(CannedEngine):
    """Has the parsers that a server has, and no server."""

    def __init__(self, calls: ModuleType, thoughts: ModuleType) -> None:
        super().__init__()
        self._calls, self.thoughts = calls, thoughts

    @override
    async def tool_calls(
        self, text: str, tools: Sequence[Json], parser: str
    ) -> tuple[str, list[dict[str, Json]], int]:
        rest, calls, unread = read(self._calls, parser, text)
        return rest, [{"name": name, "arguments": given} for name, given in calls], len(unread)

    @override
    async def separate_reasoning(self, text: str, parser: str) -> tuple[str, str]:
        found: tuple[str, str] = self.thoughts.ReasoningParser(parser).parse_non_stream(text)
        return found


@pytest.fixture(scope="module")
def engine(parsers: ModuleType) -> Iterator[InProcess]:
    import sglang.srt.parser.reasoning_parser as module

    original = module.ReasoningParser.parse_non_stream
    cut_at_marks(module)
    yield InProcess(parsers, module)
    module.ReasoningParser.parse_non_stream = original


def test_every_parser_of_thoughts_has_its_marks_here(engine: InProcess):
    assert set(THOUGHTS) | _NEED_A_TEMPLATE == set(engine.thoughts.ReasoningParser.DetectorMap)
    for name, marks in THOUGHTS.items():
        detector = engine.thoughts.ReasoningParser(name).detector
        assert (detector.think_start_token, detector.think_end_token) == marks


@pytest.mark.parametrize("name", THOUGHTS)
async def test_what_is_in_no_thought_is_text_or_a_call_and_no_thought_is_carried_out(
    engine: InProcess, name: str
):
    begin, end = THOUGHTS[name]
    rng = random.Random(name)
    for marks_before in ("", f"{begin}\n", f"{begin}\n\n{end}\n\n"):
        opening = f"<|assistant|>{marks_before}"
        parse = ReplyParser(engine, tools="hermes", reasoning=name, opening=opening)
        begins_inside = end not in marks_before and (bool(marks_before) or name in FORCED)
        for _ in range(20):
            parts = [rng.choice([begin, end, "word", "call"]) for _ in range(rng.randint(1, 7))]
            marks = [begin if begins_inside else "", *parts, ""]
            thoughts, outside, calls = list[str](), list[str](), list[str]()
            for number, part in enumerate(parts):
                if part in (begin, end):
                    continue
                around = [one for one in marks[: number + 1] if one in (begin, end)][-1:]
                after = [one for one in marks[number + 2 :] if one in (begin, end)][:1]
                is_thought = around == [begin] or (after == [end] and name not in CHANNELS)
                value = f"tree{number}q"
                if part == "call":
                    parts[number] = FORMATS["hermes"].format(name="look", value=value)
                    (thoughts if is_thought else calls).append(value)
                else:
                    parts[number] = f" {value} "
                    (thoughts if is_thought else outside).append(value)
            text = "".join(parts)
            found = await parse(text, [{}])
            values = [json.loads(str(one["arguments"]))["at"] for one in found.tool_calls]
            assert values == calls, (opening, text, found)
            assert re.findall("tree.q", found.thought) == thoughts, (opening, text, found)
            assert re.findall("tree.q", found.text) == outside, (opening, text, found)
            assert "|assistant|" not in found.thought + found.text, (opening, text, found)


@pytest.mark.parametrize(
    ("name", "text", "thought", "rest"),
    [
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>b <|end|><|start|>assistant<|channel|>analysis<|message|>c<|end|>"
            "<|start|>assistant<|channel|>final<|message|>d<|return|>",
            *("a\nc", "b d"),
        ),
        (
            "muse",
            " to=self<|message|>a<|eom|><|start|>assistant to=self<|message|>b<|eom|>"
            "<|start|>assistant to=user<|message|>c<|eot|>",
            *("a\nb", "c"),
        ),
        (
            "inkling",
            "<|message_model|><|content_thinking|>a<|end_message|><|message_model|>"
            "<|content_text|>b<|end_message|><|content_model_end_sampling|>",
            *("a", "b"),
        ),
        (
            "kimi_k3",
            "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b"
            "<|close|>response<|sep|><|open|>tools<|sep|>c",
            *("a", "b<|open|>tools<|sep|>c"),
        ),
        ("cohere_command4", "a<|END_THINKING|><|START_TEXT|>b<|END_TEXT|>", "a", "b"),
        ("cohere_command4", "<|START_TEXT|>b<|END_TEXT|>", "", "b"),
        (
            "cohere_command4",
            "a<|END_THINKING|>b<|START_TEXT|>c<|END_TEXT|>",
            *("a", "b<|START_TEXT|>c<|END_TEXT|>"),
        ),
        ("gemma4", "<|channel>thought\na<channel|>b", "a", "b"),
        ("gpt-oss", "<|start|>assistanta", "", "<|start|>assistanta"),
    ],
)
async def test_channels_come_without_their_marks_and_what_is_in_none_stays(
    engine: InProcess, name: str, text: str, thought: str, rest: str
):
    assert await engine.separate_reasoning(text, name) == (thought, rest)
