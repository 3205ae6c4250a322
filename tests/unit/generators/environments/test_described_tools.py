import asyncio

import pytest

from slipstream.generators.environments.sdk import DescribedTool, Environment, ToolCall, schema_of
from slipstream.wire.messages.trajectory import Json


def described(parameters: Json) -> DescribedTool:
    return DescribedTool("x", "Do it.", parameters, lambda **given: sorted(given.items()))


NO_PROPERTIES: list[Json] = [
    {"type": "object", "properties": {"a": 1}},
    {"type": "object", "properties": ["a"]},
]


@pytest.mark.parametrize("schema", [None, [], "object", {}, {"type": "array"}, *NO_PROPERTIES])
def test_what_describes_no_object_is_no_schema(schema: Json):
    with pytest.raises(ValueError, match="tool x: "):
        schema_of(described(schema))


def test_a_schema_is_passed_on_as_it_is():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "$defs": {}}
    assert schema_of(described(schema))["function"] == {
        "name": "x",
        "description": "Do it.",
        "parameters": schema,
    }
    assert schema_of(described({"type": "object"}))["function"]["parameters"] == {
        "type": "object",
        "properties": {},
    }


def test_it_is_called_as_a_function_is_whatever_its_arguments_are_called():
    class Tooled(Environment):
        tools = (described({"type": "object"}),)

    called = Tooled().call(ToolCall("x", {"self": 1, "a": 2}, "id"))
    assert asyncio.run(called)["content"] == "[('a', 2), ('self', 1)]"
