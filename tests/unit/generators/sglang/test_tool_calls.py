"""Where calls stand in a reply, with a parser of a few lines."""

import json
import re
from collections.abc import Collection

import pytest

from slipstream.generators.sglang.tool_calls import Marks, ReadCall, read_reply

_CALL = re.compile(r"<call>(.*?)</call>", re.DOTALL)
MARKS = Marks("<call>", {"<call>"}, {"</call>"})


def written(number: int) -> str:
    return f'<call>{{"name": "add", "arguments": {{"x": {number}}}}}</call>'


def test_calls_come_out_of_a_reply_and_what_stands_between_them_remains():
    text = f"First {written(1)} then {written(2)} done."
    found = read_reply(text, read, looks_like_call, MARKS)
    assert [one.arguments for one in found.calls] == ['{"x": 1}', '{"x": 2}']
    assert found.text == "First  then  done."


def test_a_reply_of_very_many_calls_is_read_within_a_bound_and_loses_nothing():
    text = "\n".join(map(written, range(2_000)))
    asked = 0

    def counting(part: str, names: Collection[str]) -> list[ReadCall]:
        nonlocal asked
        asked += len(part)
        return read(part, names)

    found = read_reply(text, counting, looks_like_call, MARKS)
    assert len(found.calls) == 2_000
    assert (found.text, found.unread) == (text, [])
    assert asked < 3 << 20


def test_each_of_many_calls_is_found_without_those_before_it():
    """Else the bound was reached by half as many."""
    found = read_reply("\n".join(map(written, range(60))), read, looks_like_call, MARKS)
    assert (found.text, len(found.calls)) == ("", 60)


@pytest.mark.parametrize("value", ["_" * 20_000, "a\\n" * 5_000, "\\u00e9 " * 5_000])
def test_long_arguments_are_soon_read(value: str):
    text = f'<call>{{"name": "add", "arguments": {{"x": "{value}"}}}}</call>'
    found = read_reply(text, read, looks_like_call, MARKS)
    assert (found.text, len(found.calls)) == ("", 1)


def read(part: str, _names: Collection[str]) -> list[ReadCall]:
    try:
        found = [*map(json.loads, _CALL.findall(part))]
        return [
            ReadCall(one["name"], json.dumps(one["arguments"], ensure_ascii=False)) for one in found
        ]
    except (KeyError, ValueError):
        return []


def looks_like_call(part: str) -> bool:
    return "<call>" in part
