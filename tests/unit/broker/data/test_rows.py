from datetime import date
from decimal import Decimal

import numpy as np
import pytest

from slipstream.broker.data.plain import BadRowError, plain
from slipstream.broker.data.rows import RowRules, odd_shape, prompt_from_row
from slipstream.wire.messages.trajectory import ChatMessage, Prompt

RULES = RowRules(data_source="mine")


def test_our_own_columns_are_taken_as_they_are():
    row = {
        "prompt": "1+1=",
        "ground_truth": [2, "two"],
        "data_source": "add",
        "ability": "math",
        "extra_info": {"level": 1},
    }
    assert prompt_from_row(row, RULES, number=4) == Prompt(
        prompt="1+1=",
        ground_truth=[2, "two"],
        data_source="add",
        ability="math",
        extra_info={"level": 1},
        row=4,
    )


def test_a_row_with_a_prompt_alone_is_complete():
    assert prompt_from_row({"prompt": "x"}, RULES, number=0) == Prompt(
        prompt="x", ground_truth=None, data_source="mine", row=0
    )


def test_an_absent_truth_stays_absent():
    nan = float("nan")  # of a column of floats in which a value is missing
    for row in (
        {},
        {"ground_truth": None},
        {"ground_truth": nan},
        {"reward_model": None},
        {"reward_model": {}},
        {"reward_model": {"ground_truth": np.float32(nan)}},
    ):
        assert prompt_from_row({"prompt": "x"} | row, RULES, number=0).ground_truth is None
    assert prompt_from_row({"prompt": "x", "ground_truth": ""}, RULES, number=0).ground_truth == ""


def test_another_column_may_hold_the_truth():
    rules = RowRules(data_source="a", ground_truth_column="answer")
    row = {"prompt": "x", "answer": ["7", 7], "reward_model": {"ground_truth": "8"}}
    assert prompt_from_row(row, rules, number=0).ground_truth == ["7", 7]
    for row in ({"ground_truth": "7"}, {"answer": float("nan")}):
        assert prompt_from_row({"prompt": "x"} | row, rules, number=0).ground_truth is None


def test_integers_are_taken_as_far_as_they_travel():
    row = {"prompt": "x", "ground_truth": {"least": [-(2**63)], "most": 2**64 - 1}}
    assert prompt_from_row(row, RULES, number=0).ground_truth == row["ground_truth"]
    for column in ("ground_truth", "extra_info", "reward_model"):
        for integer in (2**64, -(2**63) - 1):
            row = {"prompt": "x", column: {"deep": [integer]}}
            with pytest.raises(
                BadRowError, match=f"{column} holds an integer of more than 64 bits"
            ):
                prompt_from_row(row, RULES, number=0)


def test_odd_shapes_of_prompts_are_named():
    asked, said = ChatMessage("user", "2+2?"), ChatMessage("assistant", "4")
    as_text = '[{"role": "user", "content": "2+2?"}]'
    for prompt, what in [
        ((asked, said), "end with a turn of the policy's own (assistant)"),
        ((asked, ChatMessage("model", "4")), "end with a turn of the policy's own (model)"),
        (as_text, "are a conversation as text"),
        (" [{'content': '2+2?', 'role': 'user'}]", "are a conversation as text"),
        (as_text[1:-1], "are a conversation as text"),
        (f'{{"messages": {as_text}}}', "are a conversation as text"),
        ('[{"name": "Bo", "role": "user", "content": "2+2?"}]', "are a conversation as text"),
        ('{"conversations": [{"from": "human", "value": "2+2?"}]}', "are a conversation as text"),
        ("[{'role': 'user', 'content': '2+2?'}\n {'role': 'user'}]", "are a conversation as text"),
        ('{"role": "admin", "rights": 3}: may it write?', ""),
        ('[{"value": 3}, {"value": 4}] sum?', ""),
        ('{"from": "USD", "to": "EUR", "value": 10} convert', ""),
        ('[{"from": "A", "to": "B", "value": 1}] shortest path?', ""),
        ('{"role": "knight", "content": "Bo is a knave."} Is he?', ""),
        ((ChatMessage("user", as_text),), "are a conversation as text"),
        ((asked, said, asked), ""),
        ("[1, 2, 3] sorted?", ""),
    ]:
        assert odd_shape(Prompt(prompt=prompt)).startswith(what)
        assert bool(odd_shape(Prompt(prompt=prompt))) == bool(what)


