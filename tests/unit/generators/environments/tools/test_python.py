import asyncio

import pytest

from slipstream.broker.sandbox.console import MAX_SOURCE_BYTES, ConsoleResult
from slipstream.generators.environments.sdk import schema_of
from slipstream.generators.environments.tools.python import Interpreter, WithPython, shown


def test_a_result_says_what_was_printed_and_what_was_lost():
    for said, text in [
        (ConsoleResult("2\n", 0.1), "2"),
        (ConsoleResult(" \n", 0.1), "(it printed nothing)"),
        (
            ConsoleResult("a\n", 0.1, "it took too much memory"),
            "a\nThe interpreter was ended: it took too much memory. "
            "Its variables and functions are lost.",
        ),
    ]:
        assert shown(said) == text


@pytest.mark.parametrize(
    "limit", ["call_s", "total_s", "max_calls", "max_output", "memory_mb", "max_processes"]
)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_is_above_zero(limit: str, value: float):
    with pytest.raises(ValueError, match=f"{limit}: expected more than 0"):
        WithPython(**{limit: value})


def test_the_tool_takes_code():
    (tool,) = WithPython().tools
    function = schema_of(tool)["function"]
    assert function["name"] == "python"
    assert function["description"].startswith("Run Python code; return what it prints")
    assert function["parameters"] == {
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
    }


def test_code_that_is_too_long_starts_no_interpreter_and_counts_as_a_call():
    async def test() -> list[str]:
        interpreter = Interpreter(max_calls=1)
        try:
            return [await interpreter.python("#" * (MAX_SOURCE_BYTES + 1)) for _ in range(2)]
        finally:
            await interpreter.close()

    assert asyncio.run(test()) == [
        "error: the code has 131073 bytes, at most 131072",
        "error: there are no more calls of python, after 1",
    ]
