"""Thoughts in texts of the policy."""

import pytest

from slipstream.wire.thoughts import split_thoughts


@pytest.mark.parametrize(
    ("text", "is_inside", "thoughts", "outside"),
    [
        ("so", False, [], "so"),
        ("<think>a</think>b", False, ["a"], "b"),
        ("a</think>b", False, ["a"], "b"),
        ("a</think>b", True, ["a"], "b"),
        ("a <think>b", False, ["b"], "a "),
        ("a", True, ["a"], ""),
        ("<think>a</think>b", True, ["a"], "b"),
        ("<think>a</think>b<think>c</think>d", False, ["a", "c"], "bd"),
        ("a</think>b<think>c", False, ["a", "c"], "b"),
        ("<think>a<think>b</think>c</think>d", False, ["a<think>b</think>c"], "d"),
        ("<think>a</think>b</think>c<think>d</think>", False, ["a</think>b", "d"], "c"),
        ("a</think>b</think>c", False, ["a</think>b"], "c"),
        ("", True, [], ""),
    ],
)
def test_a_thought_ends_at_the_last_mark_before_the_next_one(
    text: str, is_inside: bool, thoughts: list[str], outside: str
):
    parts = split_thoughts(text, is_inside=is_inside)
    assert "".join(part.text for part in parts) == text
    assert [part.thought for part in parts if part.thought is not None] == thoughts
    assert "".join(part.text for part in parts if part.thought is None) == outside


def test_a_mark_that_closes_other_parts_too_closes_a_thought_once():
    parts = split_thoughts("a.[T]b.c.", "[T]", ".", is_shared=True)
    assert [(part.text, part.thought) for part in parts] == [
        ("a.", None),
        ("[T]b.", "b"),
        ("c.", None),
    ]