def test_verls_columns_are_taken_as_they_are():
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "How many?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": np.int64(3), "deep": {"scores": np.ones(2)}},
    }
    prompt = prompt_from_row(row, RULES, number=0)
    assert prompt.prompt == (ChatMessage("user", "How many?"),)
    assert prompt.ground_truth == "72"
    assert prompt.data_source == "openai/gsm8k"
    assert prompt.extra_info == {"split": "train", "index": 3, "deep": {"scores": [1.0, 1.0]}}
    assert type(prompt.extra_info["index"]) is int


def test_a_turn_may_hold_columns_that_are_empty_as_parquet_writes_them():
    row = {"prompt": [{"role": "user", "content": "x", "name": None}]}
    assert prompt_from_row(row, RULES, number=0).prompt == (ChatMessage("user", "x"),)


def test_text_becomes_a_conversation_where_asked():
    rules = RowRules(data_source="a", as_chat=True, system_prompt="Be brief.")
    assert prompt_from_row({"prompt": "x"}, rules, number=0).prompt == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "x"),
    )


def test_a_system_turn_of_the_row_wins():
    rules = RowRules(data_source="a", system_prompt="Be brief.")
    turns = [{"role": "system", "content": "Sing."}, {"role": "user", "content": "x"}]
    assert prompt_from_row({"prompt": turns}, rules, number=0).prompt == (
        ChatMessage("system", "Sing."),
        ChatMessage("user", "x"),
    )


def test_another_column_may_hold_the_prompt():
    rules = RowRules(data_source="a", prompt_column="question")
    assert prompt_from_row({"question": "x", "prompt": "y"}, rules, number=0).prompt == "x"


def test_what_is_no_prompt_is_refused_with_the_reason():
    for row, why in [
        ({}, "no prompt"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt has no turns"),
        ({"prompt": 3}, "prompt must be text or a list of turns, got int"),
        ({"prompt": ["x"]}, "turn 0 must be an object, got text"),
        ({"prompt": [{"role": "user"}]}, "content of turn 0 must be text, got nothing"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "1 places for images, and 0 images in no column",
        ),
        (
            {"prompt": [{"role": "user", "content": "x", "tool_calls": [1]}]},
            "turn 0 has tool_calls",
        ),
        ({"prompt": "x", "data_source": 3}, "data_source must be text, got int"),
        ({"prompt": "x", "extra_info": [1]}, "extra_info must be an object, got a list"),
        ({"prompt": "x", "reward_model": "72"}, "reward_model must be an object"),
        ({"prompt": "x", "ground_truth": b"72"}, "ground_truth holds bytes"),
        ({"prompt": "x", "ground_truth": [Decimal("1.5")]}, "holds Decimal, .*: write it as text"),
    ]:
        with pytest.raises(BadRowError, match=why):
            prompt_from_row(row, RULES, number=0)


def test_a_system_prompt_does_not_vanish_beside_plain_text():
    rules = RowRules(data_source="a", system_prompt="Be brief.")
    with pytest.raises(BadRowError, match=r"set data\.as_chat = true"):
        prompt_from_row({"prompt": "x"}, rules, number=0)


def test_values_become_what_json_holds():
    value = {1: (np.float32(0.5), {2}), "day": date(2026, 1, 2), "flag": np.bool_(True)}
    assert plain(value, "x") == {"1": [0.5, [2]], "day": "2026-01-02", "flag": True}
