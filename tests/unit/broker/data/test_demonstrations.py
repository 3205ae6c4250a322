"""Rows of verl's and TRL's examples of supervised fine-tuning, and rows that are none."""

from typing import Any

import pytest

from slipstream.broker.data.demonstrations import (
    Demonstration,
    demonstration_columns,
    demonstration_from_row,
)
from slipstream.broker.data.plain import BadRowError
from slipstream.broker.data.rows import RowRules

PLAIN = RowRules(data_source="")
CHAT = RowRules(data_source="", as_chat=True, system_prompt="be brief")
OTHER = RowRules(data_source="", prompt_column="ask", ground_truth_column="say")
USER, OWN = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "look", "arguments": {"at": "home"}}}
CHATS = Demonstration(messages=[USER, OWN])
ANSWERED = Demonstration(messages=[USER, OWN], num_given=1)
TEXTS = Demonstration(prompt="1+1?", reply="2")


def found(row: dict[str, Any], rules: RowRules = PLAIN, **how: bool) -> Demonstration:
    return demonstration_from_row(row, rules, is_columnar=how.get("is_columnar", False))


@pytest.mark.parametrize(
    ("row", "rules", "expected"),
    [
        # TRL: conversational and plain, language modelling and prompt-completion
        ({"messages": [USER, OWN]}, PLAIN, CHATS),
        ({"prompt": [USER], "completion": [OWN]}, PLAIN, ANSWERED),
        ({"prompt": "1+1?", "completion": "2"}, PLAIN, TEXTS),
        ({"text": "1+1=2"}, PLAIN, Demonstration(reply="1+1=2")),
        (
            {"messages": [USER, OWN], "tools": [TOOL], "chat_template_kwargs": {"a": 1}},
            PLAIN,
            Demonstration(messages=[USER, OWN], tools=[TOOL], variables={"a": 1}),
        ),
        # verl: one turn, keys of an object, several turns
        ({"prompt": "1+1?", "response": "2"}, PLAIN, TEXTS),
        ({"question": "1+1?", "answer": "2"}, PLAIN, TEXTS),
        ({"prompt": [USER], "extra_info": {"question": "1+1?", "answer": "2"}}, PLAIN, TEXTS),
        (
            {"messages": [USER, OWN], "tools": '[{"a": 1}]', "enable_thinking": False},
            PLAIN,
            Demonstration(
                messages=[USER, OWN], tools=[{"a": 1}], variables={"enable_thinking": False}
            ),
        ),
        # by settings
        ({"ask": "1+1?", "say": "2", "messages": None}, OTHER, TEXTS),
        ({"prompt": [USER], "response": "2"}, PLAIN, ANSWERED),
        (
            {"prompt": "1+1?", "response": "2"},
            CHAT,
            Demonstration(messages=[SYSTEM, USER, OWN], num_given=2),
        ),
        ({"messages": [SYSTEM, USER, OWN]}, CHAT, Demonstration(messages=[SYSTEM, USER, OWN])),
    ],
)
def test_row_becomes_a_demonstration(row: dict[str, Any], rules: RowRules, expected: Demonstration):
    assert found(row, rules) == expected
    assert demonstration_columns(rules) >= row.keys()


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"chosen": "a", "b": None}, "no demonstration: expected messages, .*or text, got chosen"),
        ({}, "got no values"),
        ({"messages": []}, "messages has no turns"),
        ({"messages": "hi"}, "messages must be a list of turns, got text"),
        ({"messages": [{"from": "gpt"}]}, "turn 0 of messages must be an object with a role"),
        ({"messages": [USER, SYSTEM]}, r"no turn of the policy's own \(assistant\), only of user"),
        ({"prompt": [USER, OWN], "completion": [USER]}, "no turn of the policy's own"),
        ({"prompt": "", "response": "2"}, "prompt is empty"),
        ({"prompt": "1", "response": ""}, "response is empty"),
        ({"prompt": "1", "response": [OWN]}, "prompt is text and response is not"),
        ({"text": 3}, "text must be text, got int"),
        ({"messages": [USER, OWN], "tools": "{"}, "tools is text, but not JSON"),
        ({"messages": [USER, OWN], "tools": {"a": 1}}, "tools must be a list, got an object"),
        ({"messages": [USER, OWN], "chat_template_kwargs": [1]}, "must be an object, got a list"),
    ],
)
def test_row_that_is_no_demonstration_has_a_reason(row: dict[str, Any], why: str):
    with pytest.raises(BadRowError, match=why):
        found(row)


def test_a_system_prompt_is_for_conversations():
    rules = RowRules(data_source="", system_prompt="be brief")
    with pytest.raises(BadRowError, match=r"set data\.as_chat = true"):
        found({"prompt": "1", "response": "2"}, rules)


def test_nulls_of_a_columnar_file_are_refused_where_they_would_be_read():
    called = {**OWN, "tool_calls": [CALL], "name": None}
    row = {"messages": [USER, called], "tools": None}
    assert found(row, is_columnar=True).messages == [USER, called]
    filled = {"function": {"name": "look", "arguments": {"at": "home", "by": None}}}
    for bad in (
        {"messages": [USER, {**OWN, "tool_calls": [filled]}]},
        {"messages": [USER, OWN], "tools": [{**TOOL, "strict": None}]},
    ):
        assert found(bad).messages
        with pytest.raises(BadRowError, match="write them as JSON in text"):
            found(bad, is_columnar=True)


def test_a_demonstration_has_no_images():
    parts = [{"type": "text", "text": "Look."}, {"type": "image", "path": "a.png"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A"}]}
    with pytest.raises(BadRowError, match="turn 0 of messages has an image"):
        demonstration_from_row(row, RowRules(data_source="x"), is_columnar=False)
