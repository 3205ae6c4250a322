"""No character of a reply is lost, whichever of SGLang's parsers of tool calls reads it."""

import json
import random
import re
from types import ModuleType

import pytest

from slipstream.generators.sglang.patches import keep_every_character
from tests.support.reply_formats import FORMATS, PROSE

pytestmark = pytest.mark.integration
_NEED_A_TEMPLATE = {"response_template"}  # of the model's tokenizer
_PROPERTIES = {"type": "object", "properties": {"at": {"type": "string"}}}


@pytest.fixture(scope="module")
def parsers() -> ModuleType:
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


@pytest.mark.parametrize("name", FORMATS)
def test_no_character_is_lost(parsers: ModuleType, name: str):
    rng = random.Random(name)
    for _ in range(40):
        values = iter(f"tree{i}q" for i in range(99))
        parts: list[str] = []
        for _ in range(rng.randint(1, 4)):
            value = next(values)
            call = FORMATS[name].format(name=rng.choice(["look", "Look"]), value=value)
            match rng.choice(["call", "call", "cut", "spoilt", "prose", "twice"]):
                case "cut":
                    call = call[: rng.randint(1, len(call))]
                case "spoilt":
                    at = rng.randrange(len(call))
                    call = call[:at] + rng.choice('{}"<>[]x') + call[at + 1 :]
                case "prose":
                    call = f" prose{value} "
                case "twice":
                    call += "\n" + FORMATS[name].format(name="look", value=next(values))
                case _:
                    pass
            parts.append(call)
        text = "".join(parts)
        rest, calls, unread = read(parsers, name, text)
        said = rest + "".join(f" {name} {arguments}" for name, arguments in calls)
        lost = [one for one in re.findall(r"\w*tree\w*", text) if one not in said]
        assert not lost, (text, rest, calls)
        assert all(one in rest for one in unread)
        if not calls:
            assert rest == text


@pytest.mark.parametrize("name", ["qwen25", "hermes", "glm45", "qwen3_coder", "deepseekv31"])
def test_what_is_beside_a_call_and_what_cannot_be_read_is_text(parsers: ModuleType, name: str):
    good = FORMATS[name].format(name="look", value="a tree")
    rest, calls, unread = read(parsers, name, f"One: {good} and then I am done!")
    found = [("look", '{"at": "a tree"}')]
    assert (rest, calls, unread) == ("One:  and then I am done!", found, [])
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
        assert read(parsers, name, f"{good}\n<tool_call>\n")[2] == ["\n<tool_call>\n"]
